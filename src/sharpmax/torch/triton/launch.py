"""What host functions need around a kernel: its arguments worked out once for each form of a call, and the launch.

Everything about a launch but the tensors themselves follows from their :class:`Form` and from plain numbers: which
kernel, how many programs, some fifty arguments. Functions that work this out are cached and return a :class:`Launch`,
so that a call like one before costs the host little more than the launch itself.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...core.policies.base import Lowered
from ..geometry import ALL, LARGEST_HEAD, LEAST_SCALE, Geometry
from .assembler import sound_assembler
from .blocks import BIAS, BOOLEAN, NONE
from .policy import policy_values
from .tiles import Kernel, Tiles, tiles_for

LOG2E = math.log2(math.e)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INFINITY = torch.finfo(torch.float32).max
OPTIONS = {"enable_fp_fusion": True}
"""The compiler's for every launch: products are added in one instruction, by Triton 3.10 only when asked to."""
FORMS = 2048
"""How many forms of a call each cache holds."""
LEAST_SIDE = 16
"""Rows or columns of the smallest tile that products take."""
ALIGNMENT = 16
"""Bytes at whose multiples a tensor should begin: compiled kernels differ by that, and descriptors need it."""


class Form(NamedTuple):
    """What a launch depends on of a tensor, beside the place where it lies."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool


def form_of(x: Tensor) -> Form:
    """The form of a tensor."""
    return Form(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT == 0)


class Masks(NamedTuple):
    """What hides keys apart from the geometry: a mask, key lengths, or packed documents."""

    mask: Tensor | None = None
    key_lengths: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None

    @classmethod
    def of(cls, mask: Tensor | None, *others: Tensor | None) -> Masks:
        """Those of a call; a mask of eight bytes becomes one of four, which logits have."""
        return cls(mask.to(torch.float32) if mask is not None and mask.dtype == torch.float64 else mask, *others)

    @property
    def form(self) -> MaskForm:
        """The form of it, where it can be served."""
        mask, key_lengths, cu_q, cu_k = self
        if mask is not None and mask.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "the Triton kernels give no gradient of the mask; use impl='reference' or impl='streaming'"
            )
        if (cu_q is None) != (cu_k is None):
            raise ValueError("expected both cu_q and cu_k, or neither")
        return MaskForm(
            None if mask is None else form_of(mask),
            key_lengths is not None,
            None if cu_q is None else cu_q.shape[0] - 1,
        )

    def given(self, q: Tensor) -> dict[str, Tensor]:
        """The tensors as arguments of a kernel; one that there is not is stood in for by ``q``."""
        mask, key_lengths, cu_q, cu_k = self
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.view(torch.uint8)
        return {
            "mask": q if mask is None else mask,
            "cu_q": q if cu_q is None else _whole_numbers(cu_q),
            "cu_k": q if cu_k is None else _whole_numbers(cu_k),
            "key_lengths": q if key_lengths is None else _whole_numbers(key_lengths),
        }


def _whole_numbers(x: Tensor) -> Tensor:
    """``x`` as kernels take whole numbers."""
    return x if x.dtype == torch.int32 and x.is_contiguous() else x.to(torch.int32).contiguous()


class MaskForm(NamedTuple):
    """What a launch depends on of :class:`Masks`."""

    mask: Form | None
    lengths: bool
    documents: int | None


Making = tuple[str, Callable[[Tensor], Any]]


class Launch:
    """A kernel with all its arguments but those that lie in memory, to be run again and again.

    Args:
      kernel: of Triton or Gluon.
      programs: how many of them, along one axis or two.
      numbers: its arguments by name, except those that :meth:`__call__` takes; others are left out.
      options: of the compiler.
      scratch: whether it keeps descriptors in memory of the device.
      made: arguments that are made of a tensor: its name, and how.

    The first run is Triton's own, which finds or compiles the kernel for arguments of such types and values. What it
    returns is launched directly from then on, which costs the host less, except where what it counts on does not hold:
    the types of all tensors, and that they begin at multiples of 16 bytes. Hooks of launches run as ever; those that
    Triton runs before it looks for a kernel, and its check of globals, are for the first run alone.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int | tuple[int, int],
        numbers: dict[str, Any],
        options: dict[str, Any],
        *,
        scratch: bool = False,
        made: Mapping[str, Making] = MappingProxyType({}),
    ) -> None:
        self.kernel, self.options, self.scratch = kernel, options, scratch
        self.grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
        names = _parameters(kernel)
        self.filled: list[tuple[int, str, Callable[[Tensor], Any] | None]] = []
        for i, name in enumerate(names):
            if name not in numbers:
                source, make = made.get(name, (name, None))
                self.filled.append((i, source, make))
        self.arguments = [numbers.get(name) for name in names]
        self.again: Callable[..., Any] | None = None
        self.kinds: list[Any] = []

    def __call__(self, given: dict[str, Any], like: Tensor) -> None:
        """Run on ``given``, arguments by name, on the device of ``like``; what the kernel does not take is left out."""
        if 0 in self.grid:
            return
        check_device(self.kernel, like)
        with torch.cuda.device_of(like):
            if self.scratch:
                with_scratch(self._run, given)
            else:
                self._run(given)

    def _run(self, given: dict[str, Any]) -> None:
        arguments, kinds, addresses = self.arguments.copy(), [], 0
        for i, name, make in self.filled:
            value = given[name]
            arguments[i] = value if make is None else make(value)
            if isinstance(value, Tensor):
                addresses |= value.data_ptr()
                kinds.append(value.dtype)
            else:
                kinds.append(None if value is None else value.bit_length() < 32)  # a whole number, of 4 bytes or 8
        aligned = addresses % ALIGNMENT == 0
        if self.again is not None and aligned and kinds == self.kinds:
            self.again(*arguments)
            return
        with sound_assembler(self.kernel) as more:
            compiled = self.kernel[self.grid](*arguments, **self.options, **more)
        # The interpreter compiles nothing.
        if self.again is None and aligned and compiled is not None:
            self.kinds, self.again = kinds, compiled[self.grid]


