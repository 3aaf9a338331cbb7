"""What kernels compute with: numbers and arrays of them, products that are under way, and addresses."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton import language as tl

from tests.gluon.machine import HazardError

NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "int1",
}
TYPES = {name: dtype for dtype, name in NAMES.items()}
LAYOUT = object()
"""Of everything: how numbers lie in threads is nothing to their values."""


def dtype_of(dtype: torch.dtype) -> Any:
    """Triton's name for a type."""
    return tl.dtype(NAMES[dtype])


def torch_dtype(dtype: Any) -> torch.dtype:
    return TYPES[dtype.name]


def tensor(x: Any, like: Tensor | None = None) -> Tensor:
    """The tensor of a value, or of a number, which takes the type of what it stands beside if that can hold it."""
    if isinstance(x, Value):
        return x.data
    if like is not None and (like.is_floating_point() or not isinstance(x, float)):
        return torch.tensor(x, dtype=like.dtype)
    kinds = {bool: torch.bool, int: torch.int32, float: torch.float32}
    return torch.tensor(x, dtype=kinds[type(x)])


def pair(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Two tensors of one type."""
    x = tensor(a, b.data if isinstance(b, Value) else None)
    y = tensor(b, x)
    if x.dtype != y.dtype:
        dtype = torch.promote_types(x.dtype, y.dtype)
        x, y = x.to(dtype), y.to(dtype)
    return x, y


class Value:
    """A number, or an array of them. It never changes: operators that would change it make another one."""

    __slots__ = ("_data", "_shape", "under_way")

    def __init__(self, data: Tensor | None, shape: Sequence[int] | None = None) -> None:
        self._data = data
        self._shape = shape
        self.under_way = data is None

    @property
    def data(self) -> Tensor:
        if self.under_way or self._data is None:
            raise HazardError("a product is read that has not been waited for")
        return self._data

    def partial(self) -> Tensor:
        """What there is of a product, for the one that goes on with it."""
        assert self._data is not None
        return self._data

    def complete(self, data: Tensor) -> None:
        self._data = data

    @property
    def shape(self) -> list[int]:
        return list(self._shape if self._data is None and self._shape is not None else self.partial().shape)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=LAYOUT)

    @property
    def dtype(self) -> Any:
        return dtype_of(self.data.dtype)

    def to(self, dtype: Any) -> Value:
        return Value(self.data.to(torch_dtype(dtype)))

    def reshape(self, shape: Sequence[int]) -> Value:
        return Value(self.data.reshape(*shape))

    def permute(self, order: Sequence[int]) -> Value:
        return Value(self.data.permute(*order))

    def split(self) -> tuple[Value, Value]:
        left, right = self.data.unbind(-1)
        return Value(left), Value(right)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __neg__(self) -> Value:
        return Value(-self.data)

    def __truediv__(self, other: Any) -> Value:
        return Value(torch.true_divide(*pair(self, other)))

    def __rtruediv__(self, other: Any) -> Value:
        return Value(torch.true_divide(*pair(other, self)))


def _division(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, y, rounding_mode="trunc")


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": _division,
    "mod": torch.fmod,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}


def _binary(name: str, operation: Callable[[Tensor, Tensor], Tensor], swapped: bool = False) -> Any:
    def method(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        return Value(operation(*(pair(other, self) if swapped else pair(self, other))))

    method.__name__ = name
    return method


for _name, _operation in (OPERATIONS | COMPARISONS).items():
    setattr(Value, f"__{_name}__", _binary(f"__{_name}__", _operation))
for _name, _operation in OPERATIONS.items():
    setattr(Value, f"__r{_name}__", _binary(f"__r{_name}__", _operation, swapped=True))
Value.__hash__ = None  # type: ignore[assignment]


class Pointer:
    """Addresses in a tensor: of what lies between its first number and its last."""

    def __init__(self, base: Tensor, offset: Tensor | None = None) -> None:
        self.base = base
        self.offset = torch.tensor(0) if offset is None else offset

    @classmethod
    def of(cls, x: Tensor) -> Pointer:
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        return cls(x.as_strided((last + 1 if x.numel() else 0,), (1,)))

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=dtype_of(self.base.dtype))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.base, self.offset + tensor(offset).to(torch.int64))

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Where to read or write, and which of these places it is about: all must be there."""
        there = torch.tensor(True) if mask is None else tensor(mask)
        offset, there = torch.broadcast_tensors(self.offset, there)
        outside = there & ((offset < 0) | (offset >= len(self.base)))
        if outside.any():
            raise HazardError(f"place {int(offset[outside][0])} is read or written, of {len(self.base)}")
        return offset, there
