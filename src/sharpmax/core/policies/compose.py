"""Policies made of policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arrays import Array, library_of, stop_gradient
from ..stats import RowStats
from .base import Lowered, Policy, Serialisable, check_callable, needs_spread, set_field
from .length import Hard


@dataclass(frozen=True)
class Detached(Serialisable):
    """Another policy's beta as a constant: no gradient flows through it. Made by :func:`detached`."""

    policy: Policy

    def __post_init__(self) -> None:
        check_callable(self.policy)

    @property
    def needs_spread(self) -> bool:
        return needs_spread(self.policy)

    def lower(self) -> Lowered | None:
        """The numbers of the policy inside: a kernel gives beta no gradient of itself."""
        return lowered(self.policy)

    def __call__(self, stats: RowStats) -> Array:
        return stop_gradient(self.policy(RowStats(*(f if f is None else stop_gradient(f) for f in stats))))


def detached(policy: Policy) -> Detached:
    """``policy`` with the gradient through beta stopped."""
    return policy if isinstance(policy, Detached) else Detached(policy)


@dataclass(frozen=True)
class PerHead(Serialisable):
    """One policy for each head: statistics are ``[..., heads, length]``, as attention has them."""

    policies: tuple[Policy, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.policies, tuple | list) or not self.policies:
            raise ValueError(f"expected PerHead to have a sequence of one or more policies, got {self.policies!r}")
        set_field(self, "policies", tuple(self.policies))
        if any(isinstance(policy, PerHead) for policy in self.policies):
            raise ValueError("expected the policies of PerHead to be for one head each, got another PerHead")
        for policy in self.policies:
            check_callable(policy)

    @property
    def needs_spread(self) -> bool:
        return any(needs_spread(policy) for policy in self.policies)

    def __call__(self, stats: RowStats) -> Array:
        check_heads(stats, len(self.policies), "PerHead")
        xp = library_of(stats.sum).xp
        heads = (RowStats(*(f if f is None else f[..., h, :] for f in stats)) for h in range(len(self.policies)))
        return xp.stack([policy(head) for policy, head in zip(self.policies, heads, strict=True)], axis=-2)


def lowered(policy: Any) -> Lowered | None:
    """``policy`` as plain numbers, or ``None`` if it has no such form."""
    return policy.lower() if hasattr(policy, "lower") else None


def is_hard(policy: Any) -> bool:
    """Whether ``policy`` gives infinite beta by its kind."""
    if isinstance(policy, PerHead):
        return any(is_hard(part) for part in policy.policies)
    return is_hard(policy.policy) if isinstance(policy, Detached) else isinstance(policy, Hard)


def check_heads(stats: RowStats, heads: int, what: str) -> None:
    """Refuse statistics that are not ``[..., heads, length]``."""
    shape = tuple(stats.sum.shape)
    if len(shape) < 2 or shape[-2] != heads:
        raise ValueError(f"expected {what} to get statistics of shape [..., {heads} heads, length], got {shape}")
