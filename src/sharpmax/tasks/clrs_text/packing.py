"""Documents packed into sequences of a fixed number of tokens, without attention from one to another.

A sequence holds whole documents. ``position_ids`` begin again at 0 with each of them, which is how
:mod:`sharpmax.huggingface` (as transformers itself) tells packed documents apart. What is left at the end is one more
document, of padding, that no loss is computed on.

Documents that are longer than a sequence are dropped, never cut, and counted by algorithm and size.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .stream import Samples
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
        self._buffer: list[tuple[int, Document]] = []

    def __iter__(self) -> Iterator[Packed]:
        return self

    def __next__(self) -> Packed:
        self._refill()
        if not self._buffer:
            raise StopIteration
        chosen, left = [self._buffer.pop(0)[1]], self.length
        left -= len(chosen[0].ids)
        while fitting := [i for i, (_, document) in enumerate(self._buffer) if len(document.ids) <= left]:
            best = max(fitting, key=lambda i: (len(self._buffer[i][1].ids), -i))
            chosen.append(self._buffer.pop(best)[1])
            left -= len(chosen[-1].ids)
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
            "waiting": [place for place, _ in self._buffer],
            "sequences": self.sequences,
            "documents": self.documents,
            "tokens": self.tokens,
            "dropped": {algorithm: dict(sizes) for algorithm, sizes in self.dropped.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state, of a packer with the same samples, order, tokenizer and settings."""
        if state.get("settings") != self._fingerprint:
            raise ValueError("expected the state of a packer with the same samples, order, tokenizer and settings")
        places = state["waiting"]
        read = {place: self.samples.read(place) for place in sorted(places)}
        self._buffer = list(zip(places, self.encoder([read[place] for place in places]), strict=True))
        self.samples.position = state["position"]
        self.sequences, self.documents, self.tokens = (state[k] for k in ("sequences", "documents", "tokens"))
        self.dropped = {algorithm: dict(sizes) for algorithm, sizes in state["dropped"].items()}

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
                    self._buffer.append((place, document))
                else:
                    sizes = self.dropped.setdefault(sample.algorithm, {})
                    sizes[str(sample.size)] = sizes.get(str(sample.size), 0) + 1
                    patience -= 1
            if patience < 0 and not self._buffer and not self.documents:
                raise ValueError(f"expected samples that fit into {self.length} tokens, got only longer ones")

    @functools.cached_property
    def _fingerprint(self) -> str:
        settings = self.samples.settings() | self.encoder.settings()
        settings |= {"length": self.length, "answers_only": self.answers_only, "waiting": self.waiting}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
