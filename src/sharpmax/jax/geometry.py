"""What decides the logits of attention apart from query and key: scale, softcap, and which keys a query may see.

    s = scale * <q_i, k_j>        z = softcap * tanh(s / softcap) + bias        weights = softmax(beta * z)

Query ``i`` sees key ``j`` if ``-left <= j - i <= right``: a band around its own position, counted from the first query
and key as ``jax.nn.dot_product_attention`` does. Causality is ``right = 0``, a window bounds both sides.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ALL = -1
"""A side of the band that has no bound."""


class Geometry(NamedTuple):
    """Plain numbers, which every implementation takes.

    Attributes:
      scale: what the product of query and key is multiplied by.
      softcap: logits are kept within plus and minus this by ``tanh``; 0 for no cap.
      left, right: how many keys before and after its own position a query sees, :data:`ALL` for all.
    """

    scale: float
    softcap: float = 0.0
    left: int = ALL
    right: int = ALL

    @property
    def banded(self) -> bool:
        """Whether some keys are out of sight of some queries."""
        return self.left != ALL or self.right != ALL

    def visible(self, rows: jax.Array, keys: jax.Array) -> jax.Array | None:
        """Whether the query at each of ``rows`` sees the key at each of ``keys``; ``None`` where all see all."""
        distance = keys - rows[:, None]
        inside = [distance >= -self.left] if self.left != ALL else []
        inside += [distance <= self.right] if self.right != ALL else []
        return both(*inside)

    def counts(self, rows: jax.Array, keys: jax.Array | int) -> jax.Array:
        """How many of the first ``keys`` keys the query at each of ``rows`` sees, int32."""
        first = jnp.maximum(rows - self.left, 0) if self.left != ALL else jnp.zeros_like(rows)
        last = jnp.zeros_like(rows) + keys - 1
        if self.right != ALL:
            last = jnp.minimum(last, rows + self.right)
        return jnp.maximum(last - first + 1, 0).astype(jnp.int32)


class Masks(NamedTuple):
    """Which keys a query sees besides the band: a mask ``[B|1, N|1, T|1, S|1]``, and lengths ``[B]`` of both.

    ``shift``, ``[B|1]``, is how far the first query stands behind the first key, where both are parts of a sequence.
    """

    mask: jax.Array | None = None
    query_lengths: jax.Array | None = None
    key_lengths: jax.Array | None = None
    shift: jax.Array | None = None


def row_counts(q: jax.Array, k: jax.Array, masks: Masks, geometry: Geometry) -> jax.Array:
    """How many keys each row ``[B, N, T]`` sees by the band and the lengths."""
    rows = jnp.arange(q.shape[1], dtype=jnp.int32)
    keys = k.shape[1] if masks.key_lengths is None else masks.key_lengths[:, None, None]
    count = geometry.counts(rows if masks.shift is None else rows + masks.shift[:, None, None], keys)
    if masks.query_lengths is not None:
        count = jnp.where(rows < masks.query_lengths[:, None, None], count, 0)
    return jnp.broadcast_to(count, (q.shape[0], q.shape[2], q.shape[1]))


def both(*conditions: jax.Array | None) -> jax.Array | None:
    """All conditions together; those that are ``None`` always hold."""
    given = [condition for condition in conditions if condition is not None]
    return functools.reduce(jnp.logical_and, given) if given else None


def accumulation(dtype: Any) -> Any:
    """The type that everything is computed in: float64 for float64, float32 for everything narrower."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def hidden_logit(dtype: Any) -> float:
    """What stands for a logit that is not seen: finite, so that 0 times it is 0."""
    return float(jnp.finfo(dtype).min) / 2


def shown(bias: jax.Array, dtype: Any) -> jax.Array:
    """Where a bias, added to logits of type ``dtype``, hides nothing; what is no number does not hide."""
    return ~(bias <= max(hidden_logit(bias.dtype), hidden_logit(dtype)))


def without_padding(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """``x`` (``[B, L, ...]``) with 0 for what lies beyond the lengths, which may be anything."""
    if lengths is None:
        return x
    inside = jnp.arange(x.shape[1]) < lengths[:, None]
    return jnp.where(inside.reshape(*inside.shape, *(1,) * (x.ndim - 2)), x, np.zeros((), x.dtype))
