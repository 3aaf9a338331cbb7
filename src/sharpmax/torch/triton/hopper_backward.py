"""The gradient of attention with a policy of the entropy, on Hopper: which calls its kernels take, and their launch.

Attention is cuDNN's, on ``q~ = beta q``. Its gradient and that of the statistics share the logits: 8 products in all,
where one after the other takes 9, and nothing is added atomically. Three kernels: one for numbers of every row, one by
rows of queries (:mod:`.hopper_query_kernel`) and one by keys (:mod:`.hopper_key_kernel`).

The numbers lie by tiles of 64 rows, ``[tile, NUMBERS, 64]``, in the order of ``hopper_query_kernel.place_of``. With
``D = <do, out>``, ``H`` the entropy, maximum ``m`` and sum ``L`` of the statistics, and logarithms to base 2:

    -lse, -D, unit / beta, H - m - log L, g / 2^H, H, slope of the policy (as ``g`` takes it), nothing
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.policies.base import Lowered
from ..geometry import ALL, Geometry
from .hopper import FILLED, descriptor, processors
from .hopper import strides as engine_strides
from .hopper_numbers_kernel import numbers_kernel
from .launch import LOG2E, OPTIONS, check_device, policy_arguments, row_numbers, strides

LINES = 64
"""Rows of a tile, of queries or of keys."""
ROWS = 128
"""Rows of queries, or keys, that a program owns at a time."""
NUMBERS = 8
"""Numbers of a row."""
STAGES = {64: 6, 128: 3}
"""Tiles in shared memory, by the head size; other sizes are not served."""
HALVES = {64: False, 128: True}
"""Whether the kernel of the queries takes tiles half by half, by the head size; as measured better on an H200."""
SECTION = 64 << 20
"""Bytes of what is streamed that programs work on at the same time; with causality alone."""
SAMPLE = 256
"""Keys that stand for all of a head's where only their mean is asked for."""


def refusal(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> str:
    """Why the kernels do not give these gradients, or nothing where they do; devices are for others to look at."""
    if geometry.softcap > 0 or geometry.scale <= 0:
        return "calls without a softcap and with a positive scale"
    aligned = not geometry.lower_right or q.shape[2] == k.shape[2]
    if geometry.left != ALL or geometry.right not in (ALL, 0) or not aligned:
        return "calls that see all keys, or those up to a row's own number"
    if q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] not in STAGES:
        return "heads of 64 or 128 columns in a two-byte type"
    if v.shape[-1] != q.shape[-1]:
        return "values as wide as queries"
    if 0 in (*q.shape, *k.shape):
        return "tensors that are not empty"
    return "" if all(_regular(x) for x in (q, k, v)) else "rows that are contiguous and begin at multiples of 16 bytes"


def _regular(x: Tensor) -> bool:
    """Whether the copy engine takes the strides of ``x``."""
    return x.stride(-1) == 1 and all(
        s > 0 and s % 8 == 0 for n, s in zip(x.shape[:-1], x.stride(), strict=False) if n > 1
    )


