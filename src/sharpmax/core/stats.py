"""RowStats: the handful of numbers that adaptive temperature needs of a row of logits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .arrays import (
    Array,
    accumulation_dtype,
    device_of,
    dtype_name,
    library_of,
    logit_rows,
    mask_threshold,
    stop_gradient,
)
from .rowwise import RowFunction, apply


class RowStats(NamedTuple):
    """Statistics of rows of logits ``s``; every field has the shape of the logits without the reduced axis.

    ========  =====================================================================
    max       ``m = max s`` (``-inf`` for an empty row)
    sum       ``L = sum exp(s - m)``
    moment    ``A = sum exp(s - m) (s - m)``, the *shifted* first moment
    min       ``min s`` (``+inf`` for an empty row), or ``None`` where it was not asked for
    count     how many logits are not masked (int32)
    ========  =====================================================================

    Everything else follows: ``lse = m + log L``, ``mean = m + A / L`` (the expected logit under the softmax),
    ``entropy = log L - A / L`` and ``spread = max - min``. The moment is shifted because the paper's unshifted
    ``K = sum exp(s - m) s`` (Appendix G) cancels catastrophically when the logits carry a common offset.

    Gradients flow through ``sum`` and ``moment``, hence through ``lse``, ``mean`` and ``entropy``; ``max``, ``min`` and
    ``count`` carry none. An empty row (no logits, or all of them masked) has entropy 0, spread 0, and ``lse`` and
    ``mean`` of ``-inf``; it is the identity of :meth:`merge`.

    A ``NamedTuple``, so JAX sees a pytree and ``torch.compile`` a plain tuple.
    """

    max: Array
    sum: Array
    moment: Array
    min: Array | None
    count: Array

    @property
    def lse(self) -> Array:
        """``log sum exp s``."""
        xp = library_of(self.sum).xp
        return self.max + xp.log(self._filled_sum(xp))

    @property
    def mean(self) -> Array:
        """The expected logit under softmax(s)."""
        return self.max + self.moment / self._filled_sum(library_of(self.sum).xp)

    @property
    def entropy(self) -> Array:
        """Shannon entropy of softmax(s), in nats."""
        xp = library_of(self.sum).xp
        filled = self._filled_sum(xp)
        return xp.log(filled) - self.moment / filled

    @property
    def spread(self) -> Array:
        """``max - min``, the delta of Lemma 2.1."""
        if self.min is None:
            raise ValueError(
                "these RowStats were made without the minimum, so they have no spread; ask for with_min=True"
            )
        xp = library_of(self.sum).xp
        return xp.where(self.sum == 0, 0.0, self.max) - xp.where(self.sum == 0, 0.0, self.min)

    def _filled_sum(self, xp: Any) -> Array:
        # L >= 1 unless the row is empty; there, 1 in place of 0 gives log L = 0 and A / L = 0 with gradient 0.
        return xp.where(self.sum == 0, xp.ones_like(self.sum), self.sum)

    def merge(self, other: RowStats) -> RowStats:
        """The statistics of rows whose disjoint parts have the statistics ``self`` and ``other``.

        Associative and commutative up to rounding, with the empty RowStats as identity: on a new maximum ``m'``,
        ``L <- a L`` and ``A <- a (A + (m - m') L)`` with ``a = exp(m - m')``.
        """
        xp = library_of(self.sum).xp
        highest = xp.maximum(self.max, other.max)
        total, moment = xp.zeros_like(self.sum), xp.zeros_like(self.moment)
        for part in (self, other):
            empty = part.sum == 0
            shift = xp.where(empty, 0.0, part.max) - xp.where(empty, 0.0, highest)
            shift = xp.maximum(shift, xp.full_like(shift, ZERO_EXPONENT))
            scale = xp.exp(shift)
            total = total + scale * part.sum
            moment = moment + scale * (part.moment + shift * part.sum)
        lowest = None if self.min is None or other.min is None else xp.minimum(self.min, other.min)
        return RowStats(highest, total, moment, lowest, self.count + other.count)


def row_stats(
    x: Array, axis: int | tuple[int, ...] | None = -1, where: Array | None = None, *, with_min: bool = True
) -> RowStats:
    """The :class:`RowStats` of ``x`` along ``axis``.

    Args:
      x: logits; float16, bfloat16, float32 or float64. Statistics are held in float64 for float64 logits and in
        float32 otherwise.
      axis: the axis (or axes; ``None`` for all) along which a row lies.
      where: a boolean array that broadcasts against ``x``; logits where it is false are masked. Logits of ``-inf``, or
        at most half of the type's lowest finite number, are masked too. Masked logits are in no statistic.
      with_min: whether to compute the minimum, which only :attr:`RowStats.spread` needs.
    """
    lib, rows, matrix, mask = logit_rows(x, axis, where)
    if matrix.shape[1] == 0:  # A row without logits is a row with one masked logit.
        matrix, mask = lib.xp.full((matrix.shape[0], 1), -math.inf, dtype=x.dtype, device=device_of(x)), None
    fields = apply(STATS_AND_MIN if with_min else STATS, lib, matrix, mask)
    highest, total, moment, count, *lowest = (lib.xp.reshape(f, rows.batch) for f in fields)
    return RowStats(highest, total, moment, lowest[0] if lowest else None, count)


ZERO_EXPONENT = -1e4
"""Exponents are cut off here, where exp is 0 in every type: a masked logit adds exactly 0, never 0 * inf."""


def masked_logits(xp: Any, x: Array, where: Array | None) -> tuple[Array, float]:
    """The logits ``x`` in the type that statistics are held in, and the threshold under which one is masked."""
    threshold = mask_threshold(dtype_name(x))
    logits = xp.astype(x, accumulation_dtype(library_of(x), x), copy=False)
    if where is not None:
        logits = xp.where(where, logits, -math.inf)
    if dtype_name(x) == "float16":  # In wider types, what is masked is negligible beside anything that is not.
        logits = xp.where(logits < threshold, -math.inf, logits)
    return logits, threshold


def row_shift(xp: Any, logits: Array, threshold: float) -> Array:
    """What to subtract from a row before exp: its maximum, without gradient, or 0 where every logit is masked."""
    highest = xp.max(stop_gradient(logits), axis=-1, keepdims=True)
    return xp.where(highest < threshold, 0.0, highest)


def _exponents(xp: Any, logits: Array, shift: Array) -> Array:
    return xp.maximum(logits - shift, xp.full_like(shift, ZERO_EXPONENT))


def _stats(xp: Any, x: Array, where: Array | None) -> tuple[Array, ...]:
    """max, sum, moment and count of every row of ``x``."""
    logits, threshold = masked_logits(xp, x, where)
    shift = row_shift(xp, logits, threshold)
    exponent = _exponents(xp, logits, shift)
    scaled = xp.exp(exponent)
    total = xp.sum(scaled, axis=-1)
    moment = xp.sum(scaled * exponent, axis=-1)
    count = xp.sum(xp.astype(stop_gradient(logits) >= threshold, xp.int32), axis=-1, dtype=xp.int32)
    highest = xp.where(stop_gradient(total) == 0, -math.inf, xp.squeeze(shift, axis=-1))
    return highest, total, moment, count


def _stats_and_min(xp: Any, x: Array, where: Array | None) -> tuple[Array, ...]:
    """max, sum, moment, count and min of every row of ``x``."""
    logits, threshold = masked_logits(xp, stop_gradient(x), where)
    lowest = xp.min(xp.where(logits >= threshold, logits, math.inf), axis=-1)
    return *_stats(xp, x, where), lowest


def _stats_backward(xp: Any, x: Array, where: Array | None, *rest: Array) -> tuple[Array]:
    """d sum = e ds and d moment = e (1 + t) ds, with t = s - max and e = exp(t)."""
    highest, (_, d_total, d_moment, *_) = xp.expand_dims(rest[0], axis=-1), rest[len(rest) // 2 :]
    logits, _ = masked_logits(xp, x, where)
    exponent = _exponents(xp, logits, xp.where(xp.isinf(highest), 0.0, highest))
    gradient = xp.expand_dims(d_total, axis=-1) + xp.expand_dims(d_moment, axis=-1) * (1.0 + exponent)
    return (xp.astype(xp.exp(exponent) * gradient, x.dtype, copy=False),)


STATS = RowFunction(_stats, _stats_backward, differentiable=(1, 2))
STATS_AND_MIN = RowFunction(_stats_and_min, _stats_backward, differentiable=(1, 2))
