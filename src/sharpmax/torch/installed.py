"""Which Triton is installed, if any: what to know before its kernels are imported."""

from __future__ import annotations

import functools
import importlib.util

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
LEAST_TRITON = (3, 4)
"""The first version of Triton that compiles the kernels."""


@functools.cache
def triton_version() -> tuple[int, ...]:
    """Major and minor."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


@torch.compiler.assume_constant_result
def triton_is_old() -> bool:
    """Whether the Triton that is installed is one that does not compile the kernels."""
    return triton_version() < LEAST_TRITON
