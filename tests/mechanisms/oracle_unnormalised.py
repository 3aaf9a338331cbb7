"""Weights by plain loops in float64, from the equations of each paper; nothing here is shared with the package.

Every function takes logits and a mask, ``[heads, queries, keys]``, and the learned numbers of each head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Learned = Mapping[str, Sequence[float]]
Oracle = Callable[[np.ndarray, np.ndarray, Learned], np.ndarray]


def sigma(x: float) -> float:
    """The logistic function."""
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def softmax_row(row: dict[int, float]) -> dict[int, float]:
    """Softmax of the keys that are there."""
    top = max(row.values(), default=0.0)
    total = sum(math.exp(s - top) for s in row.values())
    return {j: math.exp(s - top) / total for j, s in row.items()}


def by_row(weigh: Callable[[dict[int, float], dict[str, float]], dict[int, float]]) -> Oracle:
    """An oracle of a function that weighs one row: visible keys and their logits, and the head's learned numbers."""

    def oracle(logits: np.ndarray, visible: np.ndarray, learned: Learned) -> np.ndarray:
        weights = np.zeros(logits.shape)
        for h, i in np.ndindex(*logits.shape[:2]):
            row = {j: float(logits[h, i, j]) for j in range(logits.shape[2]) if visible[h, i, j]}
            for j, a in weigh(row, {name: values[h] for name, values in learned.items()}).items():
                weights[h, i, j] = a
        return weights

    return oracle


@by_row
def sigmoid(row: dict[int, float], learned: dict[str, float]) -> dict[int, float]:
    """Ramapuram et al. (2024): sigma(s + b), b = -log n."""
    return {j: sigma(s - math.log(len(row))) for j, s in row.items()}


@by_row
def linear(row: dict[int, float], learned: dict[str, float]) -> dict[int, float]:
    """Schmidhuber (1992)."""
    return row


@by_row
def linear_elu(row: dict[int, float], learned: dict[str, float]) -> dict[int, float]:
    """Katharopoulos et al. (2020), given products of features."""
    return {j: s / math.fsum(row.values()) for j, s in row.items()}


@by_row
def relu_squared(row: dict[int, float], learned: dict[str, float]) -> dict[int, float]:
    """Hua et al. (2022)."""
    return {j: max(s, 0.0) ** 2 / len(row) for j, s in row.items()}


@by_row
def stick_breaking(row: dict[int, float], learned: dict[str, float]) -> dict[int, float]:
    """Tan et al. (2025): a stick of length 1, from the last key to the first."""
    weights, stick = {}, 1.0
    for j in sorted(row, reverse=True):
        weights[j] = stick * sigma(row[j])
        stick *= sigma(-row[j])
    return weights


@by_row
def step(row: dict[int, float], learned: dict[str, float]) -> dict[int, float]:
    """Softmax."""
    return softmax_row(row)


@by_row
def threshold_relative(row: dict[int, float], learned: dict[str, float]) -> dict[int, float]:
    """Opper et al. (2025): keys with positive logits, with a distance that counts such keys alone."""
    kept = {j: s for j, s in row.items() if s > 0}
    forget = math.log(sigma(learned["gate"]))
    return softmax_row({j: s + forget * sum(k >= j for k in kept) for j, s in kept.items()})


def differential(logits: np.ndarray, visible: np.ndarray, learned: Learned) -> np.ndarray:
    """Ye et al. (2025): maps of a head follow each other."""
    maps = step(logits, visible, {})
    return np.stack([maps[2 * h] - factor * maps[2 * h + 1] for h, factor in enumerate(learned["lambda"])])


def selective(logits: np.ndarray, visible: np.ndarray, learned: Learned, first_stays: bool = True) -> np.ndarray:
    """Leviathan et al. (2025): F_ij sums what earlier queries of the first head selected, their own key not."""
    queries, keys = logits.shape[1:]
    reduced = logits.copy()
    for i, j in np.ndindex(queries, keys):
        for k in range(i):
            if visible[0, k, j] and keys - queries + k != j and not (first_stays and j == 0):
                reduced[:, i, j] -= max(logits[0, k, j], 0.0)
    return step(reduced, visible, {})


ORACLES: dict[str, Oracle] = {
    "sigmoid": sigmoid,
    "linear": linear,
    "linear_elu": linear_elu,
    "relu_squared": relu_squared,
    "stick_breaking": stick_breaking,
    "selective": selective,
    "differential": differential,
    "threshold_relative": threshold_relative,
    "step": step,
}
