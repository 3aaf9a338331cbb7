"""Mechanisms with parameters: one of each for every head, or one for all heads together."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Mechanism

NUMBERS = "one number for each head where heads is set, else one for all"


@dataclass(frozen=True)
class Learned(Mechanism, abstract=True):
    """A mechanism whose parameters are learned, for so many heads (``None``: one for all of them)."""

    heads: int | None = None  # pyright: ignore[reportIncompatibleMethodOverride]

    def __post_init__(self) -> None:
        if self.heads is not None and (type(self.heads) is not int or self.heads < 1):
            raise ValueError(f"expected heads to be a number of heads or None, got {self.heads!r}")
