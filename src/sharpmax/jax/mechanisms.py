"""Attention with a mechanism in the place of softmax and policy.

    query, key  ->  features  ->  logits  ->  mechanism  ->  weights  ->  weights @ value

All logits are held at once, and JAX differentiates in every mode. A mechanism that is softmax with a temperature has a
policy, and goes the ways of policies; so does a sliding window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..core.policies import PAPER, Constant, LearnableStructure, Policy
from ..core.stats import RowStats
from ..mechanisms import Mechanism, Window, find
from . import reference
from .checks import Inputs, band, checked, misfit
from .checks import Window as Band
from .geometry import ALL, accumulation, without_padding


@dataclass(frozen=True)
class Held:
    """A learnable policy or a mechanism with arrays for its parameters, for models that are functions.

    ``Held(LearnedEntmax(heads=8), parameters)`` is what ``mechanism=`` takes, ``Held(LearnableTemperature(), ...)`` a
    policy too; made inside of the function that is differentiated, so that the arrays get gradients.
    """

    structure: Any
    parameters: Mapping[str, Any]

    @property
    def needs_spread(self) -> bool:
        """Whether it is a policy that reads the spread of a row."""
        return getattr(self.structure, "needs_spread", False)

    def __call__(self, x: Any, where: jax.Array | None = None) -> jax.Array:
        """Beta of every row from its RowStats; of a mechanism, the weights of logits."""
        if isinstance(x, RowStats):
            policy: Any = self.structure.policy if isinstance(self.structure, Mechanism) else self.structure
            return policy.beta(x, self.parameters)
        return self.structure(x, where, parameters=self.parameters)


class Settled(NamedTuple):
    """What stands for a mechanism: a policy and a window, or the mechanism and what gives its weights."""

    policy: Policy
    window: Band
    mechanism: Mechanism | None = None
    weights: Callable[[jax.Array, jax.Array | None], jax.Array] | None = None


def check_alone(policy: Policy) -> None:
    """Refuse a policy beside a mechanism."""
    if policy != PAPER:
        raise ValueError(
            "expected a mechanism or a policy, got both; a policy as a mechanism is "
            "sharpmax.mechanisms.Temperature(policy)"
        )


def settled(mechanism: Any, policy: Policy, window: Band, is_causal: bool, query: Any, key: Any) -> Settled:
    """What stands for ``mechanism``, given beside the default policy.

    It is a name, a mechanism (with the parameters that it starts from, if it has any), or what holds parameters: a
    :class:`Held`, or a ``Learnable`` of :mod:`sharpmax.flax`.
    """
    check_alone(policy)
    structure = getattr(mechanism, "structure", None)
    if isinstance(getattr(structure, "policy", structure), LearnableStructure):
        return Settled(mechanism, window)
    if isinstance(structure, Mechanism) and structure.policy is None:
        return Settled(policy, window, structure, mechanism)
    found = find(mechanism)
    if isinstance(found, Window):
        return Settled(Constant(1.0), _latest(found, window, is_causal, query, key))
    if isinstance(found.policy, LearnableStructure):
        start = {name: jnp.asarray(array) for name, array in found.policy.parameters().items()}
        return Settled(Held(found.policy, start), window)
    return Settled(policy, window, found, found) if found.policy is None else Settled(found.policy, window)


def _latest(mechanism: Window, window: Band, is_causal: bool, query: Any, key: Any) -> Band:
    """The window of the latest keys, within what was asked for; positions are counted from the first."""
    if not is_causal and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"a {mechanism.about.title} counts positions from the first query and key here: expected as many queries "
            f"as keys, or is_causal=True, got {query.shape[-3]} and {key.shape[-3]}; give a mask instead"
        )
    left, _ = band(window)
    return (mechanism.size - 1 if left == ALL else min(left, mechanism.size - 1), 0)


def attention(
    chosen: Settled,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    *,
    impl: str,
    return_stats: bool,
    **given: Any,
) -> jax.Array:
    """The output, ``[B, T, heads of the value, Dv]`` (or without ``B``); ``given`` are the arguments of ``checked``."""
    if return_stats:
        raise ValueError(
            f"return_stats serves policies, not {_title(chosen)}; sharpmax.jax.row_stats describes its logits"
        )
    inputs, weights = weighed(chosen, query, key, value, bias, mask, impl=impl, **given)
    assert inputs.v is not None
    return inputs.restore(reference.weighted(weights, inputs.v, inputs.masks).astype(query.dtype))


def weighed(
    chosen: Settled, query: Any, key: Any, value: Any, bias: Any, mask: Any, *, impl: str, **given: Any
) -> tuple[Inputs, jax.Array]:
    """The arguments in one layout, and the weights ``[B, N, T, S]`` of the mechanism."""
    mechanism, weights_of = chosen.mechanism, chosen.weights
    assert mechanism is not None
    assert weights_of is not None
    if impl not in ("auto", "reference"):
        raise ValueError(f"impl={impl!r} serves policies, not {_title(chosen)}; reference can")
    if mechanism.features is not None and given["scale"] is not None:
        raise ValueError(
            f"expected no scale for {_title(chosen)}, whose features take its place, got {given['scale']!r}"
        )
    inputs = _checked(mechanism.maps, query, key, value, bias, mask, **given)
    _check_alignment(mechanism, inputs)
    q, k, _, bias, masks, geometry, _ = _featured(mechanism, inputs)
    return inputs, weights_of(*reference.logits(q, k, bias, masks, geometry))


def _title(chosen: Settled) -> str:
    assert chosen.mechanism is not None
    return chosen.mechanism.about.title


def _checked(maps: int, query: Any, key: Any, value: Any, bias: Any, mask: Any, **given: Any) -> Inputs:
    """The arguments in one layout; the value has one head for each ``maps`` of the key."""
    if maps == 1:
        return checked(query, key, value, bias, mask, **given)
    inputs = checked(query, key, None, bias, mask, **given)
    heads = key.shape[-2] // maps if key.shape[-2] % maps == 0 and query.shape[-2] % maps == 0 else None
    if getattr(value, "shape", ())[:-1] != (*key.shape[:-2], heads):
        expected = f"{maps} heads of query and of key for each of value"
        raise misfit(expected, {"query": query, "key": key, "value": value})
    one = checked(query[..., ::maps, :], key[..., ::maps, :], value, None, None, **given)
    return inputs._replace(v=one.v)


def _check_alignment(mechanism: Mechanism, inputs: Inputs) -> None:
    """Refuse a cache, or cross-attention, for what reads the logits of earlier queries."""
    if mechanism.reads == "rows" and inputs.q.shape[1] != inputs.k.shape[1]:
        raise ValueError(
            f"{mechanism.about.title} reads the logits of earlier queries: expected as many queries as keys, got "
            f"{inputs.q.shape[1]} and {inputs.k.shape[1]}"
        )


def _featured(mechanism: Mechanism, inputs: Inputs) -> Inputs:
    """Queries and keys as they go into their product; features take the place of the scale."""
    if mechanism.features is None:
        return inputs
    dtype, masks = accumulation(inputs.q.dtype), inputs.masks
    padded = ((inputs.q, masks.query_lengths), (inputs.k, masks.key_lengths))
    q, k = (mechanism.features(jnp, without_padding(x, lengths).astype(dtype)) for x, lengths in padded)
    return inputs._replace(q=q, k=k, geometry=inputs.geometry._replace(scale=1.0))
