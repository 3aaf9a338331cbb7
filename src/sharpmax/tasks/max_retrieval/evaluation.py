"""Evaluation of trained heads under many policies or mechanisms at once, in bounded memory (the engine of Table 1).

Logits do not depend on the policy, and the attended vector of every rule is a weighted sum of the same item vectors:
items are embedded once, and the weights of all rules are contracted with them together. The sets of a seed and a
size are a pure function of (seed, stream, size, number of the set), whatever fits in memory at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.policies import Constant
from ...core.softmax import softmax
from ...core.stats import RowStats, row_stats
from ...mechanisms import Mechanism
from .attention import (
    Rule,
    activation_of,
    beta_of,
    mechanism_weights,
    needs_training,
    policy_of,
    shares,
    simplest,
    total_of,
)
from .chunks import attention, view
from .data import Batch, Stream, Task, sample_sets, stream_key
from .model import MECHANISM, Params, learned, read
from .plan import Plan, Rules, items_at_a_time, make_plan
from .programs import compile_all
from .step import COMPILER_OPTIONS


@dataclass(frozen=True)
class Row:
    """What one rule, or one policy per seed, gives: ``[sizes, seeds]`` each.

    Attributes:
      accuracy: share of queries that were answered right.
      entropy: mean entropy of the attention weights, in nats.
      largest: mean largest attention weight.

    Weights that are not those of a softmax are taken as ``|a_i| / sum |a_j|`` here.
    """

    accuracy: np.ndarray
    entropy: np.ndarray
    largest: np.ndarray


@dataclass(frozen=True)
class Evaluation:
    """Every row on the same sets; ``ceiling`` ``[sizes, seeds]``, how often the target has the largest logit.

    The logits are those that rows with a policy see; without such rows, those of the first.
    """

    sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    sets: int
    rows: dict[str, Row]
    ceiling: np.ndarray


def evaluate(
    params: Params,
    seeds: Sequence[int],
    sizes: Sequence[int],
    sets: int,
    policies: Mapping[str, Rule | Sequence[Rule]],
    *,
    task: Task = "max",
    stream: Stream = Stream.EVALUATION,
    precision: str = "highest",
    memory: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Evaluate heads on ``sets`` sets of every size, under every policy or mechanism.

    Args:
      params: parameters of one head per seed, ``[seeds, ...]`` each.
      seeds: the seed of each head; it decides the sets the head is evaluated on.
      sizes: numbers of items.
      sets: how many sets for each size and seed.
      policies: by name, a policy or a mechanism for all heads, or a sequence of one policy for each.
      task: what is asked for.
      stream: which of the seed's random numbers to use.
      precision: of matrix products, as JAX names it.
      memory: bytes for the vectors of the items worked on at a time; :data:`MEMORY` by default.
      progress: called with every size that is done.
    """
    parts = list(evaluate_each(params, seeds, sizes, sets, policies, task, stream, precision, memory, progress))
    rows = {name: _joined([part.rows[name] for part in parts]) for name in policies}
    return Evaluation(tuple(sizes), tuple(seeds), sets, rows, np.concatenate([part.ceiling for part in parts]))


def _joined(rows: list[Row]) -> Row:
    return Row(*(np.concatenate([getattr(r, f.name) for r in rows]) for f in dataclasses.fields(Row)))


