"""Row statistics and attention with beta in plain JAX, on any device, without ever holding all logits.

Logits are computed block by block (see :mod:`.blocks`), forward and again backward, so memory grows with the number of
queries plus that of keys. With ``z`` the logits, ``t = z - max`` and ``w = softmax(beta * z)``:

    statistics    L = sum e^t, A = sum e^t t       dz = e^t (dL + dA (1 + t))
    attention     o = w v                          dz = beta g,  dbeta = sum g t,  g = w (do v^T - <do, o>)

Two functions with a backward of their own; a policy between them is ordinary code that JAX differentiates.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ..core.stats import ZERO_EXPONENT, RowStats
from .blocks import Block, Grouped, Pair, Rows, Sizes, by_pair, from_pair, over_pairs, sizes
from .cotangents import instantiated, values, wanted
from .geometry import Geometry, Masks, accumulation, hidden_logit, row_counts

LOWEST, SMALLEST_BETA = -1e30, 1e-26
"""``z - max`` is cut off at the one, so that its product with a change of beta stays finite, and beta at the other, so
that what is hidden keeps weight 0 even where beta is 0 and what is seen gets equal weights."""

Fields = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array]


def row_stats(
    q: jax.Array,
    k: jax.Array,
    bias: jax.Array | None,
    masks: Masks,
    geometry: Geometry,
    *,
    with_min: bool = False,
) -> RowStats:
    """The statistics of every row of logits, ``[B, N, T]``."""
    return RowStats(*_compiled_stats(q, k, bias, masks, geometry, with_min, sizes()))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    bias: jax.Array | None,
    masks: Masks,
    geometry: Geometry,
) -> jax.Array:
    """``softmax(beta * z) v``, ``[B, T, N, columns]`` in the type of ``q``.

    Rows of infinite beta are hard: uniform over their maxima.
    """
    return _compiled_attend(q, k, v, beta, bias, masks, geometry, sizes())


# ----------------------------------------------------------------------------------------------------------------
# Statistics
# ----------------------------------------------------------------------------------------------------------------


def fields(
    q: jax.Array,
    k: jax.Array,
    bias: jax.Array | None,
    masks: Masks,
    geometry: Geometry,
    with_min: bool,
    limits: Sizes,
) -> Fields:
    """Maximum, sum, moment, minimum (``None`` unless asked for) and count of every row, ``[B, N, T]``."""
    heads, shape = k.shape[2], (q.shape[0], k.shape[2])
    counted = bias is not None or masks.mask is not None

    def of_pair(x: Grouped) -> tuple[Any, None]:
        pair = Pair(x.q, x.k, x.bias, x.masks, geometry, limits)
        return pair.each_rows(lambda rows: _stats_of_rows(pair, rows, with_min, counted)), None

    found, _ = over_pairs(of_pair, (Grouped.of(q, k, None, bias, masks),), shape, limits.together)
    top, total, moment, *rest = (x.reshape(q.shape[0], heads * x.shape[2], q.shape[1]) for x in found)
    lowest = rest[0] if with_min else None
    return top, total, moment, lowest, rest[-1] if counted else row_counts(q, k, masks, geometry)


def _stats_of_rows(pair: Pair, rows: Rows, with_min: bool, counted: bool) -> tuple[jax.Array, ...]:
    """Maximum, sum, moment and, where asked for, minimum and count of a block of rows."""
    hidden = hidden_logit(pair.dtype)

    def step(block: Block, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, moment, *rest = carry
        z = block.logits
        higher = jnp.maximum(top, lax.stop_gradient(z).max(-1))
        shift = jnp.maximum(top - higher, ZERO_EXPONENT)
        fade = jnp.exp(shift)
        t = z - higher[..., None]
        e = jnp.exp(t)
        found = [higher, fade * total + e.sum(-1), fade * (moment + shift * total) + (e * t).sum(-1)]
        if with_min:
            lowest = z if block.seen is None else jnp.where(block.seen, z, math.inf)
            found.append(jnp.minimum(rest[0], lax.stop_gradient(lowest).min(-1)))
        if counted:
            assert block.seen is not None
            found.append(rest[-1] + jnp.broadcast_to(block.seen, z.shape).sum(-1, dtype=jnp.int32))
        return tuple(found)

    zeros = jnp.zeros(rows.query.shape[:2], pair.dtype)
    start = [jnp.full_like(zeros, hidden), zeros, zeros]
    start += [jnp.full_like(zeros, math.inf)] if with_min else []
    start += [zeros.astype(jnp.int32)] if counted else []
    top, total, moment, *rest = pair.over_keys(rows, step, tuple(start))
    empty = top <= hidden
    return jnp.where(empty, -math.inf, top), jnp.where(empty, 0.0, total), jnp.where(empty, 0.0, moment), *rest


def _stats_forward(
    q: Any, k: Any, bias: Any, masks: Any, geometry: Geometry, with_min: bool, limits: Sizes
) -> tuple[Fields, Any]:
    bias_wanted = wanted(bias)
    q, k, bias, masks = values((q, k, bias, masks))
    found = fields(q, k, bias, masks, geometry, with_min, limits)
    return found, (q, k, bias, masks, found[0], bias_wanted)


def stats_backward(geometry: Geometry, with_min: bool, limits: Sizes, saved: Any, cotangents: Any) -> Any:
    """The gradients of query, key and bias, from what forward saved: all arguments and the largest logits."""
    q, k, bias, masks, top, bias_wanted = saved
    _, d_total, d_moment, *_ = cotangents
    if isinstance(d_total, SymbolicZero) and isinstance(d_moment, SymbolicZero):
        return None, None, None, None
    shape = (q.shape[0], k.shape[2])
    by_row = tuple(
        of_heads(instantiated(x), shape[1]) for x in (jnp.where(jnp.isinf(top), 0.0, top), d_total, d_moment)
    )

    def of_pair(x: Grouped, top: jax.Array, d_total: jax.Array, d_moment: jax.Array) -> tuple[Any, Any]:
        pair = Pair(x.q, x.k, x.bias, x.masks, geometry, limits)

        def of_rows(rows: Rows, sums: Any) -> tuple[Any, jax.Array]:
            shift, slope, curve = (pair.of_rows(part, rows.start)[..., None] for part in (top, d_total, d_moment))

            def step(block: Block, carry: Any) -> Any:
                dq, (dk, dbias) = carry
                t = jnp.maximum(block.logits - shift, ZERO_EXPONENT)
                dz = jnp.exp(t) * (slope + curve * (1.0 + t))
                if block.seen is not None:
                    dz = jnp.where(block.seen, dz, 0.0)
                return _gradients(pair, rows, block, dz, dq, dk, dbias)

            dq, sums = pair.over_keys(rows, step, (jnp.zeros_like(rows.query), sums), slope=True)
            return sums, dq * geometry.scale

        (dk, dbias), dq = pair.carry_rows(of_rows, (jnp.zeros_like(pair.k), _empty_bias(pair, bias_wanted)))
        return (dq, dk * geometry.scale), dbias

    grouped = Grouped.of(q, k, None, bias, masks)
    (dq, dk), dbias = over_pairs(of_pair, (grouped, *by_row), shape, limits.together)
    return from_pair(dq).astype(q.dtype), jnp.moveaxis(dk, 1, 2).astype(k.dtype), _like(dbias, bias), None


_stats = jax.custom_vjp(fields, nondiff_argnums=(4, 5, 6))
_stats.defvjp(_stats_forward, stats_backward, symbolic_zeros=True)
_compiled_stats = jax.jit(_stats, static_argnums=(4, 5, 6))


# ----------------------------------------------------------------------------------------------------------------
# Attention
# ----------------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    bias: jax.Array | None,
    masks: Masks,
    geometry: Geometry,
    limits: Sizes,
) -> jax.Array:
    return attend_with_sums(q, k, v, beta, bias, masks, geometry, limits)[0]


def attend_with_sums(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    bias: jax.Array | None,
    masks: Masks,
    geometry: Geometry,
    limits: Sizes,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The output, and of every row ``[B, K, G, T]`` the largest logit and ``log sum exp(beta * (z - max))``."""
    shape = (q.shape[0], k.shape[2])

    def of_pair(x: Grouped, beta: jax.Array) -> tuple[Any, None]:
        pair = Pair(x.q, x.k, x.bias, x.masks, geometry, limits)
        assert x.v is not None
        value = x.v.astype(pair.dtype)
        return pair.each_rows(lambda rows: _attend_of_rows(pair, rows, value, beta)), None

    grouped = Grouped.of(q, k, v, bias, masks)
    (out, top, log_sum), _ = over_pairs(of_pair, (grouped, of_heads(beta, shape[1])), shape, limits.together)
    return from_pair(out).astype(q.dtype), top, log_sum


