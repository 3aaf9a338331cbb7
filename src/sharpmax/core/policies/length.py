"""Policies that read nothing but the length of a row, or nothing at all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from ..arrays import Array, library_of
from ..stats import RowStats
from .base import Lowered, Serialisable, check_choice, check_number, log_count, set_field


@dataclass(frozen=True)
class Constant(Serialisable):
    """The same beta for every row; ``Constant(1)`` is softmax."""

    beta: float = 1.0

    needs_spread: ClassVar[bool] = False

    def __post_init__(self) -> None:
        set_field(self, "beta", check_number(self.beta, "beta", least=0))

    def lower(self) -> Lowered:
        """The numbers that a kernel takes."""
        return Lowered("log_count", (self.beta,))

    def __call__(self, stats: RowStats) -> Array:
        return library_of(stats.sum).xp.full_like(stats.sum, self.beta)


@dataclass(frozen=True)
class Hard(Serialisable):
    """Temperature 0: all weight on the largest logit, shared equally by tied ones; its gradient is 0."""

    needs_spread: ClassVar[bool] = False

    def __call__(self, stats: RowStats) -> Array:
        return library_of(stats.sum).xp.full_like(stats.sum, math.inf)


@dataclass(frozen=True)
class LogLength(Serialisable):
    """Beta grows with the logarithm of the number ``n`` of logits that are not masked.

    Without a reference length, ``beta = scale * log n + bias`` (not below 0): ``LogLength()`` is the log-n scaling of
    Chiang & Cholak (2022), and a fitted ``scale`` and ``bias`` are SSMax (Nakanishi, 2025). With a reference length
    ``n0``, beta is 1 up to it and ``(1 + scale * log(n / n0)) ** power`` beyond; ``steps`` counts whole multiples
    instead, ``1 + scale * log(floor(n / n0) + 1)``. The constructors :meth:`relative`, :meth:`yarn` and :meth:`llama4`
    name the usual choices.
    """

    scale: float = 1.0
    bias: float = 0.0
    reference: float | None = None
    power: int = 1
    steps: bool = False

    needs_spread: ClassVar[bool] = False

    def __post_init__(self) -> None:
        set_field(self, "scale", check_number(self.scale, "scale", least=0))
        set_field(self, "bias", check_number(self.bias, "bias"))
        check_choice(self.power, "power", (1, 2))
        check_choice(self.steps, "steps", (True, False))
        if self.reference is None:
            if self.power != 1 or self.steps:
                raise ValueError("power and steps need a reference length")
        else:
            set_field(self, "reference", check_number(self.reference, "reference", least=1))
            if self.bias:
                raise ValueError("bias and reference exclude each other: beta is 1 at the reference length")
            if self.steps and self.power != 1:
                raise ValueError("steps and power exclude each other")

    @classmethod
    def relative(cls, reference: float) -> Self:
        """``log n / log n0`` beyond the reference length ``n0``, 1 up to it."""
        return cls(scale=1 / math.log(check_number(reference, "reference", least=1.5)), reference=reference)

    @classmethod
    def yarn(cls, reference: float, scale: float = 0.1) -> Self:
        """``(1 + 0.1 log(n / n0))**2``: YaRN (Peng et al., 2023) scales queries and keys each by the square root."""
        return cls(scale=scale, reference=reference, power=2)

    @classmethod
    def llama4(cls, reference: float = 8192, scale: float = 0.1) -> Self:
        """``1 + 0.1 log(floor(n / 8192) + 1)``, the temperature of Llama 4's layers without rotary embedding."""
        return cls(scale=scale, reference=reference, steps=True)

    def lower(self) -> Lowered | None:
        """The numbers that a kernel takes; ``None`` for ``steps``, which is not a polynomial of log n."""
        if self.steps:
            return None
        if self.reference is None:
            return Lowered("log_count", (self.scale, self.bias))
        start = math.log(self.reference)
        a, b = self.scale, 1 - self.scale * start
        coefficients = (a, b) if self.power == 1 else (a * a, 2 * a * b, b * b)
        return Lowered("log_count", coefficients, lo=start)

    def __call__(self, stats: RowStats) -> Array:
        return log_length_beta(stats, self.scale, self.bias, self.reference, self.power, self.steps)


def log_length_beta(
    stats: RowStats,
    scale: Array | float,
    bias: Array | float,
    reference: float | None = None,
    power: int = 1,
    steps: bool = False,
) -> Array:
    """The formulas of :class:`LogLength`, for numbers or for learned arrays."""
    xp = library_of(stats.sum).xp
    if reference is None:
        beta = scale * log_count(xp, stats) + bias
        return xp.maximum(beta, xp.zeros_like(beta))
    multiple = xp.astype(stats.count, stats.sum.dtype) / reference
    multiple = xp.floor(multiple) + 1.0 if steps else xp.maximum(multiple, xp.ones_like(multiple))
    beta = scale * xp.log(multiple) + 1.0
    return beta * beta if power == 2 else beta
