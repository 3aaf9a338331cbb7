"""An ``attention_fn`` with adaptive temperature for the attention modules of linen and of nnx."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.linen.dtypes import promote_dtype

from ..core.arrays import broadcasts, product
from ..core.policies import PAPER, Policy, needs_spread
from ..jax import dot_product_attention, mechanisms, reference
from ..jax.attention import check_impl, row_betas
from ..jax.checks import Inputs, check_policy, checked
from ..mechanisms import find


def attention_fn(
    policy: Policy = PAPER,
    *,
    mechanism: Any = None,
    impl: str = "auto",
    scale: float | None = None,
    softcap: float | None = None,
    is_causal: bool = False,
) -> Any:
    """What ``linen.MultiHeadDotProductAttention`` and ``nnx.MultiHeadAttention`` take as ``attention_fn``.

    Args:
      policy, mechanism, impl, scale, softcap: those of :func:`sharpmax.jax.dot_product_attention`. The parameters of an
        nnx module as policy or mechanism belong to the attention module it is given to; a linen module belongs to the
        module in whose ``__call__`` it was made. A mechanism with parameters that is given by name keeps those it
        starts from.
      is_causal: attend causally without a mask, which would take queries times keys of memory. Positions are counted
        from the first, so a step of decoding, whose cache brings a mask of its own, is refused.

    Masks may be of any type, as Flax makes them; what is not 0 is seen. Dropout and ``sow_weights`` need all weights at
    once, so they are served by ``"auto"`` and ``"reference"``. What would silently change nothing (``precision`` and
    einsum functions) is refused. The softmax is always in float32 or wider.
    """
    check_policy(policy)
    check_impl(impl)
    if mechanism is not None:
        mechanisms.check_alone(policy)
        mechanism = mechanism if hasattr(mechanism, "structure") else find(mechanism)
        _check_mechanism(getattr(mechanism, "structure", mechanism))
    learned = isinstance(policy, nnx.Module) or isinstance(mechanism, nnx.Module)
    kind = AttentionModule if learned else AttentionFunction
    return kind(policy, mechanism, Settings(impl, scale, softcap, is_causal))


@dataclass(frozen=True)
class Settings:
    """What an ``attention_fn`` was made with, apart from policy and mechanism."""

    impl: str
    scale: float | None
    softcap: float | None
    is_causal: bool


class _Attends:
    """The call that Flax makes; every keyword stands in the signature, because linen drops those that do not."""

    policy: Policy
    mechanism: Any
    settings: Settings

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> jax.Array:
        """Attention ``[batch..., queries, heads, columns]``."""
        _refuse(
            precision=precision,
            einsum_dot_general=einsum_dot_general,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        query, key, value = promote_dtype(query, key, value, dtype=dtype)
        shape = (*query.shape[:-1], value.shape[-1])
        logits = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
        query, key, value = (x.reshape(product(x.shape[:-3]), *x.shape[-3:]) for x in (query, key, value))
        mask = None if mask is None else _four(jnp.asarray(mask).astype(bool), logits, "mask")
        bias = None if bias is None else _four(bias, logits, "bias")
        given: dict[str, Any] = {
            "is_causal": is_causal or self._causal(query, key),
            "scale": self.settings.scale,
            "softcap": self.settings.softcap,
        }
        dropped = 0.0 if deterministic else dropout_rate
        if module is None and dropped == 0.0:
            chosen: Any = {"policy": self.policy, "mechanism": self.mechanism, "impl": self.settings.impl}
            return dot_product_attention(query, key, value, bias, mask, **chosen, **given).reshape(shape)
        self._check_weights("sow_weights" if dropped == 0.0 else "dropout")
        inputs, weights = self._weighed(query, key, value, bias, mask, **given)
        if module is not None:
            _sow(module, weights.astype(query.dtype).reshape(logits))
        if dropped > 0.0:
            weights = weights * _kept(weights, dropped, dropout_rng, broadcast_dropout)
        return reference.weighted(weights, value, inputs.masks).astype(query.dtype).reshape(shape)

    def _weighed(self, query: Any, key: Any, value: Any, *masks: Any, **given: Any) -> tuple[Inputs, jax.Array]:
        """The arguments in one layout, and all weights."""
        given |= dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"))
        policy, window = self.policy, None
        if self.mechanism is not None:
            chosen = mechanisms.settled(self.mechanism, policy, None, given["is_causal"], query, key)
            if chosen.mechanism is not None:
                rest = given | {"local_window_size": None, "impl": self.settings.impl}
                return mechanisms.weighed(chosen, query, key, value, *masks, **rest)
            policy, window = chosen.policy, chosen.window
        inputs = checked(query, key, value, *masks, local_window_size=window, **given)
        return inputs, _weights(inputs, policy)

    def _causal(self, query: jax.Array, key: jax.Array) -> bool:
        if self.settings.is_causal and query.shape[1] != key.shape[1]:
            raise ValueError(
                "attention_fn(is_causal=True) counts positions from the first: expected as many queries as keys, got "
                f"{query.shape[1]} and {key.shape[1]}; a cache brings a mask of its own"
            )
        return self.settings.is_causal

    def _check_weights(self, what: str) -> None:
        if self.settings.impl not in ("auto", "reference"):
            raise ValueError(f"impl={self.settings.impl!r} does not serve {what}; reference can")


@dataclass(frozen=True)
class AttentionFunction(_Attends):
    """An ``attention_fn``; equal to another that was made with the same arguments."""

    policy: Policy
    mechanism: Any
    settings: Settings


class AttentionModule(_Attends, nnx.Module):
    """An ``attention_fn`` whose policy or mechanism has parameters, which nnx finds."""

    def __init__(self, policy: Any, mechanism: Any, settings: Settings) -> None:
        self.policy, self.mechanism, self.settings = policy, mechanism, settings


def _check_mechanism(mechanism: Any) -> None:
    """Refuse what Flax's attention modules have no place for."""
    if getattr(mechanism, "maps", 1) > 1:
        raise ValueError(
            f"{mechanism.about.title} takes {mechanism.maps} heads of query and key for each of value, which Flax's "
            "attention modules have not; call sharpmax.jax.dot_product_attention"
        )
    if getattr(mechanism, "activation", None) is not None:
        raise ValueError(f"{mechanism.about.title} is in the feed-forward layer; attention_fn does not reach that")


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"expected {name} to be None, got {value!r}; set jax.default_matmul_precision instead")


