"""A stream of samples for training, in an order that is a pure function of a seed and a position.

Samples are taken in rounds. A round has one sample of every pair of algorithm and size, in an order of its own that
comes from the stream's seed; round after round takes the samples of a pair as upstream ordered them, which is at
random. So any stretch of the stream is balanced, and the place in it is one number.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .benchmark import Split
from .shards import CorruptShardError, load_manifest, read_shard
from .text import Generator, Sample


class Reader(Protocol):
    """Gives the samples of one pair by number, over all seeds; meant to be asked in ascending order."""

    def read(self, number: int) -> Sample:
        """The sample with this number."""
        ...


class Source(Protocol):
    """Where samples come from."""

    split: Split

    def reader(self, algorithm: str, size: int) -> Reader:
        """What reads the samples of a pair."""
        ...


class Generated:
    """Samples that are made when they are asked for; nothing is stored."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def reader(self, algorithm: str, size: int) -> Reader:
        """Makes the samples of a pair."""
        return _Making(self.split, algorithm, size)


class Stored:
    """Samples in a folder that :func:`generate` made; the same samples as :class:`Generated` gives."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        manifest = load_manifest(folder)
        self.split = Split.from_json(manifest["split"])
        self.shard: int = manifest["shard"]
        self._files: dict[tuple[str, int], list[str]] = {}
        for entry in manifest["shards"]:
            algorithm, size, _ = entry["file"].split("/")
            self._files.setdefault((algorithm, int(size)), []).append(entry["file"])

    def reader(self, algorithm: str, size: int) -> Reader:
        """Reads the shards of a pair, each checked when it is opened."""
        return _Reading([self.folder / name for name in self._files[algorithm, size]], self.shard)


class Samples:
    """The stream: an iterator over :class:`Sample`, with a place to go on from.

    Args:
      source: a :class:`Stored` folder, a :class:`Generated` split, or a folder's path.
      seed: of the order.
      epochs: how often to go through the split; without end if not given.
      rank: which part of the stream this is of ``ranks`` that have no sample in common.
      ranks: how many parts there are.

    Attributes:
      position: the place, of the whole stream, of the sample that comes next. It can be set.
    """

    def __init__(
        self,
        source: Source | str | Path,
        *,
        seed: int = 0,
        epochs: int | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"expected rank to be from 0 to ranks - 1, got {rank} of {ranks}")
        if seed < 0:
            raise ValueError(f"expected the seed of an order to be at least 0, got {seed}")
        self.source: Source = Stored(source) if isinstance(source, str | Path) else source
        self.seed, self.epochs, self.rank, self.ranks = seed, epochs, rank, ranks
        self.position = rank
        self._pairs = self.source.split.pairs
        self._readers: dict[int, Reader] = {}
        self._round: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        """How many samples are left; a stream without end has no length."""
        if self.epochs is None:
            raise TypeError("a stream without end has no length")
        return len(range(self.position, self.epochs * len(self.source.split), self.ranks))

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        if self.epochs is not None and self.position >= self.epochs * len(self.source.split):
            raise StopIteration
        sample = self.read(self.position)
        self.position += self.ranks
        return sample

    def read(self, position: int) -> Sample:
        """The sample at a place of the whole stream; quick if places are asked for in ascending order."""
        turn, slot = divmod(position, len(self._pairs))
        pair = int(self._order(turn)[slot])
        if pair not in self._readers:
            self._readers[pair] = self.source.reader(*self._pairs[pair])
        return self._readers[pair].read(turn % self.source.split.per_pair)

    def part(self, rank: int, ranks: int) -> Samples:
        """A part of this part, from the beginning."""
        return Samples(
            self.source,
            seed=self.seed,
            epochs=self.epochs,
            rank=self.rank + self.ranks * rank,
            ranks=self.ranks * ranks,
        )

    def settings(self) -> dict[str, Any]:
        """What decides which samples come in which order, whether they are stored or made."""
        return {"split": self.source.split.to_json(), "seed": self.seed, "rank": self.rank, "ranks": self.ranks}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_readers": {}}  # open files and samplers stay in their process

    def _order(self, turn: int) -> Any:
        if self._round[0] != turn:
            # RandomState, whose numbers NumPy has promised to keep.
            rng = np.random.RandomState([self.seed % 2**32, self.seed >> 32, turn % 2**32, turn >> 32])
            self._round = (turn, rng.permutation(len(self._pairs)))
        return self._round[1]


class _Making:
    def __init__(self, split: Split, algorithm: str, size: int) -> None:
        self.split, self.pair = split, (algorithm, size)
        self.made: Generator | None = None

    def read(self, number: int) -> Sample:
        seed, index = self.split.seeds[number // self.split.samples], number % self.split.samples
        if self.made is None or self.made.seed != seed or self.made.index > index:
            self.made = Generator(*self.pair, seed, traces=self.split.traces)
        self.made.skip(index - self.made.index)
        return next(self.made)


class _Reading:
    def __init__(self, files: list[Path], shard: int) -> None:
        self.files, self.shard = files, shard
        self.opened, self.at, self.lines = -1, 0, iter(())

    def read(self, number: int) -> Sample:
        shard, line = divmod(number, self.shard)
        if self.opened != shard or self.at > line:
            if not self.files[shard].is_file():
                raise CorruptShardError(
                    f"the shard {self.files[shard]} is missing: generate again, which makes what is missing"
                )
            read_shard(self.files[shard])
            content = io.BytesIO(self.files[shard].read_bytes())  # compressed, since one of every pair is open
            self.lines = gzip.GzipFile(fileobj=content)
            self.opened, self.at = shard, 0
        found = next(itertools.islice(self.lines, line - self.at, None))
        self.at = line + 1
        return Sample(**json.loads(found))
