"""From logits of items to weights: by a policy, which chooses the temperature of a softmax, or by any mechanism.

A query stands behind all items of its set and alone: whatever order means to a mechanism, every query is the last, and
other queries are not seen. Items are read backwards, so that what pads a set lies farthest from the query.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ...core.policies import Constant, LearnableStructure, Policy, needs_spread
from ...core.softmax import softmax
from ...core.stats import RowStats, row_stats
from ...mechanisms import Mechanism, Temperature

Rule: TypeAlias = Policy | Mechanism
"""What turns logits into weights."""

ROWS = 128
"""Items whose logits for all items are worked on at a time, where a mechanism reads those of earlier queries."""

SPANS = 4
"""Into how many spans the items of a set are taken then: with 4, five eighths of all logits are worked out, with 1 all
of them, and half are needed."""


def policy_of(rule: Rule) -> Policy | None:
    """The policy that gives the weights of ``rule``, where it is softmax with a temperature."""
    return rule.policy if isinstance(rule, Mechanism) else rule


def simplest(rule: Rule) -> Rule:
    """``rule``, or the policy that says the same: that of a temperature which is not learned."""
    if isinstance(rule, Temperature) and not isinstance(rule.policy, LearnableStructure):
        return rule.policy
    return rule


def needs_training(rule: Rule) -> bool:
    """Whether heads need parameters for ``rule`` that others do not have."""
    return isinstance(rule, Mechanism) and (bool(rule.parameters()) or rule.maps > 1)


def reads_rows(rule: Rule) -> bool:
    """Whether weights depend on logits of earlier queries, which are the items here."""
    return isinstance(rule, Mechanism) and rule.reads == "rows"


def row_beta(
    policy: Policy, e: jax.Array, mask: jax.Array | None = None, parameters: Mapping[str, jax.Array] | None = None
) -> jax.Array | float:
    """The inverse temperature that ``policy`` gives every row of ``e``; a number where it is one."""
    if isinstance(policy, Constant):
        return policy.beta
    return beta_of(policy, row_stats(e, where=mask, with_min=needs_spread(policy)), parameters)


def beta_of(policy: Policy, stats: RowStats, parameters: Mapping[str, jax.Array] | None = None) -> jax.Array:
    """Beta of every row; that of a policy which is learned, with the ``parameters`` of the head."""
    return policy.formula(stats, parameters or {}) if isinstance(policy, LearnableStructure) else policy(stats)


def weigh(
    rule: Rule,
    maps: Sequence[jax.Array],
    mask: jax.Array | None,
    parameters: Mapping[str, jax.Array],
    past: jax.Array | None = None,
    beta: Callable[[jax.Array | float], jax.Array | float] = lambda beta: beta,
) -> tuple[jax.Array, jax.Array | float]:
    """Weights ``[..., n]`` of logits, one array for each map that ``rule`` has, and the beta that multiplied them.

    ``past`` is what :func:`left_by_items` gives; ``beta`` maps what a policy says to what is used.
    """
    policy = policy_of(rule)
    if policy is not None:
        used = beta(row_beta(policy, maps[0], mask, parameters))
        return softmax(maps[0], where=mask, beta=used), used
    assert isinstance(rule, Mechanism)
    return mechanism_weights(rule, maps, mask, parameters, past), 1.0


def mechanism_weights(
    mechanism: Any,
    maps: Sequence[jax.Array],
    mask: jax.Array | None,
    parameters: Mapping[str, jax.Array],
    past: jax.Array | None,
) -> jax.Array:
    """Weights ``[..., n]``; a row of logits is one head's with one query, ``[..., maps, 1, n]``, to the mechanism."""
    s = jnp.stack(list(maps), axis=-2)[..., None, :]
    if mechanism.reads == "rows":
        assert past is not None
        visible = jnp.broadcast_to(True if mask is None else mask, s.shape)
        before = past.reshape(past.shape[0], *(1,) * (s.ndim - 2), past.shape[-1])
        return mechanism.given(jnp, jnp.where(visible, s, 0.0), visible, before)[..., 0, 0, :]
    backwards = mechanism.reads == "order"
    if backwards:
        s, mask = jnp.flip(s, axis=-1), None if mask is None else jnp.flip(mask, axis=-1)
    weights = mechanism(s, mask, parameters=parameters)[..., 0, 0, :]
    return jnp.flip(weights, axis=-1) if backwards else weights


def left_by_items(mechanism: Any, q: jax.Array, k: jax.Array, mask: jax.Array | None, precision: Any) -> jax.Array:
    """What items, each a query to those up to itself, leave for the query behind them: ``[sets, n]``.

    ``q`` and ``k`` are ``[sets, n, d]``, their product the logits. Only :data:`ROWS` rows of them exist at a time, and
    of the items that rows do not see only those that lie in the same of :data:`SPANS` spans.
    """
    n = q.shape[1]
    rows = min(ROWS, n)
    blocks = -(-n // rows)
    present = jnp.ones(n, bool) if mask is None else mask
    span = -(-blocks // SPANS) * rows
    found = []
    for first in range(0, n, span):
        last = min(first + span, n)
        part = _left_by_rows(mechanism, q[:, first:last], k[:, :last], first, present[:last], rows, precision)
        found.append(jnp.pad(part, ((0, 0), (0, n - last))))
    return sum(found[1:], found[0])


def _left_by_rows(
    mechanism: Any, q: jax.Array, k: jax.Array, first: int, present: jax.Array, rows: int, precision: Any
) -> jax.Array:
    """What the items ``first, first + 1, ...`` of ``q`` leave of those of ``k``, which end where they do."""
    sets, several, features = q.shape
    blocks = -(-several // rows)
    padding = blocks * rows - several
    padded = jnp.pad(q, ((0, 0), (0, padding), (0, 0))).reshape(sets, blocks, rows, features)
    there = jnp.pad(present[first:], (0, padding)).reshape(blocks, rows)
    column = jnp.arange(k.shape[1])

    def add(total: jax.Array, block: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        queries, first, there = block
        s = jnp.einsum("sid,sjd->sij", queries, k, precision=precision)[:, None]
        visible = (column <= (first + jnp.arange(rows))[:, None]) & there[:, None] & present
        visible = jnp.broadcast_to(visible, s.shape)
        return total + mechanism.leaves(jnp, jnp.where(visible, s, 0.0), visible, first)[:, 0, 0], None

    parts = (jnp.moveaxis(padded, 1, 0), first + rows * jnp.arange(blocks), there)
    zero = jnp.zeros(k.shape[:2], q.dtype)
    if blocks == 1:
        return add(zero, jax.tree.map(lambda part: part[0], parts))[0]
    return jax.lax.scan(add, zero, parts)[0]


def activation_of(rule: Rule) -> Callable[[Any, jax.Array], jax.Array] | None:
    """What ``rule`` puts in the place of the activation behind attention, if anything."""
    return rule.activation if isinstance(rule, Mechanism) else None


def total_of(rule: Rule, weights: jax.Array) -> jax.Array | None:
    """The sum of the weights of a row; ``None`` for those of a softmax, which sum to 1."""
    return None if policy_of(rule) is not None else jnp.sum(weights, axis=-1)


def shares(weights: jax.Array) -> jax.Array:
    """``|a_i| / sum |a_j|``, all 0 where no item has any weight: coefficients that sum to 1 for every mechanism."""
    sizes = jnp.abs(weights)
    total = jnp.sum(sizes, axis=-1, keepdims=True)
    return sizes / jnp.where(total > 0, total, 1.0)
