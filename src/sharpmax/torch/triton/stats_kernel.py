"""Row statistics, and beta and ``beta * q`` of a lowered policy, in one pass over the keys; the policy's gradient."""

# pyright: reportArgumentType=false, reportInvalidTypeForm=false

import triton
import triton.language as tl

from .blocks import (
    LN2,
    NOTHING,
    assigned,
    edge_block,
    edge_blocks,
    entries,
    key_range,
    logits,
    matrix,
    put_tile,
    seen,
    tile,
)
from .policy import lowered_beta, statistics_gradient


@triton.jit
def _fold(raw, visible, unit, highest, total, moment, MASKED: tl.constexpr, ROUNDED: tl.constexpr):
    """Statistics of the keys so far with those of one block, all in units of log 2; ``unit`` is positive.

    ROUNDED: products are rounded before they are added, so that all threads of a row have the same bits. It costs
    time, and is needed where a thread may have but one key of a row, whose product goes into the others' sums.
    """
    if MASKED:
        raw = tl.where(visible, raw, float("-inf"))
        new = tl.maximum(highest, tl.max(raw, 1) * unit)
        shift = tl.where(new == float("-inf"), 0.0, new)
        exponent = tl.fma(raw, unit, -shift[:, None])
        exponent = tl.maximum(exponent, NOTHING, propagate_nan=tl.PropagateNan.ALL)
    else:
        new = tl.maximum(highest, tl.max(raw, 1) * unit)
        shift = new
        exponent = tl.fma(raw, unit, -shift[:, None])
    power = tl.exp2(exponent)
    step = tl.maximum(highest - shift, NOTHING)
    fade = tl.exp2(step)
    product = tl.fma(power, exponent, tl.zeros_like(power)) if ROUNDED else power * exponent
    moment = fade * (moment + step * total) + tl.sum(product, 1)
    total = fade * total + tl.sum(power, 1)
    return new, total, moment


@triton.jit
def _least(raw, visible, unit, MASKED: tl.constexpr):
    """The least logit of every row of a block."""
    if MASKED:
        raw = tl.where(visible, raw, float("inf"))
    return tl.min(raw, 1) * unit


