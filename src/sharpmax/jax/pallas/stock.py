"""Stock attention of ``jax.nn``, with what its cuDNN implementation refuses: odd lengths, and most of ``vmap``.

Its gradients take lengths that are even, so one more query or key is added where they are not, and kept out of sight.
Its batching takes arrays that are all mapped, and over their first axis: :func:`level` sees to that.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..geometry import ALL, Geometry

Implementation = Literal["cudnn", "xla"]
Lengths = tuple[()] | tuple[jax.Array, jax.Array]
"""Those of queries and of keys, if there are any."""


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array | None,
    geometry: Geometry,
    implementation: Implementation,
) -> jax.Array:
    """``softmax(z) v``; ``lengths`` are those of the keys, of at least 1. Causality needs as many queries as keys."""
    queries, keys = q.shape[1], k.shape[1]
    if keys % 2 and lengths is None and geometry.right == ALL:
        lengths = jnp.full((k.shape[0],), keys, jnp.int32)
    q, k, v = (_even(x) for x in (q, k, v))
    both = () if lengths is None else (jnp.full(lengths.shape, q.shape[1], jnp.int32), lengths)
    out: Any = _attention(q, k, v, both, geometry, implementation)
    return out[:, :queries]


def _even(x: jax.Array) -> jax.Array:
    """``x`` (``[B, L, ...]``) with an even length, filled up with 0."""
    return jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) if x.shape[1] % 2 else x


@jax.custom_batching.custom_vmap
def level(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays as they are; under ``vmap``, if any is mapped then all are, and over their first axis."""
    return arrays


@level.def_vmap
def _level_mapped(size: int, mapped: Any, *arrays: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
    wide = (x if own else jnp.broadcast_to(x, (size, *x.shape)) for x, own in zip(arrays, mapped, strict=True))
    return level(*wide), (True,) * len(arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: Lengths, geometry: Geometry, implementation: Implementation
) -> jax.Array:
    return _stock(*level(q, k, v, *lengths), geometry=geometry, implementation=implementation)


def _stock(
    q: jax.Array, k: jax.Array, v: jax.Array, *lengths: jax.Array, geometry: Geometry, implementation: Implementation
) -> jax.Array:
    query_lengths, key_lengths = lengths or (None, None)
    return jax.nn.dot_product_attention(
        q, k, v, scale=geometry.scale, is_causal=geometry.right == 0, query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths, local_window_size=None if geometry.left == ALL else (geometry.left, 0),
        implementation=implementation,
    )  # fmt: skip


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: Lengths, geometry: Geometry, implementation: Implementation
) -> tuple[jax.Array, Any]:
    q, k, v, *both = level(q, k, v, *lengths)
    stock = functools.partial(_stock, geometry=geometry, implementation=implementation)
    return jax.vjp(lambda q, k, v: stock(q, k, v, *both), q, k, v)


def _backward(geometry: Geometry, implementation: Implementation, pullback: Any, d_out: jax.Array) -> tuple[Any, ...]:
    saved, tree = jax.tree.flatten(pullback)
    d_out, *found = level(d_out, *(x for x in saved if x.size))
    full = iter(found)
    return (*jax.tree.unflatten(tree, [next(full) if x.size else x for x in saved])(d_out), None)


_attention.defvjp(_forward, _backward)
