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


class PublishedAccuracy(NamedTuple):
    """A table of accuracies in percent, by number of items."""

    sizes: tuple[int, ...]
    softmax: tuple[float, ...]
    adaptive: tuple[float, ...]
    p_value: tuple[float, ...]


TABLE1 = PublishedAccuracy(
    sizes=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    softmax=(98.6, 97.1, 94.3, 89.7, 81.3, 70.1, 53.8, 35.7, 22.6, 15.7, 12.4),
    adaptive=(98.6, 97.1, 94.5, 89.9, 82.1, 72.5, 57.7, 39.4, 24.9, 17.5, 14.0),
    p_value=(0.4, 0.4, 0.002, 2e-5, 2e-4, 3e-5, 1e-4, 6e-4, 0.02, 1e-3, 4e-3),
)
"""Table 1: max retrieval, the mean of ten seeds; p-values of the paired t-test between the two rows."""
