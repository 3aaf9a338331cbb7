"""The gradient of attention with a policy of the entropy on Hopper: which calls its kernels take, and their launch.

Three kernels: one for the numbers of every row, one by rows of queries (:mod:`.hopper_query_kernel`), one by keys
(:mod:`.hopper_key_kernel`). The numbers lie by tiles of 64 rows, as ``[tile, NUMBERS, 64]``, in units of log 2:

    -lse, -D, unit / beta, -(max + log L), g, g H, H, slope
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.policies.base import Lowered
from ..geometry import Geometry
from .blocks import LN2, LOG2E
from .hopper import descriptor, processors
from .launch import OPTIONS, policy_arguments, row_numbers, strides
from .policy import lowered_slope

LINES = 64
"""Rows of a tile, of queries and of keys."""
ROWS = 128
"""Rows that a program of either kernel owns at a time."""
NUMBERS = 8
"""Numbers of a row."""
FAR = tl.constexpr(-1.0e30)  # an exponent whose power is exactly 0, and finite
SAMPLE = 256
"""Keys that stand for all of a head's when the offset of its logits is estimated."""
STAGES = {64: (7, 8), 128: (3, 4)}
"""Tiles in shared memory, of keys and of queries, by the head size."""
SECTION = 64 << 20
"""Bytes of what is streamed that programs work on at the same time; with causality alone."""


