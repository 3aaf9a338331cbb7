"""What decides a training run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .packing import LENGTH

PRECISIONS = ("auto", "bf16", "float32")
GENERATED = "generated"

FREE = ("data", "checkpoint_every", "log_every")
"""Settings that may change when a run goes on; that stored samples are those that would be made is checked apart."""


@dataclass(frozen=True)
class Settings:
    """What decides a run, ready for JSON. Everything else (device, folder, time) leaves its result as it is.

    Attributes:
      model: as for :func:`~sharpmax.tasks.clrs_text.find_model`.
      policy: of every head, as JSON; ``None`` for plain softmax.
      tokens: how many to train on, padding included; the last step may exceed it.
      batch: sequences in a step, over all processes.
      micro: sequences that a process takes through the model at a time; no more than the batch.
      length: tokens in a sequence.
      learning_rate: the highest.
      warmup: the share of steps in which it rises.
      final: the share of it that is left at the end of the cosine.
      weight_decay: of matrices, but for embeddings; norms and biases have none.
      betas: of AdamW.
      clip: the largest norm of the gradient.
      answers_only: whether questions are left out of the loss.
      traces: with the steps of the algorithms, or final answers alone.
      algorithms: some of the thirty; all if ``None``.
      sizes: instead of the benchmark's training sizes.
      seed: of the order of samples, and of random weights.
      data: ``generated``, or a folder of samples.
      workers: processes that make batches, for each process that trains; what comes out depends on their number.
      precision: ``bf16``: matrix products in bfloat16, weights and optimiser in float32; ``float32``; or ``auto``:
        bf16 on a GPU.
      gradient_checkpointing: less memory, more time.
      compile: whether ``torch.compile`` compiles the layers.
      checkpoint_every: steps between checkpoints.
      log_every: steps between lines of the log.
    """

    model: str = "smollm2-135m-instruct"
    policy: dict[str, Any] | None = None
    tokens: int = 100_000_000
    batch: int = 64
    micro: int = 32
    length: int = LENGTH
    learning_rate: float = 3e-4
    warmup: float = 0.02
    final: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    answers_only: bool = True
    traces: bool = True
    algorithms: tuple[str, ...] | None = None
    sizes: tuple[int, ...] | None = None
    seed: int = 0
    data: str = GENERATED
    workers: int = 0
    precision: str = "auto"
    gradient_checkpointing: bool = False
    compile: bool = False
    checkpoint_every: int = 200
    log_every: int = 10

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "micro", "checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} to be at least 1, got {getattr(self, name)}")
        object.__setattr__(self, "micro", min(self.micro, self.batch))
        if self.length < 2 or self.workers < 0:
            got = f"{self.length} and {self.workers}"
            raise ValueError(f"expected sequences of at least 2 tokens, and no negative number of workers, got {got}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"expected a seed from 0 to 2**63 - 1, got {self.seed}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"expected {name} to be above 0 and finite, got {getattr(self, name)}")
        for name in ("warmup", "final"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"expected {name} to be a share from 0 to 1, got {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"expected the weight decay to be at least 0 and finite, got {self.weight_decay}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"expected two betas from 0 to below 1, got {self.betas}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"expected precision to be one of {', '.join(PRECISIONS)}, got {self.precision!r}")

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return math.ceil(self.tokens / (self.batch * self.length))

    def accumulation(self, processes: int) -> int:
        """How many times a process goes through the model in a step."""
        if self.batch % (self.micro * processes):
            raise ValueError(
                f"expected the batch to be a multiple of {self.micro} sequences on each of {processes} processes, "
                f"got {self.batch}; a smaller micro may divide it"
            )
        return self.batch // (self.micro * processes)

    def to_json(self) -> dict[str, Any]:
        """All of it; of folders and files the name alone."""
        return asdict(self) | {
            "model": Path(self.model).name,
            "data": Path(self.data).name,
            "betas": list(self.betas),
            "algorithms": None if self.algorithms is None else list(self.algorithms),
            "sizes": None if self.sizes is None else list(self.sizes),
        }

    @staticmethod
    def from_json(content: dict[str, Any]) -> Settings:
        """What :meth:`to_json` wrote."""
        known = {field.name for field in fields(Settings)}
        if unknown := sorted(set(content) - known):
            raise ValueError(f"expected settings of a run to be among {', '.join(sorted(known))}, got {unknown[0]}")
        for name, value in content.items():
            what, fits = _KINDS[name]
            if not fits(value):
                raise ValueError(f"expected {name} to be {what}, got {value!r}")
        several: dict[str, Any] = {
            name: tuple(content[name]) for name in ("betas", "algorithms", "sizes") if content.get(name) is not None
        }
        return Settings(**content | several)

    def check_same(self, other: dict[str, Any], what: str) -> None:
        """Raise ValueError that begins with ``what`` if the settings of another run, as JSON, differ from these."""
        mine = self.to_json()
        differences = [
            f"{name} {other.get(name)} in place of {mine[name]}"
            for name in mine
            if name not in FREE and other.get(name) != mine[name]
        ]
        if differences:
            raise ValueError(
                f"{what} with {', '.join(differences)}: take another folder, or the settings that it began with"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(fits, value))


def _or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_BY_DEFAULT: dict[type, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number", _is_whole),
    float: ("a number", _is_number),
    str: ("a text", _is_text),
}
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    field.name: _BY_DEFAULT[type(field.default)] for field in fields(Settings) if type(field.default) in _BY_DEFAULT
} | {
    "policy": ("a policy or null", _or_none(lambda value: isinstance(value, dict))),
    "betas": ("a list of two numbers", _list_of(_is_number)),
    "algorithms": ("a list of names or null", _or_none(_list_of(_is_text))),
    "sizes": ("a list of whole numbers or null", _or_none(_list_of(_is_whole))),
}
"""What the value of each setting is, in words, and whether a value is that."""
