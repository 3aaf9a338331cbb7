"""What kernels call: Gluon's functions, as torch operations and turns of a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from tests.gluon.machine import Copy, HazardError, here
from tests.gluon.memory import Barrier, Barriers, Descriptor, Shared, fence
from tests.gluon.values import LAYOUT, Pointer, Value, pair, tensor, torch_dtype

BARRIER = object()
"""The layout of barriers."""
SMALLEST = torch.finfo(torch.float32).tiny


def _applied(function: Callable[..., Tensor]) -> Callable[..., Value]:
    return lambda x: Value(function(tensor(x)))


def _of_two(of_floats: Callable[..., Tensor], of_others: Callable[..., Tensor]) -> Callable[..., Value]:
    def function(a: Any, b: Any) -> Value:
        x, y = pair(a, b)
        return Value((of_floats if x.is_floating_point() else of_others)(x, y))

    return function


def arange(first: int, last: int, layout: Any = None) -> Value:
    return Value(torch.arange(first, last, dtype=torch.int32))


def full(shape: Sequence[int], value: Any, dtype: Any, layout: Any = None) -> Value:
    return Value(torch.full(tuple(shape), value, dtype=torch_dtype(dtype)))


def zeros(shape: Sequence[int], dtype: Any, layout: Any = None) -> Value:
    return full(shape, 0, dtype)


def where(condition: Any, a: Any, b: Any) -> Value:
    return Value(torch.where(tensor(condition), *pair(a, b)))


def total(x: Value, axis: int) -> Value:
    data = x.data
    return Value(data.sum(axis, dtype=data.dtype if data.is_floating_point() else torch.int32))


def _extreme(function: Callable[..., Tensor], least: float) -> Callable[..., Value]:
    """The largest or the smallest number, of those that are numbers; none where there is none."""

    def extreme(x: Value, axis: int) -> Value:
        data = x.data
        if not data.is_floating_point():
            return Value(function(data, axis))
        found = function(data.nan_to_num(least, torch.inf, -torch.inf), axis)
        return Value(found.masked_fill(data.isnan().all(axis), torch.nan))

    return extreme


def reduce(values: tuple[Value, ...], axis: int, combine: Callable[..., tuple[Value, ...]]) -> tuple[Value, ...]:
    """By halves; as many as a power of 2."""
    parts = [x.data for x in values]
    while parts[0].shape[axis] > 1:
        half = [x.chunk(2, axis) for x in parts]
        parts = [x.data for x in combine(*(Value(x[0]) for x in half), *(Value(x[1]) for x in half))]
    return tuple(Value(x.squeeze(axis)) for x in parts)


def associative_scan(x: Value, axis: int, combine: Callable[[Value, Value], Value]) -> Value:
    """By steps of powers of 2."""
    data, step = x.data, 1
    while step < data.shape[axis]:
        count = data.shape[axis] - step
        later = combine(Value(data.narrow(axis, 0, count)), Value(data.narrow(axis, step, count))).data
        data = torch.cat([data.narrow(axis, 0, step), later], axis)
        step *= 2
    return Value(data)


def _ex2(x: Tensor) -> Tensor:
    power = torch.exp2(x)
    return torch.where(power < SMALLEST, 0.0, power)


INSTRUCTIONS: dict[str, Callable[..., Tensor]] = {
    "ex2.approx.ftz.f32": _ex2,
    "mul.rn.f32": lambda a, b: a * b,
    "redux.sync.max.s32": lambda x: x,  # of a number that all have
}


def inline_asm_elementwise(asm: str, constraints: str, args: Sequence[Any], *_: Any, **__: Any) -> Value:
    return Value(INSTRUCTIONS[asm.split(maxsplit=1)[0]](*(tensor(x) for x in args)))


# --------------------------------------------------------------------------------------------------------------------
# Memory of the device.
# --------------------------------------------------------------------------------------------------------------------


def load(pointer: Pointer, mask: Any = None, other: Any = None) -> Value:
    """Numbers; where the mask is false, the other one, or if there is none, anything."""
    places, there = pointer.places(mask)
    dtype = pointer.base.dtype
    if other is None:
        other = torch.nan if dtype.is_floating_point else -(2**31)
    rest = tensor(other).to(dtype) if isinstance(other, Value) else torch.tensor(other, dtype=dtype)
    if not there.any():
        return Value(rest.expand(there.shape).clone())
    return Value(torch.where(there, pointer.base[torch.where(there, places, places[there][0])], rest))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    places, there = pointer.places(mask)
    data = tensor(value).to(pointer.base.dtype).expand(there.shape)
    pointer.base[places[there]] = data[there]


def atomic_add(pointer: Pointer, value: Any, mask: Any = None, sem: str | None = None) -> Value:
    """Others may come before."""
    here.machine.pause()
    places, there = pointer.places(mask)
    added = tensor(value).to(pointer.base.dtype).expand(there.shape)
    before = load(pointer, mask, 0)
    if added[there].any():
        pointer.base.index_add_(0, places[there].reshape(-1), added[there].reshape(-1))
        here.machine.progress()
    return before


# --------------------------------------------------------------------------------------------------------------------
# Programs and their partitions.
# --------------------------------------------------------------------------------------------------------------------


def program_id(axis: int) -> Value:
    return Value(torch.tensor(here.partition.program.number if axis == 0 else 0, dtype=torch.int32))


def num_programs(axis: int) -> Value:
    return Value(torch.tensor(here.partition.program.of if axis == 0 else 1, dtype=torch.int32))


def num_warps() -> int:
    return here.partition.warps


def numbers(*bounds: Any) -> Iterator[Value]:
    """Python's ``range``."""
    for i in range(*(int(x) for x in bounds)):
        yield Value(torch.tensor(i, dtype=torch.int32))


