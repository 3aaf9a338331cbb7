"""Top-k attention: softmax over the largest logits of a row."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.arrays import Array, stop_gradient
from ..core.policies.base import set_field
from ..core.softmax import softmax
from .base import About, Mechanism

Carry = tuple[Array, Array]
"""The largest logits so far ``[..., queries, k]``, in falling order, and the values of their keys behind them."""


@dataclass(frozen=True)
class TopK(Mechanism):
    """Softmax over the ``k`` largest logits; of equal ones at the edge, the earliest keys are taken."""

    k: int = 16

    folds: ClassVar[bool] = True
    about: ClassVar[About] = About(
        title="top-k",
        paper="Gupta et al. (2021), Memory-efficient Transformers via Top-k Attention",
        equation="a_i = softmax of s_i over the k largest logits, 0 elsewhere; of equal ones the earliest keys",
        training="nothing; a key that is not among the k gets no gradient",
        theorem="does not apply: at most k keys share a row, so its largest weight is 1 / k at least, whatever n",
        disperses=False,
    )

    def __post_init__(self) -> None:
        set_field(self, "k", check_size(self.k, "k"))

    def formula(self, xp: Any, logits: Array, visible: Array, parameters: Mapping[str, Array]) -> Array:
        held = stop_gradient(xp.where(visible, logits, -xp.inf))
        edge = xp.sort(held, axis=-1)[..., -min(self.k, held.shape[-1]), None]
        tied = held == edge
        room = self.k - xp.sum(xp.astype(held > edge, xp.int32), axis=-1, keepdims=True)
        late = tied & (xp.cumsum(xp.astype(tied, xp.int32), -1) > room)
        return softmax(logits, where=visible & ~((held < edge) | late))

    def fold(
        self,
        xp: Any,
        carry: Carry | None,
        logits: Array,
        visible: Array,
        value: Array,
        count: Array,
        parameters: Mapping[str, Array],
    ) -> Carry:
        """The ``k`` largest of what came before and of this chunk, and their values."""
        held = xp.where(visible, logits, -xp.inf)
        order = self._first(xp, held)
        flat = xp.reshape(order, (*order.shape[:-2], -1, 1))
        rows = xp.reshape(xp.take_along_axis(value, flat, axis=-2), (*order.shape, value.shape[-1]))
        best = xp.take_along_axis(held, order, axis=-1)
        if carry is None:
            return best, rows
        best, rows = xp.concat([carry[0], best], axis=-1), xp.concat([carry[1], rows], axis=-2)
        order = self._first(xp, best)
        rows = xp.take_along_axis(rows, xp.expand_dims(order, axis=-1), axis=-2)
        return xp.take_along_axis(best, order, axis=-1), rows

    def _first(self, xp: Any, held: Array) -> Array:
        return xp.argsort(-stop_gradient(held), axis=-1, stable=True)[..., : self.k]

    def finish(self, xp: Any, carry: Carry) -> Array:
        """The output."""
        weights = xp.expand_dims(softmax(carry[0]), axis=-1)
        return xp.sum(weights * xp.astype(carry[1], weights.dtype, copy=False), axis=-2)


def check_size(value: Any, what: str) -> int:
    """``value`` as an ``int``; refused unless it is a whole number of keys, at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"expected {what} to be a whole number of at least 1, got {value!r}")
    return int(value)
