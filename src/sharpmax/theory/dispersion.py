"""How sharp softmax can be: Lemma 2.1, Theorem 2.2 and Corollary B.1 as numbers."""

from __future__ import annotations

import decimal
import math
from typing import Any, NamedTuple

import numpy as np

MACHINE_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
"""The distance from 1 to the next larger number, by type."""


LARGEST_EXPONENT = 9000
"""The largest spread / theta whose lengths, of 3,900 digits, are still written out."""


class CoefficientBounds(NamedTuple):
    """Bounds of every softmax coefficient of ``n`` logits within a spread; see :func:`coefficient_bounds`."""

    lower: Any
    upper: Any
    attained_lower: Any
    attained_upper: Any


def coefficient_bounds(n: Any, spread: Any, theta: Any = 1.0) -> CoefficientBounds:
    r"""Bounds of the softmax coefficients of ``n`` logits whose maximum and minimum differ by at most ``spread``.

    ``lower`` and ``upper`` are those of Lemma 2.1 (Equation 8), with :math:`d = \delta / \theta`:

    .. math:: \frac1n e^{-d} \le \alpha_k \le \frac1n e^{d}

    ``attained_lower`` and ``attained_upper`` are the extremes that some logits reach, one item at one end of the spread
    and all others at the other: :math:`1 / (1 + (n-1) e^{d})` and :math:`e^{d} / (e^{d} + n - 1)`. Arguments broadcast.
    """
    n, d = np.asarray(n, np.float64), _scaled(spread, theta)
    if not np.all(n >= 1):
        raise ValueError(f"expected n to be at least 1, got {np.min(n):g}")
    with np.errstate(over="ignore", invalid="ignore"):
        growth, decay = np.exp(d), np.exp(-d)
        attained_lower = np.where(n == 1, 1.0, 1 / (1 + (n - 1) * growth))
        bounds = decay / n, growth / n, attained_lower, 1 / (1 + (n - 1) * decay)
    return CoefficientBounds(*(b[()] for b in np.broadcast_arrays(*bounds)))


class DispersionLength(NamedTuple):
    """From how many items on every coefficient is below epsilon; see :func:`dispersion_length`."""

    paper: int
    attained: int


def dispersion_length(spread: float, epsilon: float, theta: float = 1.0) -> DispersionLength:
    r"""The smallest ``n`` such that every coefficient of ``n`` or more logits within ``spread`` is below ``epsilon``.

    ``paper`` is that of Theorem 2.2, the first integer above :math:`e^{\delta/\theta} / \epsilon`. ``attained`` follows
    from the extreme that is reached, the first integer above :math:`1 + e^{\delta/\theta} (1/\epsilon - 1)`: one item
    fewer, and some logits still have a coefficient of at least epsilon. Both are exact integers, however large;
    arguments count as the decimal numbers they are written as.
    """
    d = float(_scaled(spread, theta))
    if d > LARGEST_EXPONENT:
        raise ValueError(f"expected spread / theta to be at most {LARGEST_EXPONENT}, got {d:g}")
    if not 0 < epsilon <= 1:
        raise ValueError(f"expected epsilon to be above 0 and at most 1, got {epsilon}")
    digits = 60 + int(d / 2) - math.floor(math.log10(epsilon))
    with decimal.localcontext(prec=digits, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN):
        growth = (_decimal(spread) / _decimal(theta)).exp()
        reciprocal = 1 / _decimal(epsilon)
        return DispersionLength(_above(growth * reciprocal), _above(1 + growth * (reciprocal - 1)))


def failure_length(spread: float, dtype: str = "float32", theta: float = 1.0) -> int:
    r"""The ``n`` of Corollary B.1: from here on the largest coefficient is below the machine epsilon of ``dtype``.

    The first integer above :math:`e^{\delta/\theta} / \epsilon`. A head that reads one item out of ``n`` must then err.
    """
    if dtype not in MACHINE_EPSILON:
        raise ValueError(f"expected dtype to be one of {', '.join(MACHINE_EPSILON)}, got {dtype!r}")
    return dispersion_length(spread, MACHINE_EPSILON[dtype], theta).paper


def _decimal(value: float) -> decimal.Decimal:
    return decimal.Decimal(repr(float(value)))


def _above(value: decimal.Decimal) -> int:
    return int(value.to_integral_value(decimal.ROUND_FLOOR)) + 1


def _scaled(spread: Any, theta: Any) -> np.ndarray:
    spread, theta = np.asarray(spread, np.float64), np.asarray(theta, np.float64)
    if not np.all((spread >= 0) & np.isfinite(spread)):
        raise ValueError(f"expected spread to be a finite number of at least 0, got {spread}")
    if not np.all((theta > 0) & np.isfinite(theta)):
        raise ValueError(f"expected theta to be a finite number above 0, got {theta}")
    return spread / theta
