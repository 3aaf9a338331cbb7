"""Appendix F: optimal temperatures by two independent searches, and the curves fitted to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import sharpmax

RNG = np.random.default_rng(4)


def log_probability(logits: np.ndarray, target: np.ndarray, beta: np.ndarray) -> np.ndarray:
    z = beta[:, None] * logits
    z -= z.max(axis=1, keepdims=True)
    return z[np.arange(len(z)), target] - np.log(np.exp(z).sum(axis=1))


def samples(rows: int = 300, n: int = 50, rank: int = 3) -> tuple[np.ndarray, np.ndarray]:
    logits = RNG.normal(size=(rows, n)) * RNG.uniform(0.5, 4, size=(rows, 1))
    return logits, np.argsort(logits, axis=1)[:, -rank]


def test_the_exact_search_is_at_the_top_of_a_concave_curve() -> None:
    logits, target = samples()
    found = sharpmax.optimal_temperatures(logits, target)
    assert len(found.betas) == found.total == 300
    best = log_probability(logits, target, found.betas)
    for factor in (0.5, 0.99, 0.9999, 1.0001, 1.01, 2.0):
        assert np.all(log_probability(logits, target, factor * found.betas) <= best + 1e-14)
    p = np.exp(found.betas[:, None] * (logits - logits.max(axis=1, keepdims=True)))
    mean = np.sum(p * logits, axis=1) / p.sum(axis=1)
    np.testing.assert_allclose(mean, logits[np.arange(300), target], rtol=1e-10, atol=1e-10)


def test_the_grid_agrees_with_the_exact_search_to_its_resolution() -> None:
    logits, target = samples()
    exact, grid = (sharpmax.optimal_temperatures(logits, target, method=m) for m in ("exact", "grid"))
    np.testing.assert_array_equal(exact.index, grid.index)
    inside = 1 / exact.betas < 9.9
    np.testing.assert_allclose(1 / grid.betas[inside], 1 / exact.betas[inside], atol=0.1)
    np.testing.assert_allclose(np.round(10 / grid.betas), 10 / grid.betas, rtol=1e-12)
    assert np.all(log_probability(logits, target, grid.betas) <= log_probability(logits, target, exact.betas) + 1e-14)


def test_samples_that_are_dropped_are_counted() -> None:
    logits = np.array(
        [
            [3.0, 1.0, 0.0],  # the wanted item has the largest logit
            [3.0, 3.0, 0.0],  # tied for it
            [3.0, 2.0, 0.0],  # a finite optimum: 2 is above the mean
            [3.0, 1.0, 2.0],  # at or below the mean of all: probability only falls with beta
            [3.0, 1.0, 2.5],
        ]
    )
    target = np.array([0, 1, 1, 1, 1])
    exact = sharpmax.optimal_temperatures(logits, target)
    assert (exact.total, exact.already_largest, exact.no_optimum, exact.index.tolist()) == (5, 2, 2, [2])
    grid = sharpmax.optimal_temperatures(logits, target, method="grid")
    assert (grid.already_largest, grid.no_optimum, grid.at_grid_edge, grid.index.tolist()) == (2, 2, 2, [2, 3, 4])
    assert grid.betas[1:].tolist() == [0.1, 0.1]


def test_masked_items_and_tensors() -> None:
    logits, target = samples(20, 10)
    padded = np.concatenate([logits, RNG.normal(size=(20, 5)) + 100], axis=1)
    where = np.arange(15) < 10
    expected = sharpmax.optimal_temperatures(logits, target)
    for got in (
        sharpmax.optimal_temperatures(padded, target, where),
        sharpmax.optimal_temperatures(np.where(where, padded, -np.inf), target),
        sharpmax.optimal_temperatures(torch.tensor(padded), torch.tensor(target), torch.tensor(where)),
    ):
        np.testing.assert_allclose(got.betas, expected.betas, rtol=1e-9)
        np.testing.assert_allclose(got.entropies, expected.entropies, rtol=1e-9)


@pytest.mark.parametrize("method", ["exact", "grid"])
def test_logits_at_the_lowest_number_are_masked_as_everywhere(method: Any) -> None:
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    padded = np.concatenate([logits, np.full((1, 4), np.finfo(np.float32).min)], axis=1).astype(np.float32)
    plain, masked = (sharpmax.optimal_temperatures(a, [2], method=method) for a in (logits, padded))
    assert (masked.no_optimum, masked.betas.tolist()) == (plain.no_optimum, plain.betas.tolist())
    assert plain.no_optimum == 1


def test_every_row_may_be_dropped() -> None:
    found = sharpmax.optimal_temperatures(np.array([[2.0, 1.0]]), np.array([0]))
    assert (len(found.betas), len(found.entropies), found.already_largest) == (0, 0, 1)


def test_fit_policy_recovers_a_polynomial_and_remembers_its_range() -> None:
    h = RNG.uniform(0.6, 4.4, size=500)
    policy = sharpmax.fit_policy(h, np.polyval(sharpmax.PAPER.coefficients, h))
    np.testing.assert_allclose(policy.coefficients, sharpmax.PAPER.coefficients, rtol=1e-8)
    assert policy.domain == (h.min(), h.max())
    assert policy.beyond == "hold_end"
    np.testing.assert_allclose(
        sharpmax.fit_policy(h, np.polyval(sharpmax.PAPER.coefficients, h), degree=4).coefficients,
        np.polyfit(h, np.polyval(sharpmax.PAPER.coefficients, h), 4),
        rtol=1e-6,
    )
    constant = sharpmax.fit_policy([1.0], [2.0], degree=0)
    assert constant.coefficients == (2.0,)


def test_a_monotone_curve_never_decreases_and_follows_the_samples() -> None:
    h = RNG.uniform(0.6, 8.0, size=4000)
    betas = 1 + np.log1p(h) + RNG.normal(size=4000) * 0.3
    curve = sharpmax.fit_monotone(h, betas)
    assert np.all(np.diff(curve.betas) >= 0)
    np.testing.assert_allclose(curve.betas, 1 + np.log1p(np.array(curve.entropies)), atol=0.1)
    falling = sharpmax.fit_monotone(h, -betas + 10)
    np.testing.assert_allclose(falling.betas, np.mean(10 - betas), rtol=1e-12)
    repeated = sharpmax.fit_monotone([1.0] * 48 + [2.0] * 48, [1.0] * 48 + [3.0] * 48)
    assert repeated.entropies == (1.0, 2.0)
    assert repeated.betas == (1.0, 3.0)
    for entropies in ([2.3] * 81, [0.7] * 49, [2.3] * 45 + [1.1] * 45):  # bin means that round apart
        assert np.all(np.diff(sharpmax.fit_monotone(entropies, np.ones(len(entropies))).entropies) > 0)


def any_text(text: str) -> Any:
    """``text``, whatever a type checker would say."""
    return text


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("logits \\[rows, n\\]", lambda: sharpmax.optimal_temperatures(np.zeros(3), np.zeros(3))),
        ("not masked", lambda: sharpmax.optimal_temperatures(np.zeros((1, 3)), np.array([3]))),
        ("not masked", lambda: sharpmax.optimal_temperatures(np.array([[0.0, -np.inf]]), np.array([1]))),
        ("finite or masked, got NaN", lambda: sharpmax.optimal_temperatures(np.array([[np.nan, 1.0]]), [1])),
        ("where to broadcast", lambda: sharpmax.optimal_temperatures(np.zeros((1, 3)), [0], np.ones(2, bool))),
        ("'exact' or 'grid'", lambda: sharpmax.optimal_temperatures(np.zeros((1, 3)), [0], method=any_text("guess"))),
        ("needs more than 4 distinct", lambda: sharpmax.fit_policy([1.0, 2.0], [1.0, 2.0])),
        ("finite", lambda: sharpmax.fit_policy([1.0, np.nan], [1.0, 2.0], 1)),
        ("as many entropies", lambda: sharpmax.fit_policy([1.0, 2.0], [1.0])),
        ("at least 2 knots", lambda: sharpmax.fit_monotone([1.0, 2.0], [1.0, 2.0], knots=1)),
    ],
)
def test_bad_input(message: str, call: object) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()  # pyright: ignore[reportCallIssue]
    assert "\n" not in str(caught.value)
