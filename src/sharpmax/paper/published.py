"""Numbers that the paper prints, each once, for comparison with ours."""

from __future__ import annotations

from typing import NamedTuple


class PublishedSpread(NamedTuple):
    """Logit spreads (delta of Lemma 2.1) over all attention heads of a model."""

    model: str
    lowest: float
    average: float
    deviation: float
    highest: float


GEMMA_SPREADS = (
    PublishedSpread("Gemma 2B", lowest=2.28, average=5.69, deviation=2.05, highest=14.78),
    PublishedSpread("Gemma 7B", lowest=0.09, average=5.82, deviation=2.61, highest=32.74),
)
"""Section 2, "Practical values of delta": measured by the paper on a code file of about 4,000 tokens."""