def _four(x: jax.Array, logits: tuple[int, ...], name: str) -> jax.Array:
    """A mask or bias with one batch axis."""
    if not broadcasts(x.shape, logits):
        raise ValueError(f"expected {name} to broadcast against logits {logits}, got shape {x.shape}")
    x = x.reshape((1,) * (len(logits) - x.ndim) + x.shape)
    if any(size != 1 for size in x.shape[:-3]):
        x = jnp.broadcast_to(x, (*logits[:-3], *x.shape[-3:]))
    return x.reshape(product(x.shape[:-3]), *x.shape[-3:])


def _weights(inputs: Inputs, policy: Policy) -> jax.Array:
    given = (inputs.bias, inputs.masks, inputs.geometry)
    stats = reference.row_stats(inputs.q, inputs.k, *given, with_min=needs_spread(policy))
    return reference.weights(inputs.q, inputs.k, row_betas(policy, stats), *given)


def _sow(module: Any, weights: jax.Array) -> None:
    """Leave the weights where Flax's own attention leaves them."""
    if isinstance(module, linen.Module):
        module.sow("intermediates", "attention_weights", weights)
    else:
        module.sow(nnx.Intermediate, "attention_weights", weights)


def _kept(weights: jax.Array, rate: float, rng: Any, broadcast: bool) -> jax.Array:
    """Factors 0 or ``1 / (1 - rate)``, drawn as Flax's own attention draws them."""
    shape = (1, 1, *weights.shape[-2:]) if broadcast else weights.shape
    return jax.random.bernoulli(rng, 1.0 - rate, shape).astype(weights.dtype) / (1.0 - rate)
