"""Where the paper as printed and the mathematics part: each test shows the printed form and the right one."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import sharpmax
from benchmarks.figure4 import COEFFICIENTS, jax_figure4, torch_figure4

RNG = np.random.default_rng(7)
LOGITS = RNG.normal(size=200) * 2


def entropy_of(logits: np.ndarray) -> float:
    p = np.exp(logits - logits.max())
    p /= p.sum()
    return float(-np.sum(p * np.log(p)))


def test_the_final_expression_of_appendix_g_is_minus_the_entropy() -> None:
    m = LOGITS.max()
    lam = np.exp(LOGITS - m)
    total, moment = lam.sum(), np.sum(lam * LOGITS)
    printed = moment / total - m - np.log(total)
    assert printed == pytest.approx(-entropy_of(LOGITS), rel=1e-12)
    assert float(sharpmax.row_stats(LOGITS).entropy) == pytest.approx(entropy_of(LOGITS), rel=1e-12)


def stream(logits: np.ndarray, *, as_printed: bool) -> float:
    """Appendix G's recurrences for Lambda and K, adding lambda relative to the old maximum, or to the new one."""
    m, total, moment = logits[0], 1.0, logits[0]
    for s in logits[1:]:
        new = max(m, s)
        lam = np.exp(s - (m if as_printed else new))
        total, moment = total * np.exp(m - new) + lam, moment * np.exp(m - new) + lam * s
        m = new
    return float(np.log(total) + m - moment / total)


def test_the_recurrence_must_use_the_new_maximum() -> None:
    rising = np.sort(LOGITS)
    assert abs(stream(rising, as_printed=True) - entropy_of(rising)) > 0.05
    assert stream(rising, as_printed=False) == pytest.approx(entropy_of(rising), rel=1e-10)
    stats = sharpmax.row_stats(rising[:1])
    for s in rising[1:]:
        stats = stats.merge(sharpmax.row_stats(s[None]))
    assert float(stats.entropy) == pytest.approx(entropy_of(rising), rel=1e-10)


def test_the_unshifted_moment_loses_digits_to_an_offset() -> None:
    x = (LOGITS + 1e4).astype(np.float32)
    exact = entropy_of(x.astype(np.float64))
    lam = np.exp(x - x.max())
    printed = np.log(lam.sum()) + x.max() - np.sum(lam * x) / lam.sum()
    shifted = sharpmax.row_stats(x).entropy
    assert abs(printed - exact) > 1e-4
    assert abs(shifted - exact) < 2e-6


def of_equal(n: int) -> np.ndarray:
    return np.zeros((1, n))


def test_the_polynomial_switches_itself_off_where_dispersion_is_worst() -> None:
    roots = np.roots(np.polysub(COEFFICIENTS, [1.0]))
    real = np.sort(roots[np.abs(roots.imag) < 1e-9].real)
    low, high = real[-2:] if len(real) > 2 else real
    assert (low, high) == pytest.approx((0.8486, 5.9445), abs=5e-5)
    # The gate at 0.5 never binds: up to there the polynomial is below 1 anyway.
    assert np.all(np.polyval(COEFFICIENTS, np.linspace(0, 0.5, 1001)) < 1)
    top = np.linspace(low, high, 200001)
    assert np.polyval(COEFFICIENTS, top).max() == pytest.approx(2.421, abs=5e-4)
    assert top[np.polyval(COEFFICIENTS, top).argmax()] == pytest.approx(4.412, abs=5e-4)
    # As printed, beta is back at 1 for more than 381 equally likely items. Held at its peak, it is not.
    betas = {n: float(sharpmax.PAPER(sharpmax.row_stats(of_equal(n)))[0]) for n in (381, 382, 10_000)}
    assert betas[381] > 1
    assert betas[382] == betas[10_000] == 1
    assert float(sharpmax.PAPER_HELD(sharpmax.row_stats(of_equal(10_000)))[0]) == pytest.approx(2.421, abs=5e-4)


def test_equation_18_would_give_a_negative_temperature() -> None:
    def equation_18(h: float) -> float:
        return min(1 / float(np.polyval(COEFFICIENTS, h)), 1.0)

    root = max(r.real for r in np.roots(COEFFICIENTS) if abs(r.imag) < 1e-9)
    assert root == pytest.approx(6.27, abs=5e-3)
    assert equation_18(root + 0.01) < 0
    flat = of_equal(int(np.exp(root + 0.5)))
    assert float(sharpmax.PAPER(sharpmax.row_stats(flat))[0]) == 1.0


@pytest.mark.parametrize("n", [3, 400])
def test_figure_4_gives_nan_on_a_fully_masked_row(n: int) -> None:
    masked = jnp.full((1, n), -jnp.inf)
    assert np.isnan(jax_figure4(masked)).all()
    assert not np.any(sharpmax.adaptive_temperature_softmax(masked))


def test_figure_4_gives_nan_on_finite_minima_for_some_n() -> None:
    for n, is_nan in ((2, False), (40, True), (400, False)):
        masked = torch.full((1, n), torch.finfo(torch.float32).min)
        assert bool(torch.isnan(torch_figure4(masked)).all()) is is_nan, n
        assert not sharpmax.adaptive_temperature_softmax(masked).any()


def test_the_1e_9_drifts_from_the_entropy_at_large_n() -> None:
    n = 131_072
    p = np.full(n, 1 / n)
    printed = -np.sum(p * np.log(p + 1e-9))
    assert np.log(n) - printed > 1e-4
    assert float(sharpmax.row_stats(np.zeros(n)).entropy) == pytest.approx(np.log(n), rel=1e-12)
