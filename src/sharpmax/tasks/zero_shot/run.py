"""Every cell of the measurement, one after the other: a cell that is written already is not measured again."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.files import write_text
from ...diagnostics.fingerprint import fingerprint
from ...progress import Show
from ...provenance import provenance
from ..prompts import Prompt, maximum_question, needle_question, sized
from . import measures, policies

CALIBRATION = 1_000_000
"""Calibration prompts are numbered from here on; no prompt that is scored is one of them."""

CALIBRATION_PROMPTS, CALIBRATION_SENTENCES, CALIBRATION_ITEMS = 4, 16, 16
TASKS = {
    "perplexity": "perplexity of a text, by tokens",
    "needle": "numbers found in a text, by tokens",
    "maximum": "the largest of a list, by items",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured, and of what size; the same settings give the same cells."""

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    """Tokens of stretches of text and of needle prompts."""

    items: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)
    """Items of maximum prompts."""

    policies: tuple[str, ...] = tuple(policies.CHOICES)
    segments: int = 16
    prompts: int = 100
    shots: int = 5
    """Solved examples before a maximum prompt."""

    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.policies if name not in policies.CHOICES]
        if unknown or not self.policies:
            raise ValueError(f"expected policies of {', '.join(policies.CHOICES)}, got {', '.join(unknown) or 'none'}")
        if not self.lengths or min(self.lengths) < 128:
            raise ValueError(f"expected lengths of at least 128 tokens, got {self.lengths}")
        if not self.items or min(self.items) < 1:
            raise ValueError(f"expected numbers of items of at least 1, got {self.items}")

    @property
    def targets(self) -> int:
        """Tokens that are predicted at the end of every stretch of text, the same ones for every length."""
        return min(measures.TARGETS, min(self.lengths) // 2)

    def sizes(self, task: str) -> tuple[int, ...]:
        """The sizes of a task's prompts."""
        return self.items if task == "maximum" else self.lengths


QUICK = Settings(
    lengths=(256, 512), items=(4, 16), policies=("off", "paper", "held", "paper_sharp"), segments=2, prompts=6
)
"""A few minutes on a CPU: whether it works, not what comes out."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with what the measurement needs to know of it."""

    name: str
    model: Any
    tokenizer: Any
    context: int

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the weights."""
        return fingerprint(self.model)

    @property
    def bos(self) -> int | None:
        """The token that the tokenizer puts before every text, if it does."""
        ids = self.tokenizer("a").input_ids
        return ids[0] if ids and ids[0] == self.tokenizer.bos_token_id else None

    @property
    def budget(self) -> int:
        """Tokens that one batch may hold."""
        return 131_072 if self.model.device.type == "cuda" else 4096


def measure(subject: Subject, settings: Settings, out: Path, show: Show = lambda done, of, now: None) -> dict[str, Any]:
    """Measure every (policy, task, size), each into a file of its own under ``out``; returns all of them.

    Files that are there are taken as they are; :func:`check_cells` refuses those of other settings or weights.
    """
    check_cells(subject, settings, out)
    heads = _cell(
        _file(out, subject, "heads"),
        _settings(subject, settings, "heads"),
        lambda: choose_heads(subject, settings),
    )
    chosen = {int(layer): which for layer, which in heads["sharp"].items()}
    cells, plan = [], _plan(settings)
    work = _Work(subject, settings)
    for done, (task, size, policy) in enumerate(plan):
        show(done, len(plan), f"{task} {size:,} {policy}")

        def one(task: str = task, size: int = size, policy: str = policy) -> dict[str, Any]:
            with policies.switched(policy, subject.model, subject.context, chosen):
                return work.measure(task, size)

        found = _cell(_file(out, subject, task, size, policy), _settings(subject, settings, task, size, policy), one)
        cells.append({"task": task, "size": size, "policy": policy, **found})
    show(len(plan), len(plan), "done")
    return {
        "model": subject.name,
        "context": subject.context,
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "settings": dataclasses.asdict(settings),
        "text": {"tokens": len(work.tokens), "sha256": _text_hash()},
        "policies": {name: policies.CHOICES[name].label for name in settings.policies},
        "heads": heads,
        "cells": cells,
    }


class _Work:
    """Prompts and text, made when they are first needed and kept for all policies."""

    def __init__(self, subject: Subject, settings: Settings) -> None:
        self.subject, self.settings = subject, settings
        self.tokens = measures.text_tokens(subject.tokenizer)
        self.ends = measures.stretch_ends(len(self.tokens), max(settings.lengths), settings.segments)
        self.questions: dict[tuple[str, int], list[measures.Question]] = {}

    def measure(self, task: str, size: int) -> dict[str, Any]:
        """One cell, with whatever policy is on."""
        s = self.subject
        if task == "perplexity":
            targets = self.settings.targets
            return measures.perplexity(
                s.model, self.tokens, self.ends, size, targets=targets, bos=s.bos, budget=s.budget
            )
        if (task, size) not in self.questions:
            made = prompts(task, size, s.tokenizer, self.settings)
            self.questions = {(task, size): measures.read(made, s.tokenizer)}
        return measures.answers(s.model, s.tokenizer, self.questions[task, size], s.budget)


def prompts(task: str, size: int, tokenizer: Any, settings: Settings) -> list[Prompt]:
    """The prompts of a task. Needles stand at evenly spaced depths, from the very beginning to the very end."""
    if task == "maximum":
        return [
            maximum_question(size, seed=settings.seed, index=i, shots=settings.shots) for i in range(settings.prompts)
        ]
    depths = [i / max(1, settings.prompts - 1) for i in range(settings.prompts)]
    return [
        sized(functools.partial(needle_question, depth=depth, seed=settings.seed, index=i), size, tokenizer)
        for i, depth in enumerate(depths)
    ]


def choose_heads(subject: Subject, settings: Settings) -> dict[str, Any]:
    """The sharp heads, from needle and maximum prompts of their own, and what they were chosen by."""
    prompts: list[Tensor] = []
    for i in range(CALIBRATION, CALIBRATION + CALIBRATION_PROMPTS):
        depth = (i + 0.5 - CALIBRATION) / CALIBRATION_PROMPTS
        needle = needle_question(CALIBRATION_SENTENCES, depth=depth, seed=settings.seed, index=i)
        maximum = maximum_question(CALIBRATION_ITEMS, seed=settings.seed, index=i, shots=settings.shots)
        prompts += [subject.tokenizer(p.text, return_tensors="pt").input_ids for p in (needle, maximum)]
    stats = policies.head_stats(subject.model, prompts)
    return {
        "sharp": {str(layer): heads for layer, heads in policies.sharp_heads(stats).items()},
        "of": list(stats.entropy.shape),
        "entropy": [[round(x, 4) for x in row] for row in stats.entropy.tolist()],
        "sink": [[round(x, 4) for x in row] for row in stats.sink.tolist()],
    }


def _settings(subject: Subject, settings: Settings, task: str, size: int = 0, policy: str = "") -> dict[str, Any]:
    """What decides a cell: a file that says otherwise is refused."""
    shared = {
        "model": subject.name,
        "weights": subject.fingerprint,
        "dtype": str(subject.model.dtype),
        "seed": settings.seed,
        "shots": settings.shots,
    }
    if task == "perplexity":
        shared |= {"segments": settings.segments, "longest": max(settings.lengths), "targets": settings.targets}
        shared |= {"text": _text_hash()}
    elif task != "heads":
        shared |= {"prompts": settings.prompts}
    return shared | {"task": task, "size": size, "policy": policy}


@functools.cache
def _text_hash() -> str:
    return hashlib.sha256(measures.text().encode()).hexdigest()


def _plan(settings: Settings) -> list[tuple[str, int, str]]:
    return [(task, size, policy) for task in TASKS for size in settings.sizes(task) for policy in settings.policies]


def _file(out: Path, subject: Subject, task: str, size: int = 0, policy: str = "") -> Path:
    return out / subject.name / ("sharp_heads.json" if task == "heads" else f"{task}_{size}_{policy}.json")


def check_cells(subject: Subject, settings: Settings, out: Path) -> None:
    """Refuse a folder that holds cells of the same names with other settings or of other weights."""
    for cell in (("heads", 0, ""), *_plan(settings)):
        if (path := _file(out, subject, *cell)).exists():
            known, asked = json.loads(path.read_text(encoding="utf-8"))["settings"], _settings(subject, settings, *cell)
            if other := sorted(name for name in {**known, **asked} if known.get(name) != asked.get(name)):
                raise ValueError(
                    f"{path.parent} holds results with other {', '.join(other)}: choose another folder, or remove them"
                )


def _cell(path: Path, settings: dict[str, Any], measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))["result"]
    result = measured()
    write_text(path, json.dumps({"settings": settings, "result": result, "provenance": provenance()}, indent=1) + "\n")
    return result


def find_subject(name_or_path: str, dtype: str | None = None, device: str | None = None) -> Subject:
    """Load a model for the measurement: on a GPU if there is one, in bfloat16 there and in float32 on a CPU.

    Policies that were saved with it are left out, with a warning: the measurement switches its own on and off.
    """
    from ...huggingface import weights

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = dtype or ("bfloat16" if where.startswith("cuda") else "float32")
    model: Any
    model, tokenizer = weights.load(name_or_path, dtype=kind, attn_implementation="sdpa")
    known = weights.MODELS.get(name_or_path)
    context = getattr(model.config, "max_position_embeddings", None) if known is None else known.context
    if not model.can_generate() or context is None:
        raise ValueError(f"expected a decoder with a known context, got {name_or_path!r}, a {type(model).__name__}")
    return Subject(Path(name_or_path).name, model.to(where), tokenizer, context)
