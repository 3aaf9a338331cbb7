"""Local attention: softmax over the keys just before a query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..core.arrays import Array, device_of
from ..core.policies.base import set_field
from ..core.softmax import softmax
from .base import About, Mechanism
from .top_k import check_size


@dataclass(frozen=True)
class Window(Mechanism):
    """Softmax over the ``size`` latest keys up to the query's own position, whether they are masked or not."""

    size: int = 16

    reads: ClassVar[Literal["row", "order", "rows"]] = "order"
    about: ClassVar[About] = About(
        title="sliding window",
        paper="Luong, Pham & Manning (2015); Beltagy, Peters & Cohan (2020), Longformer",
        equation="a_i = softmax of s_i over the keys p - size < i <= p, p the position of the query; 0 elsewhere",
        training="nothing; what lies further back is reached through several layers only",
        theorem=(
            "does not apply: at most size keys share a row, so its largest weight is 1 / size at least; a key outside "
            "of the window has no weight at all"
        ),
        disperses=False,
    )

    def __post_init__(self) -> None:
        set_field(self, "size", check_size(self.size, "size"))

    def formula(self, xp: Any, logits: Array, visible: Array, parameters: Mapping[str, Array]) -> Array:
        keys, queries = logits.shape[-1], logits.shape[-2] if len(logits.shape) > 1 else 1
        key = xp.arange(keys, device=device_of(logits))
        own = xp.arange(keys - queries, keys, device=device_of(logits))
        back = xp.expand_dims(own, axis=-1) - key
        inside = (back >= 0) & (back < self.size)
        return softmax(logits, where=visible & (inside if len(logits.shape) > 1 else inside[0]))
