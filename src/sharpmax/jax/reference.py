"""Attention with adaptive temperature as it is written down: all logits at once, differentiated by JAX in both modes.

The oracle of the other implementations, in any floating-point type; memory is queries times keys.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ..core.softmax import softmax
from ..core.stats import RowStats
from ..core.stats import row_stats as statistics
from .geometry import Geometry, Masks, accumulation, both, shown, without_padding


def logits(
    q: jax.Array, k: jax.Array, bias: jax.Array | None, masks: Masks, geometry: Geometry
) -> tuple[jax.Array, jax.Array | None]:
    """The logits ``[B, N, T, S]``, in float32 or float64, and which of them are seen (``None`` for all)."""
    dtype = accumulation(q.dtype)
    q, k = without_padding(q, masks.query_lengths), without_padding(k, masks.key_lengths)
    grouped = _grouped(q, k.shape[2]).astype(dtype)
    z = jnp.einsum("btkgd,bskd->bkgts", grouped, k.astype(dtype)) * geometry.scale
    z = z.reshape(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if geometry.softcap > 0:
        z = geometry.softcap * jnp.tanh(z / geometry.softcap)
    rows, keys = jnp.arange(q.shape[1]), jnp.arange(k.shape[1])
    band = functools.partial(geometry.visible, keys=keys)
    seen = both(
        band(rows) if masks.shift is None else _by_batch(jax.vmap(band)(rows + masks.shift[:, None])),
        masks.mask,
        None if masks.query_lengths is None else (rows < masks.query_lengths[:, None])[:, None, :, None],
        None if masks.key_lengths is None else (keys < masks.key_lengths[:, None])[:, None, None, :],
    )
    if bias is not None:
        there = shown(bias, dtype)
        z, seen = (z + jnp.where(there, bias, 0)).astype(dtype), both(seen, there)
    return z, seen


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
    z, seen = logits(q, k, bias, masks, geometry)
    return statistics(z, where=seen, with_min=with_min)


def weights(
    q: jax.Array, k: jax.Array, beta: jax.Array, bias: jax.Array | None, masks: Masks, geometry: Geometry
) -> jax.Array:
    """``softmax(beta * z)``, ``[B, N, T, S]`` in float32 or float64."""
    z, seen = logits(q, k, bias, masks, geometry)
    return softmax(z, where=seen, beta=beta)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    bias: jax.Array | None,
    masks: Masks,
    geometry: Geometry,
) -> jax.Array:
    """``softmax(beta * z) v``, ``[B, T, N, columns]`` in the type of ``q``."""
    return weighted(weights(q, k, beta, bias, masks, geometry), v, masks).astype(q.dtype)


def weighted(w: jax.Array, v: jax.Array, masks: Masks) -> jax.Array:
    """The sums of values ``[B, S, K, columns]`` with weights ``[B, N, T, S]``."""
    v = without_padding(v, masks.key_lengths).astype(w.dtype)
    batch, heads, queries, keys = w.shape
    grouped = w.reshape(batch, v.shape[2], heads // max(1, v.shape[2]), queries, keys)
    return jnp.einsum("bkgts,bskd->btkgd", grouped, v).reshape(batch, queries, heads, v.shape[3])


def _by_batch(x: jax.Array | None) -> jax.Array | None:
    return None if x is None else x[:, None]


def _grouped(q: jax.Array, key_heads: int) -> jax.Array:
    """The heads of ``q`` as ``[key heads, group]``."""
    batch, queries, heads, columns = q.shape
    return q.reshape(batch, queries, key_heads, heads // max(1, key_heads), columns)
