"""Attention with adaptive temperature, row by row in float64 NumPy: the slow truth that implementations are held to.

Every row is treated by itself with plain sums. Of sharpmax it uses nothing but the policy, called on statistics that
are computed here from their definitions. Gradients are differences of its values.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from sharpmax import RowStats


class Truth(NamedTuple):
    output: np.ndarray  # [B, T, N, columns]
    stats: RowStats  # [B, N, T]
    beta: np.ndarray

    @property
    def entropy(self) -> np.ndarray:
        """Of every row; 0 where it sees nothing."""
        full = np.where(self.stats.sum == 0, 1.0, self.stats.sum)
        return np.log(full) - self.stats.moment / full


def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    policy: Any,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    softcap: float | None = None,
    held: Truth | None = None,
) -> Truth:
    """``[B, L, heads, columns]`` arrays.

    ``held`` keeps the largest and the smallest logit of every row, which have no gradient.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    (batch, queries, heads, columns), keys, group = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    scale = 1 / math.sqrt(columns) if scale is None else scale
    added, hiding = _added(bias, (batch, heads, queries, keys))
    allowed = ~hiding if mask is None else ~hiding & np.broadcast_to(np.asarray(mask), hiding.shape)
    left, right = local_window_size if isinstance(local_window_size, tuple) else (local_window_size,) * 2
    logits: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}
    for b, h, i in np.ndindex(batch, heads, queries):
        seen = [
            j
            for j in range(keys if key_value_seq_lengths is None else int(key_value_seq_lengths[b]))
            if allowed[b, h, i, j]
            and not (is_causal and j > i)
            and not (left is not None and j < i - left)
            and not (right is not None and j > i + right)
            and not (query_seq_lengths is not None and i >= int(query_seq_lengths[b]))
        ]
        z = scale * (k[b, seen, h // group] @ q[b, i, h])
        if softcap is not None:
            z = softcap * np.tanh(z / softcap)
        logits[b, h, i] = z + added[b, h, i, seen], v[b, seen, h // group]
    stats = _stats(logits, (batch, heads, queries), held)
    betas = np.broadcast_to(np.asarray(policy(stats), np.float64), stats.sum.shape)
    output = np.zeros((batch, queries, heads, v.shape[-1]))
    for (b, h, i), (z, values) in logits.items():
        if len(z):
            output[b, i, h] = _weights(z, betas[b, h, i]) @ values
    return Truth(output, stats, betas)


def _added(bias: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The bias in float64, 0 where it hides, and where it does."""
    if bias is None:
        return np.zeros(shape), np.zeros(shape, bool)
    full = np.broadcast_to(np.asarray(bias), shape)
    hiding = full.astype(np.float64) <= float(ml_dtypes.finfo(full.dtype).min) / 2
    return np.where(hiding, 0.0, full.astype(np.float64)), hiding


def _stats(logits: Any, shape: tuple[int, ...], held: Truth | None) -> RowStats:
    top, total, moment = np.full(shape, -np.inf), np.zeros(shape), np.zeros(shape)
    lowest, count = np.full(shape, np.inf), np.zeros(shape, np.int32)
    lowest_held: Any = None if held is None else held.stats.min
    for row, (z, _) in logits.items():
        if len(z):
            top[row], lowest[row] = z.max(), z.min()
            if held is not None:
                top[row], lowest[row] = held.stats.max[row], lowest_held[row]
            e = np.exp(z - top[row])
            total[row], moment[row], count[row] = e.sum(), (e * (z - top[row])).sum(), len(z)
    return RowStats(top, total, moment, lowest, count)


def _weights(z: np.ndarray, beta: float) -> np.ndarray:
    if np.isinf(beta):
        ties = (z == z.max()).astype(np.float64)
        return ties / ties.sum()
    e = np.exp(beta * (z - z.max()))
    return e / e.sum()