def static_range(*bounds: Any) -> range:
    return range(*bounds)


def warp_specialize(functions: Sequence[tuple[Any, Any]], warps: Sequence[int], registers: Sequence[int]) -> None:
    """Run all functions at once: the first one in the partition that asks for it."""
    assert len(functions) == len(warps) + 1 == len(registers) + 1
    machine, me = here.machine, here.partition
    (function, arguments), *others = functions
    begun = [
        machine.begin(me.program, count, lambda f=f, a=a: f(*a)) for (f, a), count in zip(others, warps, strict=True)
    ]
    function(*arguments)
    machine.pause(lambda: not any(other in machine.partitions for other in begun))


def synchronize() -> None:
    """Warps of a partition wait for each other, which here go on together."""


# --------------------------------------------------------------------------------------------------------------------
# Shared memory, barriers, copies and products.
# --------------------------------------------------------------------------------------------------------------------


def allocate_shared_memory(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if layout is BARRIER:
        return Barriers(shape[0])
    return Shared.allocated(torch_dtype(dtype), shape, layout)


def reinterpret(memory: Shared, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
    return memory.reinterpreted(dtype, shape, layout)


def _begin(barrier: Barrier, count: int) -> None:
    barrier.begin(count)


def _expect(barrier: Barrier, bytes: int, pred: Any = True) -> None:
    if pred:
        barrier.expect(bytes)


def _arrive(barrier: Barrier, *, count: int = 1, pred: Any = True) -> None:
    if pred:
        barrier.arrive(count)
    here.machine.pause()


def _wait(barrier: Barrier, phase: Any, pred: Any = True) -> None:
    """Until the turn of the barrier with that parity is over."""
    parity = int(phase)
    assert parity in (0, 1)
    if pred:
        here.machine.pause(lambda: barrier.parity != parity)


def load_tile(source: Descriptor, coordinates: Sequence[Any], barrier: Barrier, into: Shared) -> None:
    """Begin to copy a tile, whose bytes the barrier waits for. What was there is lost at once."""
    at = [int(x) for x in coordinates]
    into.spoil()

    def arrives() -> None:
        into.put(source.read(at))
        barrier.received(source.block_type.nbytes)

    here.machine.copies.append(Copy(arrives))


def store_tile(into: Descriptor, coordinates: Sequence[Any], source: Shared) -> None:
    """Begin to copy a tile to the tensor: it is read some time before it has been waited for."""
    at = [int(x) for x in coordinates]
    source.fetch()  # is it fenced now?
    copy = Copy(lambda: into.write(at, source.fetch()))
    here.machine.copies.append(copy)
    here.partition.stores.append(copy)


def store_wait(pendings: int) -> None:
    """Until all but so many of the partition's copies are done."""
    stores, machine = here.partition.stores, here.machine
    machine.pause()
    while len(stores) > pendings:
        copy = stores.pop(0)
        if copy in machine.copies:
            machine.copies.remove(copy)
        copy.run()


def _operand(x: Any) -> Callable[[], Tensor]:
    """What gives an operand of a product, when it comes to that; of shared memory, what is there then."""
    if isinstance(x, Shared):
        return lambda: x.fetch().float()
    data = x.data.float()
    return lambda: data


def warpgroup_mma(a: Any, b: Shared, acc: Value, *, use_acc: bool = True, is_async: bool = False) -> Value:
    """Begin a product, and add it to ``acc``: it is done some time before it has been waited for."""
    if a.shape[1] != b.shape[0] or [a.shape[0], b.shape[1]] != acc.shape:
        raise HazardError(f"a product of {a.shape} and {b.shape} is added to {acc.shape}")
    left, right = _operand(a), _operand(b)
    queue: list[tuple[Value, Callable[[], None]]] = here.partition.products
    if use_acc and acc.under_way and all(acc is not found for found, _ in queue):
        raise HazardError("a product goes on with one that is lost")
    found = Value(None, acc.shape)

    def finish() -> None:
        product = left() @ right()
        found.complete(acc.partial() + product if use_acc else product)

    queue.append((found, Copy(finish).run))
    if here.machine.random.random() < 0.5:
        for _, run in queue:
            run()
    return found if is_async else warpgroup_mma_wait(0, [found])


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Value] = ()) -> Any:
    """Until all but so many products of the partition are done."""
    queue = here.partition.products
    here.machine.pause()
    while len(queue) > num_outstanding:
        found, run = queue.pop(0)
        run()
        found.under_way = False
    return deps[0] if len(deps) == 1 else tuple(deps)


