"""Lemma 2.1, Theorem 2.2 and Corollary B.1 on random and on adversarial logits."""

from __future__ import annotations

import math

import numpy as np
import pytest

import sharpmax
from sharpmax import theory

RNG = np.random.default_rng(5)


@pytest.mark.parametrize("n", [1, 2, 10, 1000])
@pytest.mark.parametrize("spread", [0.0, 0.5, 5.69, 14.78])
@pytest.mark.parametrize("theta", [0.5, 1.0, 3.0])
def test_every_coefficient_is_within_the_bounds(n: int, spread: float, theta: float) -> None:
    bounds = theory.coefficient_bounds(n, spread, theta)
    uniform, ends = RNG.uniform(0, spread, size=(50, n)), RNG.choice([0.0, spread], size=(50, n))
    alpha = sharpmax.softmax(np.concatenate([uniform, ends]), beta=1 / theta)
    slack = 1e-12
    assert bounds.lower <= bounds.attained_lower * (1 + slack)
    assert bounds.attained_upper <= bounds.upper * (1 + slack)
    assert np.all(alpha >= bounds.attained_lower * (1 - slack))
    assert np.all(alpha <= bounds.attained_upper * (1 + slack))


@pytest.mark.parametrize("n", [2, 10, 1000])
def test_the_extremes_are_attained(n: int) -> None:
    spread, theta = 5.69, 0.7
    bounds = theory.coefficient_bounds(n, spread, theta)
    one_high, one_low = np.eye(1, n)[0] * spread, spread - np.eye(1, n)[0] * spread
    assert sharpmax.softmax(one_high, beta=1 / theta)[0] == pytest.approx(bounds.attained_upper, rel=1e-12)
    assert sharpmax.softmax(one_low, beta=1 / theta)[0] == pytest.approx(bounds.attained_lower, rel=1e-12)
    assert bounds.attained_upper == pytest.approx(math.exp(spread / theta) / (math.exp(spread / theta) + n - 1))
    assert bounds.attained_lower == pytest.approx(1 / (1 + (n - 1) * math.exp(spread / theta)))


def test_bounds_broadcast_and_do_not_overflow() -> None:
    bounds = theory.coefficient_bounds(np.array([1, 10, 100]), 2000.0)
    assert bounds.upper.tolist() == [math.inf] * 3
    assert bounds.attained_upper.tolist() == [1.0] * 3
    assert bounds.attained_lower.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("epsilon", [0.5, 0.1, 0.01])
@pytest.mark.parametrize("spread", [0.0, 2.28, 5.69])
def test_the_n_of_theorem_2_2_is_the_first_one(spread: float, epsilon: float) -> None:
    n = theory.dispersion_length(spread, epsilon)
    assert n.paper == math.floor(math.exp(spread) * round(1 / epsilon)) + 1
    assert theory.coefficient_bounds(n.paper, spread).upper < epsilon
    assert theory.coefficient_bounds(n.paper - 1, spread).upper >= epsilon * (1 - 1e-12)
    assert n.attained <= n.paper
    assert theory.coefficient_bounds(n.attained, spread).attained_upper < epsilon * (1 + 1e-12)
    assert theory.coefficient_bounds(n.attained - 1, spread).attained_upper >= epsilon * (1 - 1e-12)
    worst = np.eye(1, n.attained)[0] * spread
    assert sharpmax.softmax(worst).max() < epsilon * (1 + 1e-12)
    assert sharpmax.softmax(worst[:-1]).max() >= epsilon * (1 - 1e-12)


def test_lengths_are_exact_integers_however_large() -> None:
    import mpmath

    with mpmath.workdps(500):
        for spread, power in ((32.74, 2), (100.0, 2), (900.0, 2), (1.0, 60), (5.69, 300)):
            expected = int(mpmath.floor(mpmath.exp(mpmath.mpf(repr(spread))) * 10**power)) + 1
            assert theory.dispersion_length(spread, float(f"1e-{power}")).paper == expected


def test_the_n_of_corollary_b1() -> None:
    assert theory.failure_length(5.69) == theory.dispersion_length(5.69, 2.0**-23).paper
    n = theory.failure_length(2.0, "float16")
    worst = np.eye(1, n)[0] * 2.0
    assert sharpmax.softmax(worst)[0] < np.finfo(np.float16).eps
    assert theory.MACHINE_EPSILON["float64"] == np.finfo(np.float64).eps
    assert theory.MACHINE_EPSILON["float32"] == np.finfo(np.float32).eps


def test_a_machine_epsilon_of_weight_is_lost_in_the_sum() -> None:
    # The corollary's mechanism: the weighted sum of {a, b, b, ...} no longer holds a.
    n = theory.failure_length(2.0, "float16")
    weight = np.float16(sharpmax.softmax(np.eye(1, n)[0] * 2.0)[0])
    b = np.float16(1.0)
    assert b + np.float16(weight / 2) == b


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("spread to be a finite number of at least 0", lambda: theory.dispersion_length(-1, 0.1)),
        ("theta to be a finite number above 0", lambda: theory.dispersion_length(1, 0.1, 0)),
        ("spread / theta to be at most 9000, got 1e\\+06", lambda: theory.dispersion_length(1e4, 0.1, 0.01)),
        ("epsilon to be above 0 and at most 1", lambda: theory.dispersion_length(1, 2)),
        ("n to be at least 1", lambda: theory.coefficient_bounds(0, 1)),
        ("dtype to be one of float16", lambda: theory.failure_length(1, "int8")),
    ],
)
def test_bad_input(message: str, call: object) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # pyright: ignore[reportCallIssue]
