"""Weights of one row in float64, by the equation of each paper: a loop or a bisection, and nothing of the package."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

TOP, WIDTH = 3, 3
"""What top-k and the window keep here."""

PAPER = (-0.037, 0.481, -2.3, 4.917, -1.791)
PEAK = max((h / 1e4 for h in range(5000, 60000)), key=lambda h: float(np.polyval(PAPER, h)))


def row(name: str, logits: np.ndarray, visible: np.ndarray, own: int, learned: Mapping[str, float]) -> np.ndarray:
    """The weights of a query at position ``own``; ``logits`` and ``visible`` are ``[keys]``."""
    seen = [i for i in range(len(logits)) if visible[i]]
    if name == "window":
        seen = [i for i in seen if own - WIDTH < i <= own]
    if name == "top_k":
        seen = sorted(seen, key=lambda i: (-logits[i], i))[:TOP]
    weights = np.zeros(len(logits))
    if seen:
        weights[seen] = of_seen(name, logits[seen].astype(np.float64), learned)
    return weights


def of_seen(name: str, s: np.ndarray, learned: Mapping[str, float]) -> np.ndarray:
    """The weights of logits that are all visible."""
    n = len(s)
    match name:
        case "sparsemax":
            return entmax(s, 2.0)
        case "entmax15":
            return entmax(s, 1.5)
        case "entmax":
            return entmax(s, 1 + 1 / (1 + math.exp(-learned["alpha_logit"])))
        case "asentmax":
            beta = math.log(1 + math.exp(learned["beta_raw"]))
            return entmax((1 + beta * math.log(n + 1) ** (2 * math.tanh(learned["gamma_raw"]))) * s, 1.5)
        case "hard":
            return (s == s.max()) / np.sum(s == s.max())
        case "adaptive" | "adaptive_held":
            return softmax(s, polynomial(entropy(softmax(s, 1.0)), held=name == "adaptive_held"))
        case "constant":
            return softmax(s, 4.0)
        case "log_n":
            return softmax(s, max(1.0, math.log(n) / math.log(16)))
        case "ssmax":
            return softmax(s, learned["scale"] * math.log(n))
        case "learned":
            return softmax(s, math.exp(learned["log_beta"]))
    return softmax(s, 1.0)


def softmax(s: np.ndarray, beta: float) -> np.ndarray:
    exponents = np.exp(beta * (s - s.max()))
    return exponents / exponents.sum()


def entropy(p: np.ndarray) -> float:
    return -math.fsum(x * math.log(x) for x in p if x > 0)


def polynomial(h: float, held: bool) -> float:
    if h <= 0.5:
        return 1.0
    return max(1.0, float(np.polyval(PAPER, min(h, PEAK) if held else h)))


def entmax(s: np.ndarray, alpha: float) -> np.ndarray:
    """``[(alpha - 1) s - tau]_+ ^ (1 / (alpha - 1))``, tau by bisection until no float64 lies between its bounds."""
    e = alpha - 1
    z = e * (s - s.max())
    low, high = -1.0, 0.0
    for _ in range(1100):
        tau = (low + high) / 2
        if tau in (low, high):
            break
        low, high = (tau, high) if np.sum(np.maximum(z - tau, 0) ** (1 / e)) >= 1 else (low, tau)
    weights = np.maximum(z - low, 0) ** (1 / e)
    return weights / weights.sum()
