"""The Differential Transformer: one softmax map, less a share of another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.arrays import Array
from ..core.policies.base import check_number, set_field
from ..core.softmax import softmax
from .base import About
from .learned import NUMBERS, Learned


@dataclass(frozen=True)
class Differential(Learned):
    """``softmax(s1) - lambda softmax(s2)``: logits ``[..., 2 heads, queries, keys]``, the maps of a head together.

    ``lambda`` is learned, one number for all heads as in the paper unless ``heads`` is set, and starts from ``init``:
    0.2 is that of the paper's first layer, by ``0.8 - 0.6 exp(-0.3 (layer - 1))``. The paper has ``exp(q1 k1) - exp(q2
    k2) + init`` of learned vectors instead.
    """

    init: float = 0.2

    about: ClassVar[About] = About(
        title="differential attention",
        paper="Ye et al. (2025), arXiv:2410.05258",
        equation="a_i = softmax(s1)_i - lambda softmax(s2)_i",
        training=(
            f"from scratch: twice the queries and keys, and lambda, {NUMBERS}; the paper makes it of learned vectors, "
            "and normalises the output of every head behind it"
        ),
        theorem=(
            "applies to both maps, and so to their difference: |a_i| <= (1 + |lambda|) exp(spread) / n. Where lambda "
            "nears 1, equal parts of the maps cancel: a key's share of what is left can stay, its size cannot"
        ),
        disperses=True,
    )
    maps: ClassVar[int] = 2
    inference: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        set_field(self, "init", check_number(self.init, "init"))

    def initial(self) -> dict[str, float]:
        return {"lambda": self.init}

    def formula(self, xp: Any, logits: Array, visible: Array, parameters: Mapping[str, Array]) -> Array:
        weights = softmax(logits, where=visible)
        return weights[..., 0::2, :, :] - parameters["lambda"] * weights[..., 1::2, :, :]
