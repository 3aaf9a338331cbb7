"""Documents packed into sequences of a fixed number of tokens, without attention from one to another.

A sequence holds whole documents. ``position_ids`` begin again at 0 with each of them, which is how
:mod:`sharpmax.huggingface` (as transformers itself) tells packed documents apart. What is left at the end is one more
document, of padding, that no loss is computed on.

Documents that are longer than a sequence are dropped, never cut, and counted by algorithm and size.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .stream import Samples
from .text import Sample
from .tokens import Document, Encoder

LENGTH = 2_048
"""Tokens in a sequence: the paper's limit."""

IGNORED = -100
"""A label that no loss is computed on, as in transformers."""


class Packed(NamedTuple):
    """A sequence: three arrays of int64, of the same length."""

    input_ids: np.ndarray
    position_ids: np.ndarray
    labels: np.ndarray


def pack(documents: list[Document], length: int = LENGTH, *, pad: int = 0, answers_only: bool = True) -> Packed:
    """Documents one after the other, and padding.

    Labels are those of transformers: the tokens themselves, which the model shifts, and -100 for the first of each
    document (what comes before it belongs to another), for padding, and with ``answers_only`` for questions.
    """
    ids = np.full(length, pad, np.int64)
    positions = np.empty(length, np.int64)
    labels = np.full(length, IGNORED, np.int64)
    at = 0
    for document in documents:
        end = at + len(document.ids)
        if end > length:
            raise ValueError(f"expected documents of at most {length} tokens together, got at least {end}")
        ids[at:end] = document.ids
        positions[at:end] = np.arange(end - at)
        silent = document.question if answers_only else 1
        labels[at + silent : end] = document.ids[silent:]
        at = end
    positions[at:] = np.arange(length - at)
    return Packed(ids, positions, labels)


class _Waiting(NamedTuple):
    """A document that is in no sequence yet, and its place in the stream."""

    place: int
    sample: Sample
    document: Document

    @property
    def tokens(self) -> int:
        return len(self.document.ids)


def _count(counts: dict[str, dict[str, int]], sample: Sample) -> None:
    sizes = counts.setdefault(sample.algorithm, {})
    sizes[str(sample.size)] = sizes.get(str(sample.size), 0) + 1


BY_SIZE = ("dropped", "packed")
"""What is counted by algorithm and size."""


def counted(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several streams of packed sequences gave together."""
    total: dict[str, Any] = {k: sum(part[k] for part in parts) for k in ("sequences", "documents", "tokens")}
    for name in BY_SIZE:
        counts: dict[str, dict[str, int]] = {}
        for part in parts:
            for algorithm, sizes in part[name].items():
                row = counts.setdefault(algorithm, {})
                for size, count in sizes.items():
                    row[size] = row.get(size, 0) + count
        total[name] = counts
    return total


class Packer:
    """An iterator over :class:`Packed` sequences, with a state to go on from to the bit.

    Of the documents that wait (``waiting`` at most), the oldest comes first into a sequence, and then always the
    longest that still fits.

    Args:
      samples: the stream of samples.
      encoder: makes tokens of them.
      length: tokens in a sequence.
      answers_only: whether labels leave out the questions.
      waiting: how many documents to choose from. More waste less padding.
    """

    def __init__(
        self,
        samples: Samples,
        encoder: Encoder,
        *,
        length: int = LENGTH,
        answers_only: bool = True,
        waiting: int = 64,
    ) -> None:
        if length < 2 or waiting < 1:
            raise ValueError(
                f"expected sequences of at least 2 tokens and at least one document to wait, got {length} and {waiting}"
            )
        self.samples, self.encoder = samples, encoder
        self.length, self.answers_only, self.waiting = length, answers_only, waiting
        self.sequences = 0
        self.documents = 0
        self.tokens = 0
        self.dropped: dict[str, dict[str, int]] = {}
        """How many samples did not fit, by algorithm and size; sizes are text, as in JSON."""
        self.packed: dict[str, dict[str, int]] = {}
        """The same of those that came into a sequence."""
        self._buffer: list[_Waiting] = []

    def __iter__(self) -> Iterator[Packed]:
        return self

    def __next__(self) -> Packed:
        self._refill()
        if not self._buffer:
            raise StopIteration
        taken, left = [self._buffer.pop(0)], self.length
        left -= taken[0].tokens
        while fitting := [i for i, document in enumerate(self._buffer) if document.tokens <= left]:
            best = max(fitting, key=lambda i: (self._buffer[i].tokens, -i))
            taken.append(self._buffer.pop(best))
            left -= taken[-1].tokens
        chosen = [waiting.document for waiting in taken]
        for waiting in taken:
            _count(self.packed, waiting.sample)
        self.sequences += 1
        self.documents += len(chosen)
        self.tokens += self.length - left
        return pack(chosen, self.length, pad=self.encoder.pad, answers_only=self.answers_only)

    def part(self, rank: int, ranks: int) -> Packer:
        """A packer of a part of the samples, from the beginning."""
        return Packer(
            self.samples.part(rank, ranks),
            self.encoder,
            length=self.length,
            answers_only=self.answers_only,
            waiting=self.waiting,
        )

    def state(self) -> dict[str, Any]:
        """Where this stands, ready for JSON: places in the stream, no tokens."""
        return {
            "settings": self._fingerprint,
            "position": self.samples.position,
            "waiting": [waiting.place for waiting in self._buffer],
            "sequences": self.sequences,
            "documents": self.documents,
            "tokens": self.tokens,
            **{name: copy.deepcopy(getattr(self, name)) for name in BY_SIZE},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state, of a packer with the same samples, order, tokenizer and settings."""
        if state.get("settings") != self._fingerprint or not set(BY_SIZE) <= set(state):
            raise ValueError("expected the state of a packer with the same samples, order, tokenizer and settings")
        places = state["waiting"]
        read = {place: self.samples.read(place) for place in sorted(places)}
        samples = [read[place] for place in places]
        self._buffer = [_Waiting(*parts) for parts in zip(places, samples, self.encoder(samples), strict=True)]
        self.samples.position = state["position"]
        self.sequences, self.documents, self.tokens = (state[k] for k in ("sequences", "documents", "tokens"))
        self.dropped, self.packed = (copy.deepcopy(state[name]) for name in BY_SIZE)

    def _refill(self) -> None:
        """Read until enough documents wait. If whole rounds bring none that fits, none ever will."""
        patience = max(1_000, 4 * len(self.samples.source.split.pairs))
        while len(self._buffer) < self.waiting:
            places, samples = [], []
            while len(samples) < self.waiting - len(self._buffer):
                place = self.samples.position
                sample = next(self.samples, None)
                if sample is None:
                    break
                places.append(place)
                samples.append(sample)
            if not samples:
                return
            for place, sample, document in zip(places, samples, self.encoder(samples), strict=True):
                if len(document.ids) <= self.length:
                    self._buffer.append(_Waiting(place, sample, document))
                else:
                    _count(self.dropped, sample)
                    patience -= 1
            if patience < 0 and not self._buffer and not self.documents:
                raise ValueError(f"expected samples that fit into {self.length} tokens, got only longer ones")

    @functools.cached_property
    def _fingerprint(self) -> str:
        settings = self.samples.settings() | self.encoder.settings()
        settings |= {"length": self.length, "answers_only": self.answers_only, "waiting": self.waiting}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
