"""Attention with beta: ``softmax(beta * z) v``, where beta meets the logits in float32."""

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
    kept,
    key_range,
    logits,
    matrix,
    put_tile,
    seen,
    survival,
    tile,
)


@triton.jit
def _fold(raw, visible, factor, highest, total, MASKED: tl.constexpr):
    """Powers of a block of logits, how much what came before fades, and the maximum and sum so far."""
    if MASKED:
        new = tl.maximum(highest, tl.max(tl.where(visible, raw * factor[:, None], float("-inf")), 1))
        shift = tl.where(new == float("-inf"), 0.0, new)
        power = tl.exp2(tl.where(visible, tl.fma(raw, factor[:, None], -shift[:, None]), NOTHING))
    else:
        new = tl.maximum(highest, tl.max(raw, 1) * factor)
        shift = new
        power = tl.exp2(tl.fma(raw, factor[:, None], -shift[:, None]))
    fade = tl.exp2(highest - shift)
    return power, fade, new, fade * total + tl.sum(power, 1)


@triton.jit(do_not_specialize=["documents", "steps", "seed"])
def attend_kernel(
    q,
    k,
    v,
    beta,
    mask,
    out,
    lse,
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
    stride_vb,
    stride_vh,
    stride_vl,
    stride_vd,
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
    dropout_p,
    seed,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
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
    DROPOUT: tl.constexpr,
    TMA: tl.constexpr,
):
    """One block of query rows against all the keys that they see."""
    batch, head, first, q_start, k_start, queries, keys, shift = assigned(
        tl.program_id(0), heads, q_len, k_len, cu_q, cu_k, documents, steps, key_lengths,
        ROWS, False, RIGHT, PACKED, LENGTHS, LOWER_RIGHT,
    )  # fmt: skip
    if first >= queries:
        return
    q += tl.cast(batch, tl.int64) * stride_qb + tl.cast(head, tl.int64) * stride_qh
    k += tl.cast(batch, tl.int64) * stride_kb + tl.cast(head // group, tl.int64) * stride_kh
    v += tl.cast(batch, tl.int64) * stride_vb + tl.cast(head // group, tl.int64) * stride_vh
    mask += tl.cast(batch, tl.int64) * stride_mb + tl.cast(head, tl.int64) * stride_mh
    q += tl.cast(q_start, tl.int64) * stride_ql
    k += tl.cast(k_start, tl.int64) * stride_kl
    v += tl.cast(k_start, tl.int64) * stride_vl
    sequence = batch * heads + head
    query = tile(q, first, queries, stride_ql, stride_qd, ROWS, BLOCK_D, D, True)
    rows = first + tl.arange(0, ROWS)
    row = rows[:, None]
    inside = rows < queries
    at = tl.cast(sequence, tl.int64) * q_len + q_start + rows
    factor = tl.load(beta + at, mask=inside, other=0.0) * unit
    factor_left = survival(dropout_p)

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    k = matrix(k, keys, stride_kl, KEYS, BLOCK_D, D, TMA)
    v = matrix(v, keys, stride_vl, KEYS, BLOCK_DV, DV, TMA)
    low, a, b, high = key_range(first, queries, keys, shift, left, right, ROWS, KEYS, LEFT, RIGHT)
    for start in range(a, b, KEYS):
        block = tile(k, start, keys, stride_kl, stride_kd, KEYS, BLOCK_D, D, False, TMA)
        product = tl.dot(query, tl.trans(block), input_precision="ieee")
        key = start + tl.arange(0, KEYS)[None, :]
        entry = entries(mask, row, key, row < queries, stride_mq, stride_mk, MASK)
        raw, visible, _ = logits(product, entry, True, limit, scale2, cap2, MASK, CAP, BENT, False)
        power, fade, highest, total = _fold(raw, visible, factor, highest, total, MASK != 0)
        if DROPOUT:
            keep = kept(seed, sequence, q_start + row, k_start + key, dropout_p)
            power = tl.where(keep, power * factor_left, 0.0)
        values = tile(v, start, keys, stride_vl, stride_vd, KEYS, BLOCK_DV, DV, False, TMA)
        result = tl.dot(power.to(values.dtype), values, result * fade[:, None], input_precision="ieee")
    if EDGES:
        for i in range(edge_blocks(low, a, b, high, KEYS)):
            start = edge_block(i, low, a, b, KEYS)
            block = tile(k, start, keys, stride_kl, stride_kd, KEYS, BLOCK_D, D, True, TMA)
            product = tl.dot(query, tl.trans(block), input_precision="ieee")
            key = start + tl.arange(0, KEYS)[None, :]
            visible = seen(row, key, queries, keys, shift, left, right, LEFT, RIGHT)
            entry = entries(mask, row, key, visible, stride_mq, stride_mk, MASK)
            raw, visible, _ = logits(product, entry, visible, limit, scale2, cap2, MASK, CAP, BENT, True)
            power, fade, highest, total = _fold(raw, visible, factor, highest, total, True)
            if DROPOUT:
                keep = kept(seed, sequence, q_start + row, k_start + key, dropout_p)
                power = tl.where(keep, power * factor_left, 0.0)
            values = tile(v, start, keys, stride_vl, stride_vd, KEYS, BLOCK_DV, DV, True, TMA)
            result = tl.dot(power.to(values.dtype), values, result * fade[:, None], input_precision="ieee")

    filled = tl.where(total == 0.0, 1.0, total)
    tl.store(lse + at, highest * LN2 + tl.log(filled), mask=inside)
    out += (tl.cast(sequence, tl.int64) * q_len + q_start) * DV
    put_tile(out, result / filled[:, None], first, queries, ROWS, BLOCK_DV, DV)
