"""attention_fn in the attention modules of linen and nnx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import sharpmax
import sharpmax.flax
import sharpmax.jax
from benchmarks.listing import Model
from sharpmax.flax import attention_fn
from tests.jax.attention_cases import quick

HEADS, FEATURES = 2, 8
X = jnp.asarray(2 * np.random.default_rng(0).normal(size=(2, 6, FEATURES)), jnp.float32)
MASK = jnp.asarray(np.random.default_rng(1).random((2, 1, 6, 6)) > 0.4).at[..., 0].set(True)
CAUSAL = jnp.tril(jnp.ones((6, 6), bool))


def by_core(params: Any, x: jax.Array, where: Any = None) -> jax.Array:
    """What a linen attention module with these parameters gives, by the core's softmax."""
    q, k, v = (
        jnp.einsum("bld,dhe->bhle", x, params[n]["kernel"]) + params[n]["bias"][:, None]
        for n in ("query", "key", "value")
    )
    logits = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    out = sharpmax.adaptive_temperature_softmax(logits, where=where) @ v
    return jnp.einsum("bhle,hed->bld", out, params["out"]["kernel"]) + params["out"]["bias"]


def linen_attention(function: Any = None, **kw: Any) -> tuple[Any, Any]:
    chosen = {} if function is None else {"attention_fn": function}
    module = linen.MultiHeadDotProductAttention(num_heads=HEADS, **chosen, **kw)
    return module, module.init(jax.random.key(0), X)


def nnx_attention(function: Any, **kw: Any) -> nnx.MultiHeadAttention:
    made: Any = {"num_heads": HEADS, "in_features": FEATURES, "decode": False, "rngs": nnx.Rngs(0), **kw}
    return nnx.MultiHeadAttention(attention_fn=function, **made)


def params_of(module: nnx.MultiHeadAttention) -> Any:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


class Network(linen.Module):
    """The network of Appendix A.3 with the function of its attention as a field."""

    function: Callable[..., Any] = linen.dot_product_attention
    n_classes: int = 10
    n_feats: int = 128
    activation: Callable[..., Any] = linen.gelu

    @linen.compact
    def __call__(self, x: jax.Array, q: jax.Array) -> jax.Array:
        x = self.activation(linen.Dense(self.n_feats)(x))
        x = self.activation(linen.Dense(self.n_feats)(x))
        q = self.activation(linen.Dense(self.n_feats)(q))
        q = linen.Dense(self.n_feats)(q)
        attention = linen.MultiHeadDotProductAttention(
            num_heads=1, qkv_features=self.n_feats, attention_fn=self.function
        )
        x = self.activation(linen.Dense(self.n_feats)(jnp.squeeze(attention(q, x, x), -2)))
        return linen.Dense(self.n_classes)(x)


@pytest.mark.filterwarnings("ignore:The inputs_kv arg:DeprecationWarning")  # the listing is as printed
def test_the_papers_network_with_the_same_parameters() -> None:
    random = np.random.default_rng(0)
    items, query = (jnp.asarray(random.normal(size=s), jnp.float32) for s in ((3, 12, 11), (3, 1, 1)))
    variables: Any = quick(Model().init)(jax.random.key(1), items, query)
    variables = jax.tree.map(lambda x: 1.5 * x, variables)  # entropies at which the policy acts

    def run(network: linen.Module) -> Any:
        return quick(network.apply)(variables, items, query)

    softmax, listed = run(Network()), run(Model())
    np.testing.assert_allclose(softmax, listed, rtol=1e-5, atol=1e-5)

    def core(query: Any, key: Any, value: Any, mask: Any = None) -> jax.Array:
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
        return jnp.einsum("bhqk,bkhd->bqhd", sharpmax.adaptive_temperature_softmax(logits, where=mask), value)

    expected = run(Network(core))
    for impl in ("reference", "streaming"):
        np.testing.assert_allclose(run(Network(attention_fn(impl=impl))), expected, rtol=1e-4, atol=1e-4)
    assert not np.allclose(np.asarray(softmax), np.asarray(expected), atol=1e-2)


@pytest.mark.parametrize(
    "mask", [MASK, MASK.astype(jnp.float32), linen.make_causal_mask(X[..., 0])], ids=["bool", "float", "causal"]
)
def test_no_mask_is_lost(mask: jax.Array) -> None:
    module, variables = linen_attention(attention_fn())
    expected = by_core(variables["params"], X, mask != 0)
    np.testing.assert_allclose(module.apply(variables, X, mask=mask), expected, atol=2e-5)
    of_nnx = nnx_attention(attention_fn())
    expected = by_core(params_of(of_nnx), X, mask != 0)
    np.testing.assert_allclose(of_nnx(X, mask=mask), expected, atol=2e-5)


def test_causality_without_a_mask() -> None:
    module, variables = linen_attention(attention_fn(is_causal=True))
    expected = by_core(variables["params"], X, CAUSAL)
    np.testing.assert_allclose(module.apply(variables, X), expected, atol=2e-5)
    of_nnx = nnx_attention(attention_fn())
    np.testing.assert_allclose(of_nnx(X, is_causal=True), by_core(params_of(of_nnx), X, CAUSAL), atol=2e-5)
    with pytest.raises(ValueError, match="as many queries as keys, got 1 and 6; a cache brings a mask"):
        module.apply(variables, X[:, :1], X, X)


