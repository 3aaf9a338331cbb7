"""ASEntmax: alpha-entmax whose logits are scaled with the length of the row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.arrays import Array
from ..core.policies.base import check_number, set_field
from .base import About, counts, shifted
from .deformed import entmax
from .entmax import check_alpha
from .learned import NUMBERS, Learned


@dataclass(frozen=True)
class ASEntmax(Learned):
    """``entmax((delta + beta log(n + 1)^gamma) s)``, with a learned ``beta > 0`` and ``gamma`` within ``gamma_range``.

    Length counts from 2 as in the authors' code: one key alone has no logarithm to raise to a power. ``beta`` starts
    from log 2 and ``gamma`` from 0.
    """

    alpha: float = 1.5
    delta: float = 1.0
    gamma_range: float = 2.0

    inference: ClassVar[bool] = False
    about: ClassVar[About] = About(
        title="ASEntmax",
        paper="Vasylenko et al. (2025), Long-Context Generalization with Sparse Attention, arXiv:2506.16640",
        equation=(
            "a = entmax((delta + beta log(n + 1)^gamma) s), beta = softplus(beta_raw), gamma = gamma_range "
            "tanh(gamma_raw)"
        ),
        training=(
            f"beta_raw and gamma_raw: {NUMBERS}; in the paper both are linear functions of the token that asks, here "
            "they are the same for all queries of a head"
        ),
        theorem=(
            "does not apply for alpha > 1: entmax gives a key that leads by g a least weight that does not depend on "
            "n, and the scale makes that lead delta g or more (nothing, if delta is 0 and gamma negative); with gamma "
            "> 0 any lead gets all of the weight from some n on"
        ),
        disperses=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        set_field(self, "alpha", check_alpha(self.alpha))
        set_field(self, "delta", check_number(self.delta, "delta", least=0))
        set_field(self, "gamma_range", check_number(self.gamma_range, "gamma_range", least=0))

    def initial(self) -> dict[str, float]:
        return {"beta_raw": 0.0, "gamma_raw": 0.0}

    def formula(self, xp: Any, logits: Array, visible: Array, parameters: Mapping[str, Array]) -> Array:
        beta = xp.logaddexp(parameters["beta_raw"], xp.zeros_like(parameters["beta_raw"]))
        gamma = self.gamma_range * xp.tanh(parameters["gamma_raw"])
        length = xp.log(counts(xp, visible, logits) + 1)
        scale = self.delta + beta * xp.exp(gamma * xp.log(length))
        return entmax(xp, scale * shifted(xp, logits, visible), visible, self.alpha)