def exponent(beta: jax.Array, z: jax.Array, top: jax.Array) -> jax.Array:
    """``beta * (z - top)``; in rows of infinite beta, 0 for what reaches the top and as good as ``-inf`` below it.

    The top is recognised by comparison: ``z - top``, which a compiler may compute in one step from what ``z`` was made
    of, is not always 0 there.
    """
    factor = jnp.clip(beta, SMALLEST_BETA, float(jnp.finfo(beta.dtype).max))
    return jnp.where(jnp.isinf(beta) & (z >= top), 0.0, factor * jnp.maximum(z - top, LOWEST))


def _attend_of_rows(pair: Pair, rows: Rows, value: jax.Array, beta: jax.Array) -> tuple[jax.Array, ...]:
    beta = pair.of_rows(beta, rows.start)[..., None]
    hidden = hidden_logit(pair.dtype)

    def step(block: Block, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, result = carry
        higher = jnp.maximum(top, lax.stop_gradient(block.logits).max(-1, keepdims=True))
        fade = jnp.exp(exponent(beta, top, higher))
        w = jnp.exp(exponent(beta, block.logits, higher))
        part = jnp.einsum("gts,sd->gtd", w, pair.of_keys(value, block.start))
        return higher, fade * total + w.sum(-1, keepdims=True), fade * result + part

    top = jnp.full(beta.shape, hidden, pair.dtype)
    start = (top, jnp.zeros_like(top), jnp.zeros((*top.shape[:2], value.shape[-1]), pair.dtype))
    top, total, result = pair.over_keys(rows, step, start)
    empty = top <= hidden
    total = jnp.where(empty, 1.0, total)
    out = jnp.where(empty, 0.0, result / total)
    return out, jnp.where(empty, 0.0, top)[..., 0], jnp.log(total)[..., 0]


def _attend_forward(
    q: Any, k: Any, v: Any, beta: Any, bias: Any, masks: Any, geometry: Geometry, limits: Sizes
) -> tuple[jax.Array, Any]:
    both_wanted = wanted(beta), wanted(bias)
    q, k, v, beta, bias, masks = values((q, k, v, beta, bias, masks))
    out, top, log_sum = attend_with_sums(q, k, v, beta, bias, masks, geometry, limits)
    return out, (q, k, v, beta, bias, masks, out, top, log_sum, both_wanted)


def attend_backward(geometry: Geometry, limits: Sizes, saved: Any, d_out: Any) -> Any:
    """The gradients of query, key, value, beta and bias, from what forward saved."""
    q, k, v, beta, bias, masks, out, top, log_sum, (beta_wanted, bias_wanted) = saved
    if isinstance(d_out, SymbolicZero):
        return (None,) * 6
    heads, shape = k.shape[2], (q.shape[0], k.shape[2])
    d_out = d_out.astype(accumulation(q.dtype))
    inner = by_pair((d_out * out).sum(-1), heads)

    def of_pair(x: Grouped, do: jax.Array, *by_row: jax.Array) -> tuple[Any, Any]:
        pair = Pair(x.q, x.k, x.bias, x.masks, geometry, limits)
        assert x.v is not None
        value = x.v.astype(pair.dtype)

        def of_rows(rows: Rows, sums: Any) -> tuple[Any, Any]:
            grad = pair.of_rows(do, rows.start)
            delta, beta, top, log_sum = (pair.of_rows(part, rows.start)[..., None] for part in by_row)
            slope = jnp.where(jnp.isinf(beta), 0.0, beta)

            def step(block: Block, carry: Any) -> Any:
                dq, d_beta, (dk, dbias), dv = carry
                w = jnp.exp(exponent(beta, block.logits, top) - log_sum)
                if block.seen is not None:
                    w = jnp.where(block.seen, w, 0.0)
                dv = pair.add_to_keys(dv, block.start, jnp.einsum("gts,gtd->sd", w, grad))
                g = w * (jnp.einsum("gtd,sd->gts", grad, pair.of_keys(value, block.start)) - delta)
                if d_beta is not None:
                    d_beta = d_beta + (g * jnp.maximum(block.logits - top, LOWEST)).sum(-1)
                dq, sums = _gradients(pair, rows, block, slope * g, dq, dk, dbias)
                return dq, d_beta, sums, dv

            zero = jnp.zeros(rows.query.shape[:2], pair.dtype) if beta_wanted is not None else None
            start = (jnp.zeros_like(rows.query), zero, *sums)
            dq, d_beta, *sums = pair.over_keys(rows, step, start, slope=True)
            if d_beta is not None:
                d_beta = jnp.where(jnp.isinf(beta[..., 0]), 0.0, d_beta)
            return tuple(sums), (dq * geometry.scale, d_beta)

        empty = (jnp.zeros_like(pair.k), _empty_bias(pair, bias_wanted)), jnp.zeros_like(value)
        ((dk, dbias), dv), (dq, d_beta) = pair.carry_rows(of_rows, empty)
        return (dq, dk * geometry.scale, dv, d_beta), dbias

    given = (Grouped.of(q, k, v, bias, masks), by_pair(d_out, heads), inner, of_heads(beta, heads), top, log_sum)
    (dq, dk, dv, d_beta), dbias = over_pairs(of_pair, given, shape, limits.together)
    return (
        from_pair(dq).astype(q.dtype),
        jnp.moveaxis(dk, 1, 2).astype(k.dtype),
        jnp.moveaxis(dv, 1, 2).astype(v.dtype),
        None if d_beta is None else d_beta.reshape(beta.shape),
        _like(dbias, bias),
        None,
    )


_attend.defvjp(_attend_forward, attend_backward, symbolic_zeros=True)
_compiled_attend = jax.jit(_attend, static_argnums=(6, 7))


# ----------------------------------------------------------------------------------------------------------------
# Gradients
# ----------------------------------------------------------------------------------------------------------------


def _gradients(
    pair: Pair, rows: Rows, block: Block, dz: jax.Array, dq: jax.Array, dk: jax.Array, dbias: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    """What the gradient ``dz`` of a block's logits adds to those of query and key (without the scale) and bias."""
    if dbias is not None:
        dbias = pair.add_to_tile(dbias, rows.start, block.start, dz)
    if block.slope is not None:
        dz = dz * block.slope
    dq = dq + jnp.einsum("gts,sd->gtd", dz, block.key)
    dk = pair.add_to_keys(dk, block.start, jnp.einsum("gts,gtd->sd", dz, rows.query))
    return dq, (dk, dbias)


def _empty_bias(pair: Pair, asked: tuple[()] | None) -> jax.Array | None:
    return None if asked is None or pair.bias is None else jnp.zeros(pair.bias.shape, pair.dtype)


def _like(gradient: jax.Array | None, bias: jax.Array | None) -> jax.Array | None:
    """The gradient of a bias in its own shape and type."""
    return None if gradient is None or bias is None else gradient.reshape(bias.shape).astype(bias.dtype)


def of_heads(x: jax.Array, key_heads: int) -> jax.Array:
    """``x`` (``[B, N, T]``) as ``[B, K, G, T]``."""
    return x.reshape(x.shape[0], key_heads, x.shape[1] // key_heads, x.shape[2])
