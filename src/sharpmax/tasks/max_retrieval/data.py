"""The sampler of Appendix A.2: sets of items with a priority and a class each, and a query that says nothing.

Every number is a pure function of a key, so that any set can be made again. The keys of a seed are split by what they
are for: ``stream_key(seed, stream)`` folds one of the constants below into ``jax.random.key(seed)``.
"""

from __future__ import annotations

from enum import IntEnum
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

CLASSES = 10
"""C of Appendix A.2."""


class Stream(IntEnum):
    """What random numbers are for; the constant that is folded into the key of a seed."""

    INITIAL = 0
    TRAINING = 1
    VALIDATION = 2
    EVALUATION = 3
    PROBE = 4
    STUDY = 5


def stream_key(seed: int | jax.Array, stream: Stream) -> jax.Array:
    """The key of one stream of a seed; Threefry, whatever the default of JAX is."""
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), int(stream))


class Batch(NamedTuple):
    """Sets of items. Features ``rho || onehot(kappa)`` are never laid out: the model gathers rows of its first kernel.

    ========  ====================================================================================
    priority  ``[sets, n]``, rho ~ U(0, 1), a multiple of 2**-24
    category  ``[sets, n]``, kappa ~ U{0, ..., 9}, int32
    query     ``[sets, 1]``, q ~ U(0, 1)
    target    ``[sets]``, which item has the largest priority (the first of equals), int32
    label     ``[sets]``, its category
    mask      ``[n]``, which items are in the sets, or ``None`` where all of them are
    ========  ====================================================================================
    """

    priority: jax.Array
    category: jax.Array
    query: jax.Array
    target: jax.Array
    label: jax.Array
    mask: jax.Array | None


def sample(key: jax.Array, sets: int, n: int, size: jax.Array | None = None) -> Batch:
    """``sets`` sets of ``n`` items; with ``size``, a traced number, only the first ``size`` items are in the sets."""
    return sample_sets(key, jnp.arange(sets), n, size)


@partial(jax.jit, static_argnames="n")
def sample_sets(key: jax.Array, index: jax.Array, n: int, size: jax.Array | None = None) -> Batch:
    """The sets with the numbers ``index`` among all that :func:`sample` would give, whatever they are sampled with."""

    def words(i: jax.Array) -> jax.Array:
        return jax.random.bits(jax.random.fold_in(key, i), (2 * n + 1,), jnp.uint32)

    bits = jax.vmap(words)(index)
    priority, query = _uniform(bits[:, :n]), _uniform(bits[:, 2 * n :])
    category = (((bits[:, n : 2 * n] >> 5) * CLASSES) >> 27).astype(jnp.int32)
    mask = None if size is None else jnp.arange(n) < size
    ranked = priority if mask is None else jnp.where(mask, priority, -1.0)
    target = jnp.argmax(ranked, axis=-1).astype(jnp.int32)
    label = jnp.take_along_axis(category, target[:, None], axis=-1)[:, 0]
    return Batch(priority, category, query, target, label, mask)


def _uniform(bits: jax.Array) -> jax.Array:
    """U(0, 1) in float32 with all 24 bits of its significand: twice as fine near 1 as ``jax.random.uniform``."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
