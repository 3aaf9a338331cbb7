"""The square of the rectified logit, over the length of the row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.arrays import Array
from .base import About
from .elementwise import Elementwise, relu


@dataclass(frozen=True)
class ReluSquared(Elementwise):
    """``relu(s)^2 / n``, with ``n`` the keys that the row sees."""

    about: ClassVar[About] = About(
        title="squared ReLU",
        paper="Hua et al. (2022), arXiv:2202.10447, after So et al. (2021), arXiv:2109.08668",
        equation="a_i = max(s_i, 0)^2 / n",
        training="from scratch: weights do not sum to 1, and keys with logits below 0 have no gradient",
        theorem=(
            "does not apply as it stands, since weights do not sum to 1; but with logits of at most M every weight is "
            "at most M^2 / n, so they vanish. A key's share of its row need not: logits of at most 0 weigh nothing, "
            "and a normalisation behind attention would restore the size"
        ),
        disperses=True,
    )

    def weight(self, xp: Any, logits: Array, count: Array) -> Array:
        kept = relu(xp, logits)
        return kept * kept / count
