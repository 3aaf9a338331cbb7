"""Two models on the same samples: McNemar's exact test, Holm's correction, and bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000


class Pairs(NamedTuple):
    """Samples that two models were asked, counted by who was right."""

    n: int
    first: int
    """Right by the first model alone."""

    second: int
    """Right by the second model alone."""

    both: int

    @property
    def difference(self) -> float:
        """The accuracy of the second model less that of the first."""
        return (self.second - self.first) / self.n if self.n else 0.0


def mcnemar(first: int, second: int) -> float:
    """The p-value of McNemar's exact test: a sample that one model alone gets right is as likely to be either's.

    Two-sided, from whole numbers without rounding: twice the smaller tail of the binomial distribution, at most 1.
    """
    n, fewer = first + second, min(first, second)
    term = total = 1
    for k in range(fewer):
        term = term * (n - k) // (k + 1)
        total += term
    return min(1.0, 2 * total / 2**n)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number by Holm's method: one below 0.05 is rejected there at that level."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = highest
    return corrected


def intervals(groups: Sequence[Pairs], seed: int = 0, level: float = 0.95) -> dict[str, tuple[float, float]]:
    """Bootstrap intervals of the difference in accuracy, with samples drawn anew within each group.

    ``groups`` is the mean over the groups of their differences, ``samples`` the difference over all samples.
    """
    drawn = np.random.default_rng(seed)
    sums = np.zeros((RESAMPLES, len(groups)))
    for i, pairs in enumerate(groups):
        shares = np.array([pairs.second, pairs.first, pairs.n - pairs.first - pairs.second]) / pairs.n
        counts = drawn.multinomial(pairs.n, shares, RESAMPLES)
        sums[:, i] = counts[:, 0] - counts[:, 1]
    n = np.array([pairs.n for pairs in groups])
    tails = [(1 - level) / 2, (1 + level) / 2]
    means, overall = (sums / n).mean(axis=1), sums.sum(axis=1) / n.sum()
    low, high = np.quantile(means, tails), np.quantile(overall, tails)
    return {"groups": (float(low[0]), float(low[1])), "samples": (float(high[0]), float(high[1]))}
