"""Tests of paired outcomes, against SciPy and their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from sharpmax.paper.paired import Pairs, holm, intervals, mcnemar


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 5), (5, 0), (3, 3), (1, 9), (40, 61), (900, 1000)])
def test_mcnemar_is_scipys_binomial_test(first: int, second: int) -> None:
    expected = stats.binomtest(first, first + second).pvalue if first + second else 1.0
    assert mcnemar(first, second) == pytest.approx(expected, rel=1e-9)
    assert mcnemar(first, second) == mcnemar(second, first)


def test_a_p_value_too_small_for_float_is_zero() -> None:
    assert mcnemar(0, 3000) == 0.0
    assert 0 < mcnemar(0, 1000) < 1e-300


def test_holm_rejects_what_the_step_down_procedure_rejects() -> None:
    drawn = np.random.default_rng(0)
    for _ in range(50):
        p = (drawn.random(9) ** 3).tolist()
        level = float(drawn.uniform(0.01, 0.3))
        rejected: list[float] = []
        for rank, value in enumerate(sorted(p)):
            if value > level / (len(p) - rank):
                break
            rejected.append(value)
        assert sorted(x for x, held in zip(p, holm(p), strict=True) if held <= level) == rejected
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_intervals_are_those_of_resampled_samples() -> None:
    groups = [Pairs(200, 20, 40, 100), Pairs(50, 5, 0, 45)]
    values = [np.repeat([1, -1, 0], [g.second, g.first, g.n - g.first - g.second]) for g in groups]
    found = intervals(groups)
    for name, statistic in (("groups", _mean_of_means), ("samples", _overall)):
        wide = stats.norm.ppf(0.975) * _error(name, values)
        assert found[name] == pytest.approx((statistic(values) - wide, statistic(values) + wide), abs=0.004)
    assert found == intervals(groups)


def _mean_of_means(values: list[np.ndarray]) -> float:
    return float(np.mean([v.mean() for v in values]))


def _overall(values: list[np.ndarray]) -> float:
    return float(np.concatenate(values).mean())


def _error(name: str, values: list[np.ndarray]) -> float:
    weights = [1 / len(values) / len(v) if name == "groups" else 1 / sum(map(len, values)) for v in values]
    return float(np.sqrt(sum(w**2 * len(v) * v.var() for w, v in zip(weights, values, strict=True))))
