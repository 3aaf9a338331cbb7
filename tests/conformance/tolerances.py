r"""How far a right implementation may be from the truth, derived from the type of the logits. Written once, here.

The logits are exact. With ``a`` the epsilon of the type that statistics are held in (float64 for float64 logits,
float32 otherwise), ``o`` the epsilon of the logits' own type, in which weights and gradients are returned,
``t = s - max``, ``p = softmax(s)`` and ``w = softmax(beta s)``, first-order analysis gives:

* ``exp(t)`` has the relative error ``(|t| + C) a``: one rounding of the exponent, ``C`` for exp and what follows it.
* A sum of ``n`` terms adds a relative ``sqrt(n) a`` of the sum of their magnitudes, the probabilistic bound of Higham
  and Mary (2019), in place of the worst case ``n a``. Call ``S = C + sqrt(n)``.
* ``sum``: relative ``rL = (d + S) a`` with ``d = E_p|t|``. ``moment``: absolute ``(E_p t**2 + S d) a L``, and what is
  lost when exponentials underflow.
* Kernels that hold logits in units of log 2 round the maximum there, and sum and moment are relative to that
  (``Result.rounded``): ``r = a |max|`` more for the maximum, ``r L`` for ``sum``, ``r (1 + d) L`` for ``moment``.
  Nothing of this is left in what is made of the three, so the entropy and all else is held to the same.
* ``moment / sum``: ``r1 = (E_p t**2 + 2 S d + d**2) a``; so ``entropy``: ``rL + r1 + (log L + d) a``, whatever offset
  the logits carry. ``lse`` and ``mean`` contain the offset, and add a rounding of it.
* ``beta``: the entropy's error times the policy's sensitivity, and a rounding of the terms it is summed from:
  ``b = |beta'| err(H) + C a magnitude``.
* ``w``: relative ``|t| (b + 2 beta a)`` from the exponent, the mean of that over ``w`` from the normaliser, ``S a``
  from the sum, and one rounding to the output's type, ``o``. Below the type's normal range, its spacing there.
* gradient: the two terms of the chain rule, each bounded by its factors' errors. Weights may be read back in the
  output's type (``o``), each term may be rounded to it before they are added, and ``p (s - mean)`` is made of terms
  that cancel, of magnitude ``p (2 + d + |t|)``.

``FACTOR`` multiplies everything; it covers what first-order analysis leaves out and faster approximations of exp. It is
small: ``test_broken.py`` shows that known mistakes exceed these tolerances.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .cases import Case
from .results import Result

FACTOR = 2.0
C = 4.0

EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}

SPACING = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
"""The absolute error of a tiny number: float16's subnormal spacing; for wider types all that flushing to 0 loses."""

LARGEST = {"float16": 3.5e38, "bfloat16": 3.5e38, "float32": 3.5e38, "float64": 1.8e308}
"""Above this, a statistic overflows the type that it is held in."""


@dataclass(frozen=True)
class Tolerances:
    """Absolute tolerances of a case: numbers by the name of a statistic, and arrays for every weight and gradient."""

    stats: dict[str, float]
    beta: float
    weights: np.ndarray
    gradient: np.ndarray


