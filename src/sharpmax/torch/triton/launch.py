"""What host functions need around a kernel: checked tensors as its arguments, the number of programs, the launch."""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from ...core.policies.base import Lowered
from ..geometry import ALL, LARGEST_HEAD, Geometry
from .blocks import BIAS, BOOLEAN, NONE
from .policy import COEFFICIENTS
from .tiles import Tiles

LOG2E = math.log2(math.e)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INFINITY = torch.finfo(torch.float32).max
OPTIONS = {"enable_fp_fusion": True}
"""Of every launch; no longer Triton's default from 3.10 on."""


def launch(kernel: Any, programs: int, tiles: Tiles, shared: dict[str, Any], like: Tensor, **arguments: Any) -> None:
    """Run ``programs`` programs of a kernel, on the device of ``like``."""
    if programs == 0:
        return
    check_device(kernel, like)
    passed = {name: value for name, value in shared.items() if name != "SCALE"} | arguments
    streamed = [passed[name] for name in ("q", "k", "v", "d_out") if name in passed]
    known = hasattr(triton.language, "make_tensor_descriptor")  # from triton 3.4 on
    descriptors = tiles.descriptors and known and all(_aligned(x) for x in streamed)
    passed |= {"ROWS": tiles.rows, "KEYS": tiles.keys, "TMA": descriptors}
    run = functools.partial(kernel[(programs,)], **passed, num_warps=tiles.warps, num_stages=tiles.stages, **OPTIONS)
    with torch.cuda.device_of(like):
        if descriptors and like.is_cuda:
            with_scratch(run)
        else:
            run()


def with_scratch(run: Callable[[], Any]) -> None:
    """Run a launch that keeps descriptors in memory of the device; the allocator that triton had stays as it was."""

    def inside() -> None:
        triton.set_allocator(_scratch)
        run()

    contextvars.copy_context().run(inside)  # the allocator is a context variable


def check_device(kernel: Any, like: Tensor) -> None:
    """Refuse tensors that are not on a GPU, unless the kernel is interpreted."""
    if not like.is_cuda and isinstance(kernel, triton.JITFunction):
        raise ValueError(f"the Triton kernels need tensors on a GPU, got {like.device}; use impl='streaming' there")


def _scratch(size: int, alignment: int, stream: int | None) -> Any:
    """Where a kernel keeps its descriptors."""
    del alignment, stream  # torch aligns to 512 bytes, on the current stream
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _aligned(x: Tensor) -> bool:
    """Whether rows are contiguous and begin at multiples of 16 bytes, as a descriptor wants them; repeated ones not."""
    return (
        x.stride(-1) == 1
        and x.stride(-2) > 0
        and x.data_ptr() % 16 == 0
        and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])
    )


def shared_arguments(
    q: Tensor, k: Tensor, v: Tensor | None, geometry: Geometry, mask: Tensor | None, key_lengths: Tensor | None,
    cu_q: Tensor | None, cu_k: Tensor | None,
) -> dict[str, Any]:  # fmt: skip
    """The arguments that every kernel takes, from checked tensors."""
    _check(q, k, v, mask, key_lengths, cu_q, cu_k)
    batch, heads, q_len, width = q.shape
    kind = NONE if mask is None else BOOLEAN if mask.dtype == torch.bool else BIAS
    limit, mask_strides = -INFINITY / 2, (0, 0, 0, 0)
    if mask is not None:
        mask_strides = mask.expand(batch, heads, q_len, k.shape[2]).stride()
        if kind == BIAS:
            limit = max(limit, torch.finfo(mask.dtype).min / 2)
        else:
            mask = mask.view(torch.uint8)
    documents = 0 if cu_q is None else cu_q.shape[0] - 1
    bent = geometry.softcap > 0 or kind == BIAS or geometry.scale < 0
    scale2 = geometry.scale * LOG2E
    return {
        "q": q,
        "k": k,
        "mask": q if mask is None else mask,
        "cu_q": q if cu_q is None else cu_q.to(torch.int32).contiguous(),
        "cu_k": q if cu_k is None else cu_k.to(torch.int32).contiguous(),
        "key_lengths": q if key_lengths is None else key_lengths.to(torch.int32).contiguous(),
        **strides("q", q, "bhld"),
        **strides("k", k, "bhld"),
        **dict(zip(("stride_mb", "stride_mh", "stride_mq", "stride_mk"), mask_strides, strict=True)),
        "heads": heads,
        "group": heads // max(k.shape[1], 1),
        "q_len": q_len,
        "k_len": k.shape[2],
        "documents": documents,
        "steps": documents.bit_length() + 1,
        "left": geometry.left,
        "right": geometry.right,
        "limit": limit,
        "unit": 1.0 if bent else scale2,
        "scale2": 2 * scale2 / geometry.softcap if geometry.softcap > 0 else scale2,
        "cap2": geometry.softcap * LOG2E,
        "SCALE": geometry.scale,
        "D": width,
        "BLOCK_D": padded(width),
        "PACKED": cu_q is not None,
        "LENGTHS": key_lengths is not None,
        "LOWER_RIGHT": geometry.lower_right,
        "LEFT": geometry.left != ALL,
        "RIGHT": geometry.right != ALL,
        "MASK": kind,
        "CAP": geometry.softcap > 0,
        "BENT": bent,
    }


