"""Linear attention: weights are the logits themselves, or products of positive features over their sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.arrays import Array, stop_gradient
from .base import About, Mechanism
from .elementwise import Elementwise


@dataclass(frozen=True)
class Linear(Elementwise):
    """``a = s``: a memory of fast weights, the sum of outer products of values and keys, read by the query."""

    about: ClassVar[About] = About(
        title="linear attention",
        paper="Schmidhuber (1992), Neural Computation 4(1)",
        equation="a_i = s_i",
        training="from scratch: weights do not sum to 1, have both signs, and outputs grow with n",
        theorem=(
            "does not apply: weights do not sum to 1, and that of a key is its logit whatever n is. The others add up "
            "all the same: a key's share of the row vanishes unless their logits are 0"
        ),
        disperses=False,
    )

    def weight(self, xp: Any, logits: Array, count: Array) -> Array:
        return logits


@dataclass(frozen=True)
class LinearFeatures(Mechanism):
    """``a = s / sum(s)`` of ``s = phi(q) phi(k)``, which is positive: ``phi(x) = elu(x) + 1``."""

    about: ClassVar[About] = About(
        title="linear attention with features",
        paper="Katharopoulos et al. (2020), arXiv:2006.16236",
        equation="a_i = s_i / sum_j s_j, s_i = phi(q) phi(k_i), phi(x) = elu(x) + 1",
        training="from scratch: queries and keys go through phi before their product, which is not scaled",
        theorem=(
            "softmax is not there, but its proof holds: phi is continuous and positive, so on a compact space products "
            "have bounds 0 < m <= s <= M, and every weight is at most M / (m n)"
        ),
        disperses=True,
    )
    inference: ClassVar[bool] = False
    folds: ClassVar[bool] = True

    def features(self, xp: Any, x: Array) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """``elu(x) + 1``: ``exp(x)`` below 0, ``x + 1`` from there on."""
        return xp.where(x > 0, x + 1.0, xp.exp(xp.where(x > 0, 0.0, x)))

    def formula(self, xp: Any, logits: Array, visible: Array, parameters: Mapping[str, Array]) -> Array:
        shares = logits / _divisor(xp, stop_gradient(xp.sum(logits, axis=-1, keepdims=True)))
        return shares / _divisor(xp, xp.sum(shares, axis=-1, keepdims=True))  # JAX squares what it divides by

    def fold(
        self, xp: Any, carry: Any, logits: Array, visible: Array, value: Array, count: Array, parameters: Any
    ) -> tuple[Array, Array]:
        """Sums of weighted values and of products; ``logits`` are as :meth:`formula` gets them, 0 where masked."""
        part = xp.matmul(logits, xp.astype(value, logits.dtype, copy=False))
        total = xp.sum(logits, axis=-1, keepdims=True)
        return (part, total) if carry is None else (carry[0] + part, carry[1] + total)

    def finish(self, xp: Any, carry: tuple[Array, Array]) -> Array:
        """The output."""
        return carry[0] / _divisor(xp, carry[1])


def _divisor(xp: Any, total: Array) -> Array:
    return xp.where(total == 0, 1.0, total)
