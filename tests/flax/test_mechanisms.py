"""Mechanisms in the attention modules of linen and nnx."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import sharpmax
import sharpmax.flax
from sharpmax.flax import attention_fn
from sharpmax.mechanisms import LearnedEntmax, Temperature, find

from .test_attention import HEADS, MASK, X, linen_attention, nnx_attention, params_of


def by_hand(params: Any, name: str) -> np.ndarray:
    """What a module with these parameters gives with NumPy's weights of a mechanism, in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = np.asarray(X, np.float64)
    q, k, v = (np.einsum("bld,dhe->bhle", x, p[n]["kernel"]) + p[n]["bias"][:, None] for n in ("query", "key", "value"))
    weights = find(name)(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), np.broadcast_to(MASK, (2, HEADS, 6, 6)))
    out = np.asarray(weights) @ v
    return np.einsum("bhle,hed->bld", out, p["out"]["kernel"]) + p["out"]["bias"]


@pytest.mark.parametrize("name", ["sparsemax", "sigmoid", "adaptive", "log_n"])
def test_weights_are_those_of_numpy(name: str) -> None:
    module, variables = linen_attention(attention_fn(mechanism=name))
    np.testing.assert_allclose(module.apply(variables, X, mask=MASK), by_hand(variables["params"], name), atol=2e-5)
    of_nnx = nnx_attention(attention_fn(mechanism=find(name)))
    np.testing.assert_allclose(of_nnx(X, mask=MASK), by_hand(params_of(of_nnx), name), atol=2e-5)


@pytest.mark.parametrize("name", ["sparsemax", "adaptive"])
def test_dropout_and_sown_weights(name: str) -> None:
    module, variables = linen_attention(attention_fn(mechanism=name), dropout_rate=0.5, deterministic=False)
    sown: Any = {
        "mask": MASK,
        "sow_weights": True,
        "mutable": ["intermediates"],
        "rngs": {"dropout": jax.random.key(5)},
    }
    out, state = module.apply(variables, X, **sown)
    (weights,) = state["intermediates"]["attention_weights"]
    np.testing.assert_allclose(np.asarray(weights).sum(-1), 1.0, atol=1e-5)
    assert not np.allclose(out, by_hand(variables["params"], name), atol=1e-3)
    quiet, _ = linen_attention(attention_fn(mechanism=name), dropout_rate=0.5, deterministic=True)
    found, _ = quiet.apply(variables, X, **sown)
    np.testing.assert_allclose(found, by_hand(variables["params"], name), atol=2e-5)


def test_a_window_is_that_of_its_mask() -> None:
    module, variables = linen_attention(attention_fn(mechanism="window", is_causal=True))
    size = find("window").size  # pyright: ignore[reportAttributeAccessIssue]
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, size + 9, X.shape[-1])), jnp.float32)
    near = jnp.tril(jnp.ones((size + 9,) * 2, bool)) & ~jnp.tril(jnp.ones((size + 9,) * 2, bool), -size)
    masked, _ = linen_attention(attention_fn(sharpmax.Constant(1.0)))
    expected = masked.apply(variables, x, mask=near[None, None])
    np.testing.assert_allclose(module.apply(variables, x), expected, atol=2e-5)
    sown, _ = module.apply(variables, x, sow_weights=True, mutable=["intermediates"])
    np.testing.assert_allclose(sown, expected, atol=2e-5)


def test_learned_ones_belong_to_the_model() -> None:
    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            learned = sharpmax.flax.Learnable(LearnedEntmax(heads=HEADS), name="alpha")
            function = attention_fn(mechanism=learned)
            return linen.MultiHeadDotProductAttention(HEADS, attention_fn=function, name="attention")(x)

    layer: Any = Layer()
    variables: Any = layer.init(jax.random.key(0), X)
    gradients: Any = jax.grad(lambda v: jnp.square(layer.apply(v, X)).sum())(variables)
    assert set(variables["params"]) == {"alpha", "attention"}
    assert all(np.all(np.asarray(g) != 0) for g in gradients["params"]["alpha"].values())
    module = nnx_attention(attention_fn(mechanism=sharpmax.flax.LearnableNNX(LearnedEntmax(heads=HEADS))))
    found: Any = nnx.grad(lambda m: jnp.square(m(X)).sum())(module)
    learned = found["attention_fn"]["mechanism"]
    assert learned
    assert all(np.all(np.asarray(learned[name].get_value()) != 0) for name in learned)


def test_what_is_refused() -> None:
    x = jnp.zeros((1, 3, 2, 4))
    with pytest.raises(ValueError, match="softmaxx"):
        attention_fn(mechanism="softmaxx")
    with pytest.raises(ValueError, match="a mechanism or a policy, got both"):
        attention_fn(sharpmax.PAPER_HELD, mechanism="sparsemax")
    with pytest.raises(ValueError, match="serves policies, not sparsemax; reference can"):
        attention_fn(mechanism="sparsemax", impl="streaming")(x, x, x)
    with pytest.raises(ValueError, match="2 heads of query and key for each of value, which Flax's"):
        attention_fn(mechanism="differential")
    with pytest.raises(ValueError, match="is in the feed-forward layer"):
        attention_fn(mechanism="step")
    with pytest.raises(ValueError, match="reads the logits of earlier queries: expected as many queries as keys"):
        attention_fn(mechanism="selective")(x[:, :1], x, x, mask=jnp.ones((1, 3), bool))  # a step of decoding
    assert attention_fn(mechanism="sparsemax") == attention_fn(mechanism=find("sparsemax"))
    assert attention_fn(mechanism=Temperature(sharpmax.PAPER)) != attention_fn()
