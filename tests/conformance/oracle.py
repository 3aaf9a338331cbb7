"""The truth about one row of logits, in 50 digits.

Written from the definitions, with mpmath, and without any of the package under test: a policy is read from its JSON
form. With ``p = softmax(s)``, ``w = softmax(beta s)`` and a cotangent ``g`` of ``w``, the gradient is

    dL/ds_i = beta w_i (g_i - <g, w>) + dL/dbeta beta'(H) dH/ds_i
    dL/dbeta = sum_i w_i s_i (g_i - <g, w>)        dH/ds_i = -p_i (s_i - mean)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mpmath import mp, mpf

from .recipes import LOWEST

DIGITS = 50


@dataclass(frozen=True)
class Beta:
    """Beta of a row, and what is needed to judge an approximation of it.

    ``slope`` is the derivative with respect to the entropy that a gradient sees (0 when detached), ``sensitivity`` the
    one that an error of the entropy sees, ``curvature`` the sum of the magnitudes of the second derivative's terms;
    ``magnitude`` bounds the intermediate numbers of an evaluation, and ``margin`` is the distance in entropy to the
    nearest point where beta or its slope jumps.
    """

    value: Any
    slope: Any
    sensitivity: Any
    curvature: Any
    magnitude: Any
    margin: Any


@dataclass(frozen=True)
class Answer:
    """Everything about a row: statistics by name, beta, weights and the gradient of ``<cotangent, weights>``."""

    stats: dict[str, Any]
    beta: Beta
    weights: list[Any]
    gradient: list[Any]


def solve(
    logits: Sequence[Any], where: Sequence[bool] | None, cotangent: Sequence[float], dtype: str, policy: Any
) -> Answer:
    """The answer for one row; ``logits`` and ``cotangent`` are taken as exact numbers."""
    with mp.workdps(DIGITS):
        return _solve(logits, where, cotangent, LOWEST[dtype] / 2, policy)


def _solve(logits: Any, where: Any, cotangent: Any, mask_bound: float, policy: Any) -> Answer:
    n = len(logits)
    kept = [i for i in range(n) if (where is None or where[i]) and logits[i] > mask_bound]
    zeros = [mpf(0)] * n
    if not kept:
        stats: dict[str, Any] = {"max": -mp.inf, "sum": mpf(0), "moment": mpf(0), "min": mp.inf, "count": 0}
        stats |= {"lse": -mp.inf, "mean": -mp.inf, "entropy": mpf(0), "spread": mpf(0)}
        return Answer(stats, beta_of(policy, mpf(0), 0), zeros, zeros)

    s = {i: mpf(logits[i]) for i in kept}
    top, bottom = max(s.values()), min(s.values())
    exponentials = _exponentials([s[i] - top for i in kept])
    e = dict(zip(kept, exponentials, strict=True))
    total = mp.fsum(e.values())
    moment = mp.fsum(e[i] * (s[i] - top) for i in kept)
    mean = top + moment / total
    entropy = mp.log(total) - moment / total
    stats = {"max": top, "sum": total, "moment": moment, "min": bottom, "count": len(kept), "lse": top + mp.log(total)}
    stats |= {"mean": mean, "entropy": entropy, "spread": top - bottom}

    beta = beta_of(policy, entropy, len(kept))
    weights, gradient = list(zeros), list(zeros)
    if mp.isinf(beta.value):
        ties = [i for i in kept if s[i] == top]
        for i in ties:
            weights[i] = mpf(1) / len(ties)
        return Answer(stats, beta, weights, gradient)
    powers = _exponentials([beta.value * (s[i] - top) for i in kept])
    normaliser = mp.fsum(powers)
    for i, power in zip(kept, powers, strict=True):
        weights[i] = power / normaliser
    g = {i: mpf(cotangent[i]) for i in kept}
    average = mp.fsum(g[i] * weights[i] for i in kept)
    d_beta = mp.fsum(weights[i] * (s[i] - top) * (g[i] - average) for i in kept)
    d_entropy = d_beta * beta.slope
    for i in kept:
        gradient[i] = beta.value * weights[i] * (g[i] - average) - d_entropy * e[i] / total * (s[i] - mean)
    return Answer(stats, beta, weights, gradient)


def _exponentials(exponents: list[Any]) -> list[Any]:
    """exp of every exponent; equal ones (many, in narrow types) are computed once."""
    known = {x: mp.exp(x) for x in set(exponents)}
    return [known[x] for x in exponents]


def beta_of(policy: dict[str, Any], entropy: Any, count: int) -> Beta:
    """Beta that the policy with this JSON form gives a row of this entropy and count."""
    kind = policy["kind"]
    if kind == "Detached":
        inner = beta_of(policy["policy"], entropy, count)
        return Beta(inner.value, mpf(0), inner.sensitivity, mpf(0), inner.magnitude, inner.margin)
    if kind == "EntropyPolynomial":
        return _polynomial(policy, entropy)
    if kind == "EntropyCurve":
        return _curve(policy, entropy)
    if kind == "Constant":
        value = mpf(policy["beta"])
    elif kind == "Hard":
        value = mp.inf
    elif kind == "LogLength":
        value = _log_length(policy, mpf(count))
    else:
        raise ValueError(f"the oracle does not know the policy {kind!r}")
    size = mpf(0) if mp.isinf(value) else abs(value)
    if kind == "LogLength":
        size += abs(policy["scale"]) * mp.log(max(count, 1)) + abs(policy["bias"])
    return Beta(value, mpf(0), mpf(0), mpf(0), size, mp.inf)


def _log_length(policy: dict[str, Any], count: Any) -> Any:
    scale = mpf(policy["scale"])
    if policy["reference"] is None:
        return max(scale * mp.log(max(count, 1)) + mpf(policy["bias"]), mpf(0))
    multiple = count / mpf(policy["reference"])
    if policy["steps"]:
        return 1 + scale * mp.log(mp.floor(multiple) + 1)
    return (1 + scale * mp.log(max(multiple, mpf(1)))) ** policy["power"]


def _polynomial(policy: dict[str, Any], entropy: Any) -> Beta:
    coefficients = [mpf(c) for c in policy["coefficients"]]
    threshold, floor = mpf(policy["threshold"]), mpf(policy["floor"])
    lo, hi = _held_range(policy, coefficients)
    kinks = [threshold, lo, hi]
    # Where the polynomial crosses its floor, the slope jumps.
    kinks += _real_roots([*coefficients[:-1], coefficients[-1] - floor])
    margin = min((abs(entropy - k) for k in kinks if not mp.isinf(k)), default=mp.inf)
    if entropy <= threshold:
        return Beta(mpf(1), mpf(0), mpf(0), mpf(0), mpf(1), margin)
    u = min(max(entropy, lo), hi)
    degree = len(coefficients) - 1
    terms = [(c, degree - i) for i, c in enumerate(coefficients)]
    value = mp.fsum(c * u**k for c, k in terms)
    size = mp.fsum(abs(c) * u**k for c, k in terms)
    if value <= floor:
        return Beta(floor, mpf(0), mpf(0), mpf(0), floor, margin)
    if u != entropy:
        return Beta(value, mpf(0), mpf(0), mpf(0), size, margin)
    slope = mp.fsum(c * k * u ** (k - 1) for c, k in terms if k)
    curvature = mp.fsum(abs(c) * k * (k - 1) * u ** (k - 2) for c, k in terms if k > 1)
    return Beta(value, slope, abs(slope), curvature, size, margin)


def _held_range(policy: dict[str, Any], coefficients: list[Any]) -> tuple[Any, Any]:
    """The entropies beyond which the value is held."""
    domain = policy["domain"]
    if policy["beyond"] in ("extrapolate", "raise"):
        return -mp.inf, mp.inf
    lo, hi = (mpf(domain[0]), mpf(domain[1])) if domain is not None else (mpf(policy["threshold"]), mp.inf)
    if policy["beyond"] == "hold_end":
        return lo, hi
    degree = len(coefficients) - 1
    derivative = [c * (degree - i) for i, c in enumerate(coefficients[:-1])]
    candidates = [lo, *(r for r in _real_roots(derivative) if lo < r < hi)] + ([] if mp.isinf(hi) else [hi])
    peak = max(candidates, key=lambda h: mp.polyval(coefficients, h))
    return (lo if domain is not None else -mp.inf), peak


def _real_roots(coefficients: list[Any]) -> list[Any]:
    while coefficients and coefficients[0] == 0:
        coefficients = coefficients[1:]
    if len(coefficients) < 2:
        return []
    roots = mp.polyroots(coefficients, maxsteps=500, extraprec=200)
    return [mp.re(r) for r in roots if abs(mp.im(r)) < mpf(10) ** -20]


def _curve(policy: dict[str, Any], entropy: Any) -> Beta:
    knots = [(mpf(h), mpf(b)) for h, b in zip(policy["entropies"], policy["betas"], strict=True)]
    threshold, floor = mpf(policy["threshold"]), mpf(policy["floor"])
    slope = mpf(0)
    value = knots[0][1] if entropy <= knots[0][0] else knots[-1][1]
    kinks = [threshold, *(h for h, _ in knots)]
    for (left, low), (right, high) in pairwise(knots):
        rise = (high - low) / (right - left)
        if left < entropy <= right:
            value, slope = low + rise * (entropy - left), rise
        if min(low, high) < floor < max(low, high):
            kinks.append(left + (floor - low) / rise)
    size = mp.fsum(abs(b - a) for (_, a), (_, b) in pairwise(knots)) + abs(knots[0][1])
    margin = min(abs(entropy - k) for k in kinks)
    if entropy <= threshold:
        return Beta(mpf(1), mpf(0), mpf(0), mpf(0), mpf(1), margin)
    if value <= floor:
        return Beta(floor, mpf(0), mpf(0), mpf(0), size, margin)
    return Beta(value, slope, abs(slope), mpf(0), size, margin)


def dot(values: Sequence[Any], vector: Sequence[float]) -> Any:
    """The exact dot product of an answer with a vector."""
    with mp.workdps(DIGITS):
        return mp.fsum(value * mpf(x) for value, x in zip(values, vector, strict=True))
