"""alpha-entmax: sparse weights between softmax (alpha = 1) and sparsemax (alpha = 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.arrays import Array
from ..core.policies.base import check_number, set_field
from .base import About, Mechanism, shifted
from .deformed import entmax, entmax_by_steps
from .learned import NUMBERS, Learned
from .temperatures import SOFTMAX

EQUATION = "a_i = max((alpha - 1) s_i - tau, 0)^(1 / (alpha - 1)), tau such that sum_i a_i = 1"
THEOREM = (
    "does not apply for alpha > 1: a key that leads every other by g has weight min((alpha - 1) g, 1)^(1 / (alpha - "
    "1)) at least, whatever n and however bounded the logits, and all of it from g = 1 / (alpha - 1) on"
)


SPARSE = About(
    title="alpha-entmax",
    paper="Peters, Niculae & Martins (2019), Sparse Sequence-to-Sequence Models",
    equation=EQUATION,
    training="nothing; a key without weight gets no gradient",
    theorem=THEOREM + "; alpha = 1 is softmax, to which it does",
    disperses=False,
)


@dataclass(frozen=True)
class Entmax(Mechanism):
    """alpha-entmax with a fixed alpha from 1 to 2; 1.5 and 2 are exact, by sorting."""

    alpha: float = 1.5

    def __post_init__(self) -> None:
        set_field(self, "alpha", check_alpha(self.alpha))

    @property
    def about(self) -> About:  # pyright: ignore[reportIncompatibleVariableOverride]
        return SPARSE if self.alpha > 1 else SOFTMAX._replace(title="alpha-entmax, alpha = 1")

    def formula(self, xp: Any, logits: Array, visible: Array, parameters: Mapping[str, Array]) -> Array:
        return entmax(xp, shifted(xp, logits, visible), visible, self.alpha)


@dataclass(frozen=True)
class LearnedEntmax(Learned):
    """alpha-entmax with a learned ``alpha = 1 + sigmoid(alpha_logit)``, between 1 and 2."""

    init: float = 1.5

    inference: ClassVar[bool] = False
    about: ClassVar[About] = About(
        title="alpha-entmax, learned alpha",
        paper="Correia, Niculae & Martins (2019), Adaptively Sparse Transformers",
        equation=EQUATION + ", alpha = 1 + sigmoid(alpha_logit)",
        training=f"alpha_logit, which has a gradient of its own: {NUMBERS}",
        theorem=THEOREM + "; as alpha is learned towards 1 it becomes softmax, to which it does",
        disperses=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        set_field(self, "init", check_number(self.init, "init"))
        if not 1 < self.init < 2:
            raise ValueError(f"expected init to be an alpha between 1 and 2, got {self.init!r}")

    def initial(self) -> dict[str, float]:
        return {"alpha_logit": math.log((self.init - 1) / (2 - self.init))}

    def formula(self, xp: Any, logits: Array, visible: Array, parameters: Mapping[str, Array]) -> Array:
        e = (1 + xp.tanh(parameters["alpha_logit"] / 2)) / 2
        return entmax_by_steps(xp, shifted(xp, logits, visible), visible, e)


def check_alpha(alpha: Any) -> float:
    """``alpha`` as a float; refused unless it is from 1 to 2."""
    number = check_number(alpha, "alpha")
    if not 1 <= number <= 2:
        raise ValueError(f"expected alpha to be from 1 (softmax) to 2 (sparsemax), got {alpha!r}")
    return number
