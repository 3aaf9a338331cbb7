"""The gradient of attention with beta (ATTEND), of the row statistics (STATS), or of both in one pass.

With ``t = z - m``, ``w`` the weights, ``dp_j = <do, v_j>`` and ``D = <do, o>``::

    dz = beta w (dp - D) + exp(t) (gL + gA (1 + t))        dbeta = sum w (dp - D) t

``query_kernel`` runs first, by blocks of rows: dq, dbeta, and ``D`` for ``key_kernel``, which gives dk and dv by blocks
of keys and visits the query heads of its group one after the other, so that nothing is added atomically.

``D`` from a rounded output is off by some ``r``, which dbeta would multiply by the mean of ``t``. Where dbeta is asked
for, ``r = sum w (dp - D)`` is summed beside it and taken out of dbeta and of the ``D`` that is handed on.

Where it is not attention that follows the statistics but ``beta * q`` (SCALED), ``d_out`` is the cotangent of that:
``query_kernel`` takes it through beta and the policy to the cotangents of the statistics, which it hands on, and dq
gets ``beta d_out`` besides.
"""

# pyright: reportArgumentType=false, reportInvalidTypeForm=false

import triton
import triton.language as tl

from .blocks import (
    LN2,
    LOG2E,
    NOTHING,
    UNREACHED,
    assigned,
    edge_block,
    edge_blocks,
    entries,
    kept,
    key_range,
    logits,
    matrix,
    put_tile,
    row_range,
    seen,
    survival,
    tile,
)
from .policy import statistics_gradient


@triton.jit
def _shift_of(pointer, at, inside):
    """A row's shift (maximum or log of the sum) in units of log 2; one that leaves nothing where the row is empty."""
    value = tl.load(pointer + at, mask=inside, other=float("-inf"))
    return tl.where(value == float("-inf"), UNREACHED, value * LOG2E)


@triton.jit
def _of_stats(raw, visible, unit, highest, d_sum, d_moment, MASKED: tl.constexpr):
    """dz of the statistics: ``d_sum`` is ``gL + gA`` and ``d_moment`` is ``gA log 2``, of every row."""
    exponent = tl.fma(raw, unit, -highest)
    if MASKED:
        exponent = tl.where(visible, exponent, NOTHING)
    return tl.exp2(exponent) * (d_sum + d_moment * exponent)


@triton.jit
def _weights(raw, visible, factor, lse, MASKED: tl.constexpr):
    exponent = tl.fma(raw, factor, -lse)
    if MASKED:
        exponent = tl.where(visible, exponent, NOTHING)
    return tl.exp2(exponent)


