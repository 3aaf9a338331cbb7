"""Sigmoid attention: every key is weighed by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.arrays import Array
from .base import About
from .elementwise import Elementwise


@dataclass(frozen=True)
class Sigmoid(Elementwise):
    """``sigma(s - log n)``, with ``n`` the keys that the row sees (the paper's is the length of the sequence)."""

    about: ClassVar[About] = About(
        title="sigmoid attention",
        paper="Ramapuram et al. (2024), arXiv:2409.04431",
        equation="a_i = 1 / (1 + exp(-(s_i + b))), b = -log n",
        training="from scratch: weights do not sum to 1; b = -log n keeps their sum of the order of 1 at the start",
        theorem=(
            "does not apply as it stands, since weights do not sum to 1; but with b = -log n and logits of at most M "
            "every weight is below exp(M) / n, so they vanish as softmax's do (without b a weight would keep its size, "
            "and the sum of the others would grow with n)"
        ),
        disperses=True,
    )

    def weight(self, xp: Any, logits: Array, count: Array) -> Array:
        return sigmoid(xp, logits - xp.log(count))


def sigmoid(xp: Any, x: Array) -> Array:
    """``1 / (1 + exp(-x))`` to full relative precision at both ends; its gradient at 0 is 1/4 in every library."""
    right = x >= 0
    tail = xp.exp(-xp.where(right, x, -x))
    return xp.where(right, 1.0, tail) / (1.0 + tail)


def log_sigmoid(xp: Any, x: Array) -> Array:
    """``log(sigmoid(x))``, about ``x`` far to the left."""
    right = x >= 0
    return xp.where(right, 0.0, x) - xp.log1p(xp.exp(-xp.where(right, x, -x)))
