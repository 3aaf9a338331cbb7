"""Many programs that differ in their static arguments, compiled side by side."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

MOST_PROGRAMS = 64

_COMPILED: dict[Any, Callable[..., Any]] = {}
"""Programs by what they were compiled for, the latest :data:`MOST_PROGRAMS`."""


def compile_all(jitted: Any, arguments: tuple[Any, ...], variants: list[dict[str, Any]]) -> list[Callable[..., Any]]:
    """``jitted`` for each of ``variants`` of its static arguments; each is to be called with ``arguments`` alone.

    Those that are new are compiled in threads: compiling takes far longer than running them once, and one core each.
    """
    shapes = tuple((a.shape, a.dtype) for a in jax.tree.leaves(arguments))
    keys = [(jitted, jax.tree.structure(arguments), shapes, tuple(variant.items())) for variant in variants]
    new = {key: variant for key, variant in zip(keys, variants, strict=True) if key not in _COMPILED}
    lowered = [jitted.lower(*arguments, **variant) for variant in new.values()]
    with ThreadPoolExecutor(max_workers=max(1, min(len(lowered), os.cpu_count() or 1))) as pool:
        _COMPILED.update(zip(new, pool.map(lambda program: program.compile(), lowered), strict=True))
    found = [_COMPILED[key] for key in keys]
    while len(_COMPILED) > MOST_PROGRAMS:
        del _COMPILED[next(iter(_COMPILED))]
    return found
