"""Softmax with an inverse temperature: the family that policies span."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.arrays import Array
from ..core.policies import Constant, LearnableStructure, Policy, needs_spread
from ..core.softmax import softmax
from ..core.stats import row_stats
from .base import About, Mechanism, check_no_mechanism
from .temperatures import about_policy


@dataclass(frozen=True)
class Temperature(Mechanism):
    """``softmax(beta s)``, beta from a policy; ``Temperature()`` is softmax itself."""

    chosen_by: Policy = field(default_factory=Constant)

    def __post_init__(self) -> None:
        check_no_mechanism(self.chosen_by)
        if isinstance(self.chosen_by, type) or not callable(self.chosen_by):
            raise ValueError(f"expected chosen_by to be a policy of sharpmax, got {self.chosen_by!r}")

    @property
    def about(self) -> About:  # pyright: ignore[reportIncompatibleVariableOverride]
        return about_policy(self.chosen_by)

    @property
    def inference(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not isinstance(self.chosen_by, LearnableStructure)

    @property
    def heads(self) -> int | None:
        return self.chosen_by.heads if isinstance(self.chosen_by, LearnableStructure) else None

    @property
    def policy(self) -> Policy:
        """The policy."""
        return self.chosen_by

    def initial(self) -> dict[str, float]:
        return self.chosen_by.initial() if isinstance(self.chosen_by, LearnableStructure) else {}

    def formula(self, xp: Any, logits: Array, visible: Array, parameters: Mapping[str, Array]) -> Array:
        stats = row_stats(logits, where=visible, with_min=needs_spread(self.chosen_by))
        if isinstance(self.chosen_by, LearnableStructure):
            rows = {name: xp.squeeze(a, axis=-1) if self.heads is not None else a for name, a in parameters.items()}
            return softmax(logits, where=visible, beta=self.chosen_by.formula(stats, rows))
        return softmax(logits, where=visible, beta=self.chosen_by(stats))
