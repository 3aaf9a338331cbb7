"""The kernels of row statistics for NVIDIA GPUs, in Pallas: forward, and backward to queries and to keys.

One program has one block of query rows (or of keys) and walks over the blocks of keys (or rows) that it sees any of:
first those that are seen whole, then those at the edge of the band or of the lengths, whose logits are masked. With
``m`` the maximum of a row and ``t = z - m``:

    statistics    L = sum e^t, A = sum e^t t       dz = e^t (gL + gA (1 + t))

Where logits are a plain product, ``raw`` is that product, and the scale is left to the exponent; where they are bent
(softcap, a scale that is not positive), ``raw`` is the logit itself. Exponents are in units of ``log 2`` (``exp2`` is
what the hardware has), ``(raw - maximum) * unit``: the difference first, so that a common offset costs no digits.
Sums are float32.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ..geometry import hidden_logit
from .blocks import (
    LOG2E,
    Call,
    Number,
    column,
    key_range,
    over_blocks,
    put_tile,
    row,
    row_range,
    some,
    span,
    tile,
    visible,
)

NOTHING = -1e4
"""An exponent whose power is exactly 0, and finite, so that 0 times it is 0."""
HIDDEN = hidden_logit(jnp.float32)


def stats_kernel(*given: Any, call: Call, with_min: bool) -> None:
    """Maximum, sum, moment and perhaps minimum of a block of rows: of raw logits, the moment in units of log 2."""
    q_ref, k_ref, *refs = given
    queries, keys = call.lengths(refs, pl.program_id(2))
    first = call.row_block(pl.program_id(0)) * call.tiles.rows
    query = tile(q_ref, 0, call.tiles.rows, queries - first, call.columns)
    zeros = jnp.zeros((call.tiles.rows,), jnp.float32)
    carry = (zeros + HIDDEN, zeros, zeros, *([zeros + math.inf] if with_min else []))

    def step(start: Number, carry: tuple[jax.Array, ...], edge: bool) -> tuple[jax.Array, ...]:
        block = tile(k_ref, start, call.tiles.keys, keys if edge else None, call.columns)
        raw, _ = logits(product(query, block, 1, 1), call)
        seen = None
        if edge:
            seen = visible(column(first, call.tiles.rows), row(start, call.tiles.keys), queries, keys, call.geometry)
        return fold(raw, seen, call.unit, carry)

    found = over_blocks(key_range(first, queries, keys, call), call.tiles.keys, call.keys, call.edges, step, carry)
    inside = span(call.tiles.rows) < call.queries - first
    for ref, values in zip(refs, found, strict=True):
        triton.store(ref, values, mask=inside)


def fold(raw: jax.Array, seen: jax.Array | None, unit: float, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Statistics of the keys so far, with those of one more block; ``seen`` is ``None`` where all of it is."""
    highest, total, moment, *lowest = carry
    new = jnp.maximum(highest, jnp.max(raw if seen is None else jnp.where(seen, raw, HIDDEN), 1))
    t = (raw - new[:, None]) * unit
    if seen is not None:
        t = jnp.where(seen, t, NOTHING)
    e = jnp.exp2(t)
    step = jnp.maximum((highest - new) * unit, NOTHING)
    fade = jnp.exp2(step)
    found = new, fade * total + jnp.sum(e, 1), fade * (moment + step * total) + jnp.sum(e * t, 1)
    if not lowest:
        return found
    least = jnp.min(raw if seen is None else jnp.where(seen, raw, math.inf), 1)
    return *found, jnp.minimum(lowest[0], least)


