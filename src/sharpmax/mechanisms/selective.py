"""Selective attention: queries mark keys that later queries need no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..core.arrays import Array, device_of
from ..core.softmax import softmax
from .base import About, Mechanism, shifted
from .elementwise import relu


@dataclass(frozen=True)
class Selective(Mechanism):
    """Softmax of logits less what earlier queries selected: the positive logits of the first head (axis -3), for all.

    No query selects its own key, and none the first one while ``first_stays``, as in the paper, where that is the
    token that begins a sequence: the first key that any query sees, so that padding before it changes nothing. Set it
    to false where the first key is one like the others.
    """

    first_stays: bool = True

    about: ClassVar[About] = About(
        title="selective attention",
        paper="Leviathan et al. (2025), arXiv:2410.02703",
        equation="a_i = softmax(s_i - F_i), F_ij = sum of max(s_kj, 0) over queries k < i, k != j, of the first head",
        training="from scratch or further training; nothing is added, but the first head learns what to remove",
        theorem=(
            "need not apply: what is taken away adds up over queries, so logits have no lower bound, and keys that "
            "keep being selected weigh nothing. Where nothing is selected it is softmax and disperses"
        ),
        disperses=False,
    )
    reads: ClassVar[Literal["row", "order", "rows"]] = "rows"
    inference: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if type(self.first_stays) is not bool:
            raise ValueError(f"expected first_stays to be True or False, got {self.first_stays!r}")

    def formula(self, xp: Any, logits: Array, visible: Array, parameters: Mapping[str, Array]) -> Array:
        return self.given(xp, logits, visible, self.before(xp, logits, visible))

    def given(self, xp: Any, logits: Array, visible: Array, past: Array) -> Array:
        """Weights, given what queries above each row selected: ``past [..., 1 or queries, keys]``."""
        return softmax(shifted(xp, logits, visible) - past, where=visible)

    def leaves(self, xp: Any, logits: Array, visible: Array, position: int | None = None) -> Array:
        """What a block of queries selects altogether, ``[..., 1, keys]``; ``position`` is the first one's key."""
        return xp.sum(self._selected(xp, logits, visible, position), axis=-2, keepdims=True)

    def before(self, xp: Any, logits: Array, visible: Array, position: int | None = None) -> Array:
        """What the queries of this block above each row select, ``[..., queries, keys]``."""
        selected = self._selected(xp, logits, visible, position)
        return xp.concat([xp.zeros_like(selected[..., :1, :]), xp.cumsum(selected, -2)[..., :-1, :]], axis=-2)

    def _selected(self, xp: Any, logits: Array, visible: Array, position: int | None) -> Array:
        """Positive logits of the first head. The last query stands beside the last key unless ``position`` is given."""
        if len(logits.shape) > 2:
            logits, visible = logits[..., :1, :, :], visible[..., :1, :, :]
        queries, keys = logits.shape[-2:]
        first = keys - queries if position is None else position
        column = xp.arange(keys, device=device_of(logits))
        later = xp.cumsum(xp.astype(xp.any(visible, axis=-2, keepdims=True), xp.int32), -1) > 1
        free = visible & (column != xp.expand_dims(xp.arange(queries, device=device_of(logits)) + first, axis=-1))
        return xp.where(free & later if self.first_stays else free, relu(xp, logits), 0.0)