def has_edges(shared: dict[str, Any]) -> bool:
    """Whether some blocks hold logits that do not count, whatever their size."""
    return bool(shared["PACKED"] or shared["LENGTHS"] or shared["LEFT"] or shared["RIGHT"] or shared["MASK"])


def programs_of(shared: dict[str, Any], block: int, *, by_key: bool) -> int:
    """How many programs there are: one for each block of each head."""
    length = shared["k_len"] if by_key else shared["q_len"]
    heads = shared["heads"] // shared["group"] if by_key else shared["heads"]
    blocks = -(-length // block)
    if shared["PACKED"]:
        return (blocks + shared["documents"]) * heads if shared["documents"] else 0
    return blocks * heads * shared["q"].shape[0]


def strides(name: str, x: Tensor, axes: str) -> dict[str, int]:
    """The strides of ``x`` as arguments of a kernel, one for each letter of ``axes``."""
    return {f"stride_{name}{axis}": stride for axis, stride in zip(axes, x.stride(), strict=True)}


def room(
    like: Tensor, shape: tuple[int, ...], packed: bool, dtype: torch.dtype | None = None, fill: float = 0.0
) -> Tensor:
    """Where a kernel writes; with packed documents, ``fill`` stays where no document is."""
    if packed:
        return like.new_full(shape, fill, dtype=dtype)
    return like.new_empty(shape, dtype=dtype)


def row_numbers(values: Tensor, q: Tensor) -> Tensor:
    """One float32 number for each row, contiguous."""
    if values.dtype == torch.float32 and values.shape == q.shape[:-1] and values.is_contiguous():
        return values
    return values.to(torch.float32).expand(q.shape[:-1]).contiguous()


def padded(width: int) -> int:
    """The columns of a tile that holds ``width`` of them."""
    return max(16, 1 << (width - 1).bit_length())


def policy_arguments(lowered: Lowered | None) -> dict[str, Any]:
    """A lowered policy as arguments of the kernel; missing powers have coefficient 0, missing bounds are huge."""
    plain = lowered or Lowered("entropy", (1.0,))
    if len(plain.coefficients) > COEFFICIENTS:
        got = len(plain.coefficients)
        raise ValueError(f"the Triton kernel evaluates polynomials of up to {COEFFICIENTS} coefficients, got {got}")
    padded = (0.0,) * (COEFFICIENTS - len(plain.coefficients)) + plain.coefficients
    bounds = {
        "policy_low": plain.lo, "policy_high": plain.hi, "threshold": plain.threshold, "floor": plain.floor,
    }  # fmt: skip
    return {
        **{f"c{i}": float(c) for i, c in enumerate(padded)},
        **{name: min(max(float(value), -INFINITY), INFINITY) for name, value in bounds.items()},
        "POLICY": lowered is not None,
        "LOG_COUNT": plain.variable == "log_count",
    }


def _check(
    q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor | None, key_lengths: Tensor | None, cu_q: Tensor | None,
    cu_k: Tensor | None,
) -> None:  # fmt: skip
    tensors = [q, k] if v is None else [q, k, v]
    if any(x.dtype != q.dtype for x in tensors) or q.dtype not in DTYPES:
        got = ", ".join(str(x.dtype).removeprefix("torch.") for x in tensors)
        raise TypeError(
            f"the Triton kernels take float16, bfloat16 or float32, the same for query, key and value, got {got}; "
            "impl='reference' and impl='streaming' take float64"
        )
    if any(x.ndim != 4 for x in tensors):
        raise ValueError(f"expected [batch, heads, length, columns], got {[tuple(x.shape) for x in tensors]}")
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"query {tuple(q.shape)} and key {tuple(k.shape)} do not fit together")
    if v is not None and v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"key {tuple(k.shape)} and value {tuple(v.shape)} do not fit together")
    if any(not 1 <= x.shape[-1] <= LARGEST_HEAD for x in tensors):
        got = [x.shape[-1] for x in tensors]
        raise ValueError(f"the Triton kernels take heads of up to {LARGEST_HEAD} columns, got {got}")
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        raise ValueError("the Triton kernels give no gradient of the mask; use impl='reference' or impl='streaming'")
    if (cu_q is None) != (cu_k is None):
        raise ValueError("expected both cu_q and cu_k, or neither")
    if cu_q is not None and (mask is not None or key_lengths is not None or q.shape[0] != 1):
        raise ValueError("packed documents come as one batch element, without a mask and without key lengths")
