"""Decoding kernels: few queries against a long cache, which is split over the card.

    logits_kernel    K, once:  the logits of a split, and the statistics of each row of them
    values_kernel    V, once:  statistics of all splits -> beta -> weights -> the split's part of the output
    combine_kernel             the sum of the parts

The rows of a program are the ``ROWS = heads in the group * QUERIES`` queries that share a head of the cache, so that
it is read once for all of them. Weights are relative to the maximum of the whole row, which is known by then, so that
parts of the output are added without rescaling. A masked logit is :data:`MASKED`, which is finite: no
difference is NaN.

DEPENDENT kernels (Hopper's programmatic dependent launch) are launched when the one before them nears its end, and wait
for that before they touch memory: a decoding step is so short that launches are a good part of it. Launched earlier,
they would crowd onto the processors that are done first.
"""

# Triton's language says little of its types.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from .policy import COEFFICIENTS, lowered_beta

MASKED = tl.constexpr(-1e30)
LOG2E = tl.constexpr(1.4426950408889634)
POLICY_NUMBERS = ("lo", "hi", "threshold", "floor", *(f"c{i}" for i in reversed(range(COEFFICIENTS))))
"""What decoding kernels call the numbers of a policy: its bounds, and its coefficients from the highest power down."""


@triton.jit
def split_span(lengths, batch, split, splits, capacity, left, QUERIES: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many keys are valid, the oldest that any row sees, and the keys ``[first, last)`` of the split's blocks."""
    length = capacity
    if lengths is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths + batch), 0), capacity)
    oldest = tl.where(left >= 0, tl.maximum(length - QUERIES - left, 0), 0)
    start = oldest // BLOCK_N * BLOCK_N
    blocks = (length - start + BLOCK_N - 1) // BLOCK_N
    share = (blocks + splits - 1) // splits * BLOCK_N
    first = start + split * share
    return length, oldest, first, tl.minimum(first + share, length)


@triton.jit
def row_span(rows, length, left, QUERIES: tl.constexpr):
    """The newest and the oldest key that each row sees."""
    newest = length - QUERIES + rows % QUERIES
    return newest, tl.where(left >= 0, tl.maximum(newest - left, 0), 0)


@triton.jit
def unmasked(mask, batch, n, inside, stride_mask):
    """Which of the keys ``n`` are ``inside`` and not hidden."""
    if mask is not None:
        inside = inside & (tl.load(mask + batch.to(tl.int64) * stride_mask + n, mask=inside, other=0) != 0)
    return inside


