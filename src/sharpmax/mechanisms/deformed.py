"""The numbers behind alpha-entmax, with ``e = alpha - 1`` in [0, 1]; ``e = 0`` is softmax and ``e = 1`` sparsemax.

With logits ``z`` shifted so that the largest is 0, weights depend on one number, the largest weight ``exp(m)``::

    a_i = exp(m) [1 + e y_i]_+ ^ (1 / e),    y_i = z_i exp(-e m),    sum_i a_i = 1

which is ``[(alpha - 1) s_i - tau]_+ ^ (1 / (alpha - 1))`` (Peters et al., 2019) without its cancellation at large ``n``
and without its singularity at ``alpha = 1``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from ..core.arrays import Array, library_of, stop_gradient
from .base import counts
from .sparsemax import sparsemax, support_of

PAIRS = 8
"""How many pairs of steps :func:`log_largest` takes; each pair at least halves the bracket and squares the error."""

SMALL = 1e-2
"""Below this ``log(1 + u) / u`` is summed as a series, whose first neglected term is under float64's rounding."""


def entmax(xp: Any, z: Array, visible: Array, alpha: float) -> Array:
    """The weights of logits ``z`` whose largest is 0, by sorting where that is exact."""
    if alpha == 2:
        return sparsemax(xp, z, visible)
    return entmax15(xp, z, visible) if alpha == 1.5 else entmax_by_steps(xp, z, visible, alpha - 1)


def entmax_by_steps(xp: Any, z: Array, visible: Array, e: Array | float) -> Array:
    """The weights of logits ``z`` whose largest is 0, for ``alpha = 1 + e`` that may have a gradient."""
    held = e if isinstance(e, float) else stop_gradient(e)
    return normalised(xp, z, visible, e, log_largest(xp, stop_gradient(z), visible, held, counts(xp, visible, z)))


def entmax15(xp: Any, z: Array, visible: Array) -> Array:
    """The weights for ``alpha = 1.5``: ``sqrt a_i = c + z_i / 2`` on the support, ``c`` the root of a quadratic."""
    half = z / 2
    support = support_of(xp, half, visible, power=2)
    size = counts(xp, support, z)
    mean = xp.sum(xp.where(support, half, 0.0), axis=-1, keepdims=True) / size
    variance = xp.sum(xp.where(support, (half - mean) ** 2, 0.0), axis=-1, keepdims=True) / size
    root = xp.where(support, xp.sqrt(1 / size - variance) - mean + half, 0.0)
    return xp.maximum(root, xp.zeros_like(root)) ** 2


class Weights(NamedTuple):
    """Weights (not yet normalised), and their derivatives with respect to ``m``."""

    values: Array
    slopes: Array


def weights_given(xp: Any, z: Array, visible: Array, e: Array | float, m: Array) -> Weights:
    """The weights of ``z`` if the largest is ``exp(m)``; ``m`` is ``[..., 1]``."""
    y = xp.maximum(z, xp.full_like(z, -1e4)) * xp.exp(-e * m)
    u = e * y
    supported = visible & ~(u <= -1.0)
    u = xp.where(supported, u, 0.0)
    values = xp.where(supported, xp.exp(m + y * log1p_ratio(xp, u)), 0.0)
    return Weights(values, values / (1.0 + u))


def log1p_ratio(xp: Any, u: Array) -> Array:
    """``log(1 + u) / u`` for ``u > -1``, with all of its derivatives at 0."""
    small = xp.abs(u) < SMALL
    near, far = xp.where(small, u, 0.0), xp.where(small, 1.0, u)
    series = xp.full_like(u, 1 / 9)
    for k in range(8, 0, -1):
        series = 1 / k - near * series
    return xp.where(small, series, xp.log1p(far) / far)


def log_largest(xp: Any, z: Array, visible: Array, e: Array | float, count: Array) -> Array:
    """The ``m`` at which weights sum to 1, ``[..., 1]``, without gradient.

    ``F ** e`` is a convex function of ``exp(e m)``, ``F`` the sum of the weights, so a step of Newton's method from
    anywhere ends above the root: it moves the upper end of a bracket whose other end is found by bisection.
    """
    if library_of(z).name == "jax":
        return _jax_search()(z, visible, e, count)
    low, high = -xp.log(count), xp.zeros_like(count)
    for _ in range(PAIRS):
        low, high = _narrowed(xp, z, visible, e, low, high)
    return high


def _narrowed(xp: Any, z: Array, visible: Array, e: Array | float, low: Array, high: Array) -> tuple[Array, Array]:
    """The bracket after a pair of steps."""
    for at in (high, (low + high) / 2):
        values, slopes = weights_given(xp, z, visible, e, at)
        total = _sum_or_one(xp, values)
        part = total / _sum_or_one(xp, slopes) * one_less(xp, e, xp.log(total))
        high = xp.maximum(xp.minimum(high, at - part * log1p_ratio(xp, -e * part)), low)
        low = xp.where(total <= 1, xp.minimum(at, high), low)
    return low, high


@functools.cache
def _jax_search() -> Callable[..., Any]:
    """:func:`log_largest` for JAX, compiled once for every shape: a pair of steps once, and not PAIRS times."""
    jax = sys.modules["jax"]

    def search(z: Any, visible: Any, e: Any, count: Any) -> Any:
        xp = library_of(z).xp
        start = (-xp.log(count), xp.zeros_like(count))
        return jax.lax.fori_loop(0, PAIRS, lambda _, bracket: _narrowed(xp, z, visible, e, *bracket), start)[1]

    return jax.jit(search)


def one_less(xp: Any, e: Array | float, x: Array) -> Array:
    """``(1 - exp(-e x)) / e``, which is ``x`` at ``e = 0``; it is used to take steps, and has no gradient to give."""
    v = e * x
    tiny = xp.abs(v) < 1e-3
    return x * xp.where(tiny, 1 - v / 2 + v * v / 6, -xp.expm1(-v) / xp.where(tiny, 1.0, v))


def normalised(xp: Any, z: Array, visible: Array, e: Array | float, m: Array) -> Array:
    """The weights of ``z``, given ``m`` without gradient.

    A step of Newton's method with its derivative held constant gives ``m`` the gradient that the implicit function
    theorem asks for, with respect to ``z`` and to ``e``, and every further one the next derivative: two make first and
    second derivatives exact.
    """
    m = stop_gradient(m)
    values, slopes = weights_given(xp, z, visible, e, m)
    rate = stop_gradient(_sum_or_one(xp, values) / _sum_or_one(xp, slopes))
    for _ in range(2):
        m = m - xp.log(_sum_or_one(xp, values)) * rate
        values = weights_given(xp, z, visible, e, m).values
    return values


def _sum_or_one(xp: Any, values: Array) -> Array:
    """The sum of every row, ``[..., 1]``; 1 where it is 0."""
    total = xp.sum(values, axis=-1, keepdims=True)
    return xp.where(total > 0, total, 1.0)