def pays(q: Tensor, k: Tensor, causal: bool, count: int) -> bool:
    """Whether ``count`` processors all have blocks of rows and of keys to do, as ``hopper.pays`` asks."""
    for x in (q, k):
        blocks = -(-x.shape[2] // ROWS) * x.shape[0] * x.shape[1]
        if blocks < (2 * count if causal else FILLED * count * -(-blocks // count)):
            return False
    return True


def sharpened_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    geometry: Geometry,
    lowered: Lowered,
    *,
    scaled: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    row_moment: Tensor,
    beta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; ``out`` and ``lse`` are those of attention on ``scaled``, which is ``beta * q``."""
    check_device(numbers_kernel, q)
    refused = refusal(q, k, v, geometry)
    if refused:
        raise ValueError(f"the gradient kernels for Hopper serve {refused}")
    rows = {"beta": beta, "lse": lse, "row_max": row_max, "row_sum": row_sum, "row_moment": row_moment}
    scaled = scaled.contiguous()
    shared = {"unit": geometry.scale * LOG2E, "scale": geometry.scale}
    numbers = torch.empty(
        (q.shape[0] * q.shape[1], -(-q.shape[2] // LINES), NUMBERS, LINES), dtype=torch.float32, device=q.device
    )
    with torch.cuda.device_of(q):
        _row_numbers(q, k, scaled, out, grad_out, rows, lowered, shared, numbers)
        streamed = {"q_desc": scaled, "g_desc": grad_out, "k_desc": k, "v_desc": v}
        tiles = {name: descriptor(_placed(x), LINES) for name, x in streamed.items()}
        shared |= {"numbers": numbers, "group": q.shape[1] // k.shape[1], "queries": q.shape[2], **tiles}
        dq = _query_gradient(q, k, geometry.banded, shared)
        dk, dv = _key_gradients(q, k, v, geometry.banded, shared)
    return dq, dk, dv


def _placed(x: Tensor) -> Tensor:
    """``x``, where the copy engine can take it."""
    return x.clone(memory_format=torch.contiguous_format) if engine_strides(x) is None else x


def _row_numbers(
    q: Tensor, k: Tensor, scaled: Tensor, out: Tensor, grad_out: Tensor, rows: dict[str, Tensor], lowered: Lowered,
    shared: dict[str, Any], numbers: Tensor,
) -> None:  # fmt: skip
    kernel: Any = numbers_kernel
    policy = {name: x for name, x in policy_arguments(lowered).items() if name not in ("POLICY", "LOG_COUNT")}
    kernel[(numbers.shape[1], numbers.shape[0])](
        q=q,
        scaled=scaled,
        out=out,
        d_out=grad_out,
        mean=k[:, :, :: max(1, k.shape[2] // SAMPLE)].mean(2, dtype=torch.float32),
        **{name: row_numbers(x, q) for name, x in rows.items()},
        numbers=numbers,
        **strides("q", q, "bhld"),
        **strides("o", out, "bhld"),
        **strides("g", grad_out, "bhld"),
        heads=q.shape[1],
        group=q.shape[1] // k.shape[1],
        queries=q.shape[2],
        **shared,
        **policy,
        D=q.shape[-1],
        LINES=LINES,
        NUMBERS=NUMBERS,
        num_warps=8,
        **OPTIONS,
    )


def _query_gradient(q: Tensor, k: Tensor, causal: bool, shared: dict[str, Any]) -> Tensor:
    from .hopper_query_kernel import hopper_query_kernel

    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kernel: Any = hopper_query_kernel
    programs, sizes = _programs(q, k, causal)
    kernel[(programs,)](
        **shared,
        **sizes,
        out_desc=descriptor(dq, LINES),
        keys=k.shape[2],
        STAGES=STAGES[q.shape[-1]],
        CAUSAL=causal,
        EDGES=causal or k.shape[2] % LINES != 0 or q.shape[2] % ROWS != 0,
        HALVES=HALVES[q.shape[-1]],
        num_warps=4,
        **OPTIONS,
    )
    return dq


def _key_gradients(q: Tensor, k: Tensor, v: Tensor, causal: bool, shared: dict[str, Any]) -> tuple[Tensor, Tensor]:
    from .hopper_key_kernel import hopper_key_kernel

    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    kernel: Any = hopper_key_kernel
    programs, sizes = _programs(k, q, causal)
    kernel[(programs,)](
        **shared,
        **sizes,
        dk_desc=descriptor(dk, LINES),
        dv_desc=descriptor(dv, LINES),
        STAGES=STAGES[q.shape[-1]],
        CAUSAL=causal,
        num_warps=4,
        **OPTIONS,
    )
    return dk, dv


def _programs(owned: Tensor, streamed: Tensor, causal: bool) -> tuple[int, dict[str, int]]:
    """How many programs share the blocks of ``owned``, and in which order they take them."""
    batch, heads, length, width = owned.shape
    blocks, sequences = -(-length // ROWS), batch * heads
    bytes_streamed = 2 * streamed.shape[2] * width * owned.element_size()
    section = max(1, SECTION // bytes_streamed) if causal else 1
    items = blocks * sequences
    sizes = {"items": items, "section": min(section, sequences), "blocks": blocks}
    return min(items, processors(owned.device)), sizes | {"sequences": sequences, "heads": heads}
