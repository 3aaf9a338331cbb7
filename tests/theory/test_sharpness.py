"""Propositions 3.1 and 3.2, on every library."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import sharpmax
from sharpmax import theory
from tests.arrays import LIBRARIES, make, numbers

RNG = np.random.default_rng(6)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_spread_is_within_the_bound_of_proposition_3_1(library: str) -> None:
    for scale in (1.0, -0.25):
        Q, K = RNG.normal(size=(8, 5)), RNG.normal(size=(8, 5))
        x, y = RNG.normal(size=(20, 30, 5)) * 3, RNG.normal(size=(20, 5))
        logits = scale * np.einsum("bk,bnk->bn", y @ Q.T, x @ K.T)
        bound = numbers(theory.spread_bound(*(make(library, a) for a in (Q, K, x, y)), scale=scale))
        expected = 2 * abs(scale) * np.linalg.norm(Q, 2) * np.linalg.norm(K, 2)
        expected = expected * np.linalg.norm(y, axis=-1) * np.linalg.norm(x, axis=-1).max(axis=-1)
        np.testing.assert_allclose(bound, expected, rtol=1e-5)
        assert np.all(numbers(sharpmax.row_stats(logits).spread) <= expected)


def test_the_bound_is_attained_by_opposite_singular_vectors() -> None:
    Q, K = RNG.normal(size=(6, 6)), RNG.normal(size=(6, 6))
    left_q, sizes_q, right_q = np.linalg.svd(Q)
    # A key matrix whose first left singular vector is that of Q, and items along its first right one, both ways.
    _, sizes_k, right_k = np.linalg.svd(K)
    K = left_q @ np.diag(sizes_k) @ right_k
    y, x = right_q[0] * 2, np.stack([right_k[0], -right_k[0]]) * 3
    spread = sharpmax.row_stats((K @ x.T).T @ (Q @ y)).spread
    assert spread == pytest.approx(theory.spread_bound(Q, K, x, y), rel=1e-12)
    assert spread == pytest.approx(2 * sizes_q[0] * sizes_k[0] * 2 * 3, rel=1e-12)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0, 2.5])
def test_the_slope_of_the_entropy(library: str, beta: float) -> None:
    x = np.concatenate([RNG.normal(size=(4, 12)) * 2, np.zeros((1, 12))])
    step = 1e-5
    difference = [sharpmax.row_stats((beta + s) * x).entropy for s in (step, -step)]
    numeric = (difference[0] - difference[1]) / (2 * step)
    with jax.enable_x64(True):
        slope = numbers(theory.entropy_slope(make(library, x, "float64"), beta))
    np.testing.assert_allclose(slope, numeric, atol=1e-8)
    assert np.all(slope <= 0)


def test_the_slope_of_narrow_types_and_of_hard_rows() -> None:
    assert theory.entropy_slope(np.array([400, 0, 0], np.float16)) == 0
    assert theory.entropy_slope(np.array([1e20, 0, 0], np.float32)) == 0
    assert theory.entropy_slope(np.array([1.0, 2.0]), np.inf) == 0
    narrow, wide = (theory.entropy_slope(np.array([1000, 1001, 1002], t)) for t in (np.float16, np.float64))
    assert narrow == pytest.approx(wide, rel=1e-5)


def test_masked_logits_do_not_enter_the_slope() -> None:
    x = RNG.normal(size=(3, 8))
    padded = np.concatenate([x, np.full((3, 2), -np.inf)], axis=1)
    np.testing.assert_allclose(theory.entropy_slope(padded, 1.3), theory.entropy_slope(x, 1.3))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected Q \[m', m\]"):
        theory.spread_bound(np.ones((3, 2)), np.ones((3, 2)), np.ones((4, 3)), np.ones(2))