def evaluate_each(
    params: Params,
    seeds: Sequence[int],
    sizes: Sequence[int],
    sets: int,
    policies: Mapping[str, Rule | Sequence[Rule]],
    task: Task = "max",
    stream: Stream = Stream.EVALUATION,
    precision: str = "highest",
    memory: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Evaluation]:
    """What :func:`evaluate` does, size by size; the programs for all sizes are compiled side by side before."""
    named = {name: _per_head(name, rule, len(seeds), own=MECHANISM in params) for name, rule in policies.items()}
    leaves = jax.tree.leaves(params)
    if not leaves or any(len(leaf) != len(seeds) for leaf in leaves):
        raise ValueError(f"expected parameters of {len(seeds)} heads, one for each seed, got {len(leaves[0])}")
    if sets < 1 or not sizes or any(n < 1 for n in sizes):
        raise ValueError(f"expected at least one set of at least one size, got {sets} sets of {list(sizes)} items")
    params = jax.tree.map(jnp.asarray, params)
    member_seeds = jnp.asarray(np.asarray(seeds, np.uint32))
    rules = tuple(named.values())
    options = {"sets": sets, "rules": rules, "task": task, "stream": stream, "precision": precision}
    plans = [{"n": n, "plan": make_plan(len(seeds), sets, n, rules, task, memory)} for n in sizes]
    variants = [{**plan, **options} for plan in plans]
    programs = compile_all(_jitted(jax.default_backend()), (params, member_seeds), variants)
    for n, program in zip(sizes, programs, strict=True):
        ceiling, measured = (np.asarray(a)[None] for a in program(params, member_seeds))  # measured [1, seeds, 3, rows]
        rows = {name: Row(*(measured[:, :, k, i] for k in range(3))) for i, name in enumerate(named)}
        if progress is not None:
            progress(n)
        yield Evaluation((n,), tuple(seeds), sets, rows, ceiling)


def _per_head(name: str, rule: Rule | Sequence[Rule], heads: int, *, own: bool) -> Rules:
    """The rules of a row; ``own`` says that the heads have parameters of a mechanism."""
    rules = tuple(rule) if isinstance(rule, Sequence) else (rule,)
    if len(rules) not in (1, heads) or not all(callable(r) for r in rules):
        raise ValueError(f"expected {name} to be a policy, or a sequence of {heads} policies, got {rule!r}")
    if any(needs_training(r) for r in rules) and not own:
        raise ValueError(f"{name} has parameters that heads learn with it, and these heads were trained without")
    rules = tuple(simplest(r) for r in rules)
    if len(set(rules)) == 1:
        return rules[:1]
    if any(isinstance(r, Mechanism) for r in rules):
        raise ValueError(f"expected {name} to be one mechanism for all heads; only policies may differ between them")
    return rules


@cache
def _jitted(platform: str) -> Any:
    """:func:`_evaluate_size`, to be compiled for a platform."""
    static = ("n", "sets", "rules", "task", "stream", "precision", "plan")
    return jax.jit(_evaluate_size, static_argnames=static, compiler_options=COMPILER_OPTIONS.get(platform))


