"""Appendix F on a trained head: optimal temperatures of validation sets, and policies fitted to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from ...core.fitting import fit_monotone, fit_policy, optimal_temperatures
from ...core.policies import EntropyCurve, EntropyPolynomial
from .data import Stream
from .evaluation import sample_logits
from .model import Params


@dataclass(frozen=True)
class Samples:
    """Pairs of entropy and optimal beta (Figure 6), one for every validation set that has a finite optimum.

    Attributes:
      entropies, betas: the pairs.
      seed, size: the head and the number of items each pair comes from.
      counts: for every size and all heads together, how many sets there were (``total``) and how many were dropped:
        ``already_largest``, the optimum is temperature 0; ``no_optimum``, no finite temperature is optimal.
      seeds, sizes: all heads and sizes that were asked for.
    """

    entropies: np.ndarray
    betas: np.ndarray
    seed: np.ndarray
    size: np.ndarray
    counts: dict[int, dict[str, int]]
    seeds: tuple[int, ...]
    sizes: tuple[int, ...]

    def fit(self, degree: int = 4, **options: Any) -> EntropyPolynomial:
        """One polynomial for all heads; ``options`` are those of :func:`sharpmax.fit_policy`."""
        return fit_policy(self.entropies, self.betas, degree, **options)

    def fit_monotone(self, knots: int = 16, **options: Any) -> EntropyCurve:
        """One curve that never decreases for all heads; ``options`` are those of :func:`sharpmax.fit_monotone`."""
        return fit_monotone(self.entropies, self.betas, knots, **options)


def collect(
    params: Params,
    seeds: Sequence[int],
    sizes: Sequence[int],
    sets: int,
    *,
    method: Literal["exact", "grid"] = "exact",
    stream: Stream = Stream.VALIDATION,
    precision: str = "highest",
) -> Samples:
    """Samples of every head at every size, from sets that neither training nor evaluation sees.

    Args:
      params: parameters of one head per seed, ``[seeds, ...]`` each.
      seeds: the seed of each head.
      sizes: numbers of items.
      sets: how many sets for each size and seed; those without a finite optimum are dropped.
      method: that of :func:`sharpmax.optimal_temperatures`; ``"grid"`` is the paper's.
      stream: which of the seed's random numbers to use.
      precision: of matrix products, as JAX names it.
    """
    entropies, betas, seed_of, size_of = [], [], [], []
    counts = {n: {"total": 0, "already_largest": 0, "no_optimum": 0} for n in sizes}
    for i, seed in enumerate(seeds):
        head = jax.tree.map(lambda a, i=i: a[i], params)
        for n in sizes:
            e, target = sample_logits(head, seed, n, sets, stream=stream, precision=precision)
            found = optimal_temperatures(e, target, method=method)
            for name, count in counts[n].items():
                counts[n][name] = count + getattr(found, name)
            entropies.append(found.entropies)
            betas.append(found.betas)
            seed_of.append(np.full(len(found.betas), seed))
            size_of.append(np.full(len(found.betas), n))
    pairs = (np.concatenate(part) for part in (entropies, betas, seed_of, size_of))
    return Samples(*pairs, counts=counts, seeds=tuple(seeds), sizes=tuple(sizes))
