"""Appendix F on a trained head: optimal temperatures of validation sets, and policies fitted to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from ...core.fitting import fit_monotone, fit_policy, optimal_temperatures
from ...core.policies import EntropyCurve, EntropyPolynomial
from .checkpoint import Checkpoint
from .data import Stream, Task
from .evaluation import sample_logits
from .model import Params

FIT_SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Where optimal temperatures are looked for, unless other sizes are asked for."""

FIT_SETS = 64
"""Validation sets for each size and seed."""

LARGEST_FIT_SIZE, ENOUGH_SAMPLES = 16_384, 100
"""Heads that seldom err give few samples: sizes are doubled up to the first until there are as many as the second."""

DEGREE, SAMPLES_PER_DEGREE = 4, 10
"""Degree of the paper's polynomial; with fewer samples than this for each degree it is lowered."""


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
    task: Task = "max",
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
      task: what is asked for.
      stream: which of the seed's random numbers to use.
      precision: of matrix products, as JAX names it.
    """
    entropies, betas, seed_of, size_of = [], [], [], []
    counts = {n: {"total": 0, "already_largest": 0, "no_optimum": 0} for n in sizes}
    for i, seed in enumerate(seeds):
        head = jax.tree.map(lambda a, i=i: a[i], params)
        for n in sizes:
            e, target = sample_logits(head, seed, n, sets, task=task, stream=stream, precision=precision)
            found = optimal_temperatures(e, target, method=method)
            for name, count in counts[n].items():
                counts[n][name] = count + getattr(found, name)
            entropies.append(found.entropies)
            betas.append(found.betas)
            seed_of.append(np.full(len(found.betas), seed))
            size_of.append(np.full(len(found.betas), n))
    pairs = (np.concatenate(part) for part in (entropies, betas, seed_of, size_of))
    return Samples(*pairs, counts=counts, seeds=tuple(seeds), sizes=tuple(sizes))


@dataclass(frozen=True)
class Fitted:
    """The samples of Appendix F, and the polynomial through them, which holds its value beyond their range.

    Attributes:
      samples: pairs of entropy and optimal beta, of all heads.
      sets: validation sets for each size and seed.
      polynomial: one for all heads.
      notes: where it was not done as asked: sizes that were added, a degree that was lowered.
    """

    samples: Samples
    sets: int
    polynomial: EntropyPolynomial
    notes: tuple[str, ...]

    @property
    def kept(self) -> int:
        """How many samples there are."""
        return len(self.samples.betas)

    def to_dict(self) -> dict[str, Any]:
        """What to report, for JSON."""
        polynomial = self.polynomial
        return {
            "data": "validation sets, separate from those of training and evaluation; one polynomial for all seeds",
            "sizes": list(self.samples.sizes),
            "sets": self.sets,
            "counts": {str(n): dict(counts) for n, counts in self.samples.counts.items()},
            "kept": self.kept,
            "coefficients": list(polynomial.coefficients),
            "domain": None if polynomial.domain is None else list(polynomial.domain),
            "notes": list(self.notes),
        }


def fit(
    checkpoint: Checkpoint,
    sizes: Sequence[int] | None = None,
    sets: int = FIT_SETS,
    progress: Callable[[int], None] | None = None,
) -> Fitted:
    """Fit one polynomial to all heads (Appendix F).

    Args:
      checkpoint: the heads.
      sizes: numbers of items of the validation sets. Without, :data:`FIT_SIZES`, and larger ones for heads that
        err too seldom there.
      sets: validation sets for each size and seed.
      progress: called with every size before it is worked on.
    """
    samples, notes = None, []
    for n in FIT_SIZES if sizes is None else sizes:
        samples = _with_size(checkpoint, samples, n, sets, progress)
    assert samples is not None
    if sizes is None:
        first = f"sizes up to {FIT_SIZES[-1]:,} gave {len(samples.betas)} samples"
        while len(samples.betas) < ENOUGH_SAMPLES and samples.sizes[-1] < LARGEST_FIT_SIZE:
            samples = _with_size(checkpoint, samples, 2 * samples.sizes[-1], sets, progress)
        if samples.sizes != FIT_SIZES:
            notes.append(f"{first}, so sizes up to {samples.sizes[-1]:,} were added: {len(samples.betas)} in all")
    distinct = len(np.unique(samples.entropies))
    degree = min(DEGREE, len(samples.betas) // SAMPLES_PER_DEGREE, max(distinct - 1, 0))
    if not distinct:
        notes.append("the true maximum had the largest logit in every set, so there is nothing to fit: beta is 1")
        return Fitted(samples, sets, EntropyPolynomial((1.0,)), tuple(notes))
    if degree < DEGREE:
        notes.append(f"{len(samples.betas)} samples are too few for degree {DEGREE}; the polynomial has {degree}")
    return Fitted(samples, sets, samples.fit(degree), tuple(notes))


def _with_size(
    checkpoint: Checkpoint, before: Samples | None, n: int, sets: int, progress: Callable[[int], None] | None
) -> Samples:
    if progress is not None:
        progress(n)
    new = collect(checkpoint.params, checkpoint.seeds, (n,), sets, task=checkpoint.protocol.task)
    if before is None:
        return new
    arrays = ("entropies", "betas", "seed", "size")
    return dataclasses.replace(
        before,
        **{name: np.concatenate([getattr(before, name), getattr(new, name)]) for name in arrays},
        counts=before.counts | new.counts,
        sizes=before.sizes + new.sizes,
    )
