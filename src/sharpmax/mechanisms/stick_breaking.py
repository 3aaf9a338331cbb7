"""Stick-breaking attention: from the last key to the first, each takes a part of what is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..core.arrays import Array
from .base import About, Mechanism
from .sigmoid import log_sigmoid


@dataclass(frozen=True)
class StickBreaking(Mechanism):
    """``sigma(s_i)`` of the stick that keys behind ``i`` left; a mask decides whether a query sees its own key.

    In the paper it does not: pass a mask without the diagonal for that.
    """

    about: ClassVar[About] = About(
        title="stick-breaking attention",
        paper="Tan et al. (2025), arXiv:2410.17980",
        equation="a_i = sigma(s_i) prod_{k > i} (1 - sigma(s_k))",
        training="from scratch, without positional encoding; weights sum to at most 1, and what is left goes nowhere",
        theorem=(
            "does not apply: weights are not normalised over the row, and with logits of at least m the last key has "
            "at least sigma(m) whatever n is. A key with d others behind it has at most (1 - sigma(m))^d"
        ),
        disperses=False,
    )
    reads: ClassVar[Literal["row", "order", "rows"]] = "order"
    inference: ClassVar[bool] = False
    folds: ClassVar[bool] = True
    last_first: ClassVar[bool] = True

    def formula(self, xp: Any, logits: Array, visible: Array, parameters: Mapping[str, Array]) -> Array:
        taken, left = self._parts(xp, logits, visible)
        return xp.exp(taken + _behind(xp, left))

    def fold(
        self, xp: Any, carry: Any, logits: Array, visible: Array, value: Array, count: Array, parameters: Any
    ) -> tuple[Array, Array]:
        """The output so far and the logarithm of what is left; ``logits`` are as :meth:`formula` gets them."""
        taken, left = self._parts(xp, logits, visible)
        remaining = xp.sum(left, axis=-1, keepdims=True)
        log_weights = taken + _behind(xp, left)
        if carry is not None:
            log_weights, remaining = log_weights + carry[1], remaining + carry[1]
        weights = xp.where(visible, xp.exp(log_weights), 0.0)
        part = xp.matmul(weights, xp.astype(value, weights.dtype, copy=False))
        return (part if carry is None else carry[0] + part), remaining

    def finish(self, xp: Any, carry: tuple[Array, Array]) -> Array:
        """The output."""
        return carry[0]

    def _parts(self, xp: Any, logits: Array, visible: Array) -> tuple[Array, Array]:
        """Logarithms of what a key takes of the stick, and of what it leaves: all of it where it is masked."""
        return log_sigmoid(xp, logits), xp.where(visible, log_sigmoid(xp, -logits), 0.0)


def _behind(xp: Any, x: Array) -> Array:
    """The sum of the entries behind each, without it: no large number is added and taken away again."""
    sums = xp.cumsum(xp.flip(x, axis=-1), -1)[..., :-1]
    return xp.flip(xp.concat([xp.zeros_like(x[..., :1]), sums], axis=-1), axis=-1)
