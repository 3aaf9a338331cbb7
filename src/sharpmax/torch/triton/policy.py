"""A lowered policy inside a kernel: beta of a row, and gradients. Coefficients run from the highest power down."""

import triton
import triton.language as tl

from ...core.policies.base import Lowered
from ..geometry import LARGEST_POLYNOMIAL

COEFFICIENTS = LARGEST_POLYNOMIAL
"""How many coefficients the kernels take."""


def policy_values(lowered: Lowered, largest: float) -> tuple[float, ...]:
    """Low and high bound, threshold, floor and all coefficients of a policy, in the order that kernels know.

    Powers that it does not have get coefficient 0. The first three are kept within ``largest``, since a policy without
    bounds has infinite ones.
    """
    missing = COEFFICIENTS - len(lowered.coefficients)
    if missing < 0:
        got = len(lowered.coefficients)
        raise ValueError(f"the Triton kernel evaluates polynomials of up to {COEFFICIENTS} coefficients, got {got}")
    bounds = (min(max(x, -largest), largest) for x in (lowered.lo, lowered.hi, lowered.threshold))
    return tuple(float(x) for x in (*bounds, lowered.floor, *(0.0,) * missing, *lowered.coefficients))


@triton.jit
def lowered_beta(variable, c0, c1, c2, c3, c4, c5, c6, c7, low, high, threshold, floor):
    """Beta of every row: the formula of :class:`sharpmax.core.policies.Lowered`."""
    u = tl.minimum(tl.maximum(variable, low), high)
    value = c0 * u + c1
    value = value * u + c2
    value = value * u + c3
    value = value * u + c4
    value = value * u + c5
    value = value * u + c6
    value = value * u + c7
    return tl.where(variable > threshold, tl.maximum(value, floor), 1.0)


@triton.jit
def _above(x, bound):
    """1 above ``bound``, 0 below, one half at it."""
    return tl.where(x > bound, 1.0, tl.where(x == bound, 0.5, 0.0))


@triton.jit
def lowered_slope(variable, c0, c1, c2, c3, c4, c5, c6, c7, low, high, threshold, floor):
    """The derivative of :func:`lowered_beta`, as :meth:`sharpmax.core.policies.Lowered.slope` has it."""
    u = tl.minimum(tl.maximum(variable, low), high)
    slope = c0
    value = c0 * u + c1
    slope = slope * u + value
    value = value * u + c2
    slope = slope * u + value
    value = value * u + c3
    slope = slope * u + value
    value = value * u + c4
    slope = slope * u + value
    value = value * u + c5
    slope = slope * u + value
    value = value * u + c6
    slope = slope * u + value
    value = value * u + c7
    slope = slope * _above(variable, low) * _above(-variable, -high) * _above(value, floor)
    return tl.where(variable > threshold, slope, 0.0)


@triton.jit
def statistics_gradient(
    d_beta, total, moment, c0, c1, c2, c3, c4, c5, c6, c7, low, high, threshold, floor
):  # fmt: skip
    """The cotangents of sum and moment of every row, from that of beta, under a policy of the entropy.

    With ``H = log L - A / L``: ``dH/dL = 1 / L + A / L^2`` and ``dH/dA = -1 / L``.
    """
    filled = tl.where(total == 0.0, 1.0, total)
    mean = moment / filled
    slope = lowered_slope(tl.log(filled) - mean, c0, c1, c2, c3, c4, c5, c6, c7, low, high, threshold, floor)
    d_entropy = tl.where(total == 0.0, 0.0, d_beta * slope / filled)
    return d_entropy * (1.0 + mean), -d_entropy
