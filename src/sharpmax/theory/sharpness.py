"""What sharpness costs and how temperature buys it: Propositions 3.1 and 3.2."""

from __future__ import annotations

import math

from ..core.arrays import Array, accumulation_dtype, library_of
from ..core.softmax import softmax


def spread_bound(Q: Array, K: Array, x: Array, y: Array, scale: float = 1.0) -> Array:
    r"""Proposition 3.1: an upper bound of the spread of the logits ``scale * <Q y, K x_i>``.

    .. math:: \delta \le 2 |s| \, \sigma_{\max}(Q) \, \sigma_{\max}(K) \, \|y\| \, \max_i \|x_i\|

    Args:
      Q: query matrix ``[m', m]``, applied as ``Q @ y``.
      K: key matrix ``[m', m]``.
      x: items ``[..., n, m]``.
      y: query vector ``[..., m]``.
      scale: what the products are multiplied by, ``1 / sqrt(m')`` in most attention. Layers with biases have the same
        bound with the bias as another column of the matrix and a 1 at the end of each vector.
    """
    xp = library_of(Q).xp
    if Q.shape[-1] != y.shape[-1] or K.shape[-1] != x.shape[-1] or Q.shape[-2] != K.shape[-2]:
        raise ValueError(
            "expected Q [m', m], K [m', m], x [..., n, m] and y [..., m], got shapes "
            f"{tuple(Q.shape)}, {tuple(K.shape)}, {tuple(x.shape)} and {tuple(y.shape)}"
        )
    gain = xp.linalg.matrix_norm(Q, ord=2) * xp.linalg.matrix_norm(K, ord=2)
    longest = xp.max(xp.linalg.vector_norm(x, axis=-1), axis=-1)
    return 2 * abs(scale) * gain * xp.linalg.vector_norm(y, axis=-1) * longest


def entropy_slope(x: Array, beta: Array | float = 1.0, axis: int = -1, where: Array | None = None) -> Array:
    r"""Proposition 3.2: the derivative of the entropy of ``softmax(beta * x)`` with respect to beta.

    .. math:: \frac{dH}{d\beta} = -\beta \, \mathrm{Var}_{i \sim p}(x_i) \le 0
    """
    lib = library_of(x)
    xp = lib.xp
    wide = xp.astype(x, accumulation_dtype(lib, x), copy=False)
    p = softmax(wide, axis, where, beta=beta)
    # The variance of s - max, which is small where p is not 0.
    kept = xp.where(p > 0, wide - xp.max(xp.where(p > 0, wide, -math.inf), axis=axis, keepdims=True), 0.0)
    mean = xp.sum(p * kept, axis=axis, keepdims=True)
    variance = xp.sum(p * (kept - mean) ** 2, axis=axis)
    if isinstance(beta, int | float):
        return (0.0 if math.isinf(beta) else -beta) * variance
    return -xp.where(xp.isinf(beta), 0.0, beta) * variance
