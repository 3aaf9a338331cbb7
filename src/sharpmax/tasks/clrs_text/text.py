"""Samples of CLRS-Text: a pure function of algorithm, size, seed and index.

Upstream draws the samples of an algorithm, a size and a seed one after the other from one stream of random numbers. The
stream is a matter of the samplers alone, not of the algorithms that run on what they draw; so samples before the first
that is wanted are drawn and not worked out, and any stretch can be made anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .benchmark import LARGEST_SEED, check_algorithm, check_size
from .upstream import load


@dataclass(frozen=True, slots=True)
class Sample:
    """A question and its answer, and what they were made from."""

    algorithm: str
    size: int
    seed: int
    index: int
    question: str
    """Ends with the names of what is asked for, a colon and a line break."""

    answer: str
    """``trace | final`` or ``final``, and an empty line."""


class Generator:
    """The samples of one algorithm, size and seed, in their order."""

    def __init__(self, algorithm: str, size: int, seed: int, *, traces: bool = True) -> None:
        check_algorithm(algorithm)
        check_size(size)
        if not 0 <= seed <= LARGEST_SEED:
            raise ValueError(f"expected a seed to be a whole number from 0 to {LARGEST_SEED:,}, got {seed}")
        self.algorithm, self.size, self.seed, self.traces = algorithm, size, seed, traces
        self.index = 0
        self._text = load().text
        self._sampler: Any = load().samplers.build_sampler(
            algorithm, -1, seed=seed, length=size, track_max_steps=False
        )[0]

    def skip(self, count: int) -> None:
        """Pass over ``count`` samples."""
        sampler = self._sampler
        for _ in range(count):
            sampler._sample_data(*sampler._args, **sampler._kwargs)
        self.index += count

    def __next__(self) -> Sample:
        drawn = self._sampler.next(batch_size=1)
        question, answer = self._text.format_clrs_example(self.algorithm, drawn, use_hints=self.traces)
        self.index += 1
        return Sample(self.algorithm, self.size, self.seed, self.index - 1, question, answer)

    def __iter__(self) -> Iterator[Sample]:
        return self


def generate_samples(
    algorithm: str, size: int, seed: int = 0, *, start: int = 0, count: int | None = None, traces: bool = True
) -> Iterator[Sample]:
    """The samples from ``start`` on, ``count`` of them or without end."""
    made = Generator(algorithm, size, seed, traces=traces)
    made.skip(start)
    return itertools.islice(made, count)