@functools.cache
def _parameters(kernel: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kernel.fn).parameters)


def tiled(
    kernel: Any, programs: int, tiles: Tiles, shared: dict[str, Any], streamed: tuple[Form, ...], **numbers: Any
) -> Launch:
    """The launch of a kernel that goes through ``streamed`` tensors in tiles."""
    descriptors = tiles.descriptors and all(_describable(x) for x in streamed)
    numbers |= shared | {"ROWS": tiles.rows, "KEYS": tiles.keys, "TMA": descriptors}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, **OPTIONS}
    on_gpu = streamed[0].device.type == "cuda"
    return Launch(kernel, programs, numbers, options, scratch=descriptors and on_gpu)


def with_scratch(run: Callable[..., None], *given: Any) -> None:
    """Run a launch that keeps descriptors in memory of the device; the allocator that triton had stays as it was."""
    within = contextvars.copy_context()  # the allocator is a context variable
    within.run(triton.set_allocator, _scratch)
    within.run(run, *given)


def check_device(kernel: Any, like: Tensor) -> None:
    """Refuse tensors that are not on a GPU, unless the kernel is interpreted."""
    if not like.is_cuda and isinstance(kernel, triton.JITFunction):
        raise ValueError(f"the Triton kernels need tensors on a GPU, got {like.device}; use impl='streaming' there")


def _scratch(size: int, alignment: int, stream: int | None) -> Any:
    """Where a kernel keeps its descriptors."""
    del alignment, stream  # torch aligns to 512 bytes, on the current stream
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _describable(x: Form) -> bool:
    """Whether rows are contiguous and begin at multiples of 16 bytes, as a descriptor wants them; repeated ones not."""
    *outer, last = x.strides
    return x.aligned and last == 1 and outer[-1] > 0 and all(s * x.dtype.itemsize % ALIGNMENT == 0 for s in outer)


def shared_numbers(q: Form, k: Form, v: Form | None, geometry: Geometry, masks: MaskForm) -> dict[str, Any]:
    """The numbers that every kernel takes, from checked forms."""
    _check(q, k, v, masks)
    batch, heads, q_len, width = q.shape
    mask, lengths, documents = masks
    kind = NONE if mask is None else BOOLEAN if mask.dtype == torch.bool else BIAS
    limit, mask_strides = -INFINITY / 2, (0, 0, 0, 0)
    if mask is not None:
        mask_strides = _expanded_strides(mask, (batch, heads, q_len, k.shape[2]))
        if kind == BIAS:
            limit = max(limit, torch.finfo(mask.dtype).min / 2)
    bent = geometry.softcap > 0 or kind == BIAS or geometry.scale < LEAST_SCALE
    scale2 = geometry.scale * LOG2E
    return {
        **strides("q", q, "bhld"),
        **strides("k", k, "bhld"),
        **dict(zip(("stride_mb", "stride_mh", "stride_mq", "stride_mk"), mask_strides, strict=True)),
        "batch": batch,
        "heads": heads,
        "group": heads // max(k.shape[1], 1),
        "q_len": q_len,
        "k_len": k.shape[2],
        "documents": documents or 0,
        "steps": (documents or 0).bit_length() + 1,
        "left": geometry.left,
        "right": geometry.right,
        "limit": limit,
        "unit": 1.0 if bent else scale2,
        "scale": geometry.scale,
        "scale2": 2 * scale2 / geometry.softcap if geometry.softcap > 0 else scale2,
        "cap2": geometry.softcap * LOG2E,
        "D": width,
        "BLOCK_D": power_of_2(width, LEAST_SIDE),
        "PACKED": documents is not None,
        "LENGTHS": lengths,
        "LOWER_RIGHT": geometry.lower_right,
        "LEFT": geometry.left != ALL,
        "RIGHT": geometry.right != ALL,
        "MASK": kind,
        "CAP": geometry.softcap > 0,
        "BENT": bent,
    }