@triton.jit
def numbers_kernel(
    q, scaled, out, d_out, mean, beta, lse, row_max, row_sum, row_moment, numbers,
    stride_qb, stride_qh, stride_ql, stride_qd, stride_ob, stride_oh, stride_ol, stride_od,
    stride_gb, stride_gh, stride_gl, stride_gd,
    heads, group, queries, unit, scale,
    c0, c1, c2, c3, c4, c5, c6, c7, policy_low, policy_high, threshold, floor,
    D: tl.constexpr, LINES: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """The numbers of 64 rows.

    ``q~`` was rounded: a component that all keys share makes its logits differ from those of the statistics by a
    common offset, which is taken out of what ``p`` is made of.
    """
    sequence, tile = tl.program_id(1), tl.program_id(0)
    batch, head = sequence // heads, sequence % heads
    line = tl.arange(0, LINES)
    row = tile * LINES + line
    column = tl.arange(0, D)[None, :]
    inside = row < queries
    at = tl.cast(sequence, tl.int64) * queries + row
    q += tl.cast(batch, tl.int64) * stride_qb + tl.cast(head, tl.int64) * stride_qh
    out += tl.cast(batch, tl.int64) * stride_ob + tl.cast(head, tl.int64) * stride_oh
    d_out += tl.cast(batch, tl.int64) * stride_gb + tl.cast(head, tl.int64) * stride_gh
    whole = inside[:, None] & (column < D)
    place = tl.cast(row, tl.int64)[:, None]
    output = tl.load(out + place * stride_ol + column * stride_od, mask=whole, other=0.0).to(tl.float32)
    cotangent = tl.load(d_out + place * stride_gl + column * stride_gd, mask=whole, other=0.0).to(tl.float32)
    delta = tl.sum(output * cotangent, 1)
    inverse = 1.0 / tl.load(beta + at, mask=inside, other=1.0)
    query = tl.load(q + place * stride_ql + column * stride_qd, mask=whole, other=0.0).to(tl.float32)
    rounded = tl.load(scaled + at[:, None] * D + column, mask=whole, other=0.0).to(tl.float32)
    common = tl.load(mean + (batch * (heads // group) + head // group) * D + column)
    offset = unit * tl.sum((rounded * inverse[:, None] - query) * common, 1)
    offset = tl.where(tl.abs(offset) < 1.0e4, offset, 0.0)  # not finite, where some key is not
    total = tl.load(row_sum + at, mask=inside, other=1.0)
    mean_exponent = tl.load(row_moment + at, mask=inside, other=0.0) / total
    entropy = tl.log(total) - mean_exponent
    slope = lowered_slope(entropy, c0, c1, c2, c3, c4, c5, c6, c7, policy_low, policy_high, threshold, floor)
    shift = tl.load(row_max + at, mask=inside, other=0.0) * LOG2E + tl.log2(total) + offset
    numbers += (tl.cast(sequence, tl.int64) * tl.num_programs(0) + tile) * (NUMBERS * LINES)
    numbers += line // 16 * 16 + line // 2 % 4 * 4 + line // 8 % 2 * 2 + line % 2  # hopper_query_kernel.place_of
    tl.store(numbers, tl.where(inside, -tl.load(lse + at, mask=inside, other=0.0) * LOG2E, FAR))
    tl.store(numbers + LINES, tl.where(inside, -delta, 0.0))
    tl.store(numbers + 2 * LINES, tl.where(inside, unit * inverse, 0.0))
    tl.store(numbers + 3 * LINES, tl.where(inside, -shift, FAR))
    tl.store(numbers + 4 * LINES, tl.zeros([LINES], tl.float32))
    tl.store(numbers + 5 * LINES, tl.zeros([LINES], tl.float32))
    tl.store(numbers + 6 * LINES, tl.where(inside, entropy * LOG2E, 0.0))
    tl.store(numbers + 7 * LINES, tl.where(inside, -LN2 * scale * slope * inverse * inverse, 0.0))


def backward(
    q: Tensor, k: Tensor, v: Tensor, scaled: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
    row_max: Tensor, row_sum: Tensor, row_moment: Tensor, beta: Tensor, geometry: Geometry, lowered: Lowered,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv; ``lse`` is that of attention on ``scaled``, which is ``beta * q``, contiguous."""
    from .hopper_key_kernel import hopper_key_kernel
    from .hopper_query_kernel import hopper_query_kernel

    batch, heads, queries, width = q.shape
    key_heads, keys = k.shape[1:3]
    causal, group = geometry.banded, heads // key_heads
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    tiles = -(-queries // LINES)
    unit = geometry.scale * LOG2E.value
    policy = {name: x for name, x in policy_arguments(lowered).items() if name not in ("POLICY", "LOG_COUNT")}
    numbers = torch.empty(batch * heads * tiles * NUMBERS * LINES, dtype=torch.float32, device=q.device)
    rows = {"beta": beta, "lse": lse, "row_max": row_max, "row_sum": row_sum, "row_moment": row_moment}
    mean = k[:, :, :: max(1, keys // SAMPLE)].mean(2, dtype=torch.float32)
    q_stages, k_stages = options.get("stages", STAGES[width])
    section = max(1, SECTION // (2 * max(queries, keys) * width * q.element_size())) if causal else 1
    kernels: Any = numbers_kernel, hopper_query_kernel, hopper_key_kernel
    with torch.cuda.device_of(q):
        kernels[0][(tiles, batch * heads)](
            q=q, scaled=scaled, out=out, d_out=grad_out, mean=mean, numbers=numbers,
            **{name: row_numbers(x, q) for name, x in rows.items()},
            **strides("q", q, "bhld"), **strides("o", out, "bhld"), **strides("g", grad_out, "bhld"),
            heads=heads, group=group, queries=queries, unit=unit, scale=geometry.scale, **policy,
            D=width, LINES=LINES, NUMBERS=NUMBERS, num_warps=4, **OPTIONS,
        )  # fmt: skip
        described = {
            name: descriptor(x, LINES)
            for name, x in (("q_desc", scaled), ("g_desc", grad_out), ("k_desc", k), ("v_desc", v))
        }
        blocks = -(-queries // ROWS)
        items = blocks * batch * heads
        kernels[1][(min(items, processors(q.device)),)](
            **described, out_desc=descriptor(dq, LINES), numbers=numbers,
            items=items, section=min(section, batch * heads), blocks=blocks, sequences=batch * heads, heads=heads,
            group=group, queries=queries, keys=keys, unit=unit, scale=geometry.scale,
            STAGES=q_stages, SLOTS=options.get("slots", (2, 1))[0], CAUSAL=causal,
            EDGES=causal or keys % LINES != 0 or queries % ROWS != 0, STYLE=options.get("style", 0),
            num_warps=4, **OPTIONS,
        )  # fmt: skip
        blocks = -(-keys // ROWS)
        items = blocks * batch * key_heads
        kernels[2][(min(items, processors(q.device)),)](
            **described, dk_desc=descriptor(dk, LINES), dv_desc=descriptor(dv, LINES), numbers=numbers,
            items=items, section=min(section, batch * key_heads), blocks=blocks, sequences=batch * key_heads,
            heads=key_heads, group=group, queries=queries, unit=unit, scale=geometry.scale,
            STAGES=k_stages, SLOTS=options.get("slots", (2, 1))[1], CAUSAL=causal,
            num_warps=4, **OPTIONS,
        )  # fmt: skip
    return dq, dk, dv