def _evaluate_size(
    params: Params,
    seeds: jax.Array,
    *,
    n: int,
    sets: int,
    rules: tuple[Rules, ...],
    task: Task,
    stream: Stream,
    precision: str,
    plan: Plan,
) -> tuple[jax.Array, jax.Array]:
    """Ceiling ``[seeds]``, and accuracy, entropy and largest weight ``[seeds, 3, rows]``."""
    groups = -(-sets // plan.sets)

    def member(args: tuple[Params, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        head, seed, index = args
        key = jax.random.fold_in(stream_key(seed, stream), n)

        def group(number: jax.Array) -> tuple[jax.Array, jax.Array]:
            which = number * plan.sets + jnp.arange(plan.sets)
            batch = sample_sets(key, which, n, task=task)
            found, measured = _evaluate_sets(head, index, batch, rules, precision, plan.items)
            counted = which < sets
            return jnp.sum(jnp.where(counted, found, 0)), jnp.sum(jnp.where(counted, measured, 0.0), axis=-1)

        found, measured = jax.lax.map(group, jnp.arange(groups))
        return jnp.sum(found) / sets, jnp.sum(measured, axis=0) / sets

    return jax.lax.map(member, (params, seeds, jnp.arange(len(seeds))), batch_size=plan.members)


def _evaluate_sets(
    params: Params, index: jax.Array, batch: Batch, rules: tuple[Rules, ...], precision: str, items: int
) -> tuple[jax.Array, jax.Array]:
    """How often the target has the largest logit ``[sets]``; and right, entropy, largest weight ``[3, rows, sets]``."""
    logits, left, contract = attention(params, batch, [each[0] for each in rules], precision, items)
    e = next(iter(logits.values()))[0]
    stats = row_stats(e)
    weights, coefficients, totals = [], [], []
    for each in rules:
        rule, maps = each[0], logits[view(each[0])]
        if policy_of(rule) is not None:
            found = softmax(e, beta=_beta(each, stats, index, learned(params)))
        else:
            found = mechanism_weights(rule, maps, None, learned(params), left.get(rule))
        weights.append(found)
        coefficients.append(found if policy_of(rule) is not None else shares(found))
        totals.append(total_of(rule, found))
    stacked, parts = jnp.stack(weights), jnp.stack(coefficients)
    right = (_scores(params, contract(stacked), rules, totals, precision) == batch.label).astype(e.dtype)
    entropy = -jnp.sum(parts * jnp.log(jnp.where(parts > 0, parts, 1.0)), axis=-1)
    found = jnp.take_along_axis(e, batch.target[..., None], axis=-1)[..., 0] >= stats.max
    measured = jnp.stack([right, entropy, jnp.max(parts, axis=-1)])
    if batch.target.ndim > 1:
        return jnp.mean(found.astype(e.dtype), axis=-1), jnp.mean(measured, axis=-1)
    return found, measured


def _scores(
    params: Params, attended: jax.Array, rules: tuple[Rules, ...], totals: list[jax.Array | None], precision: str
) -> jax.Array:
    """The class that every row answers with, ``[rows, ...]``."""
    one = jnp.ones(attended.shape[1:-1], attended.dtype)
    filled = None if all(t is None for t in totals) else jnp.stack([one if t is None else t for t in totals])
    scores = read(params, attended, precision, total=filled)
    for i, each in enumerate(rules):
        if (activation := activation_of(each[0])) is not None:
            scores = scores.at[i].set(read(params, attended[i], precision, activation, totals[i]))
    return jnp.argmax(scores, axis=-1)


def _beta(rules: Rules, stats: RowStats, index: jax.Array, parameters: Mapping[str, jax.Array]) -> jax.Array:
    """Beta of every row under the policy of the head ``index``."""
    policies: list[Any] = [policy_of(rule) for rule in rules]
    if len(policies) == 1:
        return beta_of(policies[0], stats, parameters)
    return jax.lax.switch(index, policies, stats)


@cache
def _compiled_logits(platform: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """:func:`_logits`, compiled for a platform."""
    static = ("n", "sets", "task", "stream", "precision", "items")
    return jax.jit(_logits, static_argnames=static, compiler_options=COMPILER_OPTIONS.get(platform))


def _logits(
    params: Params, seed: jax.Array, *, n: int, sets: int, task: Task, stream: Stream, precision: str, items: int
) -> tuple[jax.Array, jax.Array]:
    key = jax.random.fold_in(stream_key(seed, stream), n)

    def one(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch = sample_sets(key, i[None], n, task=task)
        return attention(params, batch, [Constant()], precision, items)[0]["softmax"][0][0], batch.target[0]

    return jax.lax.map(one, jnp.arange(sets), batch_size=max(1, min(sets, items // n)))


def sample_logits(
    params: Params,
    seed: int,
    n: int,
    sets: int,
    *,
    stream: Stream,
    task: Task = "max",
    precision: str = "highest",
    memory: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The attention logits ``[rows, n]`` of one head, up to a constant, and the target's index ``[rows]``.

    A row is a set; in recall, where a set is asked four times, four of them are.
    """
    items = items_at_a_time((), task, memory)
    options = {"task": task, "stream": stream, "precision": precision, "items": items}
    e, target = _compiled_logits(jax.default_backend())(params, jnp.uint32(seed), n=n, sets=sets, **options)
    return np.asarray(e).reshape(-1, n), np.asarray(target).reshape(-1)
