"""Mechanisms that weigh a key by its own logit and the length of the row, whatever the other keys are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..core.arrays import Array
from .base import Mechanism, counts


class Elementwise(Mechanism, abstract=True):
    """A mechanism of :meth:`weight` alone. Keys come in chunks: the output is a sum over keys."""

    inference: ClassVar[bool] = False
    folds: ClassVar[bool] = True

    def weight(self, xp: Any, logits: Array, count: Array) -> Array:
        """The weight of every key, given how many keys its row sees, ``count [..., queries, 1]``."""
        raise NotImplementedError

    def formula(self, xp: Any, logits: Array, visible: Array, parameters: Mapping[str, Array]) -> Array:
        return self.weight(xp, logits, counts(xp, visible, logits))

    def fold(
        self,
        xp: Any,
        carry: Array | None,
        logits: Array,
        visible: Array,
        value: Array,
        count: Array,
        parameters: Mapping[str, Array],
    ) -> Array:
        """The output so far and what this chunk adds to it; ``logits`` are as :meth:`formula` gets them."""
        weights = xp.where(visible, self.weight(xp, logits, _at_least_one(xp, count, logits)), 0.0)
        part = xp.matmul(weights, xp.astype(value, weights.dtype, copy=False))
        return part if carry is None else carry + part

    def finish(self, xp: Any, carry: Array) -> Array:
        """The output."""
        return carry


def _at_least_one(xp: Any, count: Array, like: Array) -> Array:
    count = xp.astype(count, like.dtype, copy=False)
    return xp.maximum(count, xp.ones_like(count))


def relu(xp: Any, x: Array) -> Array:
    """``max(x, 0)``, with gradient 0 at 0."""
    return xp.where(x > 0, x, 0.0)
