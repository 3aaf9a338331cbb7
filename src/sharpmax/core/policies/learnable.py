"""Policies with parameters: their structure and formula, for any framework to hold the arrays.

``sharpmax.torch.Learnable(structure)`` and ``sharpmax.flax.Learnable(structure)`` make a module of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..arrays import Array, library_of
from ..stats import RowStats
from .base import Serialisable, check_number, set_field
from .compose import check_heads
from .length import log_length_beta


@dataclass(frozen=True)
class LearnableStructure(Serialisable, abstract=True):
    """The structure of a policy with parameters, one of each for every head (or one for all with ``heads=None``).

    ``sharpmax.torch.Learnable`` and ``sharpmax.flax.Learnable`` make modules of it, which are policies. Saved as JSON
    like any policy; the arrays are saved with the model they belong to.
    """

    heads: int | None = None

    needs_spread: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.heads is not None and (type(self.heads) is not int or self.heads < 1):
            raise ValueError(f"expected heads to be a number of heads or None, got {self.heads!r}")

    def initial(self) -> dict[str, float]:
        """The value that each parameter starts from."""
        raise TypeError("LearnableStructure is abstract; use LearnableTemperature or LearnableLogLength")

    def parameters(self) -> dict[str, np.ndarray]:
        """The parameters to start from, float32, of shape ``[heads]`` or ``[]``."""
        shape = () if self.heads is None else (self.heads,)
        return {name: np.full(shape, value, np.float32) for name, value in self.initial().items()}

    def beta(self, stats: RowStats, parameters: Mapping[str, Array]) -> Array:
        """Beta of every row, given arrays for :meth:`parameters`."""
        if self.heads is None:
            return self.formula(stats, dict(parameters))
        check_heads(stats, self.heads, type(self).__name__)
        xp = library_of(stats.sum).xp
        return self.formula(stats, {name: xp.expand_dims(array, axis=-1) for name, array in parameters.items()})

    def formula(self, stats: RowStats, parameters: Mapping[str, Array]) -> Array:
        """:meth:`beta` with parameters that broadcast against the rows."""
        raise TypeError("LearnableStructure is abstract; use LearnableTemperature or LearnableLogLength")

    def __call__(self, stats: RowStats) -> Array:
        raise TypeError(
            f"{type(self).__name__} has parameters to learn; make a module of it with sharpmax.torch.Learnable or "
            "sharpmax.flax.Learnable"
        )


@dataclass(frozen=True)
class LearnableTemperature(LearnableStructure):
    """A learned temperature per head (as in AERO; Jha & Reagen, 2024): ``beta = exp(log_beta)``.

    ``init`` is the beta that it starts from.
    """

    init: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        set_field(self, "init", check_number(self.init, "init", least=1e-6))

    def initial(self) -> dict[str, float]:
        return {"log_beta": math.log(self.init)}

    def formula(self, stats: RowStats, parameters: Mapping[str, Array]) -> Array:
        xp = library_of(stats.sum).xp
        return xp.exp(xp.astype(parameters["log_beta"], stats.sum.dtype, copy=False)) * xp.ones_like(stats.sum)


@dataclass(frozen=True)
class LearnableLogLength(LearnableStructure):
    """SSMax (Nakanishi, 2025) with a learned scale, and a bias if asked for: ``beta = scale * log n + bias``.

    ``scale`` and ``bias`` are where they start; ``scale=1 / log(n)`` starts as softmax at length ``n``.
    """

    scale: float = 1.0
    bias: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        set_field(self, "scale", check_number(self.scale, "scale", least=0))
        if self.bias is not None:
            set_field(self, "bias", check_number(self.bias, "bias"))

    def initial(self) -> dict[str, float]:
        return {"scale": self.scale} if self.bias is None else {"scale": self.scale, "bias": self.bias}

    def formula(self, stats: RowStats, parameters: Mapping[str, Array]) -> Array:
        xp = library_of(stats.sum).xp
        learned = {name: xp.astype(array, stats.sum.dtype, copy=False) for name, array in parameters.items()}
        return log_length_beta(stats, learned["scale"], learned.get("bias", 0.0))
