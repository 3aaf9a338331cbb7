"""The array layer: which library an array belongs to, and the few things the array API does not say.

Everything else in :mod:`sharpmax.core` is written once against the functions of the array API standard. What a
library adds beyond it (stopping a gradient, compiling, working on large arrays block by block) is decided here.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import array_api_compat
import numpy as np

Array: TypeAlias = Any
"""A NumPy array, a PyTorch tensor or a JAX array (or tracer)."""

LOWEST = {
    "float16": -65504.0,
    "bfloat16": -3.3895313892515355e38,
    "float32": float(np.finfo(np.float32).min),
    "float64": float(np.finfo(np.float64).min),
}
"""The lowest finite number of every floating-point type that is served."""


class Library(NamedTuple):
    """An array library: its short name and its array-API namespace."""

    name: str
    xp: Any


NUMPY = Library("numpy", np)
"""NumPy has the functions of the array API itself since 2.1, and array-api-compat's copy of it is slow to import."""


def library_of(x: Array) -> Library:
    """The library that ``x`` belongs to.

    Known types are told apart by the module that defines them, without calling into array-api-compat: its cached
    helpers make ``torch.compile`` warn, so the namespace is settled before anything is traced.
    """
    root = type(x).__module__.partition(".")[0]
    if root == "torch":
        import array_api_compat.torch as torch_namespace

        return Library("torch", torch_namespace)
    if root in ("jax", "jaxlib"):
        return Library("jax", sys.modules["jax.numpy"])
    if root == "numpy" and isinstance(x, np.ndarray | np.generic):
        return NUMPY
    if array_api_compat.is_torch_array(x):
        import array_api_compat.torch as torch_namespace

        return Library("torch", torch_namespace)
    if array_api_compat.is_jax_array(x):
        return Library("jax", sys.modules["jax.numpy"])
    if array_api_compat.is_numpy_array(x):
        return NUMPY
    raise TypeError(
        f"expected a NumPy, PyTorch or JAX array, got {type(x).__name__}; convert it first, for example with "
        "numpy.asarray(x, dtype=numpy.float32)"
    )


def dtype_name(x: Array) -> str:
    """``"float32"`` and the like, the same for every library."""
    return str(x.dtype).rpartition(".")[2]


def floating_dtype(x: Array, what: str = "logits") -> str:
    """The name of ``x``'s type, refused unless it is one of :data:`LOWEST`."""
    name = dtype_name(x)
    if name not in LOWEST:
        raise TypeError(
            f"expected {what} of type float16, bfloat16, float32 or float64, got {name}; convert them first, for "
            "example to float32"
        )
    return name


def accumulation_dtype(lib: Library, x: Array) -> Any:
    """The type statistics of ``x`` are held in: float64 for float64, float32 for everything narrower."""
    return lib.xp.float64 if dtype_name(x) == "float64" else lib.xp.float32


def mask_threshold(name: str) -> float:
    """Logits below this are masked: ``-inf`` and everything at or under half of the lowest finite number.

    The numbers stand in the code itself: ``torch.compile`` makes symbols of those that it finds elsewhere, and cannot
    pass these from one ``autograd.Function`` to the next.
    """
    if name == "float16":
        return -32751.998046875
    if name == "bfloat16":
        return -1.6947655932137197e38
    return -8.988465674311578e307 if name == "float64" else -1.7014116317805963e38


def stop_gradient(x: Array) -> Array:
    """``x`` as a constant: no gradient flows through it, in any library."""
    name = library_of(x).name
    if name == "torch":
        return x.detach()
    if name == "jax":
        return sys.modules["jax"].lax.stop_gradient(x)
    return x


def in_transform(x: Array) -> bool:
    """Whether ``x`` has no values to look at: a JAX tracer, or torch under ``torch.compile`` or ``torch.func``."""
    name = library_of(x).name
    if name == "torch":
        torch = sys.modules["torch"]
        return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return name == "jax" and isinstance(x, sys.modules["jax"].core.Tracer)


def to_numpy(x: Any, dtype: Any = np.float64) -> np.ndarray:
    """``x`` (any array or nested sequence) as a NumPy array of ``dtype``, detached and on the host."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = x.double() if x.dtype.is_floating_point else x
    return np.asarray(x, dtype=dtype)


# ----------------------------------------------------------------------------------------------------------------
# Rows: any axis of any array, seen as a matrix [rows, n].
# ----------------------------------------------------------------------------------------------------------------


def product(sizes: Sequence[int]) -> int:
    """``math.prod``, in a form that ``torch.compile`` traces with symbolic sizes."""
    result = 1
    for size in sizes:
        result = result * size
    return result


class Rows(NamedTuple):
    """How an array of shape ``shape`` was laid out as a matrix of rows, and how to lay results out again."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def batch(self) -> tuple[int, ...]:
        """The shape without the reduced axes: that of statistics and of beta."""
        return tuple(size for i, size in enumerate(self.shape) if i not in self.axes)

    @property
    def order(self) -> tuple[int, ...]:
        """The permutation that brings the reduced axes to the end."""
        return tuple(i for i in range(len(self.shape)) if i not in self.axes) + self.axes

    def matrix(self, xp: Any, x: Array) -> Array:
        """``x`` as ``[rows, n]``."""
        if self.order != tuple(range(len(self.shape))):
            x = xp.permute_dims(x, self.order)
        return xp.reshape(x, (product(self.batch), product([self.shape[i] for i in self.axes])))

    def restore(self, xp: Any, matrix: Array) -> Array:
        """The inverse of :meth:`matrix`."""
        y = xp.reshape(matrix, self.batch + tuple(self.shape[i] for i in self.axes))
        if self.order != tuple(range(len(self.shape))):
            y = xp.permute_dims(y, tuple(self.order.index(i) for i in range(len(self.shape))))
        return y


