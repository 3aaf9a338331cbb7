"""An interpreter of Gluon, for which Triton has none: kernels for Hopper run on a CPU.

What kernels compute is torch's; what they do at once takes turns at random. Copies and products happen some time
between their beginning and the wait for them: what is read too early or written too late spoils the result or raises
:class:`HazardError`, as partitions do that wait for each other for ever. Warps of a partition go on together: whether
they wait for each other where they must is not seen here, nor how numbers lie in threads, nor how fast a kernel is.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from triton import language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia import hopper

from sharpmax.torch.triton import hopper_kernel
from tests.gluon import language
from tests.gluon.machine import HazardError, Machine, Partition, Program, here
from tests.gluon.memory import Descriptor
from tests.gluon.values import Pointer, Value

__all__ = ["HazardError", "function", "partition", "run", "value"]

STAND_INS: list[tuple[Any, Any]] = [
    (gl, language.LANGUAGE),
    (hopper.mbarrier, language.MBARRIER),
    (hopper.tma, language.TMA),
    (hopper.warpgroup_mma, language.warpgroup_mma),
    (hopper.warpgroup_mma_wait, language.warpgroup_mma_wait),
    (hopper.fence_async_shared, language.fence),
    (hopper_kernel.load_tile, language.load_tile),
    (hopper_kernel.store_tile, language.store_tile),
    (hopper_kernel.reinterpret, language.reinterpret),
    (hopper_kernel.synchronize, language.synchronize),
]
_modules: dict[int, dict[str, Any]] = {}


def function(kernel: Any) -> Any:
    """A function of Gluon as one of Python, which calls stand-ins for what it calls."""
    made = kernel.fn
    return types.FunctionType(made.__code__, _names(made.__globals__), made.__name__, made.__defaults__)


def _names(known: dict[str, Any]) -> dict[str, Any]:
    """The globals of a module as its functions find them."""
    if id(known) not in _modules:
        names: dict[str, Any] = {"range": language.numbers}
        _modules[id(known)] = names
        names.update((name, _stand_in(x)) for name, x in list(known.items()))
    return _modules[id(known)]


def _stand_in(x: Any) -> Any:
    if isinstance(x, GluonJITFunction):
        return function(x)
    if isinstance(x, tl.constexpr):
        return x.value
    return next((stand_in for real, stand_in in STAND_INS if real is x), x)


@contextlib.contextmanager
def partition(warps: int) -> Iterator[None]:
    """Some warps, for functions that are called alone."""
    here.partition = Partition(Program(0, 1), warps)
    yield
    del here.partition


def value(x: Any) -> Any:
    """An argument as a kernel has it."""
    if isinstance(x, Tensor):
        return Pointer.of(x.detach())
    if hasattr(x, "block_shape"):
        return Descriptor(x)
    if isinstance(x, float):
        return Value(torch.tensor(x, dtype=torch.float32))
    if isinstance(x, int) and not isinstance(x, bool):
        return Value(torch.tensor(x, dtype=torch.int32 if -(2**31) <= x < 2**31 else torch.int64))
    return x


def run(kernel: Any, programs: int, *arguments: Any, warps: int = 4, together: bool = False, seed: int = 0) -> None:
    """Run a kernel.

    Args:
      kernel: decorated with ``gluon.jit``.
      programs: how many.
      arguments: its own, in order.
      warps: of a program's first partition.
      together: whether programs wait for each other; if not, one comes after the other.
      seed: of the order in which things happen.
    """
    body = function(kernel)
    given = [x if p.is_constexpr else value(x) for p, x in zip(kernel.params, arguments, strict=True)]
    all_programs = [Program(i, programs) for i in range(programs)]
    for i, those in enumerate([all_programs] if together else [[program] for program in all_programs]):
        Machine(seed + i).run([(program, warps, lambda: body(*given)) for program in those])