def test_decoding_with_a_cache_linen() -> None:
    module, variables = linen_attention(attention_fn(), decode=True)
    expected = by_core(variables["params"], X, CAUSAL)
    step = jax.jit(lambda cache, x: module.apply({"params": variables["params"], "cache": cache}, x, mutable=["cache"]))
    cache = variables["cache"]
    for i in range(X.shape[1]):
        out, changed = step(cache, X[:, i : i + 1])
        cache = changed["cache"]
        np.testing.assert_allclose(out[:, 0], expected[:, i], atol=2e-5)


@pytest.mark.parametrize("key_heads", [2, 1])
def test_decoding_with_a_cache_nnx(key_heads: int) -> None:
    module = nnx_attention(attention_fn(), num_kv_heads=key_heads)
    expected = module(X, mask=CAUSAL, decode=False)
    if key_heads == HEADS:
        np.testing.assert_allclose(expected, by_core(params_of(module), X, CAUSAL), atol=2e-5)
    module.init_cache(X.shape)
    step = nnx.jit(lambda module, x: module(x, decode=True))
    for i in range(X.shape[1]):
        np.testing.assert_allclose(step(module, X[:, i : i + 1])[:, 0], expected[:, i], atol=2e-5)


def test_weights_are_sown_where_flax_sows_them() -> None:
    module, variables = linen_attention(attention_fn())
    _, state = module.apply(variables, X, mask=MASK, sow_weights=True, mutable=["intermediates"])
    (sown,) = state["intermediates"]["attention_weights"]
    of_nnx = nnx_attention(attention_fn())
    captured_call: Any = nnx.capture(of_nnx, nnx.Intermediate)
    _, captured = captured_call(X, mask=MASK, sow_weights=True)
    (also,) = captured["attention_weights"].get_value()
    for weights in (sown, also):
        assert weights.shape == (2, HEADS, 6, 6)
        np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)
        assert (np.where(MASK, 0.0, weights) == 0).all()


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_is_that_of_flax(broadcast: bool) -> None:
    kw: Any = {"dropout_rate": 0.5, "broadcast_dropout": broadcast, "deterministic": False}
    found, expected = (
        module.apply(variables, X, mask=MASK, rngs={"dropout": jax.random.key(5)})
        for module, variables in (linen_attention(attention_fn(sharpmax.Constant(1.0)), **kw), linen_attention(**kw))
    )
    np.testing.assert_allclose(found, expected, atol=2e-5)
    quiet, variables = linen_attention(attention_fn(), **(kw | {"deterministic": True}))
    np.testing.assert_allclose(quiet.apply(variables, X), by_core(variables["params"], X), atol=2e-5)


def test_learnable_policies_belong_to_the_model() -> None:
    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            policy = sharpmax.flax.Learnable(sharpmax.LearnableTemperature(heads=HEADS), name="policy")
            return linen.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn(policy), name="attention")(x)

    layer: Any = Layer()
    variables: Any = layer.init(jax.random.key(0), X)
    gradients: Any = jax.jit(jax.grad(lambda v: jnp.square(layer.apply(v, X)).sum()))(variables)
    assert set(variables["params"]) == {"policy", "attention"}
    assert np.all(np.asarray(gradients["params"]["policy"]["log_beta"]) != 0)
    policy: Any = sharpmax.flax.LearnableNNX(sharpmax.LearnableTemperature(heads=HEADS))
    module = nnx_attention(attention_fn(policy))
    found: Any = nnx.jit(nnx.grad(lambda m: jnp.square(m(X)).sum()))(module)
    assert np.all(np.asarray(found["attention_fn"]["policy"]["log_beta"].get_value()) != 0)


def test_any_batch_axes_and_types() -> None:
    q = jnp.asarray(np.random.default_rng(3).normal(size=(2, 3, 5, 4, 8)), jnp.bfloat16)
    mask = jnp.asarray(np.random.default_rng(4).random((3, 1, 5, 5)) > 0.5).at[..., 0].set(True)
    found = attention_fn()(q, q, q, mask=mask)
    expected = sharpmax.jax.dot_product_attention(
        *(q.reshape(6, 5, 4, 8),) * 3, mask=jnp.broadcast_to(mask, (2, 3, 1, 5, 5)).reshape(6, 1, 5, 5)
    )
    assert found.shape == q.shape
    np.testing.assert_array_equal(found.reshape(6, 5, 4, 8), expected)
    assert attention_fn()(q, q, q, dtype=jnp.float32).dtype == jnp.float32


def test_what_is_refused() -> None:
    x = jnp.zeros((1, 3, 2, 4))
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: attention_fn(impl="flash"), "one of auto, reference, streaming, pallas, got 'flash'"),
        (lambda: attention_fn(impl="streaming")(x, x, x, dropout_rate=0.1), "does not serve dropout; reference can"),
        (lambda: attention_fn(impl="streaming")(x, x, x, module=linen.Dense(1)), "sow_weights; reference can"),
        (lambda: attention_fn()(x, x, x, precision="highest"), "precision to be None, got 'highest'"),
        (lambda: attention_fn()(x, x, x, qk_attn_weights_einsum=jnp.einsum), "qk_attn_weights_einsum to be None"),
        (lambda: attention_fn()(x, x, x, mask=jnp.ones((4, 3))), r"mask to broadcast against logits \(1, 2, 3, 3\)"),
    ]
    for call, words in refused:
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match="policy to be callable"):
        attention_fn(1.0)  # pyright: ignore[reportArgumentType]


def test_equal_functions_share_a_compilation() -> None:
    assert attention_fn() == attention_fn()
    assert hash(attention_fn()) == hash(attention_fn())
    assert attention_fn() != attention_fn(sharpmax.PAPER_HELD)
