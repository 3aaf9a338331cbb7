"""Checkpoints: a safetensors file named by its content, and ``checkpoint.json`` that says which one and what is in it.

The JSON file is replaced last, and the tensors of the checkpoint before are removed after that. Whenever a run is
killed, ``checkpoint.json`` names a tensors file that is there and whole, and whose checksum it holds.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from ...core.files import write_bytes, write_text
from ...core.policies.base import check_number
from .layout import Layout, layout
from .model import Params
from .protocol import Protocol, check_whole
from .step import State

SCHEMA = "sharpmax.max-retrieval-checkpoint/1"
SIDECAR = "checkpoint.json"
TENSORS = re.compile(r"checkpoint-[0-9a-f]{16}\.safetensors")
"""What files of tensors are called."""

TEMPORARY = re.compile(r"\.checkpoint(-[0-9a-f]{16}\.safetensors|\.json)\.\w{8}")
"""What a write that was killed leaves."""


class TensorsMissingError(ValueError):
    """There is a checkpoint's JSON file, and not the file of tensors that it names."""


@dataclass(frozen=True)
class Checkpoint:
    """A head of every seed, trained up to ``step``.

    Attributes:
      state: parameters (and while training, Adam's moments and the average), flat, ``[seeds, D]`` each. A finished run
        keeps no moments.
      history: an entry for step 0 and for some of the chunks: ``step``, and for each seed ``spread`` and ``bound``
        after it, and ``loss`` and ``accuracy``, means over the chunk; ``None`` where a run diverged.
      chunk: steps between checkpoints.
      seconds: how long training took, compilation included.
      provenance: whatever the caller wants to say about how it was made.
    """

    protocol: Protocol
    seeds: tuple[int, ...]
    step: int
    chunk: int
    state: State
    history: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> Params:
        """What to evaluate: the averaged parameters where there are such, else the last ones; ``[seeds, ...]`` each."""
        return self.layout.unravel(self.state.theta if self.state.average is None else self.state.average)

    @property
    def layout(self) -> Layout:
        """Which parameters there are, and where they lie in the flat vector."""
        return layout(self.protocol.task, self.protocol.mechanism)

    @property
    def finished(self) -> bool:
        """Whether training is over."""
        return self.step >= self.protocol.steps

    def save(self, directory: str | Path) -> None:
        """Write the checkpoint, in place of the one that may be there."""
        directory = Path(directory)
        kept = {"params": self.state.theta, "average": self.state.average}
        if not self.finished:
            kept |= {"adam_m": self.state.m, "adam_v": self.state.v}
        tensors = {}
        for group, flat in kept.items():
            if flat is not None:
                leaves = jax.tree.leaves(self.layout.unravel(np.asarray(flat)))
                for name, array in zip(self.layout.names, leaves, strict=True):
                    tensors[f"{group}/{name}"] = np.ascontiguousarray(array)
        content = safetensors.numpy.save(tensors)
        digest = hashlib.sha256(content).hexdigest()
        name = f"checkpoint-{digest[:16]}.safetensors"
        sidecar = {
            "schema": SCHEMA,
            "tensors": name,
            "sha256": digest,
            "step": self.step,
            "chunk": self.chunk,
            "seeds": list(self.seeds),
            "seconds": self.seconds,
            "protocol": self.protocol.to_dict(),
            "provenance": self.provenance,
            "history": self.history,
        }
        write_bytes(directory / name, content)
        write_text(directory / SIDECAR, json.dumps(sidecar, indent=1, allow_nan=False) + "\n")
        for old in directory.iterdir():
            if old.name != name and (TENSORS.fullmatch(old.name) or TEMPORARY.fullmatch(old.name)):
                old.unlink()