@triton.jit
def cache_rows(
    cache, table, batch, head, n, inside, stride_b, stride_h, stride_n, stride_table, PAGE_SIZE: tl.constexpr
):
    """Pointers to the rows of the keys ``n``; with pages, ``stride_b`` is that of a page."""
    cache += head.to(tl.int64) * stride_h
    if table is None:
        rows = cache + batch.to(tl.int64) * stride_b + n.to(tl.int64) * stride_n
    else:
        page = tl.load(table + batch.to(tl.int64) * stride_table + n // PAGE_SIZE, mask=inside, other=0)
        rows = cache + page.to(tl.int64) * stride_b + (n % PAGE_SIZE) * stride_n
    return rows


@triton.jit
def merged(high, total, moment):
    """Maximum, sum and shifted moment of rows from those of their parts, which lie along ``axis 0``.

    Several threads have a copy of each, the same bits in all of them: what is added is rounded first. A product
    that is a part of a fused multiply-add is not, and then it would matter whose it is.
    """
    top = tl.max(high, axis=0)
    shift = high - top[None, :]
    scale = tl.exp2(shift * LOG2E)
    some = top > MASKED
    zero = tl.zeros_like(scale)
    merged_total = tl.where(some, tl.sum(tl.fma(scale, total, zero), axis=0), 0.0)
    merged_moment = tl.where(some, tl.sum(tl.fma(scale, moment + shift * total, zero), axis=0), 0.0)
    return top, merged_total, merged_moment


@triton.jit(do_not_specialize=["stride_part", "capacity", "splits", "left"])
def logits_kernel(
    query, key, table, lengths, mask, logits, parts,
    stride_qb, stride_qh, stride_ql, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd, stride_table, stride_mask,
    padded, stride_part, heads, capacity, splits, left, scale, softcap,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, CAPPED: tl.constexpr,
    WITH_MIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Logits of the split's keys, and (maximum, sum, moment, minimum) of each row of them."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    split, batch = tl.program_id(0) % splits, tl.program_id(0) // splits
    head = tl.program_id(1) % heads
    rows = tl.program_id(1) // heads * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    pair = batch * heads + head
    length, from_key, first, last = split_span(lengths, batch, split, splits, capacity, left, QUERIES, BLOCK_N)

    query_heads = head * (ROWS // QUERIES) + rows // QUERIES
    query += batch.to(tl.int64) * stride_qb
    q = tl.load(
        query + (query_heads * stride_qh + rows % QUERIES * stride_ql)[:, None] + (dims * stride_qd)[None, :],
        mask=(rows < ROWS)[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )
    newest, oldest = row_span(rows, length, left, QUERIES)
    row_logits = logits + pair.to(tl.int64) * ROWS * padded + rows.to(tl.int64) * padded

    # Every column of the block keeps its own statistics, merged once at the end: no reduction within the loop.
    high = tl.full((BLOCK_M, BLOCK_N), MASKED, tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    moment = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    low = tl.full((BLOCK_M, BLOCK_N), float("inf"), tl.float32)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = unmasked(mask, batch, n, (n >= from_key) & (n < last), stride_mask)
        pointers = cache_rows(
            key, table, batch, head, n, inside, stride_kb, stride_kh, stride_kn, stride_table, PAGE_SIZE
        )
        k = tl.load(
            pointers[:, None] + (dims * stride_kd)[None, :],
            mask=inside[:, None] & (dims < DIM)[None, :],
            other=0.0,
        )
        z = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            z = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(z * (2.0 * LOG2E / softcap))))
        seen = inside[None, :] & (n[None, :] <= newest[:, None]) & (n[None, :] >= oldest[:, None])
        if WITH_MIN:
            low = tl.minimum(low, tl.where(seen, z, float("inf")))
        z = tl.where(seen, z, MASKED)
        tl.store(row_logits[:, None] + n[None, :], z, mask=(rows < ROWS)[:, None])
        higher = z > high
        gap = -tl.abs(z - high)
        scaled = tl.exp2(gap * LOG2E)
        moment = tl.where(higher, scaled * (moment + gap * total), moment + scaled * gap)
        total = tl.where(higher, scaled * total + 1.0, total + scaled)
        high = tl.where(higher, z, high)

    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    top, row_total, row_moment = merged(tl.trans(high), tl.trans(total), tl.trans(moment))
    parts += (pair.to(tl.int64) * splits + split) * ROWS + rows
    tl.store(parts, top, mask=rows < ROWS)
    tl.store(parts + stride_part, row_total, mask=rows < ROWS)
    tl.store(parts + 2 * stride_part, row_moment, mask=rows < ROWS)
    if WITH_MIN:
        tl.store(parts + 3 * stride_part, tl.min(low, axis=1), mask=rows < ROWS)


@triton.jit(do_not_specialize=["stride_part", "stride_stats", "capacity", "splits", "left"])
def values_kernel(
    logits, value, table, lengths, mask, parts, stats, betas, output, sums,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_table, stride_mask,
    padded, stride_part, stride_stats, heads, capacity, splits, left,
    lo, hi, threshold, floor, c7, c6, c5, c4, c3, c2, c1, c0,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, LOWERED: tl.constexpr,
    ENTROPY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr, WHOLE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The split's part of the output, and of the sum of weights (``WHOLE``: the output itself).

    ``LOWERED``: statistics come from ``parts``, beta from the policy's numbers, and the first split writes both. Else
    maxima are in ``stats`` and ``betas`` are given.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    split, batch = tl.program_id(0) % splits, tl.program_id(0) // splits
    head = tl.program_id(1) % heads
    rows = tl.program_id(1) // heads * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    pair = batch * heads + head
    length, from_key, first, last = split_span(lengths, batch, split, splits, capacity, left, QUERIES, BLOCK_N)

    newest, oldest = row_span(rows, length, left, QUERIES)
    at = pair.to(tl.int64) * ROWS + rows
    if LOWERED:
        each = tl.arange(0, SPLITS)
        there = (each < splits)[:, None] & (rows < ROWS)[None, :]
        parts += pair.to(tl.int64) * splits * ROWS + each[:, None] * ROWS + rows[None, :]
        top, total, moment = merged(
            tl.load(parts, mask=there, other=MASKED),
            tl.load(parts + stride_part, mask=there, other=0.0),
            tl.load(parts + 2 * stride_part, mask=there, other=0.0),
        )
        filled = tl.where(total > 0, total, 1.0)
        v = tl.log(filled) - moment / filled
        if not ENTROPY:
            v = tl.log(tl.maximum(newest + 1 - oldest, 1).to(tl.float32))
        beta = lowered_beta(v, c7, c6, c5, c4, c3, c2, c1, c0, lo, hi, threshold, floor)
        writes = rows < tl.where(split == 0, ROWS, 0)
        tl.store(stats + at, tl.where(total > 0, top, -float("inf")), mask=writes)
        tl.store(stats + stride_stats + at, total, mask=writes)
        tl.store(stats + 2 * stride_stats + at, moment, mask=writes)
        tl.store(betas + at, beta, mask=writes)
    else:
        top = tl.load(stats + at, mask=rows < ROWS, other=0.0)
        top = tl.maximum(top, MASKED)
        beta = tl.load(betas + at, mask=rows < ROWS, other=1.0)
    hard = beta == float("inf")
    factor = tl.where(hard, 0.0, beta * LOG2E)
    lowest = tl.where(hard, tl.maximum(top, MASKED * 0.5), MASKED * 0.5)

    row_logits = logits + pair.to(tl.int64) * ROWS * padded + rows.to(tl.int64) * padded
    weight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = unmasked(mask, batch, n, (n >= from_key) & (n < last), stride_mask)
        seen = inside[None, :] & (n[None, :] >= oldest[:, None])  # what lies outside may never have been written
        z = tl.load(row_logits[:, None] + n[None, :], mask=(rows < ROWS)[:, None], other=MASKED)
        z = tl.where(seen, z, MASKED)
        pointers = cache_rows(
            value, table, batch, head, n, inside, stride_vb, stride_vh, stride_vn, stride_table, PAGE_SIZE
        )
        values = tl.load(
            pointers[:, None] + (dims * stride_vd)[None, :],
            mask=inside[:, None] & (dims < DIM)[None, :],
            other=0.0,
        )
        w = tl.where(z >= lowest[:, None], tl.exp2(factor[:, None] * (z - top[:, None])), 0.0)
        weight += w
        out = tl.dot(w.to(values.dtype), values, out, input_precision="ieee")

    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    row_weight = tl.sum(weight, axis=1)
    if WHOLE:
        out = out / tl.where(row_weight > 0, row_weight, 1.0)[:, None]
        to = output + at[:, None] * DIM + dims[None, :]
    else:
        part = (pair.to(tl.int64) * splits + split) * ROWS + rows
        tl.store(sums + part, row_weight, mask=rows < ROWS)
        to = output + part[:, None] * DIM + dims[None, :]
    tl.store(to, out.to(output.dtype.element_ty), mask=(rows < ROWS)[:, None] & (dims < DIM)[None, :])


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    parts, sums, output, splits,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row of the output: the sum of its parts over the sum of its weights."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64)
    first = at // ROWS * splits * ROWS + at % ROWS
    dims = tl.arange(0, BLOCK_D)
    total = tl.zeros((CHUNK,), tl.float32)
    out = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.static_range(0, SPLITS, CHUNK):
        each = start + tl.arange(0, CHUNK)
        part = first + each * ROWS
        total += tl.load(sums + part, mask=each < splits, other=0.0)
        there = (each < splits)[:, None] & (dims < DIM)[None, :]
        out += tl.sum(tl.load(parts + part[:, None] * DIM + dims[None, :], mask=there, other=0.0), axis=0)
    weight = tl.sum(total, axis=0)
    out = out / tl.where(weight > 0, weight, 1.0)
    tl.store(output + at * DIM + dims, out.to(output.dtype.element_ty), mask=dims < DIM)
