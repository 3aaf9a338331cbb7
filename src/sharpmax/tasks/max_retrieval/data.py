"""The sampler of Appendix A.2: sets of items with a priority and a class each, and a query that says nothing.

Beside the paper's task there are two more, of the same form: a query asks for the class of one of the items.

    max     the item of the largest priority (Appendix A.2)
    second  the item of the second largest priority
    recall  the item whose key the query is: keys are 24 random signs, and every set is asked four times

Guessing is right in one of ten cases. In recall, two items may have one key and different classes: of n items, a
share of about (n - 1) / 2**24 of all queries is asked for a key that another item has too, 0.1 % at 16,384 items.

Every number is a pure function of a key, so that any set can be made again. The keys of a seed are split by what they
are for: ``stream_key(seed, stream)`` folds one of the constants below into ``jax.random.key(seed)``.
"""

from __future__ import annotations

from enum import IntEnum
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

CLASSES = 10
"""C of Appendix A.2."""

SIGNS, QUERIES = 24, 4
"""Of recall: signs that make a key, and queries a set."""

Task = Literal["max", "second", "recall"]


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
    target    ``[sets]``, which item is asked for (of equal priorities the first is the largest), int32
    label     ``[sets]``, its category
    mask      ``[n]``, which items are in the sets, or ``None`` where all of them are
    ========  ====================================================================================

    In recall, ``priority`` holds the keys, their signs as the bits of a uint32; ``query`` is such keys, too, and
    ``query``, ``target`` and ``label`` are ``[sets, 4]``.
    """

    priority: jax.Array
    category: jax.Array
    query: jax.Array
    target: jax.Array
    label: jax.Array
    mask: jax.Array | None


def sample(key: jax.Array, sets: int, n: int, size: jax.Array | None = None, task: Task = "max") -> Batch:
    """``sets`` sets of ``n`` items; with ``size``, a traced number, only the first ``size`` items are in the sets."""
    return sample_sets(key, jnp.arange(sets), n, size, task)


@partial(jax.jit, static_argnames=("n", "task"))
def sample_sets(key: jax.Array, index: jax.Array, n: int, size: jax.Array | None = None, task: Task = "max") -> Batch:
    """The sets with the numbers ``index`` among all that :func:`sample` would give, whatever they are sampled with."""
    asked = QUERIES if task == "recall" else 1

    def words(i: jax.Array) -> jax.Array:
        return jax.random.bits(jax.random.fold_in(key, i), (2 * n + asked,), jnp.uint32)

    bits = jax.vmap(words)(index)
    category = (((bits[:, n : 2 * n] >> 5) * CLASSES) >> 27).astype(jnp.int32)
    mask = None if size is None else jnp.arange(n) < size
    if task == "recall":
        there = n if size is None else size
        return _recall(bits[:, :n] >> (32 - SIGNS), category, _uniform(bits[:, 2 * n :]), there, mask)
    priority, query = _uniform(bits[:, :n]), _uniform(bits[:, 2 * n :])
    ranked = priority if mask is None else jnp.where(mask, priority, -1.0)
    target = jnp.argmax(ranked, axis=-1).astype(jnp.int32)
    if task == "second":
        ranked = jnp.where(jnp.arange(n) == target[:, None], -1.0, ranked)
        target = jnp.argmax(ranked, axis=-1).astype(jnp.int32)
    label = jnp.take_along_axis(category, target[:, None], axis=-1)[:, 0]
    return Batch(priority, category, query, target, label, mask)


def _recall(
    keys: jax.Array, category: jax.Array, drawn: jax.Array, size: jax.Array | int, mask: jax.Array | None
) -> Batch:
    """The sets of recall; ``drawn`` in [0, 1) says which item each query is about."""
    target = jnp.minimum(jnp.floor(drawn * size).astype(jnp.int32), size - 1)
    query, label = (jnp.take_along_axis(a, target, axis=-1) for a in (keys, category))
    return Batch(keys, category, query, target, label, mask)


def signs(keys: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """The :data:`SIGNS` signs of every key, 1 where its bit is set and -1 elsewhere: ``[..., 24]``."""
    bits = (keys[..., None] >> jnp.arange(SIGNS, dtype=keys.dtype)) & 1
    return 2 * bits.astype(dtype) - 1


def _uniform(bits: jax.Array) -> jax.Array:
    """U(0, 1) in float32 with all 24 bits of its significand: twice as fine near 1 as ``jax.random.uniform``."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
