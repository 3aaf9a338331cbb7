"""Sigmoid, linear, stick-breaking and squared ReLU: against the equations of their papers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from sharpmax.mechanisms import Linear, LinearFeatures, ReluSquared, Sigmoid, StickBreaking
from tests.arrays import LIBRARIES, gradient, make, numbers
from tests.mechanisms import cases_unnormalised as cases


@pytest.mark.parametrize("library", LIBRARIES)
def test_sigmoid_divides_by_the_keys_it_sees(library: str) -> None:
    """sigma(0 - log n) = 1 / (1 + n), where n does not count what is masked; the tail keeps its digits."""
    logits = make(library, [[0.0, 0.0, 0.0, -math.inf], [-60.0, -math.inf, -math.inf, -math.inf]])
    want = [[0.25, 0.25, 0.25, 0.0], [math.exp(-60.0), 0.0, 0.0, 0.0]]
    np.testing.assert_allclose(numbers(cases.at_once(library, Sigmoid())(logits)), want, rtol=1e-5)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_slopes_at_zero(library: str) -> None:
    """Where branches meet: sigma has slope 1/4, the square 0, stick-breaking 1/4 of one key."""

    def total(x: Any) -> Any:
        return Sigmoid()(x[:1]).sum() + ReluSquared()(x[1:2]).sum() + StickBreaking()(x[2:]).sum()

    slopes = gradient(library, cases.at_once(library, total), make(library, [0.0, 0.0, 0.0]))
    np.testing.assert_allclose(slopes, [0.25, 0.0, 0.25], rtol=1e-6)


def test_stick_breaking_goes_from_the_last_key_to_the_first() -> None:
    weights = StickBreaking()(np.array([0.0, 0.0, 0.0]))
    np.testing.assert_allclose(weights, [0.125, 0.25, 0.5], rtol=1e-15)


def test_stick_breaking_over_a_long_row_leaves_what_no_key_took() -> None:
    logits = np.random.default_rng(0).normal(size=2000) - 8
    left = math.exp(-math.fsum(math.log1p(math.exp(s)) for s in logits))
    assert 1 - StickBreaking()(logits).sum() == pytest.approx(left, rel=1e-12)
    assert 1 - float(StickBreaking()(logits.astype(np.float32)).sum()) == pytest.approx(left, rel=1e-4)


def test_stick_breaking_loses_no_digits_beside_a_key_that_takes_all() -> None:
    """A logit of 1e4 leaves exp(-1e4); keys behind it keep theirs to full precision."""
    weights = StickBreaking()(np.array([0.3, 1e4, -0.4, 0.2], np.float32))
    left = 1 / (1 + math.exp(0.2)) / (1 + math.exp(-0.4))
    np.testing.assert_allclose(weights[:2], [0.0, left], rtol=1e-6)


def test_linear_attention_is_a_memory_of_fast_weights() -> None:
    """Schmidhuber's form: the matrix is the sum of outer products of values and keys, and the query reads it."""
    random = np.random.default_rng(2)
    query, keys, values = random.normal(size=4), random.normal(size=(6, 4)), random.normal(size=(6, 3))
    memory = np.zeros((3, 4))
    for key, value in zip(keys, values, strict=True):
        memory += np.outer(value, key)
    np.testing.assert_allclose(Linear()(keys @ query) @ values, memory @ query, rtol=1e-12)


@pytest.mark.parametrize("library", LIBRARIES)
def test_features_make_a_recurrent_state(library: str) -> None:
    """Katharopoulos' equations 9 to 12: state and normaliser grow by a key, and the query reads both."""
    random = np.random.default_rng(3)
    query, keys, values = random.normal(size=(1, 4)), random.normal(size=(6, 4)), random.normal(size=(6, 3))

    def phi(x: np.ndarray) -> np.ndarray:
        return np.array([v + 1 if v > 0 else math.exp(v) for v in x])

    state, normaliser = np.zeros((4, 3)), np.zeros(4)
    for key, value in zip(keys, values, strict=True):
        state += np.outer(phi(key), value)
        normaliser += phi(key)
    want = phi(query[0]) @ state / (phi(query[0]) @ normaliser)
    xp = cases.namespace(library)
    mechanism = LinearFeatures()

    def weigh(q: Any, k: Any) -> Any:
        return mechanism(mechanism.features(xp, q) @ mechanism.features(xp, k).T)

    weights = cases.at_once(library, weigh)(make(library, query), make(library, keys))
    np.testing.assert_allclose(numbers(weights) @ values, want[None], rtol=1e-5)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_features_far_away_have_a_gradient(library: str) -> None:
    """exp(x) below 0 and x + 1 above: values and slopes stay finite where the other branch would overflow."""
    x = make(library, [-1e4, -1.0, 0.0, 1e4])
    xp = cases.namespace(library)
    slopes = gradient(library, cases.at_once(library, lambda t: LinearFeatures().features(xp, t).sum()), x)
    np.testing.assert_allclose(slopes, [0.0, math.exp(-1.0), 1.0, 1.0], rtol=1e-6)


def test_products_that_are_all_zero_have_no_weights() -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    weights = LinearFeatures()(logits)
    weights.sum().backward()
    assert logits.grad is not None
    assert weights.eq(0).all()
    assert logits.grad.isfinite().all()


def test_vanishing_with_length() -> None:
    """What ``about.theorem`` says: bounds of sigmoid and squared ReLU, and the floor of stick-breaking."""
    random = np.random.default_rng(4)
    for n in (10, 1000, 100_000):
        logits = random.uniform(-2, 2, size=n)
        assert Sigmoid()(logits).max() <= math.exp(2) / n
        assert ReluSquared()(logits).max() <= 4 / n
        assert LinearFeatures()(np.abs(logits) + 0.5).max() <= 2.5 / 0.5 / n
        assert StickBreaking()(logits)[-1] >= 1 / (1 + math.exp(2))
        assert Linear()(logits).max() == logits.max()


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("scale", [1.0, 1e-18, 1e-36])
def test_small_products_of_features_have_gradients(library: str, scale: float) -> None:
    """Training drives products down; weights depend on their ratios alone, whose gradient is that of a quotient."""
    products, cotangent = np.array([3.0, 1.0, 0.5, 0.25]), np.array([1.0, -2.0, 0.5, 3.0])
    want = (cotangent - (cotangent * products).sum() / products.sum()) / products.sum()

    def total(x: Any) -> Any:
        return (LinearFeatures()(x) * make(library, cotangent.tolist())).sum()

    found = gradient(library, total, make(library, (products * scale).tolist()))
    np.testing.assert_allclose(numbers(found).astype(np.float64) * scale, want, rtol=1e-5)
