"""A step in the feed-forward part: what it computes, what its gradient is, and what it changes about dispersion."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from sharpmax import softmax
from sharpmax.core.policies import Constant
from sharpmax.mechanisms import StepFeedForward
from tests.arrays import LIBRARIES, gradient, make, numbers
from tests.mechanisms import cases_unnormalised as cases


def test_weights_are_those_of_softmax(tmp_path: Path) -> None:
    cases.check_values("step")
    cases.check_gradients("step")
    cases.check_large("step")
    cases.check_half("step")
    cases.check_vmap("step")
    cases.check_file("step", tmp_path)
    assert StepFeedForward().policy == Constant()


@pytest.mark.parametrize("library", LIBRARIES)
def test_activation_is_exactly_zero_or_one(library: str) -> None:
    x = [-1e4, -0.3, -1e-30, 0.0, 1e-30, 0.7, 1e4]
    xp = cases.namespace(library)
    found = cases.at_once(library, lambda t: StepFeedForward().activation(xp, t))(make(library, x))
    assert numbers(found).tolist() == [0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_gradient_is_that_of_the_logistic_function(library: str) -> None:
    x = [-1e4, -2.0, 0.0, 3.0, 1e4]
    xp = cases.namespace(library)
    total = cases.at_once(library, lambda t: StepFeedForward().activation(xp, t).sum())
    want = [0.0, *(math.exp(-v) / (1 + math.exp(-v)) ** 2 for v in x[1:-1]), 0.0]
    np.testing.assert_allclose(gradient(library, total, make(library, x)), want, rtol=1e-6, atol=1e-30)


def test_a_step_tells_apart_what_dispersion_brings_together() -> None:
    """Weights vanish as softmax's do, and so does what an item adds to the output; a step still sees its sign."""
    mechanism, seen = StepFeedForward(), []
    for n in (100, 10_000, 1_000_000):
        logits = np.zeros(n)
        logits[3] = 2.0
        weights = mechanism(logits)
        np.testing.assert_array_equal(weights, softmax(logits))
        assert weights.max() <= math.exp(2) / n
        outputs = np.array([weights[3] * value for value in (-1.0, 1.0)])
        assert abs(outputs[1] - outputs[0]) <= 2 * math.exp(2) / n
        seen.append(mechanism.activation(np, outputs).tolist())
    assert seen == [[0.0, 1.0]] * 3