LANGUAGE = SimpleNamespace(
    **{name: getattr(gl, name) for name in ("float16", "bfloat16", "float32", "int32", "int64")},
    **dict.fromkeys(
        (
            "BlockedLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout", "SliceLayout",
            "SwizzledSharedLayout",
        ),
        lambda *_: LAYOUT,
    ),
    NVMMASharedLayout=gl.NVMMASharedLayout,
    abs=_applied(torch.abs),
    allocate_shared_memory=allocate_shared_memory,
    arange=arange,
    associative_scan=associative_scan,
    atomic_add=atomic_add,
    convert_layout=lambda x, layout, assert_trivial=False: x,
    exp2=_applied(torch.exp2),
    expand_dims=lambda x, axis: Value(x.data.unsqueeze(axis)),
    full=full,
    inline_asm_elementwise=inline_asm_elementwise,
    load=load,
    log=_applied(torch.log),
    max=_extreme(torch.amax, -torch.inf),
    maximum=_of_two(torch.fmax, torch.maximum),
    min=_extreme(torch.amin, torch.inf),
    minimum=_of_two(torch.fmin, torch.minimum),
    num_programs=num_programs,
    num_warps=num_warps,
    program_id=program_id,
    reduce=reduce,
    static_range=static_range,
    store=store,
    sum=total,
    warp_specialize=warp_specialize,
    where=where,
    zeros=zeros,
    zeros_like=lambda x: Value(torch.zeros_like(x.data)),
)  # fmt: skip
MBARRIER = SimpleNamespace(MBarrierLayout=lambda: BARRIER, init=_begin, expect=_expect, arrive=_arrive, wait=_wait)
TMA = SimpleNamespace(store_wait=store_wait)

__all__ = ["LANGUAGE", "MBARRIER", "TMA", "fence", "load_tile", "numbers", "reinterpret", "store_tile", "synchronize"]
