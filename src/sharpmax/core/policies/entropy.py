"""Policies that read the entropy of a row: the paper's polynomial, and a monotone curve."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, Literal, get_args

import numpy as np

from ..arrays import Array, in_transform, library_of
from ..stats import RowStats
from .base import Lowered, Serialisable, check_number, check_numbers, set_field

Beyond = Literal["extrapolate", "hold_peak", "hold_end", "raise"]


@dataclass(frozen=True)
class EntropyPolynomial(Serialisable):
    """Beta as a polynomial of the entropy ``H`` (Equations 17 and 18, in the form of Figure 4)::

        beta = max(polynomial(H), floor)    where H > threshold,    else 1

    Args:
      coefficients: from the highest power to the constant, as in ``numpy.polyval``.
      threshold: rows whose entropy does not exceed it are left alone: they are sharp already.
      floor: beta is never below it where the polynomial applies; 1 means that entropy never rises.
      domain: the entropies ``(lowest, highest)`` that the polynomial was fitted on, if known.
      beyond: what to do outside of the domain. ``"extrapolate"``: use the polynomial all the same, as the paper does.
        ``"hold_end"``: keep the value at the end of the domain. ``"hold_peak"``: keep the largest value in the domain
        from where it is reached (without a domain: over all entropies above the threshold). ``"raise"``: refuse.
    """

    coefficients: tuple[float, ...]
    threshold: float = 0.5
    floor: float = 1.0
    domain: tuple[float, float] | None = None
    beyond: Beyond = "extrapolate"
    _range: tuple[float, float] = field(init=False, repr=False, compare=False)

    needs_spread: ClassVar[bool] = False

    def __post_init__(self) -> None:
        set_field(self, "coefficients", check_numbers(self.coefficients, "coefficients"))
        set_field(self, "threshold", check_number(self.threshold, "threshold", least=0))
        set_field(self, "floor", check_number(self.floor, "floor", least=0))
        if self.domain is not None:
            domain = check_numbers(self.domain, "domain")
            if len(domain) != 2 or not domain[0] < domain[1]:
                raise ValueError(f"expected domain to be (lowest, highest) entropy, got {self.domain!r}")
            set_field(self, "domain", domain)
        if self.beyond not in get_args(Beyond):
            raise ValueError(f"expected beyond to be one of {', '.join(get_args(Beyond))}, got {self.beyond!r}")
        if self.domain is None and self.beyond in ("hold_end", "raise"):
            raise ValueError(f"beyond={self.beyond!r} needs the domain that the polynomial was fitted on")
        set_field(self, "_range", self._held_range())

    def _held_range(self) -> tuple[float, float]:
        """The entropies at which the polynomial is evaluated; others are moved to the nearer end."""
        if self.beyond in ("extrapolate", "raise"):
            return (-math.inf, math.inf)
        lo, hi = self.domain if self.domain is not None else (self.threshold, math.inf)
        if self.beyond == "hold_end":
            return (lo, hi)
        turning = np.roots(np.polyder(np.asarray(self.coefficients)))
        candidates = [float(r.real) for r in turning if abs(r.imag) < 1e-9 and lo < r.real < hi] + [lo]
        if hi < math.inf:
            candidates.append(hi)
        elif any(c > 0 for c in np.trim_zeros(np.asarray(self.coefficients[:-1]), "f")[:1]):
            raise ValueError("beyond='hold_peak' needs a domain for a polynomial that grows without bound")
        return (
            lo if self.domain is not None else -math.inf,
            max(candidates, key=lambda h: np.polyval(self.coefficients, h)),
        )

    def lower(self) -> Lowered | None:
        """The numbers that a kernel takes; ``None`` for ``beyond="raise"``, which must look at values first."""
        return None if self.beyond == "raise" else self._lowered()

    def _lowered(self) -> Lowered:
        lo, hi = self._range
        return Lowered("entropy", self.coefficients, lo, hi, self.threshold, self.floor)

    def __call__(self, stats: RowStats) -> Array:
        if self.beyond == "raise":
            self._check_domain(stats)
        return self._lowered()(stats)

    def _check_domain(self, stats: RowStats) -> None:
        if in_transform(stats.sum):
            raise ValueError(
                "beyond='raise' looks at values, which a function being traced has not; use 'hold_end' there"
            )
        assert self.domain is not None
        xp, entropy = library_of(stats.sum).xp, stats.entropy
        outside = (entropy > self.threshold) & ((entropy < self.domain[0]) | (entropy > self.domain[1]))
        if bool(xp.any(outside)):
            worst = float(xp.max(xp.where(outside, entropy, 0.0)))
            raise ValueError(
                f"a row's entropy ({worst:.4g}) is outside of the fitted range {self.domain[0]:.4g} to "
                f"{self.domain[1]:.4g}; refit the policy, or choose another value for beyond"
            )


@dataclass(frozen=True)
class EntropyCurve(Serialisable):
    """Beta as a piecewise linear curve of the entropy, constant beyond its ends::

        beta = max(curve(H), floor)    where H > threshold,    else 1

    Unlike a polynomial it cannot turn down where nothing was fitted; :func:`~sharpmax.fit_monotone` makes one that
    never decreases.
    """

    entropies: tuple[float, ...]
    betas: tuple[float, ...]
    threshold: float = 0.5
    floor: float = 1.0

    needs_spread: ClassVar[bool] = False

    def __post_init__(self) -> None:
        set_field(self, "entropies", check_numbers(self.entropies, "entropies"))
        set_field(self, "betas", check_numbers(self.betas, "betas"))
        set_field(self, "threshold", check_number(self.threshold, "threshold", least=0))
        set_field(self, "floor", check_number(self.floor, "floor", least=0))
        if len(self.entropies) != len(self.betas):
            raise ValueError(f"expected as many betas as entropies, got {len(self.betas)} and {len(self.entropies)}")
        if any(b <= a for a, b in pairwise(self.entropies)):
            raise ValueError(f"expected entropies to increase, got {self.entropies!r}")

    def __call__(self, stats: RowStats) -> Array:
        xp, entropy = library_of(stats.sum).xp, stats.entropy
        value = xp.full_like(entropy, self.betas[0])
        knots = zip(self.entropies, self.betas, strict=True)
        for (left, low), (right, high) in pairwise(knots):
            within = xp.minimum(xp.maximum(entropy, xp.full_like(entropy, left)), xp.full_like(entropy, right))
            value = value + (high - low) / (right - left) * (within - left)
        return xp.where(entropy > self.threshold, xp.maximum(value, xp.full_like(value, self.floor)), 1.0)


PAPER = EntropyPolynomial((-0.037, 0.481, -2.3, 4.917, -1.791))
"""The polynomial of Figure 4, exactly as printed. It exceeds 1 only for entropies between 0.8486 and 5.9445 nats."""

PAPER_HELD = EntropyPolynomial(PAPER.coefficients, beyond="hold_peak")
"""The same polynomial held at its peak (2.421 at H = 4.412), so that it does not switch off on very flat rows."""
