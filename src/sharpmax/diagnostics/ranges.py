"""Where a policy is sure of itself: the entropies it was made for, and the rows that lie outside."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.policies import Detached, EntropyCurve, EntropyPolynomial, PerHead
from ..core.stats import RowStats


def policy_range(policy: Any) -> tuple[float, float] | None:
    """The entropies that ``policy`` was made for; ``None`` where it has no such range.

    That is the domain of a polynomial, or the knots of a curve. A polynomial without a domain, such as ``PAPER``,
    counts as made for all entropies up to where it last exceeds its floor (5.94 nats for ``PAPER``): beyond, it has
    switched itself off. One that holds its peak is in range up to the peak.
    """
    if isinstance(policy, Detached):
        return policy_range(policy.policy)
    if isinstance(policy, EntropyCurve):
        return policy.entropies[0], policy.entropies[-1]
    if not isinstance(policy, EntropyPolynomial):
        return None
    if policy.domain is not None:
        return policy.domain
    if policy.beyond == "hold_peak":
        return -math.inf, policy._lowered().hi
    above_floor = np.asarray(policy.coefficients, np.float64)
    above_floor[-1] -= policy.floor
    roots = [float(r.real) for r in np.roots(above_floor) if abs(r.imag) < 1e-9]
    falls = bool(roots) and np.polyval(above_floor, max(roots) + 1) < 0
    return -math.inf, max(roots) if falls else math.inf


def outside_range(policy: Any, stats: RowStats) -> Tensor:
    """Which rows the policy would change although their entropy is outside of its range; ``[B, H, L]``."""
    entropy = stats.entropy
    if isinstance(policy, PerHead):
        heads = [
            outside_range(part, RowStats(*(f if f is None else f[:, h : h + 1] for f in stats)))
            for h, part in enumerate(policy.policies)
        ]
        return torch.cat(heads, dim=1)
    found = policy_range(policy)
    if found is None:
        return torch.zeros_like(entropy, dtype=torch.bool)
    inner: Any = policy.policy if isinstance(policy, Detached) else policy
    return (entropy > inner.threshold) & ((entropy < found[0]) | (entropy > found[1]))


def has_range(policy: Any) -> bool:
    """Whether any part of ``policy`` has a range."""
    if isinstance(policy, PerHead):
        return any(has_range(part) for part in policy.policies)
    return policy_range(policy) is not None
