"""Shared memory, which holds NaN at first, and the barriers in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.gluon.machine import HazardError, here
from tests.gluon.values import Value, dtype_of


class Shared:
    """A part of shared memory.

    Rows wider than the swizzle of the layout lie in panels of that width, one after the other. What is stored is not
    seen by copies and products before the partition that did it has put a fence.
    """

    def __init__(self, numbers: Tensor, unfenced: Tensor, panels: bool, flipped: bool = False) -> None:
        self.numbers, self.unfenced, self.panels, self.flipped = numbers, unfenced, panels, flipped

    @classmethod
    def allocated(cls, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        count = math.prod(shape)
        fill = math.nan if dtype.is_floating_point else -(2**31)
        memory, unfenced = torch.full((count,), fill, dtype=dtype), torch.zeros(count, dtype=torch.bool)
        return cls._viewed(memory, unfenced, shape, layout)

    @classmethod
    def _viewed(cls, memory: Tensor, unfenced: Tensor, shape: Sequence[int], layout: Any) -> Shared:
        width = getattr(layout, "swizzle_byte_width", 0) // memory.dtype.itemsize
        panels = 0 < width < shape[-1]
        if panels:
            *outer, rows, columns = shape
            memory, unfenced = (
                x.view(*outer, columns // width, rows, width).transpose(-2, -3) for x in (memory, unfenced)
            )
        else:
            memory, unfenced = memory.view(*shape), unfenced.view(*shape)
        return cls(memory, unfenced, panels)

    def reinterpreted(self, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
        """The same memory, all that was allocated, in another shape."""
        assert dtype == self.dtype
        memory, unfenced = (x.as_strided((x.numel(),), (1,), 0) for x in (self.numbers, self.unfenced))
        return self._viewed(memory, unfenced, shape, layout)

    @property
    def dtype(self) -> Any:
        return dtype_of(self.numbers.dtype)

    @property
    def layout(self) -> Any:
        class Layout:
            swizzle_byte_width = self.numbers.shape[-1] * self.numbers.dtype.itemsize if self.panels else 0

        return Layout

    @property
    def shape(self) -> list[int]:
        *outer, last = self.numbers.shape
        shape = [*outer[:-1], outer[-1] * last] if self.panels else [*outer, last]
        return shape[::-1] if self.flipped else shape

    def index(self, place: Any) -> Shared:
        place = int(place)
        if not 0 <= place < len(self.numbers):
            raise HazardError(f"part {place} of shared memory is named, of {len(self.numbers)}")
        return Shared(self.numbers[place], self.unfenced[place], self.panels)

    def slice(self, start: int, length: int) -> Shared:
        if not 0 <= start <= start + length <= len(self.numbers):
            raise HazardError(f"{length} rows from {start} on are named, of {len(self.numbers)}")
        end = start + length
        return Shared(self.numbers[start:end], self.unfenced[start:end], self.panels, self.flipped)

    def permute(self, order: Sequence[int]) -> Shared:
        assert list(order) == [1, 0]
        return Shared(self.numbers, self.unfenced, self.panels, not self.flipped)

    def load(self, layout: Any) -> Value:
        return Value(self._read())

    def store(self, value: Value) -> None:
        self._write(value.data.to(self.numbers.dtype))
        self.unfenced[...] = True
        here.partition.unfenced.append(self.unfenced)

    def fetch(self) -> Tensor:
        """What a copy or a product reads."""
        if self.unfenced.any():
            raise HazardError("a copy or a product reads what was stored before a fence")
        return self._read()

    def put(self, data: Tensor) -> None:
        """What a copy writes."""
        self._write(data.reshape(self.shape))
        self.unfenced[...] = False

    def spoil(self) -> None:
        """Nobody may read it until something is put there."""
        self.numbers.fill_(math.nan)

    def _read(self) -> Tensor:
        found = self.numbers.flatten(-2) if self.panels else self.numbers.clone()
        return found.mT if self.flipped else found

    def _write(self, data: Tensor) -> None:
        data = data.mT if self.flipped else data
        self.numbers.copy_(data.reshape(self.numbers.shape) if self.panels else data)


def fence() -> None:
    """What the partition has stored may be read by copies and products."""
    for unfenced in here.partition.unfenced:
        unfenced[...] = False
    here.partition.unfenced.clear()


class Barrier:
    """Counts arrivals, and bytes that are to come; when all are there, its parity changes and it counts anew."""

    def __init__(self) -> None:
        self.count: int | None = None
        self.missing = self.bytes = self.parity = 0

    def begin(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, count: int) -> None:
        if self.count is None or count > self.missing:
            raise HazardError("more arrivals than a barrier waits for")
        self.missing -= count
        self._check()

    def expect(self, count: int) -> None:
        self.bytes += count
        self.arrive(1)

    def received(self, count: int) -> None:
        self.bytes -= count
        self._check()

    def _check(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            assert self.count is not None
            self.missing = self.count
            self.parity ^= 1
        here.machine.progress()


class Barriers:
    """Some of them."""

    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, place: Any) -> Barrier:
        place = int(place)
        if not 0 <= place < len(self.all):
            raise HazardError(f"barrier {place} is named, of {len(self.all)}")
        return self.all[place]


class Descriptor:
    """Tiles of a tensor, as the copy engine takes them; beside the tensor lie zeros."""

    def __init__(self, made: Any) -> None:
        self.base: Tensor = made.base.detach()
        self.block = list(made.block_shape)
        self.dtype = dtype_of(self.base.dtype)

        class Block:
            shape = self.block
            nbytes = math.prod(self.block) * self.base.dtype.itemsize

        self.block_type = Block

    def _window(self, coordinates: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of the tensor a tile covers, and where that lies in the tile."""
        inside, within = [], []
        for first, size, n in zip(map(int, coordinates), self.block, self.base.shape, strict=True):
            low, high = max(first, 0), max(min(first + size, n), 0)
            high = max(low, high)
            inside.append(slice(low, high))
            within.append(slice(low - first, high - first))
        return tuple(inside), tuple(within)

    def read(self, coordinates: Sequence[Any]) -> Tensor:
        tile = torch.zeros(self.block, dtype=self.base.dtype)
        inside, within = self._window(coordinates)
        found = self.base[inside]
        if found.numel():
            tile[within] = found
        return tile

    def write(self, coordinates: Sequence[Any], data: Tensor) -> None:
        inside, within = self._window(coordinates)
        if self.base[inside].numel():
            self.base[inside] = data.reshape(self.block)[within]
