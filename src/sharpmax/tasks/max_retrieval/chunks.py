"""Logits and weighted sums of the items of sets, embedded all at once or in chunks, for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...mechanisms import Mechanism
from .attention import Rule, policy_of, reads_rows
from .data import Batch
from .model import FEATURES, Params, hidden, past, scorer


def view(rule: Rule) -> Any:
    """What decides the logits: rules with equal views see the same ones."""
    if policy_of(rule) is not None:
        return "softmax"
    assert isinstance(rule, Mechanism)
    return rule if rule.features is not None or rule.maps > 1 else "mechanism"


def attention(
    params: Params, batch: Batch, rules: Sequence[Rule], precision: str, items: int
) -> tuple[dict[Any, tuple[jax.Array, ...]], dict[Rule, jax.Array], Callable[[jax.Array], jax.Array]]:
    """Logits by view, those of policies first; what items leave behind, by rule; and what contracts weights.

    The last turns weights ``[rows, sets, ..., n]`` into attended vectors ``[rows, sets, ..., 128]``. Items beyond
    ``items`` are embedded in chunks, once for the logits and again for the sum.
    """
    views = dict(sorted(((view(rule), rule) for rule in rules), key=lambda pair: pair[0] != "softmax"))
    scorers = {view: scorer(params, batch.query, rule, precision) for view, rule in views.items()}
    n = batch.priority.shape[-1]
    queries = "q" * (batch.target.ndim - 1)
    products = f"rs{queries}n,snd->rs{queries}d"
    if n <= items:
        h = hidden(params, batch.priority, batch.category, precision)
        left = {rule: past(params, h, None, rule, precision) for rule in rules if reads_rows(rule)}
        logits = {view: score(h) for view, score in scorers.items()}
        return logits, left, lambda w: jnp.einsum(products, w, h, precision=precision)  # pyright: ignore

    chunks = -(-n // items)
    padding = chunks * items - n

    def chunked(x: jax.Array) -> jax.Array:
        """``[..., n]`` as ``[chunks, ..., items]``, zeros at the end."""
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
        return jnp.moveaxis(x.reshape(*x.shape[:-1], chunks, items), -2, 0)

    parts = chunked(batch.priority), chunked(batch.category)

    def scored(part: tuple[jax.Array, jax.Array]) -> list[tuple[jax.Array, ...]]:
        h = hidden(params, part[0], part[1], precision)
        return [score(h) for score in scorers.values()]

    def contract(weights: jax.Array) -> jax.Array:
        def add(total: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            w, priority, category = part
            h = hidden(params, priority, category, precision)
            return total + jnp.einsum(products, w, h, precision=precision), None

        zero = jnp.zeros((*weights.shape[:-1], FEATURES), weights.dtype)
        return jax.lax.scan(add, zero, (chunked(weights), *parts))[0]

    joined = jax.tree.map(
        lambda e: jnp.moveaxis(e, 0, -2).reshape(*e.shape[1:-1], -1)[..., :n], jax.lax.map(scored, parts)
    )
    return dict(zip(scorers, joined, strict=True)), {}, contract
