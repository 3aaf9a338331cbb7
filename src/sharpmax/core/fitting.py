"""Fitting a policy to a head (Appendix F): optimal temperatures of rows, and a curve of beta against entropy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .arrays import broadcasts, floating_dtype, mask_threshold, to_numpy
from .policies.entropy import Beyond, EntropyCurve, EntropyPolynomial
from .stats import row_stats

GRID = np.arange(101) / 10
"""The temperatures that the paper tries: 0 to 10 in steps of 0.1."""

BLOCK = 1 << 20
"""Logits that are worked on at a time."""


@dataclass(frozen=True)
class OptimalTemperatures:
    """For rows of logits and a wanted item each, the temperature that gives the item the most probability.

    Attributes:
      index: which rows were kept, in order.
      entropies: the entropy of softmax(logits) of each kept row.
      betas: the optimal inverse temperature of each kept row.
      total: how many rows there were.
      already_largest: rows dropped because the wanted item has the largest logit (the optimum is temperature 0).
      no_optimum: rows whose wanted logit is at or below the mean of all, so that its probability only falls with beta
        and no finite temperature is optimal. The exact search drops them; the grid keeps them at its end.
      at_grid_edge: rows for which the grid's largest temperature was the best one (0 for the exact search).
    """

    index: np.ndarray
    entropies: np.ndarray
    betas: np.ndarray
    total: int
    already_largest: int
    no_optimum: int
    at_grid_edge: int


def optimal_temperatures(
    logits: Any, target: Any, where: Any = None, *, method: Literal["exact", "grid"] = "exact"
) -> OptimalTemperatures:
    """The optimal temperature of every row of ``logits`` ``[rows, n]`` whose wanted item is ``target`` ``[rows]``.

    The logarithm of the item's probability is concave in beta, and largest where its logit equals the mean logit under
    beta. ``"exact"`` finds that point with Newton's method inside a shrinking bracket, in float64; ``"grid"`` tries the
    paper's temperatures, 0 to 10 in steps of 0.1.
    """
    if method not in ("exact", "grid"):
        raise ValueError(f"expected method to be 'exact' or 'grid', got {method!r}")
    logits = logits if hasattr(logits, "dtype") else np.asarray(logits, np.float64)
    threshold = mask_threshold(floating_dtype(logits))
    s, wanted = to_numpy(logits), to_numpy(target, np.int64)
    if s.ndim != 2 or wanted.shape != s.shape[:1]:
        raise ValueError(f"expected logits [rows, n] and target [rows], got shapes {s.shape} and {wanted.shape}")
    valid = ~(s < threshold)  # the mask rule of row_stats
    if where is not None:
        keep = to_numpy(where, bool)
        if not broadcasts(keep.shape, s.shape):
            raise ValueError(f"expected where to broadcast against logits of shape {s.shape}, got shape {keep.shape}")
        valid &= keep
    if not np.all(np.isfinite(s[valid])):
        raise ValueError("expected logits that are finite or masked, got NaN or +inf")
    rows = np.arange(len(s))
    if np.any((wanted < 0) | (wanted >= s.shape[1])) or not np.all(valid[rows, wanted]):
        raise ValueError("expected every target to be the index of a logit that is not masked")

    shifted = np.where(valid, s - np.max(s, axis=1, where=valid, initial=-np.inf, keepdims=True), 0.0)
    item = shifted[rows, wanted]
    largest = item == 0
    hopeless = ~largest & (item <= np.sum(shifted, axis=1) / np.sum(valid, axis=1))
    kept = np.flatnonzero(~largest & ~hopeless if method == "exact" else ~largest)
    search = _exact if method == "exact" else _grid
    betas = np.concatenate([search(shifted[i], valid[i], item[i]) for i in _blocks(kept, s.shape[1])] or [np.empty(0)])
    entropies = row_stats(s[kept], where=valid[kept], with_min=False).entropy if len(kept) else np.empty(0)
    edge = 0 if method == "exact" else int(np.sum(betas == 1 / GRID[-1]))
    return OptimalTemperatures(kept, entropies, betas, len(s), int(largest.sum()), int(hopeless.sum()), edge)


def _blocks(index: np.ndarray, n: int) -> Iterator[np.ndarray]:
    step = max(1, BLOCK // max(1, n))
    return (index[start : start + step] for start in range(0, len(index), step))


def _moments(shifted: np.ndarray, valid: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of the logits under softmax(beta * logits)."""
    p = np.where(valid, np.exp(beta[:, None] * shifted), 0.0)
    p /= p.sum(axis=1, keepdims=True)
    mean = np.sum(p * shifted, axis=1)
    return mean, np.sum(p * (shifted - mean[:, None]) ** 2, axis=1)


