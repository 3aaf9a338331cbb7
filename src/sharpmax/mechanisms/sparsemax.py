"""Sparsemax: the point of the simplex that is nearest to the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.arrays import Array, stop_gradient
from .base import About, Mechanism, counts, shifted


@dataclass(frozen=True)
class Sparsemax(Mechanism):
    """``[s - tau]_+``, with ``tau`` such that the weights sum to 1; most of them are exactly 0."""

    about: ClassVar[About] = About(
        title="sparsemax",
        paper="Martins & Astudillo (2016), From Softmax to Sparsemax",
        equation="a_i = max(s_i - tau, 0), tau such that sum_i a_i = 1",
        training="nothing; a key without weight gets no gradient",
        theorem=(
            "does not apply: a key that leads every other by g has weight min(g, 1) at least, whatever n and however "
            "bounded the logits, and all of it from g = 1 on; only keys within less than 1 of the largest share it"
        ),
        disperses=False,
    )

    def formula(self, xp: Any, logits: Array, visible: Array, parameters: Mapping[str, Array]) -> Array:
        return sparsemax(xp, shifted(xp, logits, visible), visible)


def sparsemax(xp: Any, z: Array, visible: Array) -> Array:
    """The weights of logits ``z`` whose largest is 0, exactly, by sorting them."""
    support = support_of(xp, z, visible, power=1)
    size = counts(xp, support, z)
    largest = (1 - xp.sum(xp.where(support, z, 0.0), axis=-1, keepdims=True)) / size
    return xp.where(support & ~(largest + z <= 0), largest + z, 0.0)


def support_of(xp: Any, z: Array, visible: Array, power: int) -> Array:
    """Which of ``z`` (the largest is 0) lie above the ``tau`` at which ``sum_i max(z_i - tau, 0) ** power`` is 1.

    Those for which the sum over what is larger, with themselves as ``tau``, is below 1. Sorted, that sum grows by terms
    that are never negative, so nothing cancels in long rows.
    """
    held = stop_gradient(xp.maximum(xp.where(visible, z, -1.0), xp.full_like(z, -1.0)))  # -1 is never above tau
    ordered = xp.flip(xp.sort(held, axis=-1), axis=-1)
    down = xp.concat([xp.zeros_like(ordered[..., :1]), ordered[..., :-1] - ordered[..., 1:]], axis=-1)
    before = xp.cumsum(xp.ones_like(ordered), -1) - 1
    first = xp.cumsum(before * down, -1)
    if power == 2:
        first = xp.cumsum(down * (2 * first - before * down), -1)
    lowest = xp.min(xp.where(first < 1, ordered, 0.0), axis=-1, keepdims=True)
    return visible & ~(held < lowest)
