"""What an implementation hands back for one row."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

STATISTICS = ("max", "sum", "moment", "min", "count", "lse", "mean", "entropy", "spread")


@dataclass(frozen=True)
class Result:
    """What an implementation can tell about a row; what it leaves out is not judged. Arrays are float64 ``[n]``."""

    stats: dict[str, float] = field(default_factory=dict)
    beta: float | None = None
    weights: np.ndarray | None = None
    gradient: np.ndarray | None = None
    rounded: bool = False
    """Whether the maximum is rounded, and sum and moment are relative to that."""