@triton.jit(do_not_specialize=["documents", "steps"])
def stats_kernel(
    q,
    k,
    mask,
    out_max,
    out_sum,
    out_moment,
    out_min,
    out_count,
    out_beta,
    out_q,
    cu_q,
    cu_k,
    key_lengths,
    stride_qb,
    stride_qh,
    stride_ql,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kl,
    stride_kd,
    stride_mb,
    stride_mh,
    stride_mq,
    stride_mk,
    heads,
    group,
    q_len: tl.int32,
    k_len: tl.int32,
    documents,
    steps,
    left,
    right,
    limit,
    unit,
    scale2,
    cap2,
    c0,
    c1,
    c2,
    c3,
    c4,
    c5,
    c6,
    c7,
    policy_low,
    policy_high,
    threshold,
    floor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PACKED: tl.constexpr,
    LENGTHS: tl.constexpr,
    LOWER_RIGHT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    EDGES: tl.constexpr,
    MASK: tl.constexpr,
    CAP: tl.constexpr,
    BENT: tl.constexpr,
    WITH_MIN: tl.constexpr,
    POLICY: tl.constexpr,
    LOG_COUNT: tl.constexpr,
    SCALED_QUERY: tl.constexpr,
    TMA: tl.constexpr,
):
    """One block of query rows against all the keys that they see."""
    ROUNDED: tl.constexpr = q.dtype.element_ty == tl.float32
    batch, head, first, q_start, k_start, queries, keys, shift = assigned(
        tl.program_id(0), heads, q_len, k_len, cu_q, cu_k, documents, steps, key_lengths,
        ROWS, False, RIGHT, PACKED, LENGTHS, LOWER_RIGHT,
    )  # fmt: skip
    if first >= queries:
        return
    q += tl.cast(batch, tl.int64) * stride_qb + tl.cast(head, tl.int64) * stride_qh
    k += tl.cast(batch, tl.int64) * stride_kb + tl.cast(head // group, tl.int64) * stride_kh
    mask += tl.cast(batch, tl.int64) * stride_mb + tl.cast(head, tl.int64) * stride_mh
    q += tl.cast(q_start, tl.int64) * stride_ql
    k += tl.cast(k_start, tl.int64) * stride_kl
    query = tile(q, first, queries, stride_ql, stride_qd, ROWS, BLOCK_D, D, True)
    rows = first + tl.arange(0, ROWS)
    row = rows[:, None]

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    moment = tl.zeros([ROWS], tl.float32)
    lowest = tl.full([ROWS], float("inf"), tl.float32)
    count = tl.zeros([ROWS], tl.int32)
    k = matrix(k, keys, stride_kl, KEYS, BLOCK_D, D, TMA)
    low, a, b, high = key_range(first, queries, keys, shift, left, right, ROWS, KEYS, LEFT, RIGHT)
    key = a + tl.arange(0, KEYS)[None, :]  # of the mask, the next block is fetched ahead: no product waits for it
    entry = entries(mask, row, key, (row < queries) & (key < b), stride_mq, stride_mk, MASK)
    for start in range(a, b, KEYS):
        block = tile(k, start, keys, stride_kl, stride_kd, KEYS, BLOCK_D, D, False, TMA)
        product = tl.dot(query, tl.trans(block), input_precision="ieee")
        raw, visible, _ = logits(product, entry, True, limit, scale2, cap2, MASK, CAP, BENT, False)
        key = start + KEYS + tl.arange(0, KEYS)[None, :]
        entry = entries(mask, row, key, (row < queries) & (key < b), stride_mq, stride_mk, MASK)
        highest, total, moment = _fold(raw, visible, unit, highest, total, moment, MASK != 0, ROUNDED)
        if WITH_MIN:
            lowest = tl.minimum(lowest, _least(raw, visible, unit, MASK != 0))
        if MASK != 0:
            count += tl.sum(visible.to(tl.int32), 1)
    if EDGES:
        for i in range(edge_blocks(low, a, b, high, KEYS)):
            start = edge_block(i, low, a, b, KEYS)
            block = tile(k, start, keys, stride_kl, stride_kd, KEYS, BLOCK_D, D, True, TMA)
            product = tl.dot(query, tl.trans(block), input_precision="ieee")
            key = start + tl.arange(0, KEYS)[None, :]
            visible = seen(row, key, queries, keys, shift, left, right, LEFT, RIGHT)
            entry = entries(mask, row, key, visible, stride_mq, stride_mk, MASK)
            raw, visible, _ = logits(product, entry, visible, limit, scale2, cap2, MASK, CAP, BENT, True)
            highest, total, moment = _fold(raw, visible, unit, highest, total, moment, True, ROUNDED)
            if WITH_MIN:
                lowest = tl.minimum(lowest, _least(raw, visible, unit, True))
            if MASK != 0:
                count += tl.sum(visible.to(tl.int32), 1)

    if MASK == 0:
        begin = tl.zeros([ROWS], tl.int32)
        end = begin + keys
        if LEFT:
            begin = tl.maximum(rows + shift - left, 0)
        if RIGHT:
            end = tl.minimum(end, rows + shift + right + 1)
        count = tl.maximum(end - begin, 0)
    moment *= LN2
    inside = rows < queries
    at = (tl.cast(batch, tl.int64) * heads + head) * q_len + q_start + rows
    tl.store(out_max + at, highest * LN2, mask=inside)
    tl.store(out_sum + at, total, mask=inside)
    tl.store(out_moment + at, moment, mask=inside)
    tl.store(out_count + at, count, mask=inside)
    if WITH_MIN:
        tl.store(out_min + at, lowest * LN2, mask=inside)
    if POLICY:
        if LOG_COUNT:
            variable = tl.log(tl.maximum(count, 1).to(tl.float32))
        else:
            filled = tl.where(total == 0.0, 1.0, total)
            variable = tl.log(filled) - moment / filled
        beta = lowered_beta(variable, c0, c1, c2, c3, c4, c5, c6, c7, policy_low, policy_high, threshold, floor)
        tl.store(out_beta + at, beta, mask=inside)
        if SCALED_QUERY:
            again = tile(q, first, queries, stride_ql, stride_qd, ROWS, BLOCK_D, D, True).to(tl.float32)
            out_q += ((tl.cast(batch, tl.int64) * heads + head) * q_len + q_start) * D
            put_tile(out_q, again * beta[:, None], first, queries, ROWS, BLOCK_D, D)


@triton.jit
def policy_gradient_kernel(
    dbeta, row_sum, row_moment, grad_sum, grad_moment, rows,
    c0, c1, c2, c3, c4, c5, c6, c7, policy_low, policy_high, threshold, floor, ROWS: tl.constexpr,
):  # fmt: skip
    """The cotangents of sum and moment of one block of rows, from that of beta."""
    at = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = at < rows
    d_sum, d_moment = statistics_gradient(
        tl.load(dbeta + at, mask=inside, other=0.0),
        tl.load(row_sum + at, mask=inside, other=0.0),
        tl.load(row_moment + at, mask=inside, other=0.0),
        c0, c1, c2, c3, c4, c5, c6, c7, policy_low, policy_high, threshold, floor,
    )  # fmt: skip
    tl.store(grad_sum + at, d_sum, mask=inside)
    tl.store(grad_moment + at, d_moment, mask=inside)
