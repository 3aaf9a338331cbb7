"""Evaluation of trained heads under many policies at once, in bounded memory (the engine of Table 1).

Logits do not depend on the policy, and the attended vector of every policy is a weighted sum of the same item vectors:
items are embedded once, and the weights of all policies are contracted with them together. The sets of a seed and a
size are a pure function of (seed, stream, size, number of the set), whatever fits in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...core.policies import Policy
from ...core.softmax import softmax
from ...core.stats import RowStats, row_stats
from .data import Batch, Stream, sample_sets, stream_key
from .model import FEATURES, Params, folded_query, hidden, item_logits, read
from .step import COMPILER_OPTIONS

MEMORY = {"cpu": 64 << 20, "gpu": 2 << 30}
"""Bytes that the vectors of the items worked on at a time may take, by platform."""

VECTOR_BYTES = 2 * 4 * FEATURES
"""What an item takes: two float32 vectors are alive at a time."""


@dataclass(frozen=True)
class Row:
    """What one policy, or one policy per seed, gives: ``[sizes, seeds]`` each.

    Attributes:
      accuracy: share of sets that were classified right.
      entropy: mean entropy of the attention weights, in nats.
      largest: mean largest attention weight.
    """

    accuracy: np.ndarray
    entropy: np.ndarray
    largest: np.ndarray


@dataclass(frozen=True)
class Evaluation:
    """Every row on the same sets; ``ceiling`` ``[sizes, seeds]``, how often the true maximum has the largest logit."""

    sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    sets: int
    rows: dict[str, Row]
    ceiling: np.ndarray


class _Plan(NamedTuple):
    """How much is worked on at a time."""

    members: int
    sets: int
    items: int


def evaluate(
    params: Params,
    seeds: Sequence[int],
    sizes: Sequence[int],
    sets: int,
    policies: Mapping[str, Policy | Sequence[Policy]],
    *,
    stream: Stream = Stream.EVALUATION,
    precision: str = "highest",
    memory: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Evaluate heads on ``sets`` sets of every size, under every policy.

    Args:
      params: parameters of one head per seed, ``[seeds, ...]`` each.
      seeds: the seed of each head; it decides the sets the head is evaluated on.
      sizes: numbers of items.
      sets: how many sets for each size and seed.
      policies: by name, a policy for all heads or a sequence of one for each.
      stream: which of the seed's random numbers to use.
      precision: of matrix products, as JAX names it.
      memory: bytes for the vectors of the items worked on at a time; :data:`MEMORY` by default.
      progress: called with every size that is done.
    """
    named = {name: _per_head(name, policy, len(seeds)) for name, policy in policies.items()}
    leaves = jax.tree.leaves(params)
    if not leaves or any(len(leaf) != len(seeds) for leaf in leaves):
        raise ValueError(f"expected parameters of {len(seeds)} heads, one for each seed, got {len(leaves[0])}")
    if sets < 1 or not sizes or any(n < 1 for n in sizes):
        raise ValueError(f"expected at least one set of at least one size, got {sets} sets of {list(sizes)} items")
    params = jax.tree.map(jnp.asarray, params)
    member_seeds = jnp.asarray(np.asarray(seeds, np.uint32))
    results = []
    options = {"sets": sets, "policies": tuple(named.values()), "stream": stream, "precision": precision}
    for n in sizes:
        plan = _plan(len(seeds), sets, n, _memory(memory))
        result = _compiled(jax.default_backend())(params, member_seeds, n=n, plan=plan, **options)
        results.append(jax.tree.map(np.asarray, result))
        if progress is not None:
            progress(n)
    ceiling, measured = np.stack([r[0] for r in results]), np.stack([r[1] for r in results])  # [sizes, seeds, 3, rows]
    rows = {name: Row(*(measured[:, :, k, i] for k in range(3))) for i, name in enumerate(named)}
    return Evaluation(tuple(sizes), tuple(seeds), sets, rows, ceiling)


