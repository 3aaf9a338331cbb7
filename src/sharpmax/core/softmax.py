"""softmax with an inverse temperature, and the paper's adaptive temperature on top of it."""

from __future__ import annotations

import math
from typing import Any

from .arrays import Array, accumulation_dtype, device_of, logit_rows, row_values, stop_gradient
from .policies import PAPER, Policy, needs_spread
from .policies.base import check_callable
from .rowwise import RowFunction, apply
from .stats import masked_logits, row_shift, row_stats


def softmax(
    x: Array, axis: int | tuple[int, ...] | None = -1, where: Array | None = None, *, beta: Array | float = 1.0
) -> Array:
    """``softmax(beta * x)`` along ``axis``, in the type of ``x``.

    Args:
      x: logits; float16, bfloat16, float32 or float64, computed in at least float32.
      axis: the axis (or axes; ``None`` for all) that sums to 1.
      where: a boolean array that broadcasts against ``x``; weights where it is false are 0, as they are for logits of
        ``-inf`` or of at most half of the type's lowest finite number. A fully masked row is all zeros, and so is its
        gradient.
      beta: inverse temperature, ``1 / theta``, not negative: a number, or an array that broadcasts against the rows
        (``x``'s shape without ``axis``). ``inf`` is hard attention: uniform over tied maxima, gradient 0.
    """
    lib, rows, matrix, mask = logit_rows(x, axis, where)
    if isinstance(beta, int | float) and not beta >= 0:
        raise ValueError(f"expected beta to be a number of at least 0, got {beta}")
    betas = row_values(lib, rows, beta, accumulation_dtype(lib, x), device_of(x), "beta")
    if matrix.shape[1] == 0:
        return x
    weights, _ = apply(WEIGHTS, lib, matrix, mask, betas)
    return rows.restore(lib.xp, weights)


def adaptive_temperature_softmax(
    x: Array,
    axis: int | tuple[int, ...] | None = -1,
    where: Array | None = None,
    *,
    policy: Policy = PAPER,
) -> Array:
    """Softmax whose inverse temperature is chosen row by row: ``softmax(policy(row_stats(x)) * x)``.

    A drop-in replacement for ``jax.nn.softmax``. With the default policy, value and gradient are those of the paper's
    Figure 4; gradient flows through beta unless the policy is :func:`~sharpmax.detached`. ``x``, ``axis`` and ``where``
    are those of :func:`softmax`; ``policy`` is any callable that takes :class:`~sharpmax.RowStats` and returns beta.
    """
    check_callable(policy)
    return softmax(x, axis, where, beta=policy(row_stats(x, axis, where, with_min=needs_spread(policy))))


def _weights(xp: Any, x: Array, where: Array | None, beta: Array) -> tuple[Array, Array]:
    """softmax(beta * x) of every row of ``x``, and the shift of the row, which the backward reads.

    Hard rows count their maxima alone, with factor 0 and so no gradient; the others count what is not masked.
    """
    logits, threshold = masked_logits(xp, x, where)
    shift = row_shift(xp, logits, threshold)
    beta = xp.expand_dims(beta, axis=-1)
    hard = xp.isinf(beta)
    dropped = logits < xp.where(hard, shift, threshold)
    exponent = xp.where(hard, 0.0, beta) * _finite_exponents(xp, logits, shift)
    scaled = xp.exp(xp.where(dropped, -math.inf, exponent))
    total = xp.sum(scaled, axis=-1, keepdims=True)
    weights = scaled / xp.where(total == 0, 1.0, total)
    # No cast that does nothing: the output would have two nodes in a compiled graph, and torch 2.11 loses its gradient
    # then (https://github.com/pytorch/pytorch/issues/180642).
    return weights if weights.dtype == x.dtype else xp.astype(weights, x.dtype), shift


def _weights_backward(
    xp: Any, x: Array, where: Array | None, beta: Array, weights: Array, shift: Array, cotangent: Array, _: Array
) -> tuple[Array, Array]:
    """With dz = w (g - <g, w>): the gradient of x is beta dz, that of beta <dz, t>, t = s - max."""
    logits, _ = masked_logits(xp, x, where)
    shift = stop_gradient(shift)
    exponent = _finite_exponents(xp, logits, shift)
    weights = xp.astype(weights, exponent.dtype, copy=False)
    cotangent = xp.astype(cotangent, exponent.dtype, copy=False)
    inner = weights * (cotangent - xp.sum(weights * cotangent, axis=-1, keepdims=True))
    hard = xp.isinf(beta)
    d_beta = xp.where(hard, 0.0, xp.sum(inner * exponent, axis=-1))
    factor = xp.expand_dims(xp.where(hard, 0.0, beta), axis=-1)
    return xp.astype(factor * inner, x.dtype, copy=False), d_beta


def _finite_exponents(xp: Any, logits: Array, shift: Array) -> Array:
    """``s - max``, cut off far below anything that has weight, so that a factor of 0 meets no infinity."""
    return xp.maximum(logits - shift, xp.full_like(shift, -1e30))


WEIGHTS = RowFunction(_weights, _weights_backward, differentiable=(0,))