def query_kernel(*given: Any, call: Call) -> None:
    """dq of a block of rows, from their maxima and the cotangents ``gL + gA`` and ``gA log 2``."""
    q_ref, k_ref, *row_refs, dq_ref = given
    *refs, top_ref, slope_ref, curve_ref = row_refs
    queries, keys = call.lengths(refs, pl.program_id(2))
    first = call.row_block(pl.program_id(0)) * call.tiles.rows
    query = tile(q_ref, 0, call.tiles.rows, queries - first, call.columns)
    inside = span(call.tiles.rows) < call.queries - first
    by_row = [triton.load(ref, mask=inside, other=0.0)[:, None] for ref in (top_ref, slope_ref, curve_ref)]

    def step(start: Number, dq: jax.Array, edge: bool) -> jax.Array:
        block = tile(k_ref, start, call.tiles.keys, keys if edge else None, call.columns)
        raw, bend = logits(product(query, block, 1, 1), call)
        seen = None
        if edge:
            seen = visible(column(first, call.tiles.rows), row(start, call.tiles.keys), queries, keys, call.geometry)
        dz = gradient(raw, bend, seen, call.unit, *by_row)
        return dq + product(dz.astype(block.dtype), block, 1, 0)

    ranges = key_range(first, queries, keys, call)
    dq = over_blocks(ranges, call.tiles.keys, call.keys, call.edges, step, jnp.zeros(query.shape, jnp.float32))
    put_tile(dq_ref, dq * call.geometry.scale, call.queries - first, call.columns)


def key_kernel(*given: Any, call: Call) -> None:
    """dk of a block of keys, over the rows of every query head of its group, one head after the other."""
    q_ref, k_ref, *row_refs, dk_ref = given
    *refs, top_ref, slope_ref, curve_ref = row_refs
    queries, keys = call.lengths(refs, pl.program_id(2))
    first = pl.program_id(0) * call.tiles.keys
    block = tile(k_ref, 0, call.tiles.keys, keys - first, call.columns)
    ranges = row_range(first, queries, keys, call)

    def of_head(member: Number, dk: jax.Array) -> jax.Array:
        def step(start: Number, dk: jax.Array, edge: bool) -> jax.Array:
            query = tile(q_ref, start, call.tiles.rows, queries if edge else None, call.columns, member)
            here = (member, pl.ds(start, call.tiles.rows))
            inside = span(call.tiles.rows) < call.queries - start if edge else None
            by_row = [some(ref, here, inside)[None, :] for ref in (top_ref, slope_ref, curve_ref)]
            raw, bend = logits(product(block, query, 1, 1), call)
            seen = None
            if edge:
                at, to = row(start, call.tiles.rows), column(first, call.tiles.keys)
                seen = visible(at, to, queries, keys, call.geometry)
            dz = gradient(raw, bend, seen, call.unit, *by_row)
            return dk + product(dz.astype(query.dtype), query, 1, 0)

        return over_blocks(ranges, call.tiles.rows, call.queries, call.edges, step, dk)

    dk = lax.fori_loop(0, call.group, of_head, jnp.zeros(block.shape, jnp.float32))
    put_tile(dk_ref, dk * call.geometry.scale, call.keys - first, call.columns)


def logits(product: jax.Array, call: Call) -> tuple[jax.Array, jax.Array | None]:
    """``raw`` logits, and what the softcap multiplies their gradient by."""
    cap, scale = call.geometry.softcap, call.geometry.scale
    if cap > 0:
        curved = 1.0 - 2.0 / (1.0 + jnp.exp2(jnp.minimum(product * (2 * LOG2E * scale / cap), 100.0)))
        return curved * cap, 1.0 - curved * curved
    return (product * scale if call.bent else product), None


def gradient(
    raw: jax.Array,
    bend: jax.Array | None,
    seen: jax.Array | None,
    unit: float,
    top: jax.Array,
    slope: jax.Array,
    curve: jax.Array,
) -> jax.Array:
    """dz of a block; ``slope`` is ``gL + gA`` and ``curve`` is ``gA log 2``, of every row."""
    t = (raw - top) * unit
    if seen is not None:
        t = jnp.where(seen, t, NOTHING)
    dz = jnp.exp2(t) * (slope + curve * t)
    return dz if bend is None else dz * bend


def product(a: jax.Array, b: jax.Array, i: int, j: int) -> jax.Array:
    """The product of matrices over axis ``i`` of the one and ``j`` of the other, summed in float32.

    float32 is not rounded on the way in.
    """
    return lax.dot_general(
        a, b, (((i,), (j,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