def _per_head(name: str, policy: Policy | Sequence[Policy], heads: int) -> tuple[Policy, ...]:
    policies = tuple(policy) if isinstance(policy, Sequence) else (policy,)
    if len(policies) not in (1, heads) or not all(callable(p) for p in policies):
        raise ValueError(f"expected {name} to be a policy, or a sequence of {heads} policies, got {policy!r}")
    return policies[:1] if len(set(policies)) == 1 else policies


def _memory(memory: int | None) -> int:
    return MEMORY.get(jax.default_backend(), MEMORY["gpu"]) if memory is None else memory


def _plan(members: int, sets: int, n: int, memory: int) -> _Plan:
    items = max(1, memory // VECTOR_BYTES)
    if items < n:
        return _Plan(1, 1, items)
    rows = items // n
    side_by_side = max(k for k in range(1, min(members, rows) + 1) if members % k == 0)
    groups = -(-sets // min(sets, rows // side_by_side))
    return _Plan(side_by_side, -(-sets // groups), n)


@cache
def _compiled(platform: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """:func:`_evaluate_size`, compiled for a platform."""
    static = ("n", "sets", "policies", "stream", "precision", "plan")
    return jax.jit(_evaluate_size, static_argnames=static, compiler_options=COMPILER_OPTIONS.get(platform))


def _evaluate_size(
    params: Params,
    seeds: jax.Array,
    *,
    n: int,
    sets: int,
    policies: tuple[tuple[Policy, ...], ...],
    stream: Stream,
    precision: str,
    plan: _Plan,
) -> tuple[jax.Array, jax.Array]:
    """Ceiling ``[seeds]``, and accuracy, entropy and largest weight ``[seeds, 3, rows]``."""
    groups = -(-sets // plan.sets)

    def member(args: tuple[Params, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        head, seed, index = args
        key = jax.random.fold_in(stream_key(seed, stream), n)

        def group(number: jax.Array) -> tuple[jax.Array, jax.Array]:
            which = number * plan.sets + jnp.arange(plan.sets)
            batch = sample_sets(key, which, n)
            found, measured = _evaluate_sets(head, index, batch, policies, precision, plan.items)
            counted = which < sets
            return jnp.sum(found & counted), jnp.sum(jnp.where(counted, measured, 0.0), axis=-1)

        found, measured = jax.lax.map(group, jnp.arange(groups))
        return jnp.sum(found) / sets, jnp.sum(measured, axis=0) / sets

    return jax.lax.map(member, (params, seeds, jnp.arange(len(seeds))), batch_size=plan.members)


def _evaluate_sets(
    params: Params, index: jax.Array, batch: Batch, policies: tuple[tuple[Policy, ...], ...], precision: str, items: int
) -> tuple[jax.Array, jax.Array]:
    """Whether the target has the largest logit ``[sets]``; and right, entropy, largest weight ``[3, rows, sets]``."""
    e, contract = _attention(params, batch, precision, items)
    stats = row_stats(e)
    weights = jnp.stack([softmax(e, beta=_beta(each, stats, index)) for each in policies])
    scores = read(params, contract(weights), precision)
    right = (jnp.argmax(scores, axis=-1) == batch.label).astype(e.dtype)
    entropy = -jnp.sum(weights * jnp.log(jnp.where(weights > 0, weights, 1.0)), axis=-1)
    found = jnp.take_along_axis(e, batch.target[:, None], axis=-1)[:, 0] >= stats.max
    return found, jnp.stack([right, entropy, jnp.max(weights, axis=-1)])


def _beta(policies: tuple[Policy, ...], stats: RowStats, index: jax.Array) -> jax.Array:
    """Beta of every row under the policy of the head ``index``."""
    if len(policies) == 1:
        return policies[0](stats)
    return jax.lax.switch(index, policies, stats)


def _attention(
    params: Params, batch: Batch, precision: str, items: int
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Logits ``[sets, n]``, and what turns weights ``[rows, sets, n]`` into attended vectors ``[rows, sets, 128]``.

    Items beyond ``items`` are embedded in chunks, once for the logits and again for the sum.
    """
    folded, _ = folded_query(params, batch.query, precision)
    sets, n = batch.priority.shape
    if n <= items:
        h = hidden(params, batch.priority, batch.category, precision)
        return item_logits(folded, h, precision), lambda w: jnp.einsum("rsn,snd->rsd", w, h, precision=precision)

    chunks = -(-n // items)
    padding = chunks * items - n

    def chunked(x: jax.Array) -> jax.Array:
        """``[..., n]`` as ``[chunks, ..., items]``, zeros at the end."""
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
        return jnp.moveaxis(x.reshape(*x.shape[:-1], chunks, items), -2, 0)

    parts = chunked(batch.priority), chunked(batch.category)
    e = jax.lax.map(lambda part: item_logits(folded, hidden(params, part[0], part[1], precision), precision), parts)

    def contract(weights: jax.Array) -> jax.Array:
        def add(total: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            w, priority, category = part
            h = hidden(params, priority, category, precision)
            return total + jnp.einsum("rsn,snd->rsd", w, h, precision=precision), None

        zero = jnp.zeros((weights.shape[0], sets, FEATURES), weights.dtype)
        return jax.lax.scan(add, zero, (chunked(weights), *parts))[0]

    return jnp.moveaxis(e, 0, -2).reshape(sets, -1)[:, :n], contract


@cache
def _compiled_logits(platform: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """:func:`_logits`, compiled for a platform."""
    static = ("n", "sets", "stream", "precision", "items")
    return jax.jit(_logits, static_argnames=static, compiler_options=COMPILER_OPTIONS.get(platform))


def _logits(
    params: Params, seed: jax.Array, *, n: int, sets: int, stream: Stream, precision: str, items: int
) -> tuple[jax.Array, jax.Array]:
    key = jax.random.fold_in(stream_key(seed, stream), n)

    def one(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch = sample_sets(key, i[None], n)
        return _attention(params, batch, precision, items)[0][0], batch.target[0]

    return jax.lax.map(one, jnp.arange(sets), batch_size=max(1, min(sets, items // n)))


def sample_logits(
    params: Params,
    seed: int,
    n: int,
    sets: int,
    *,
    stream: Stream,
    precision: str = "highest",
    memory: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The attention logits ``[sets, n]`` of one head, up to a constant, and the true maximum's index ``[sets]``."""
    items = max(1, _memory(memory) // VECTOR_BYTES)
    options = {"stream": stream, "precision": precision, "items": items}
    e, target = _compiled_logits(jax.default_backend())(params, jnp.uint32(seed), n=n, sets=sets, **options)
    return np.asarray(e), np.asarray(target)


def paired_p_values(row: Any, baseline: Any) -> list[float | None]:
    """The p-value of the paired t-test over seeds, for every size of two tables ``[sizes, seeds]``.

    Rows that are equal in every seed give 1, rows that differ by the same amount in every seed 0, and fewer than three
    seeds, which say too little, ``None``.
    """
    from scipy import stats

    row, baseline = np.asarray(row, np.float64), np.asarray(baseline, np.float64)
    if row.ndim != 2 or row.shape != baseline.shape:
        raise ValueError(f"expected two tables [sizes, seeds] of one shape, got {row.shape} and {baseline.shape}")
    values: list[float | None] = []
    for a, b in zip(row, baseline, strict=True):
        difference = a - b
        if len(difference) < 3:
            values.append(None)
        elif np.ptp(difference) <= 1e-12:
            values.append(1.0 if np.all(np.abs(difference) <= 1e-12) else 0.0)
        else:
            values.append(float(stats.ttest_rel(a, b).pvalue))
    return values