def usual_tiles(kernel: Kernel, width: int, q: Form, geometry: Geometry, masks: MaskForm) -> Tiles:
    """The tiles that the tables have for a call."""
    mask_bytes = 0 if masks.mask is None else masks.mask.dtype.itemsize
    return tiles_for(kernel, width, q.dtype, q.device, banded=geometry.banded, mask_bytes=mask_bytes)


def _expanded_strides(x: Form, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of ``x`` expanded to a shape."""
    missing = len(shape) - len(x.shape)
    own = (0 if size == 1 else stride for size, stride in zip(x.shape, x.strides, strict=True))
    fits = missing >= 0 and all(a in (1, b) for a, b in zip(x.shape, shape[missing:], strict=True))
    if not fits:
        raise ValueError(f"expected a mask that broadcasts against {tuple(shape)}, got shape {tuple(x.shape)}")
    return (0,) * missing + tuple(own)


def value_numbers(v: Form, dropout_p: float) -> dict[str, Any]:
    """The numbers that kernels with values take."""
    return {
        **strides("v", v, "bhld"),
        "dropout_p": dropout_p,
        "DV": v.shape[-1],
        "BLOCK_DV": power_of_2(v.shape[-1], LEAST_SIDE),
        "DROPOUT": dropout_p > 0,
    }


def has_edges(shared: dict[str, Any]) -> bool:
    """Whether blocks of any size may reach beyond the lengths or the band."""
    return bool(shared["PACKED"] or shared["LENGTHS"] or shared["LEFT"] or shared["RIGHT"])


def programs_of(shared: dict[str, Any], block: int, *, by_key: bool) -> int:
    """How many programs there are: one for each block of each head."""
    length = shared["k_len"] if by_key else shared["q_len"]
    heads = shared["heads"] // shared["group"] if by_key else shared["heads"]
    blocks = -(-length // block)
    if shared["PACKED"]:
        return (blocks + shared["documents"]) * heads if shared["documents"] else 0
    return blocks * heads * shared["batch"]


def strides(name: str, x: Form, axes: str) -> dict[str, int]:
    """The strides of ``x`` as arguments of a kernel, one for each letter of ``axes``."""
    return {f"stride_{name}{axis}": stride for axis, stride in zip(axes, x.strides, strict=True)}


def room(
    like: Tensor, shape: tuple[int, ...], packed: bool, dtype: torch.dtype | None = None, fill: float = 0.0
) -> Tensor:
    """Where a kernel writes; with packed documents, ``fill`` stays where no document is."""
    if packed:
        return like.new_full(shape, fill, dtype=dtype)
    return like.new_empty(shape, dtype=dtype)


def room_like(x: Tensor, packed: bool, fill: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
    """:func:`room` of the shape of ``x``, which costs the host less."""
    if packed:
        return torch.full_like(x, fill, dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def row_numbers(values: Tensor, rows: tuple[int, ...]) -> Tensor:
    """One float32 number for each of ``rows``, contiguous."""
    if values.dtype == torch.float32 and values.shape == rows and values.is_contiguous():
        return values
    return values.to(torch.float32).expand(rows).contiguous()


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of 2 that is at least ``n`` and ``least``."""
    return max(least, 1 << (n - 1).bit_length())


def policy_arguments(lowered: Lowered | None) -> dict[str, Any]:
    """A lowered policy as arguments of all kernels but those for decoding; missing bounds are huge."""
    plain = lowered or Lowered("entropy", (1.0,))
    low, high, threshold, floor, *coefficients = policy_values(plain, INFINITY)
    return {
        **{f"c{i}": c for i, c in enumerate(coefficients)},
        "policy_low": low,
        "policy_high": high,
        "threshold": threshold,
        "floor": min(max(floor, -INFINITY), INFINITY),
        "POLICY": lowered is not None,
        "LOG_COUNT": plain.variable == "log_count",
    }


def _check(q: Form, k: Form, v: Form | None, masks: MaskForm) -> None:
    tensors = [q, k] if v is None else [q, k, v]
    if any(x.dtype != q.dtype for x in tensors) or q.dtype not in DTYPES:
        got = ", ".join(str(x.dtype).removeprefix("torch.") for x in tensors)
        raise TypeError(
            f"the Triton kernels take float16, bfloat16 or float32, the same for query, key and value, got {got}; "
            "impl='reference' and impl='streaming' take float64"
        )
    if any(len(x.shape) != 4 for x in tensors):
        raise ValueError(f"expected [batch, heads, length, columns], got {[tuple(x.shape) for x in tensors]}")
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"query {tuple(q.shape)} and key {tuple(k.shape)} do not fit together")
    if v is not None and v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"key {tuple(k.shape)} and value {tuple(v.shape)} do not fit together")
    if any(not 1 <= x.shape[-1] <= LARGEST_HEAD for x in tensors):
        got = [x.shape[-1] for x in tensors]
        raise ValueError(f"the Triton kernels take heads of up to {LARGEST_HEAD} columns, got {got}")
    if masks.documents is not None and (masks.mask is not None or masks.lengths or q.shape[0] != 1):
        raise ValueError("packed documents come as one batch element, without a mask and without key lengths")
