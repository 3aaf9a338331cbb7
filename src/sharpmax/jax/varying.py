"""Arrays inside of ``jax.shard_map``, which keeps account of the axes of the mesh that each one varies over.

Loops and functions with a backward of their own want arrays that agree in that; ordinary code never notices.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def alike(tree: Any, like: Any = ()) -> Any:
    """``tree`` with all arrays varying over every axis that one of them, or one of ``like``, varies over.

    A JAX that has no ``lax.pcast`` is left to itself: there ``shard_map`` is called without that account.
    """
    if not hasattr(lax, "pcast"):
        return tree
    axes = frozenset[str]().union(*(_axes(x) for x in jax.tree.leaves((tree, like))))
    return jax.tree.map(lambda x: _over(x, axes - _axes(x)), tree) if axes else tree


def _axes(x: Any) -> frozenset[str]:
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset() if kind is None else kind.varying


def _over(x: Any, axes: frozenset[str]) -> Any:
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x
