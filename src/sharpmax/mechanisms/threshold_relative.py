"""Threshold relative attention: what is under a threshold is removed, and distance counts what remains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..core.arrays import Array
from ..core.policies.base import check_number, set_field
from ..core.softmax import softmax
from .base import About, shifted
from .learned import NUMBERS, Learned
from .sigmoid import log_sigmoid


@dataclass(frozen=True)
class ThresholdRelative(Learned):
    """Softmax over the keys with logits above 0, each less ``-log sigma(gate)`` for every such key from it on.

    A row without any logit above 0 is all zeros. ``gate`` is learned and starts from ``init``.
    """

    init: float = 0.0

    about: ClassVar[About] = About(
        title="threshold relative attention",
        paper="Opper et al. (2025), arXiv:2503.23174",
        equation="a = softmax over {i: s_i > 0} of s_i + d_i log sigma(gate), d_i the number of j >= i with s_j > 0",
        training=(
            "from scratch, without positional encoding. In the paper the gate is a projection of the query's token; "
            f"logits are all that is seen here, so a learned gate stands in for it: {NUMBERS}. The paper also "
            "normalises queries and keys, which is the model's part"
        ),
        theorem=(
            "does not apply: removed keys weigh nothing, and the distance has no bound, so the nearest key that is "
            "kept has at least (1 - sigma(gate)) exp(-M) with logits of at most M, whatever n is. A key with d kept "
            "ones behind it loses a factor of sigma(gate)^d"
        ),
        disperses=False,
    )
    reads: ClassVar[Literal["row", "order", "rows"]] = "order"
    inference: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        set_field(self, "init", check_number(self.init, "init"))

    def initial(self) -> dict[str, float]:
        return {"gate": self.init}

    def formula(self, xp: Any, logits: Array, visible: Array, parameters: Mapping[str, Array]) -> Array:
        kept = visible & (logits > 0)
        ones = xp.flip(xp.astype(kept, logits.dtype), axis=-1)
        distance = xp.flip(xp.cumsum(ones, -1), axis=-1)
        return softmax(shifted(xp, logits, kept) + distance * log_sigmoid(xp, parameters["gate"]), where=kept)