def _whole(axis: Any) -> int:
    try:
        return operator.index(axis)
    except TypeError:
        got = f"an array of shape {tuple(axis.shape)}" if hasattr(axis, "shape") else repr(axis)
        raise TypeError(f"expected axis to be a whole number, several, or None, got {got}") from None


def rows_of(x: Array, axis: int | tuple[int, ...] | None) -> Rows:
    """The rows of ``x`` along ``axis`` (one axis, several, or ``None`` for all of them)."""
    rank = len(x.shape)
    if axis is None:
        return Rows(tuple(x.shape), tuple(range(rank)))
    axes: tuple[int, ...] = ()
    for a in axis if isinstance(axis, tuple | list) else (axis,):
        if not isinstance(a, int):
            a = _whole(a)  # noqa: PLW2901
        # Compared one by one, an axis that torch.compile holds as a symbol becomes the plain number it is.
        named = [i for i in range(rank) if a == i or a + rank == i]
        if not named:
            raise ValueError(f"axis {a} does not exist in an array of shape {tuple(x.shape)}")
        axes += tuple(named)
    if len(axes) > 1:
        if len(set(axes)) != len(axes):
            raise ValueError(f"axis {axis} names one axis of shape {tuple(x.shape)} twice")
        axes = tuple(sorted(axes))
    return Rows(tuple(x.shape), axes)


class LogitRows(NamedTuple):
    """Checked logits laid out as rows: the library, the layout, logits ``[rows, n]`` and a mask of that shape."""

    lib: Library
    rows: Rows
    matrix: Array
    where: Array | None


def logit_rows(x: Array, axis: int | tuple[int, ...] | None, where: Array | None) -> LogitRows:
    """Check the arguments that every function of logits takes, and lay them out as rows."""
    lib = library_of(x)
    floating_dtype(x)
    rows = rows_of(x, axis)
    if where is not None:
        if getattr(where, "dtype", None) is None or dtype_name(where) != "bool":
            got = dtype_name(where) if hasattr(where, "dtype") else type(where).__name__
            raise TypeError(f"expected where to be a boolean array, got {got}")
        _check_library(lib, where, "where")
        if not broadcasts(tuple(where.shape), rows.shape):
            raise ValueError(
                f"expected where to broadcast against logits of shape {rows.shape}, got shape {tuple(where.shape)}"
            )
        where = rows.matrix(lib.xp, lib.xp.broadcast_to(where, rows.shape))
    return LogitRows(lib, rows, rows.matrix(lib.xp, x), where)


def row_values(lib: Library, rows: Rows, values: Array | float, dtype: Any, device: Any, what: str) -> Array:
    """``values`` (a number, or an array that broadcasts against the batch shape) as one number per row."""
    if isinstance(values, int | float):
        return lib.xp.full((product(rows.batch),), float(values), dtype=dtype, device=device)
    if not hasattr(values, "shape"):
        raise TypeError(f"expected {what} to be a number or an array, got {type(values).__name__}")
    if isinstance(values, np.generic):
        return lib.xp.full((product(rows.batch),), float(values), dtype=dtype, device=device)
    _check_library(lib, values, what)
    if not broadcasts(tuple(values.shape), rows.batch):
        raise ValueError(
            f"expected {what} to broadcast against the rows of shape {rows.batch}, got shape {tuple(values.shape)}"
        )
    values = lib.xp.broadcast_to(lib.xp.astype(values, dtype, copy=False), rows.batch)
    return lib.xp.reshape(values, (product(rows.batch),))


def _check_library(lib: Library, x: Array, what: str) -> None:
    """Refuse an array of another library; JAX takes NumPy's."""
    name = library_of(x).name
    if name != lib.name and (lib.name, name) != ("jax", "numpy"):
        raise TypeError(f"expected {what} to be a {lib.name} array like the logits, got a {name} array")


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether an array of ``shape`` broadcasts against ``to``."""
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(shape[::-1], to[::-1], strict=False))


def device_of(x: Array) -> Any:
    """The device to create arrays on that will meet ``x``; ``None`` lets the library choose (JAX, NumPy)."""
    return x.device if library_of(x).name == "torch" else None