def _exact(shifted: np.ndarray, valid: np.ndarray, item: np.ndarray) -> np.ndarray:
    """The root of ``item - mean(beta)``, which falls from above 0 at beta = 0 to ``item < 0`` at infinity."""
    low, high = np.zeros(len(item)), np.full(len(item), 1.0)
    while np.any(short := _moments(shifted, valid, high)[0] < item):
        low, high = np.where(short, high, low), np.where(short, 2 * high, high)
    beta = (low + high) / 2
    for _ in range(200):
        mean, variance = _moments(shifted, valid, beta)
        below = mean < item
        low, high = np.where(below, beta, low), np.where(below, high, beta)
        with np.errstate(divide="ignore", invalid="ignore"):
            step = beta + (item - mean) / variance
        following = np.where((step > low) & (step < high), step, (low + high) / 2)
        done = np.abs(following - beta) <= 4e-16 * beta
        beta = following
        if np.all(done):
            break
    return beta


def _grid(shifted: np.ndarray, valid: np.ndarray, item: np.ndarray) -> np.ndarray:
    best, probability = np.full(len(item), np.inf), np.full(len(item), -np.inf)
    for theta in GRID[1:]:  # At temperature 0 the wanted item, which is not the largest, has probability 0.
        log_p = item / theta - np.log(np.sum(np.where(valid, np.exp(shifted / theta), 0.0), axis=1))
        better = log_p > probability
        best, probability = np.where(better, theta, best), np.where(better, log_p, probability)
    return 1 / best


def fit_policy(
    entropies: Any,
    optimal_betas: Any,
    degree: int = 4,
    *,
    threshold: float = 0.5,
    floor: float = 1.0,
    beyond: Beyond = "hold_end",
) -> EntropyPolynomial:
    """The least-squares polynomial of beta against entropy (Equation 17); it remembers the range it was fitted on.

    Beyond it, it holds its value unless ``beyond`` says otherwise; ``"extrapolate"`` is what the paper does.
    """
    h, beta = _samples(entropies, optimal_betas)
    if degree < 0 or len(np.unique(h)) <= degree:
        raise ValueError(
            f"a polynomial of degree {degree} needs more than {degree} distinct entropies, got {len(np.unique(h))}"
        )
    domain = (float(h.min()), float(h.max()))
    fitted = np.polynomial.Polynomial.fit(h, beta, degree).convert().coef
    coefficients = np.zeros(degree + 1)
    coefficients[: len(fitted)] = fitted
    return EntropyPolynomial(
        tuple(float(c) for c in coefficients[::-1]),
        threshold=threshold,
        floor=floor,
        domain=domain if domain[0] < domain[1] else None,
        beyond=beyond if domain[0] < domain[1] else "extrapolate",
    )


def fit_monotone(
    entropies: Any, optimal_betas: Any, knots: int = 16, *, threshold: float = 0.5, floor: float = 1.0
) -> EntropyCurve:
    """A curve of beta against entropy that never decreases: isotonic regression of ``knots`` quantile bins.

    For heads that meet entropies far above those of the samples, where a polynomial turns down; the curve stays.
    """
    h, beta = _samples(entropies, optimal_betas)
    if knots < 2:
        raise ValueError(f"expected at least 2 knots, got {knots}")
    order = np.argsort(h, kind="stable")
    bins = [b for b in np.array_split(order, min(knots, len(order))) if len(b)]
    at, values, weights = ([float(f(b)) for b in bins] for f in (lambda b: h[b].mean(), lambda b: beta[b].mean(), len))
    at = np.maximum.accumulate(at).tolist()  # the means of equal entropies may differ by a rounding
    increasing = _isotonic(values, weights)
    curve: dict[float, list[float]] = {}
    for entropy, value in zip(at, increasing, strict=True):
        curve.setdefault(entropy, []).append(value)
    return EntropyCurve(
        tuple(curve), tuple(float(np.mean(v)) for v in curve.values()), threshold=threshold, floor=floor
    )


def _isotonic(values: list[float], weights: list[float]) -> list[float]:
    """The closest non-decreasing sequence, by pooling adjacent violators."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, wa, na), (b, wb, nb) = pools[-2:]
            pools[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    return [mean for mean, _, length in pools for _ in range(length)]


def _samples(entropies: Any, betas: Any) -> tuple[np.ndarray, np.ndarray]:
    h, beta = to_numpy(entropies), to_numpy(betas)
    if h.ndim != 1 or h.shape != beta.shape or not len(h):
        raise ValueError(f"expected as many entropies as betas, at least one, got shapes {h.shape} and {beta.shape}")
    if not (np.all(np.isfinite(h)) and np.all(np.isfinite(beta))):
        raise ValueError("expected entropies and betas to be finite; drop the samples without a finite optimum first")
    return h, beta
