"""Packed sequences as batches of PyTorch tensors, made by this process or by several, with a state to go on from."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...extras import require

require("torch", "torch", "sharpmax.tasks.clrs_text.Loader")

import torch  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, get_worker_info  # noqa: E402

from .packing import Packed, Packer, counted  # noqa: E402
from .shards import start_worker  # noqa: E402

Batch = dict[str, torch.Tensor]
Arrays = dict[str, np.ndarray]


class PackedDataset(IterableDataset[Packed]):
    """The sequences of a :class:`Packer` as a dataset of PyTorch, in the process that asks for them."""

    def __init__(self, packer: Packer) -> None:
        self.packer = packer

    def __iter__(self) -> Iterator[Packed]:
        if get_worker_info() is not None:
            raise ValueError("expected a DataLoader without workers: Loader(packer, batch, workers=...) divides work")
        return iter(self.packer)


class Loader:
    """Batches ``{"input_ids", "position_ids", "labels"}``, each ``[batch, length]``, for a model of transformers.

    Args:
      packer: makes the sequences; workers take parts of a packer that has made none yet.
      batch: sequences in a batch; a last batch with fewer is left out.
      workers: processes that make them; with 0, this one does. They are spawned, so a script that asks for some needs
        ``if __name__ == "__main__":``. What comes out depends on their number, and on nothing else.
    """

    def __init__(self, packer: Packer, batch: int, *, workers: int = 0) -> None:
        if batch < 1 or workers < 0:
            raise ValueError(f"expected a batch of at least 1 and at least 0 workers, got {batch} and {workers}")
        if workers and packer.sequences:
            raise ValueError("expected a packer at its beginning, to be divided among workers, got one that has begun")
        self.packer, self.batch, self.workers = packer, batch, workers
        parts = [packer.part(i, workers) for i in range(workers)] if workers else [packer]
        self._states: list[dict[str, Any]] = [part.state() for part in parts]
        self._turn = 0

    def __iter__(self) -> Iterator[Batch]:
        if self.workers == 0:
            while len(batch := [p for _, p in zip(range(self.batch), self.packer, strict=False)]) == self.batch:
                self._states = [self.packer.state()]
                yield _tensors(_stacked(batch))
            return
        order = [(self._turn + i) % self.workers for i in range(self.workers)]
        with tempfile.TemporaryDirectory() as folder:
            stored = Path(folder) / "packer"
            stored.write_bytes(pickle.dumps(self.packer))
            batches = DataLoader(
                _Parts(stored, self.batch, order, self._states),
                batch_size=None,
                collate_fn=_untouched,
                num_workers=self.workers,
                multiprocessing_context="spawn",
                prefetch_factor=4,
                worker_init_fn=_begin,
            )
            for i, (worker, batch, state) in enumerate(batches):
                if i == self.workers:  # all have read it
                    stored.unlink()
                if isinstance(batch, str):
                    raise ValueError(batch)
                self._states[worker], self._turn = state, (worker + 1) % self.workers
                yield _tensors(batch)

    def state(self) -> dict[str, Any]:
        """Where this stands after the last batch that came out, ready for JSON."""
        return {"batch": self.batch, "workers": self.workers, "turn": self._turn, "states": list(self._states)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state, of a loader with the same number of workers and batches of the same size."""
        for what in ("batch", "workers"):
            if state.get(what) != getattr(self, what):
                raise ValueError(
                    f"expected the state of a loader with {what} {getattr(self, what)}, got {state.get(what)}"
                )
        if self.workers == 0:
            self.packer.restore(state["states"][0])
        self._states, self._turn = list(state["states"]), state["turn"]

    @property
    def counts(self) -> dict[str, Any]:
        """Sequences, documents and tokens (without padding) so far; what was packed and dropped, by size."""
        return counted(self._states)


class _Parts(IterableDataset[tuple[int, Arrays | str, dict[str, Any]]]):
    """Batches of the part of each worker, with where it stands after them; ``order`` says which part is whose.

    What is wrong with the samples comes as a text in the place of a batch, since PyTorch would add a traceback to it.
    Arrays are sent, not tensors: a worker that is told to end while its queue moves a tensor to shared memory aborts.
    The packer, with a vocabulary of megabytes, is read from a file: what is sent to a worker waits for all its imports,
    and the next worker is started after that.
    """

    def __init__(self, stored: Path, batch: int, order: list[int], states: list[dict[str, Any]]) -> None:
        self.stored, self.batch, self.order, self.states = stored, batch, order, states

    def __iter__(self) -> Iterator[tuple[int, Arrays | str, dict[str, Any]]]:
        worker = get_worker_info()
        assert worker is not None
        part = self.order[worker.id]
        packer: Packer = pickle.loads(self.stored.read_bytes()).part(part, len(self.order))
        try:
            packer.restore(self.states[part])
            while len(batch := [p for _, p in zip(range(self.batch), packer, strict=False)]) == self.batch:
                yield part, _stacked(batch), packer.state()
        except ValueError as error:
            yield part, str(error), {}


def _stacked(batch: list[Packed]) -> Arrays:
    return {name: np.stack([getattr(p, name) for p in batch]) for name in Packed._fields}


def _tensors(arrays: Arrays) -> Batch:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _begin(worker: int) -> None:
    del worker
    start_worker()


def _untouched(sample: Any) -> Any:
    return sample
