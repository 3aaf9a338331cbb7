"""Functions of rows, run as fast as each library allows.

A :class:`RowFunction` treats every row of a matrix ``[rows, n]`` by itself and is written once, over the array API. How
it runs is decided here: JAX compiles it, as it compiles ``jax.nn.softmax``; NumPy and eager torch run it on blocks of
rows that stay in cache, so that its temporaries never take more than a block; torch's autograd gets its backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from .arrays import Array, Library, in_transform

CPU_BLOCK, ACCELERATOR_BLOCK = 1 << 17, 1 << 24
"""Elements that one block of rows holds: about a level-2 cache, or enough to keep an accelerator busy."""

Matrices = tuple[Array | None, ...]
Kernel = Callable[..., tuple[Array, ...]]


class RowFunction:
    """A function of matrices whose first axis is the rows.

    ``forward(xp, *inputs)`` returns a tuple of arrays. ``backward(xp, *inputs, *outputs, *cotangents)`` returns the
    gradient of every input that has one (the first, and those after the mask), and must be differentiable itself.
    ``forward`` alone is differentiable too, with the same result; ``backward`` needs fewer operations and less memory.
    ``differentiable`` says which of the outputs carry a gradient.
    """

    every: ClassVar[list[RowFunction]] = []

    def __init__(self, forward: Kernel, backward: Kernel, differentiable: tuple[int, ...]) -> None:
        self.forward, self.backward, self.differentiable = forward, backward, differentiable
        self.torch_function: Any = None
        self.every.append(self)


def apply(function: RowFunction, lib: Library, *inputs: Array | None) -> tuple[Array, ...]:
    """``function`` of ``inputs``: logits ``[rows, n]``, a mask or ``None``, and what else is aligned with the rows."""
    if lib.name == "jax":
        return _jax_compiled(function.forward)(*inputs)
    if lib.name == "torch" and _records(inputs):
        from . import torch_functions  # noqa: F401  (torch is there; this gives every RowFunction its autograd form)

        return function.torch_function.apply(*inputs)
    return run(function.forward, lib, inputs)


def run(kernel: Kernel, lib: Library, inputs: Matrices) -> tuple[Array, ...]:
    """``kernel``, block by block where it can be."""
    x = inputs[0]
    assert x is not None
    n = x.shape[1]
    if lib.name == "numpy":
        with np.errstate(over="ignore", invalid="ignore"):
            return _in_blocks(kernel, lib.xp, max(1, CPU_BLOCK // max(1, n)), inputs)
    if in_transform(x) or not all(t is None or _is_plain(t) for t in inputs):
        return kernel(lib.xp, *inputs)
    block = CPU_BLOCK if x.device.type == "cpu" else ACCELERATOR_BLOCK
    return _in_blocks(kernel, lib.xp, max(1, block // max(1, n)), inputs)


def _in_blocks(kernel: Kernel, xp: Any, step: int, inputs: Matrices) -> tuple[Array, ...]:
    x = inputs[0]
    assert x is not None
    rows = x.shape[0]
    if rows <= step:
        return kernel(xp, *(m if m is None else _contiguous(m) for m in inputs))
    outputs: tuple[Array, ...] = ()
    for start in range(0, rows, step):
        parts = kernel(xp, *(m if m is None else _contiguous(m[start : start + step]) for m in inputs))
        if not outputs:
            outputs = tuple(_empty(part, (rows, *part.shape[1:])) for part in parts)
        for output, part in zip(outputs, parts, strict=True):
            output[start : start + step] = part
    return outputs


def _contiguous(block: Array) -> Array:
    """``block`` with its rows in one piece: NumPy sums such rows pairwise, others one by one with far more rounding."""
    return np.ascontiguousarray(block) if isinstance(block, np.ndarray) else block.contiguous()


def _empty(like: Array, shape: tuple[int, ...]) -> Array:
    return np.empty(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_empty(shape)


def _is_plain(tensor: Array) -> bool:
    """Whether ``tensor`` holds numbers and nothing records what is done to it."""
    torch = sys.modules["torch"]
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type != "meta"
        and not (torch.is_grad_enabled() and tensor.requires_grad)
    )


def _records(inputs: Matrices) -> bool:
    """Whether reverse-mode autograd records this call, and nothing but it."""
    torch = sys.modules["torch"]
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in inputs):
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    if torch.compiler.is_compiling():
        return True
    unpack_dual = torch.autograd.forward_ad.unpack_dual
    return all(t is None or t.dtype == torch.bool or unpack_dual(t).tangent is None for t in inputs)


_JAX_COMPILED: dict[Kernel, Callable[..., Any]] = {}


def _jax_compiled(kernel: Kernel) -> Callable[..., Any]:
    """``kernel`` under ``jax.jit``, made once."""
    if kernel not in _JAX_COMPILED:
        jax = sys.modules["jax"]

        def compiled(*inputs: Any) -> Any:
            return kernel(jax.numpy, *inputs)

        compiled.__name__ = kernel.__name__
        _JAX_COMPILED[kernel] = jax.jit(compiled)
    return _JAX_COMPILED[kernel]
