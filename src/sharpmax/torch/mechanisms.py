"""Attention with a mechanism in the place of softmax and policy.

    query, key  ->  features  ->  logits  ->  mechanism  ->  weights  ->  weights @ value

``reference`` holds all logits at once, ``streaming`` (:mod:`.folding`) takes keys in chunks for mechanisms that fold.
A mechanism that is softmax with a temperature has a policy, and goes the ways of policies; so does a sliding window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from ..core.arrays import library_of, product
from ..core.policies import PAPER, Constant, LearnableStructure, Policy
from ..core.stats import RowStats
from ..mechanisms import Mechanism, Window, find
from . import folding, reference
from .blocks import accumulation
from .checks import Causal, Inputs, band, forward_mode, full_precision, has_tangent, transformed
from .checks import Window as Band
from .geometry import ALL
from .learnable import Learnable

AT_ONCE = 1 << 18
"""Up to so many logits, all of them are held at once where nothing else was asked for."""


_folded: Any = torch.compiler.disable(folding.attend)
"""What ``torch.compile`` calls and does not look into."""


class Held(NamedTuple):
    """A mechanism, and the arrays of its parameters (``None`` for those that it starts from)."""

    mechanism: Mechanism
    parameters: dict[str, Tensor] | None


@dataclass(frozen=True)
class Started:
    """A learnable policy with the parameters that it starts from."""

    structure: LearnableStructure

    @property
    def needs_spread(self) -> bool:
        """Whether it reads the spread of a row."""
        return self.structure.needs_spread

    def __call__(self, stats: RowStats) -> Tensor:
        """Beta of every row."""
        start = self.structure.parameters()
        return self.structure.beta(stats, {k: torch.from_numpy(v).to(stats.sum.device) for k, v in start.items()})


class Settled(NamedTuple):
    """What stands for a mechanism: a policy, with a window of so many keys if it has one, or what is held of it."""

    policy: Policy
    held: Held | None = None
    size: int | None = None


def settled(mechanism: Any, policy: Policy) -> Settled:
    """What stands for ``mechanism``, a name, an object or a module, given beside the default policy."""
    if policy is not PAPER and policy != PAPER:  # torch.compile need not look into the one that is given by default
        raise ValueError(
            "expected a mechanism or a policy, got both; a policy as a mechanism is "
            "sharpmax.mechanisms.Temperature(policy)"
        )
    if isinstance(mechanism, Learnable) and not isinstance(mechanism.structure, Mechanism):
        return Settled(mechanism)
    learned = isinstance(mechanism, Learnable)
    found = find(mechanism.structure if learned else mechanism)
    if isinstance(found, Window):
        return Settled(Constant(1.0), size=found.size)
    if isinstance(found.policy, LearnableStructure):
        return Settled(Started(found.policy))
    if found.policy is not None:
        return Settled(found.policy)
    return Settled(policy, Held(found, mechanism.held if learned else None))


def latest(size: int, window: Band, is_causal: Causal, attn_mask: Any) -> tuple[Band, Causal]:
    """The window and causality of the ``size`` latest keys, within those that were asked for.

    Positions are counted from the last key, unless causality was asked for that counts from the first.
    """
    left = band(window)[0]
    counted = bool(is_causal) or isinstance(attn_mask, CausalBias)
    return (size - 1 if left == ALL else min(left, size - 1), 0), is_causal if counted else "lower_right"


def check_served(held: Held, scale: float | None, return_stats: bool) -> None:
    """Refuse arguments that mean nothing for a mechanism without a policy."""
    title = held.mechanism.about.title
    if return_stats:
        raise ValueError(f"return_stats serves policies, not {title}; sharpmax.torch.row_stats describes its logits")
    if held.mechanism.features is not None and scale is not None:
        raise ValueError(f"expected no scale for {title}, whose features take its place, got {scale!r}")


def attention(held: Held, inputs: Inputs, dropout_p: float, impl: str) -> Tensor:
    """The output ``[B, heads of the value, Lq, Dv]`` in the type of the query."""
    mechanism, dtype = held.mechanism, inputs.q.dtype
    chosen = choose(impl, held, inputs, dropout_p)
    with full_precision(inputs.q):
        q, k, v, mask, key_lengths, geometry, _ = _featured(mechanism, inputs)
        assert v is not None
        if chosen == "reference":

            def weights(z: Tensor, seen: Tensor | None) -> Tensor:
                return mechanism(z, seen, parameters=held.parameters)

            return reference.weighted(q, k, v, weights, geometry, mask, key_lengths, dropout_p).to(dtype)
        return _folded(mechanism, held.parameters, q, k, v, mask, key_lengths, geometry).to(dtype)


def choose(impl: str, held: Held, inputs: Inputs, dropout_p: float) -> str:
    """The implementation that serves a call: ``impl`` itself, or for ``"auto"`` one by size.

    ``"auto"`` is ``"streaming"`` where that can serve and there are more than :data:`AT_ONCE` logits (``B * Hq * Lq *
    Lk``), else ``"reference"``.
    """
    _check_alignment(held.mechanism, inputs)
    title = held.mechanism.about.title
    reasons = {
        f"{title}, which needs all logits of a row at once": not held.mechanism.folds,
        f"{title} with dropout": dropout_p > 0,
        "the transforms of torch.func": transformed(),
        "differentiation in forward mode": forward_mode() and has_tangent(*inputs, *(held.parameters or {}).values()),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    if impl == "auto":
        many = product((*inputs.q.shape[:3], inputs.k.shape[2])) > AT_ONCE
        return "streaming" if many and not reason else "reference"
    if impl == "streaming" and reason:
        raise ValueError(f"impl='streaming' does not serve {reason}; reference can")
    if impl not in ("reference", "streaming"):
        can = "reference" if reason else "reference and streaming"
        raise ValueError(f"impl={impl!r} serves policies, not {title}; {can} can")
    return impl


def _check_alignment(mechanism: Mechanism, inputs: Inputs) -> None:
    """Refuse other positions than those that a mechanism that reads earlier queries takes: counted from the last."""
    geometry, uneven = inputs.geometry, inputs.q.shape[2] != inputs.k.shape[2]
    shifted = geometry.lower_right and inputs.key_lengths is not None
    if mechanism.reads == "rows" and (shifted or (uneven and geometry.banded and not geometry.lower_right)):
        raise ValueError(
            f"{mechanism.about.title} has its last query beside the last key: expected as many queries as keys, or "
            "is_causal='lower_right' without key_lengths"
        )


def _featured(mechanism: Mechanism, inputs: Inputs) -> Inputs:
    """Queries and keys as they go into their product; features take the place of the scale."""
    if mechanism.features is None:
        return inputs
    dtype = accumulation(inputs.q.dtype)
    k = reference.without_padding(inputs.k, inputs.key_lengths)
    q, k = (mechanism.features(library_of(x).xp, x.to(dtype)) for x in (inputs.q, k))
    return inputs._replace(q=q, k=k, geometry=inputs.geometry._replace(scale=1.0))
