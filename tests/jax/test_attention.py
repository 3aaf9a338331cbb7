"""dot_product_attention and row_stats: every implementation that runs on a CPU against the oracle."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sharpmax
import sharpmax.torch
from sharpmax.jax import blocks, dot_product_attention, row_stats
from tests.jax import oracle
from tests.jax.attention_cases import (
    BATCH,
    HEADS,
    KEYS,
    MASKS,
    POLICIES,
    QUERIES,
    TOLERANCE,
    close,
    compare,
    cotangent_of,
    inputs,
    quick,
    set_sizes,
    with_gradients,
)

IMPLEMENTATIONS = ["reference", "streaming"]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.usefixtures("wide", "small_blocks")
def test_matches_the_oracle(mask: str, impl: str) -> None:
    compare(impl, **MASKS[mask])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.usefixtures("wide", "small_blocks")
def test_policies(policy: str, impl: str) -> None:
    compare(impl, POLICIES[policy], is_causal=True)


@pytest.mark.usefixtures("wide")
def test_streaming_with_all_pairs_at_once_matches_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    set_sizes(monkeypatch, blocks.Sizes(rows=8, keys=5, together=True))
    compare("streaming", **MASKS["bias"], **MASKS["lengths"])


@pytest.mark.parametrize(
    ("dtype", "impl"),
    [("float32", "streaming"), ("bfloat16", "streaming"), ("float16", "streaming"), ("bfloat16", "reference")],
)
def test_narrow_types(dtype: str, impl: str) -> None:
    q, k, v = inputs(dtype)
    cotangent = cotangent_of(v)
    found, gradients = with_gradients(impl, sharpmax.PAPER, is_causal=True)(q, k, v, None, cotangent, {})
    truth = oracle.attention(q, k, v, policy=sharpmax.PAPER, is_causal=True)
    assert found.output.dtype == dtype
    assert found.beta.dtype == found.stats.sum.dtype == "float32"
    close(found.stats.entropy, truth.entropy, 2e-5, "entropy")
    close(found.beta, truth.beta, 1e-3, "beta")
    close(found.output, truth.output, TOLERANCE[dtype], "output")
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v, cotangent)]
        _, expected = with_gradients("reference", sharpmax.PAPER, is_causal=True)(*wide[:3], None, wide[3], {})
    for name, a, b in zip(("dq", "dk", "dv"), gradients, expected, strict=True):
        assert a.dtype == dtype
        close(a, b, 4 * TOLERANCE[dtype], name)


WITH_ALL = {impl: with_gradients(impl, sharpmax.PAPER_HELD, is_causal=True) for impl in IMPLEMENTATIONS}


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Everything that is an array, in one shape; adversarial numbers among them."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    factor = draw(st.sampled_from([0.0, 1.0, 3.0, 30.0]))
    bias = random.normal(size=(BATCH, 1, QUERIES, KEYS)) + draw(st.sampled_from([0.0, 1e4, -1e4]))
    bias[random.random(bias.shape) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = draw(st.sampled_from([-np.inf, -1e308]))
    lengths = st.lists(st.integers(-1, 12), min_size=BATCH, max_size=BATCH).map(np.asarray)
    return {
        "factor": factor,
        "bias": bias,
        "seed": draw(st.integers(0, 1 << 30)),
        "arrays": {
            "mask": random.random((1, HEADS, 1, KEYS)) < draw(st.sampled_from([0.3, 1.0])),
            "query_seq_lengths": np.clip(draw(lengths), 0, QUERIES),
            "key_value_seq_lengths": np.clip(draw(lengths), 0, KEYS),
        },
    }


@given(call=calls())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("wide", "small_blocks")
def test_any_arrays_match_the_oracle(call: dict[str, Any]) -> None:
    q, k, v = inputs(seed=call["seed"])
    q = call["factor"] * q
    bias, arrays = jnp.asarray(call["bias"]), {name: jnp.asarray(x) for name, x in call["arrays"].items()}
    truth = oracle.attention(
        q, k, v, call["bias"], policy=sharpmax.PAPER_HELD, is_causal=True, **call["arrays"]
    )  # fmt: skip
    results = {}
    for impl in IMPLEMENTATIONS:
        found, results[impl] = WITH_ALL[impl](q, k, v, bias, cotangent_of(v), arrays)
        close(found.output, truth.output, 1e-8, f"{impl}: output")
        np.testing.assert_array_equal(found.stats.count, truth.stats.count)
        close(found.stats.entropy, truth.entropy, 1e-8, f"{impl}: entropy")
    for name, a, b in zip(("dq", "dk", "dv", "dbias"), *results.values(), strict=True):
        close(a, b, 1e-8, name)


@pytest.mark.usefixtures("wide", "small_blocks")
def test_gradient_of_a_shared_bias_streaming() -> None:
    q, k, v = inputs()
    bias = jnp.asarray(np.random.default_rng(2).normal(size=(QUERIES, 1)))

    def loss(bias: jax.Array, impl: str) -> jax.Array:
        return jnp.square(dot_product_attention(q, k, v, bias, policy=lambda s: s.count / 4, impl=impl)).sum()

    found, expected = (quick(jax.grad(loss), static_argnums=1)(bias, impl) for impl in ("streaming", "reference"))
    close(found, expected, 1e-11, "bias")


TORCH_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "window": ({"local_window_size": 2, "softcap": 3.0}, {"window": 3, "softcap": 3.0}),
    "lengths": (
        {"key_value_seq_lengths": np.array([7, 11]), "is_causal": True},
        {"key_lengths": torch.tensor([7, 11]), "is_causal": True},
    ),
}


@pytest.mark.parametrize("case", TORCH_CALLS)
def test_agrees_with_torch(case: str) -> None:
    ours, theirs = TORCH_CALLS[case]
    given = {name: jnp.asarray(x) for name, x in ours.items() if isinstance(x, np.ndarray)}
    plain = {name: x for name, x in ours.items() if name not in given}
    arrays = [np.asarray(x) for x in (*inputs("float32"), cotangent_of(inputs("float32")[2]))]
    q, k, v, cotangent = (jnp.asarray(x) for x in arrays)
    found, gradients = with_gradients("streaming", sharpmax.PAPER, **plain)(q, k, v, None, cotangent, given)
    tensors: Any = [torch.tensor(x).transpose(1, 2).requires_grad_() for x in arrays[:3]]
    expected = sharpmax.torch.scaled_dot_product_attention(
        *tensors, enable_gqa=True, impl="streaming", return_stats=True, **theirs
    )
    close(found.output, expected.output.detach().transpose(1, 2), 2e-5, "output")
    close(found.stats.entropy, expected.stats.entropy.detach(), 2e-5, "entropy")
    close(found.beta, expected.beta.detach(), 2e-4, "beta")
    theirs_back = torch.autograd.grad(expected.output, tensors, torch.tensor(arrays[3]).transpose(1, 2))
    for name, a, b in zip(("dq", "dk", "dv"), gradients, theirs_back, strict=True):
        close(a, b.transpose(1, 2), 1e-4, name)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_constant_one_is_the_attention_of_jax(impl: str) -> None:
    q, k, v = inputs("float32")
    v = jnp.concatenate([v, v[..., :2]], -1)  # jax.nn wants values as wide as keys
    kw: Any = {"is_causal": True, "local_window_size": (3, 1), "key_value_seq_lengths": jnp.array([9, 11], jnp.int32)}
    ours = functools.partial(dot_product_attention, policy=sharpmax.Constant(1), impl=impl)

    def whole_and_alone(attend: Any) -> Any:
        return jax.jit(lambda q, k, v: (attend(q, k, v, **kw), attend(q[0], k[0], v[0])))(q, k, v)

    for found, expected in zip(whole_and_alone(ours), whole_and_alone(jax.nn.dot_product_attention), strict=True):
        close(found, expected, 2e-6, impl)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_row_stats(impl: str) -> None:
    q, k, _ = inputs("float32")
    where = jnp.tril(jnp.ones((QUERIES, KEYS), bool))
    z = jnp.einsum("btkgd,bskd->bkgts", q.reshape(BATCH, QUERIES, 2, 2, -1), k).reshape(BATCH, HEADS, QUERIES, KEYS)
    expected = sharpmax.row_stats(z * q.shape[-1] ** -0.5, where=where)
    stats = quick(lambda q, k: row_stats(q, k, is_causal=True, with_min=True, impl=impl))(q, k)
    close(stats.entropy, expected.entropy, 1e-5, "entropy")
    close(stats.spread, expected.spread, 1e-4, "spread")
    np.testing.assert_array_equal(stats.count, expected.count)
    shapes = jax.eval_shape(lambda q, k: row_stats(q, k, impl=impl), q[0], k[0])
    assert shapes.min is None
    assert shapes.sum.shape == (HEADS, QUERIES)