def tolerances(case: Case, rounded: bool = False) -> Tolerances:
    """The tolerances of a case. Conditioning is computed in float64 from the case's own logits and expected beta."""
    a, o = EPSILON["float64" if case.dtype == "float64" else "float32"], EPSILON[case.dtype]
    kept = case.kept
    every = np.zeros(case.n)
    exact: dict[str, float] = dict.fromkeys(("max", "min", "count"), 0.0)
    terms = case.beta_terms
    if not kept.any():
        zeros: dict[str, float] = dict.fromkeys(("sum", "moment", "lse", "mean", "entropy", "spread"), 0.0)
        stats = exact | zeros
        return Tolerances(stats, FACTOR * C * a * terms["magnitude"], every, every)

    top, total = case.stats["max"], case.stats["sum"]
    with np.errstate(over="ignore", under="ignore"):
        t = np.maximum(case.logits[kept] - top, -1e4)  # beyond, every exponential is 0
        p = np.exp(t)
        p /= p.sum()
        beta = case.beta if np.isfinite(case.beta) else 0.0
        w = np.exp(case.beta * t) if beta == case.beta else (t == 0).astype(np.float64)
        w /= w.sum()
    size = np.abs(t)
    d, q = float(p @ size), float(p @ t**2)
    log_total = float(np.log(total))
    S = C + np.sqrt(kept.sum())

    r_sum = (d + S) * a
    r_ratio = (q + 2 * S * d + d * d) * a
    entropy = r_sum + r_ratio + (log_total + d) * a
    stats = exact | {
        "sum": r_sum * total,
        "moment": (q + S * d) * a * total + 1e4 * case.n * SPACING["float64" if case.dtype == "float64" else "float32"],
        "lse": r_sum + (abs(top) + abs(case.stats["lse"]) + log_total) * a,
        "mean": r_ratio + (abs(top) + abs(case.stats["mean"]) + d) * a,
        "entropy": entropy,
        "spread": case.stats["spread"] * a,
    }
    if rounded:
        low, r = abs(case.stats["min"]) * a, abs(top) * a
        more = {"max": r, "min": low, "sum": r * total, "moment": r * (1 + d) * total, "spread": r + low}
        stats |= {name: stats[name] + value for name, value in more.items()}
    b = terms["sensitivity"] * entropy + C * a * terms["magnitude"]

    exponent = b + 2 * beta * a
    r_weight = size * exponent + float(w @ size) * exponent + S * a + o
    e_weight = w * r_weight + SPACING[case.dtype]

    g = case.cotangent[kept]
    centred = np.abs(g - w @ g)
    e_average = float(e_weight @ np.abs(g)) + S * a * float(w @ np.abs(g))
    direct = beta * w * centred
    e_direct = beta * (e_weight * centred + w * e_average) + b * w * centred + (2 * o + C * a) * direct
    d_beta = abs(float((w * t) @ (g - w @ g)))
    e_d_beta = float(size @ (e_weight * centred + w * e_average)) + S * a * float((w * centred) @ size)
    slope = abs(terms["slope"])
    e_slope = terms["curvature"] * entropy + C * a * (terms["magnitude"] if slope else 0.0)
    d_entropy = p * np.abs(t + d)
    e_d_entropy = d_entropy * (size * a + r_sum) + p * ((2 + d + size) * C * a + r_ratio)
    e_through = slope * e_d_beta * d_entropy + d_beta * (e_slope * d_entropy + slope * e_d_entropy)
    e_through += 2 * o * slope * d_beta * d_entropy
    gradient, weights = every.copy(), every.copy()
    weights[kept] = FACTOR * e_weight
    gradient[kept] = FACTOR * (e_direct + e_through + SPACING[case.dtype])
    if beta != case.beta:  # hard rows have gradient 0, exactly
        gradient[kept] = 0.0
    return Tolerances({name: FACTOR * value for name, value in stats.items()}, FACTOR * b, weights, gradient)


def deviations(case: Case, result: Result) -> Iterator[tuple[str, float]]:
    """For everything that ``result`` holds: its name, and its error as a multiple of the tolerance."""
    allowed = tolerances(case, result.rounded)
    largest = LARGEST[case.dtype]
    for name, value in result.stats.items():
        expected = case.stats[name]
        expected = expected if abs(expected) < largest else float(np.copysign(np.inf, expected))
        yield name, _worst(value, expected, allowed.stats[name])
    if result.beta is not None:
        yield "beta", _worst(result.beta, case.beta, allowed.beta)
    arrays = (
        ("weights", result.weights, case.weights, case.weight_probes, allowed.weights),
        ("gradient", result.gradient, case.gradient, case.gradient_probes, allowed.gradient),
    )
    for name, got, expected, expected_probes, tolerance in arrays:
        if got is None:
            continue
        if got.shape != (case.n,):
            yield f"{name}'s shape", np.inf
            continue
        yield name, _worst(got[case.indices], expected, tolerance[case.indices])
        for probe, value in zip(case.probes(), expected_probes, strict=True):
            yield f"{name}'s checksum", _worst(got @ probe, value, float(tolerance.sum()))
        yield f"masked {name}", _worst(got[~case.kept], 0.0, 0.0)


def _worst(got: float | np.ndarray, expected: float | np.ndarray, tolerance: float | np.ndarray) -> float:
    """The largest error over tolerance; infinite for NaN, and for any error where none is allowed."""
    got, expected, tolerance = np.broadcast_arrays(np.asarray(got, np.float64), expected, tolerance)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratio = np.where(got == expected, 0.0, np.abs(got - expected) / tolerance)
    return float(np.max(np.where(np.isnan(ratio), np.inf, ratio), initial=0.0))