def load_checkpoint(directory: str | Path, *, tensors: bool = True) -> Checkpoint:
    """Read the checkpoint in ``directory``; refused in one sentence if it is not one, or not whole.

    Without ``tensors`` they are not read, and its state is empty.
    """
    path = Path(directory) / SIDECAR
    try:
        sidecar = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ValueError(f"{directory} holds no checkpoint: there is no file {SIDECAR} in it") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a checkpoint: {error}") from None
    schema = sidecar.get("schema") if isinstance(sidecar, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"expected {path} to have the schema {SCHEMA!r}, got {schema!r}")
    try:
        protocol = Protocol.from_dict(sidecar["protocol"])
        seeds = checked_seeds(sidecar["seeds"])
        step, chunk = check_whole(sidecar["step"], "step", 0, protocol.steps), check_whole(sidecar["chunk"], "chunk", 1)
        history = _checked_history(sidecar["history"], step, len(seeds), finished=step == protocol.steps)
        file, digest, provenance = sidecar["tensors"], str(sidecar["sha256"]), dict(sidecar["provenance"])
        seconds = check_number(sidecar["seconds"], "seconds", least=0)
        if not TENSORS.fullmatch(file):
            raise ValueError(f"expected tensors to be called {TENSORS.pattern}, got {file!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a complete checkpoint: {_reason(error)}") from None
    state = State(None, None, None, None)
    if tensors:
        moments, averaged = step < protocol.steps, protocol.average > 0
        names = layout(protocol.task, protocol.mechanism).names
        state = _state(path.parent / file, digest, names, len(seeds), moments=moments, averaged=averaged)
    return Checkpoint(protocol, seeds, step, chunk, state, history, seconds, provenance)


def checked_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """``seeds``; refused unless they are different and JAX takes each."""
    seeds = tuple(seeds)
    whole = all(isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**32 for seed in seeds)
    if not seeds or not whole or len(set(seeds)) != len(seeds):
        raise ValueError(f"expected seeds to be different whole numbers from 0 to 2**32 - 1, got {list(seeds)}")
    return seeds


def _checked_history(history: Any, step: int, seeds: int, *, finished: bool) -> list[dict[str, Any]]:
    """``history``; refused unless every entry has its numbers, and a finished run an entry for its last step."""
    if not isinstance(history, list) or not history or not all(isinstance(entry, dict) for entry in history):
        raise ValueError("expected history to be one or more objects")
    before = -1
    for entry in history:
        before = check_whole(entry.get("step"), "a step of history", before + 1, step)
        for name in ("spread", "bound", *(("loss", "accuracy") if before else ())):
            values = entry.get(name)
            if not isinstance(values, list) or len(values) != seeds:
                raise ValueError(
                    f"expected {name} of step {before} in history to be {seeds} numbers, one for each seed"
                )
            for value in values:
                if value is not None:
                    check_number(value, f"{name} of step {before} in history")
    if finished and before != step:
        raise ValueError(f"expected history to end with step {step}, got {before}")
    return history


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _state(
    path: Path, digest: str, names: dict[str, tuple[int, ...]], seeds: int, *, moments: bool, averaged: bool
) -> State:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise TensorsMissingError(f"the checkpoint's tensors are missing: expected the file {path}") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(
            f"{path} is corrupt: its SHA-256 is not the one in {SIDECAR}; restore it, or remove it to train again"
        )
    try:
        tensors = safetensors.numpy.load(content)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None
    groups = ["params", *["average"] * averaged, *["adam_m", "adam_v"] * moments]
    flat: dict[str, np.ndarray] = {}
    for group in groups:
        parts = []
        for name, shape in names.items():
            array = tensors.get(f"{group}/{name}")
            if array is None or array.shape != (seeds, *shape) or array.dtype != np.float32:
                got = "nothing" if array is None else f"{array.dtype} {array.shape}"
                raise ValueError(f"expected {path} to hold {group}/{name} as float32 {(seeds, *shape)}, got {got}")
            parts.append(array.reshape(seeds, -1))
        flat[group] = np.concatenate(parts, axis=-1)
    return State(flat["params"], flat.get("adam_m"), flat.get("adam_v"), flat.get("average"))


def check_same(checkpoint: Checkpoint, protocol: Protocol, seeds: tuple[int, ...], directory: str | Path) -> None:
    """Refuse to go on from a checkpoint of another run."""
    there, here = checkpoint.protocol.to_dict(), protocol.to_dict()
    if different := [name for name in here if here[name] != there[name]]:
        said = ", ".join(f"{name} {there[name]!r} there and {here[name]!r} here" for name in different)
        raise ValueError(f"{directory} holds a checkpoint of another protocol ({said}); choose another directory")
    if checkpoint.seeds != seeds:
        raise ValueError(
            f"{directory} holds a checkpoint of the seeds {list(checkpoint.seeds)}, not {list(seeds)}; "
            "choose another directory"
        )
