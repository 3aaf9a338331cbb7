"""Learnable policies as Flax modules, linen and nnx."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import sharpmax
import sharpmax.flax

X = jnp.asarray(np.random.default_rng(9).normal(size=(2, 3, 4, 20)), jnp.float32)


class Head(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        policy = sharpmax.flax.Learnable(sharpmax.LearnableLogLength(heads=3, scale=0.4, bias=0.1))
        return sharpmax.adaptive_temperature_softmax(x, policy=policy)


def test_linen() -> None:
    head = Head()
    variables = head.init(jax.random.key(0), X)

    def apply(v: Any) -> Any:
        return head.apply(v, X)

    assert jax.tree.map(jnp.shape, variables) == {"params": {"Learnable_0": {"scale": (3,), "bias": (3,)}}}
    expected = sharpmax.adaptive_temperature_softmax(X, policy=sharpmax.LogLength(0.4, 0.1))
    np.testing.assert_allclose(apply(variables), expected, atol=1e-6)
    grads = jax.jit(jax.grad(lambda v: jnp.sum(apply(v) ** 2)))(variables)
    assert np.all(np.asarray(grads["params"]["Learnable_0"]["scale"]) > 0)


def test_nnx() -> None:
    policy = sharpmax.flax.LearnableNNX(sharpmax.LearnableTemperature(heads=3, init=2.0))
    expected = sharpmax.softmax(X, beta=2.0)
    weights = nnx.jit(lambda m, x: sharpmax.adaptive_temperature_softmax(x, policy=m))(policy, X)
    np.testing.assert_allclose(weights, expected, atol=1e-6)
    grads = nnx.grad(lambda m, x: jnp.sum(sharpmax.adaptive_temperature_softmax(x, policy=m) ** 2))(policy, X)
    assert grads["log_beta"].get_value().shape == (3,)
    assert np.all(np.asarray(grads["log_beta"].get_value()) > 0)