@triton.jit
def _query_step(
    start, entry, query, d_out, d_query, d_beta, excess, mean,
    k, v, mask, row, factor, inverse, lse, delta, highest, d_sum, d_moment,
    stride_kl, stride_kd, stride_vl, stride_vd, stride_mq, stride_mk,
    q_start, k_start, queries, keys, shift, left, right, limit, unit, scale2, cap2, sequence, dropout_p, seed,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, KEYS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, MASK: tl.constexpr, CAP: tl.constexpr, BENT: tl.constexpr,
    DROPOUT: tl.constexpr, ATTEND: tl.constexpr, STATS: tl.constexpr, NEED_BETA: tl.constexpr,
    NEED_QUERY: tl.constexpr, TMA: tl.constexpr, AHEAD: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """What one block of keys adds to dq and dbeta; ``entry`` is that of the mask where it was fetched ahead."""
    block = tile(k, start, keys, stride_kl, stride_kd, KEYS, BLOCK_D, D, EDGE, TMA)
    product = tl.dot(query, tl.trans(block), input_precision="ieee")
    key = start + tl.arange(0, KEYS)[None, :]
    visible = row < queries
    if EDGE:
        visible = seen(row, key, queries, keys, shift, left, right, LEFT, RIGHT)
    if EDGE or AHEAD == 0:
        entry = entries(mask, row, key, visible, stride_mq, stride_mk, MASK)
    raw, visible, slope = logits(product, entry, visible, limit, scale2, cap2, MASK, CAP, BENT, EDGE)
    dz = tl.zeros_like(product)
    if ATTEND:
        weights = _weights(raw, visible, factor[:, None], lse[:, None], EDGE or MASK != 0)
        values = tile(v, start, keys, stride_vl, stride_vd, KEYS, BLOCK_DV, DV, EDGE, TMA)
        d_weights = tl.dot(d_out, tl.trans(values), input_precision="ieee")
        if DROPOUT:
            keep = kept(seed, sequence, q_start + row, k_start + key, dropout_p)
            d_weights = tl.where(keep, d_weights * survival(dropout_p), 0.0)
        dz = weights * (d_weights - delta[:, None])
        if NEED_BETA:
            t = tl.fma(raw, unit, -highest[:, None])
            if MASK != 0:  # a key that is hidden may hold anything
                t = tl.where(visible, t, 0.0)
            d_beta += tl.sum(dz * t, 1)
            excess += tl.sum(dz, 1)
            mean += tl.sum(weights * t, 1)
        dz = dz * inverse[:, None]
    if STATS:
        dz += _of_stats(raw, visible, unit, highest[:, None], d_sum[:, None], d_moment[:, None], EDGE or MASK != 0)
    if NEED_QUERY:
        if CAP:
            dz = dz * slope
        d_query = tl.dot(dz.to(block.dtype), block, d_query, input_precision="ieee")
    return d_query, d_beta, excess, mean


@triton.jit(do_not_specialize=["documents", "steps", "seed"])
def query_kernel(
    q, k, v, beta, mask, out, lse, d_out, row_max, row_sum, row_moment, grad_sum, grad_moment, delta, dq, dbeta,
    cu_q, cu_k, key_lengths,
    stride_qb, stride_qh, stride_ql, stride_qd, stride_kb, stride_kh, stride_kl, stride_kd,
    stride_vb, stride_vh, stride_vl, stride_vd, stride_gb, stride_gh, stride_gl, stride_gd,
    stride_mb, stride_mh, stride_mq, stride_mk,
    heads, group, q_len: tl.int32, k_len: tl.int32, documents, steps,
    left, right, limit, unit, scale, scale2, cap2, dropout_p, seed,
    c0, c1, c2, c3, c4, c5, c6, c7, policy_low, policy_high, threshold, floor,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr,
    LOWER_RIGHT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, EDGES: tl.constexpr, MASK: tl.constexpr,
    CAP: tl.constexpr, BENT: tl.constexpr, DROPOUT: tl.constexpr, ATTEND: tl.constexpr, STATS: tl.constexpr,
    NEED_BETA: tl.constexpr, NEED_QUERY: tl.constexpr, GIVEN_DELTA: tl.constexpr, SCALED: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """dq, dbeta and ``D`` of one block of query rows."""
    # Compilers fetch ahead what products are made of, which the mask is for dq alone: else it is fetched ahead here.
    AHEAD: tl.constexpr = 0 if NEED_QUERY else MASK  # pyright: ignore[reportAssignmentType]
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
    sequence = batch * heads + head
    rows = first + tl.arange(0, ROWS)
    row = rows[:, None]
    inside = rows < queries
    start_row = tl.cast(sequence, tl.int64) * q_len + q_start
    at = start_row + rows

    query = tile(q, first, queries, stride_ql, stride_qd, ROWS, BLOCK_D, D, True)
    d_output = query
    nothing = tl.zeros([ROWS], tl.float32)
    factor, inverse, sums, row_delta = nothing, nothing, nothing, nothing
    highest, d_sum, d_moment = nothing, nothing, nothing
    if ATTEND:
        v += tl.cast(batch, tl.int64) * stride_vb + tl.cast(head // group, tl.int64) * stride_vh
        v += tl.cast(k_start, tl.int64) * stride_vl
        d_out += tl.cast(batch, tl.int64) * stride_gb + tl.cast(head, tl.int64) * stride_gh
        d_out += tl.cast(q_start, tl.int64) * stride_gl
        d_output = tile(d_out, first, queries, stride_gl, stride_gd, ROWS, BLOCK_DV, DV, True)
        if GIVEN_DELTA:
            row_delta = tl.load(delta + at, mask=inside, other=0.0)
        else:
            output = tile(out + start_row * DV, first, queries, DV, 1, ROWS, BLOCK_DV, DV, True)
            row_delta = tl.sum(d_output.to(tl.float32) * output.to(tl.float32), 1)
        inverse = tl.load(beta + at, mask=inside, other=0.0)
        factor = inverse * unit
        sums = _shift_of(lse, at, inside)
    if STATS or NEED_BETA:
        highest = _shift_of(row_max, at, inside)
    if SCALED:
        d_out += tl.cast(batch, tl.int64) * stride_gb + tl.cast(head, tl.int64) * stride_gh
        d_out += tl.cast(q_start, tl.int64) * stride_gl
        cotangent = tile(d_out, first, queries, stride_gl, stride_gd, ROWS, BLOCK_D, D, True)
        d_sum, d_moment = statistics_gradient(
            tl.sum(query.to(tl.float32) * cotangent.to(tl.float32), 1),
            tl.load(row_sum + at, mask=inside, other=0.0),
            tl.load(row_moment + at, mask=inside, other=0.0),
            c0, c1, c2, c3, c4, c5, c6, c7, policy_low, policy_high, threshold, floor,
        )  # fmt: skip
        tl.store(grad_sum + at, d_sum, mask=inside)
        tl.store(grad_moment + at, d_moment, mask=inside)
    elif STATS:
        d_sum = tl.load(grad_sum + at, mask=inside, other=0.0)
        d_moment = tl.load(grad_moment + at, mask=inside, other=0.0)
    if STATS:
        d_sum += d_moment
        d_moment *= LN2

    d_query = tl.zeros([ROWS, BLOCK_D], tl.float32)
    d_beta, excess, mean = nothing, nothing, nothing
    k = matrix(k, keys, stride_kl, KEYS, BLOCK_D, D, TMA)
    if ATTEND:
        v = matrix(v, keys, stride_vl, KEYS, BLOCK_DV, DV, TMA)
    low, a, b, high = key_range(first, queries, keys, shift, left, right, ROWS, KEYS, LEFT, RIGHT)
    key = a + tl.arange(0, KEYS)[None, :]
    entry = entries(mask, row, key, (row < queries) & (key < b), stride_mq, stride_mk, AHEAD)
    for start in range(a, b, KEYS):
        now = entry
        key = start + KEYS + tl.arange(0, KEYS)[None, :]
        entry = entries(mask, row, key, (row < queries) & (key < b), stride_mq, stride_mk, AHEAD)
        d_query, d_beta, excess, mean = _query_step(
            start, now, query, d_output, d_query, d_beta, excess, mean,
            k, v, mask, row, factor, inverse, sums, row_delta, highest, d_sum, d_moment,
            stride_kl, stride_kd, stride_vl, stride_vd, stride_mq, stride_mk,
            q_start, k_start, queries, keys, shift, left, right, limit, unit, scale2, cap2,
            sequence, dropout_p, seed, D, DV, BLOCK_D, BLOCK_DV, KEYS,
            LEFT, RIGHT, MASK, CAP, BENT, DROPOUT, ATTEND, STATS, NEED_BETA, NEED_QUERY, TMA, AHEAD, False,
        )  # fmt: skip
    if EDGES:
        for i in range(edge_blocks(low, a, b, high, KEYS)):
            start = edge_block(i, low, a, b, KEYS)
            d_query, d_beta, excess, mean = _query_step(
                start, 0, query, d_output, d_query, d_beta, excess, mean,
                k, v, mask, row, factor, inverse, sums, row_delta, highest, d_sum, d_moment,
                stride_kl, stride_kd, stride_vl, stride_vd, stride_mq, stride_mk,
                q_start, k_start, queries, keys, shift, left, right, limit, unit, scale2, cap2,
                sequence, dropout_p, seed, D, DV, BLOCK_D, BLOCK_DV, KEYS,
                LEFT, RIGHT, MASK, CAP, BENT, DROPOUT, ATTEND, STATS, NEED_BETA, NEED_QUERY, TMA, 0, True,
            )  # fmt: skip

    if NEED_BETA:
        tl.store(dbeta + at, (d_beta - excess * mean) * LN2, mask=inside)
    if ATTEND and not GIVEN_DELTA:
        tl.store(delta + at, row_delta + excess, mask=inside)
    if NEED_QUERY:
        d_query *= scale
        if SCALED:
            cotangent = tile(d_out, first, queries, stride_gl, stride_gd, ROWS, BLOCK_D, D, True)
            d_query += tl.load(beta + at, mask=inside, other=0.0)[:, None] * cotangent.to(tl.float32)
        put_tile(dq + start_row * D, d_query, first, queries, ROWS, BLOCK_D, D)


@triton.jit
def _key_step(
    start, block, values, d_key, d_value,
    q, d_out, mask, beta, lse, delta, row_max, grad_sum, grad_moment, start_row, key,
    stride_ql, stride_qd, stride_gl, stride_gd, stride_mq, stride_mk,
    q_start, k_start, queries, keys, shift, left, right, limit, unit, scale2, cap2, sequence, dropout_p, seed,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, MASK: tl.constexpr, CAP: tl.constexpr, BENT: tl.constexpr,
    DROPOUT: tl.constexpr, ATTEND: tl.constexpr, STATS: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """What one block of query rows adds to dk and dv; everything is transposed here: ``[keys, rows]``."""
    rows = start + tl.arange(0, ROWS)
    row = rows[None, :]
    inside = rows < queries
    at = start_row + rows
    query = tile(q, start, queries, stride_ql, stride_qd, ROWS, BLOCK_D, D, EDGE, TMA)
    product = tl.dot(block, tl.trans(query), input_precision="ieee")
    visible = inside[None, :]
    if EDGE:
        visible = seen(row, key, queries, keys, shift, left, right, LEFT, RIGHT)
    entry = entries(mask, row, key, visible, stride_mq, stride_mk, MASK)
    raw, visible, slope = logits(product, entry, visible, limit, scale2, cap2, MASK, CAP, BENT, EDGE)
    dz = tl.zeros_like(product)
    if ATTEND:
        inverse = tl.load(beta + at, mask=inside, other=0.0)
        sums = _shift_of(lse, at, inside)
        weights = _weights(raw, visible, (inverse * unit)[None, :], sums[None, :], EDGE or MASK != 0)
        d_output = tile(d_out, start, queries, stride_gl, stride_gd, ROWS, BLOCK_DV, DV, EDGE, TMA)
        d_weights = tl.dot(values, tl.trans(d_output), input_precision="ieee")
        dropped = weights
        if DROPOUT:
            keep = kept(seed, sequence, q_start + row, k_start + key, dropout_p)
            dropped = tl.where(keep, weights * survival(dropout_p), 0.0)
            d_weights = tl.where(keep, d_weights * survival(dropout_p), 0.0)
        d_value = tl.dot(dropped.to(d_output.dtype), d_output, d_value, input_precision="ieee")
        row_delta = tl.load(delta + at, mask=inside, other=0.0)
        dz = weights * (d_weights - row_delta[None, :]) * inverse[None, :]
    if STATS:
        highest = _shift_of(row_max, at, inside)
        d_moment = tl.load(grad_moment + at, mask=inside, other=0.0)
        d_sum = tl.load(grad_sum + at, mask=inside, other=0.0) + d_moment
        d_sum, d_moment = d_sum[None, :], (d_moment * LN2)[None, :]
        dz += _of_stats(raw, visible, unit, highest[None, :], d_sum, d_moment, EDGE or MASK != 0)
    if CAP:
        dz = dz * slope
    d_key = tl.dot(dz.to(query.dtype), query, d_key, input_precision="ieee")
    return d_key, d_value


@triton.jit(do_not_specialize=["documents", "steps", "seed"])
def key_kernel(
    q, k, v, beta, mask, lse, d_out, row_max, grad_sum, grad_moment, delta, dk, dv, cu_q, cu_k, key_lengths,
    stride_qb, stride_qh, stride_ql, stride_qd, stride_kb, stride_kh, stride_kl, stride_kd,
    stride_vb, stride_vh, stride_vl, stride_vd, stride_gb, stride_gh, stride_gl, stride_gd,
    stride_mb, stride_mh, stride_mq, stride_mk,
    heads, group, q_len: tl.int32, k_len: tl.int32, documents, steps,
    left, right, limit, unit, scale, scale2, cap2, dropout_p, seed,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr,
    LOWER_RIGHT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, EDGES: tl.constexpr, MASK: tl.constexpr,
    CAP: tl.constexpr, BENT: tl.constexpr, DROPOUT: tl.constexpr, ATTEND: tl.constexpr, STATS: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of keys, over the rows of every query head of its group."""
    key_heads = heads // group
    batch, key_head, first, q_start, k_start, queries, keys, shift = assigned(
        tl.program_id(0), key_heads, q_len, k_len, cu_q, cu_k, documents, steps, key_lengths,
        KEYS, True, False, PACKED, LENGTHS, LOWER_RIGHT,
    )  # fmt: skip
    stored = keys if PACKED else k_len  # keys beyond the length of their batch element have gradient 0
    if first >= stored:
        return
    k += tl.cast(batch, tl.int64) * stride_kb + tl.cast(key_head, tl.int64) * stride_kh
    k += tl.cast(k_start, tl.int64) * stride_kl
    block = tile(k, first, keys, stride_kl, stride_kd, KEYS, BLOCK_D, D, True)
    values = block
    if ATTEND:
        v += tl.cast(batch, tl.int64) * stride_vb + tl.cast(key_head, tl.int64) * stride_vh
        v += tl.cast(k_start, tl.int64) * stride_vl
        values = tile(v, first, keys, stride_vl, stride_vd, KEYS, BLOCK_DV, DV, True)
    key = first + tl.arange(0, KEYS)[:, None]

    d_key = tl.zeros([KEYS, BLOCK_D], tl.float32)
    d_value = tl.zeros([KEYS, BLOCK_DV], tl.float32)
    low, a, b, high = row_range(first, queries, keys, shift, left, right, KEYS, ROWS, LEFT, RIGHT)
    for member in range(group):
        head = key_head * group + member
        sequence = batch * heads + head
        start_row = tl.cast(sequence, tl.int64) * q_len + q_start
        q_head = q + tl.cast(batch, tl.int64) * stride_qb + tl.cast(head, tl.int64) * stride_qh
        q_head += tl.cast(q_start, tl.int64) * stride_ql
        d_out_head = d_out + tl.cast(batch, tl.int64) * stride_gb + tl.cast(head, tl.int64) * stride_gh
        d_out_head += tl.cast(q_start, tl.int64) * stride_gl
        q_head = matrix(q_head, queries, stride_ql, ROWS, BLOCK_D, D, TMA)
        if ATTEND:
            d_out_head = matrix(d_out_head, queries, stride_gl, ROWS, BLOCK_DV, DV, TMA)
        mask_head = mask + tl.cast(batch, tl.int64) * stride_mb + tl.cast(head, tl.int64) * stride_mh
        for start in range(a, b, ROWS):
            d_key, d_value = _key_step(
                start, block, values, d_key, d_value,
                q_head, d_out_head, mask_head, beta, lse, delta, row_max, grad_sum, grad_moment, start_row, key,
                stride_ql, stride_qd, stride_gl, stride_gd, stride_mq, stride_mk,
                q_start, k_start, queries, keys, shift, left, right, limit, unit, scale2, cap2,
                sequence, dropout_p, seed, D, DV, BLOCK_D, BLOCK_DV, ROWS,
                LEFT, RIGHT, MASK, CAP, BENT, DROPOUT, ATTEND, STATS, TMA, False,
            )  # fmt: skip
        if EDGES:
            for i in range(edge_blocks(low, a, b, high, ROWS)):
                start = edge_block(i, low, a, b, ROWS)
                d_key, d_value = _key_step(
                    start, block, values, d_key, d_value,
                    q_head, d_out_head, mask_head, beta, lse, delta, row_max, grad_sum, grad_moment, start_row, key,
                    stride_ql, stride_qd, stride_gl, stride_gd, stride_mq, stride_mk,
                    q_start, k_start, queries, keys, shift, left, right, limit, unit, scale2, cap2,
                    sequence, dropout_p, seed, D, DV, BLOCK_D, BLOCK_DV, ROWS,
                    LEFT, RIGHT, MASK, CAP, BENT, DROPOUT, ATTEND, STATS, TMA, True,
                )  # fmt: skip

    start_key = (tl.cast(batch, tl.int64) * key_heads + key_head) * k_len + k_start
    put_tile(dk + start_key * D, d_key * scale, first, stored, KEYS, BLOCK_D, D)
    if ATTEND:
        put_tile(dv + start_key * DV, d_value, first, stored, KEYS, BLOCK_DV, DV)
