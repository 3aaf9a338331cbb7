"""What the gradient kernels for Hopper need to know of every row, which :mod:`.hopper_backward` lists."""

# pyright: reportArgumentType=false, reportOperatorIssue=false

import triton
import triton.language as tl

from .blocks import LN2, LOG2E
from .policy import lowered_slope

FAR = tl.constexpr(-1.0e30)  # an exponent whose power is exactly 0, and finite
LEAST = tl.constexpr(1.0e-24)  # a factor that is 0 to logits, and still puts hidden products out of reach


@triton.jit
def numbers_kernel(
    out, d_out, beta, lse, row_max, row_sum, row_moment, numbers,
    stride_ob, stride_oh, stride_ol, stride_od, stride_gb, stride_gh, stride_gl, stride_gd,
    tiles, heads, queries, unit, scale,
    c0, c1, c2, c3, c4, c5, c6, c7, policy_low, policy_high, threshold, floor,
    D: tl.constexpr, LINES: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """The numbers of 64 rows; a row that is not there has no weights, and gives nothing to any key."""
    sequence, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    batch, head = sequence // heads, sequence % heads
    line = tl.arange(0, LINES)
    row = tile * LINES + line
    column = tl.arange(0, D)[None, :]
    inside = row < queries
    at = tl.cast(sequence, tl.int64) * queries + row
    out += tl.cast(batch, tl.int64) * stride_ob + tl.cast(head, tl.int64) * stride_oh
    d_out += tl.cast(batch, tl.int64) * stride_gb + tl.cast(head, tl.int64) * stride_gh
    whole = inside[:, None] & (column < D)
    place = tl.cast(row, tl.int64)[:, None]
    output = tl.load(out + place * stride_ol + column * stride_od, mask=whole, other=0.0).to(tl.float32)
    cotangent = tl.load(d_out + place * stride_gl + column * stride_gd, mask=whole, other=0.0).to(tl.float32)
    delta = tl.sum(-output * cotangent, 1)
    factor = tl.maximum(tl.load(beta + at, mask=inside, other=0.0) * unit, LEAST)
    total = tl.load(row_sum + at, mask=inside, other=1.0)
    mean_exponent = tl.load(row_moment + at, mask=inside, other=0.0) / total
    entropy = tl.log(total) - mean_exponent
    slope = lowered_slope(entropy, c0, c1, c2, c3, c4, c5, c6, c7, policy_low, policy_high, threshold, floor)
    shift = tl.load(row_max + at, mask=inside, other=0.0) * LOG2E + tl.log2(total)
    numbers += tl.cast(tl.program_id(0), tl.int64) * (NUMBERS * LINES)
    numbers += line // 16 * 16 + line // 2 % 4 * 4 + line // 8 % 2 * 2 + line % 2  # hopper_query_kernel.place_of
    tl.store(numbers, tl.where(inside, tl.load(lse + at, mask=inside, other=0.0) * -LOG2E, FAR))
    tl.store(numbers + LINES, tl.where(inside, delta, 0.0))
    tl.store(numbers + 2 * LINES, tl.where(inside, factor, 0.0))
    tl.store(numbers + 3 * LINES, tl.where(inside, entropy * LOG2E - shift, FAR))
    tl.store(numbers + 4 * LINES, tl.zeros([LINES], tl.float32))
    tl.store(numbers + 5 * LINES, tl.where(inside, -LN2 * scale * slope * tl.exp(-entropy), 0.0))
    tl.store(numbers + 6 * LINES, tl.zeros([LINES], tl.float32))
