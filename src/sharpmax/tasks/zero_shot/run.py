"""Every cell of the measurement, one after the other: a cell that is written already is not measured again."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.claims import claimed
from ...core.files import write_text
from ...diagnostics.fingerprint import fingerprint
from ...progress import Show
from ...provenance import provenance
from ..prompts import Prompt, maximum_question, needle_question, sized
from . import measures, policies
from .study import HEADS, Cell, Settings, Study, begin, load_study, merged, read_cell

CALIBRATION = 1_000_000
"""Calibration prompts are numbered from here on; no prompt that is scored is one of them."""

CALIBRATION_PROMPTS, CALIBRATION_SENTENCES, CALIBRATION_ITEMS = 4, 16, 16


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

    @functools.cached_property
    def text(self) -> Tensor:
        """The tokens of the text."""
        return measures.text_tokens(self.tokenizer)

    def study(self, settings: Settings) -> Study:
        """What is asked of it, as it is kept."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        text = measures.text_hash()
        return Study(self.name, self.context, self.fingerprint, dtype, text, len(self.text), settings)

    @property
    def bos(self) -> int | None:
        """The token that the tokenizer puts before every text, if it does."""
        ids = self.tokenizer("a").input_ids
        return ids[0] if ids and ids[0] == self.tokenizer.bos_token_id else None

    @property
    def budget(self) -> int:
        """Tokens that one batch may hold."""
        return 131_072 if self.model.device.type == "cuda" else 4096


def prepare(subject: Subject, settings: Settings, out: Path) -> Settings:
    """Begin a study in OUT/MODEL, or go on with the one that is there; returns the settings of all of it.

    A folder with results of other settings or of another model is refused and left as it is.
    """
    folder = out / subject.name
    there, asked = load_study(folder), subject.study(settings)
    measures.stretch_ends(asked.text_tokens, settings.longest, settings.segments)
    whole = settings if there is None else merged(there.settings, settings, folder)
    for cell in (HEADS, *whole.cells()):
        read_cell(cell, folder, subject.study(whole))
    return begin(folder, asked).settings


def measure(subject: Subject, settings: Settings, out: Path, show: Show = lambda done, of, now: None) -> list[Cell]:
    """Measure every cell of ``settings``, each into a file of its own in OUT/MODEL, if it is not there.

    Cells that another process works on are left to it, and returned. :func:`prepare` refuses what does not fit.
    """
    whole, folder = prepare(subject, settings, out), out / subject.name
    heads = _heads(subject, whole, folder)
    work, plan = _Work(subject, whole), settings.cells()
    taken: list[Cell] = []
    for attempt in (plan, taken):  # Those that others hold are tried once more in the end.
        left, taken[:] = list(attempt), []
        for cell in left:
            show(plan.index(cell), len(plan), f"{cell.task} {cell.size:,} {cell.policy}")
            if not _fill(cell, folder, work, heads):
                taken.append(cell)
    taken = [cell for cell in taken if not cell.file(folder).exists()]
    show(len(plan) - len(taken), len(plan), "done")
    return taken


def _heads(subject: Subject, settings: Settings, folder: Path) -> policies.Heads:
    """The sharp heads, chosen by the first process that comes, for which others wait."""
    with claimed(HEADS.claim(folder), wait=True):
        if not HEADS.file(folder).exists():
            _write(HEADS, folder, subject.study(settings), choose_heads(subject, settings))
    found = read_cell(HEADS, folder, subject.study(settings))
    assert found is not None
    return {int(layer): which for layer, which in found["result"]["sharp"].items()}


def _fill(cell: Cell, folder: Path, work: _Work, heads: policies.Heads) -> bool:
    """Measure a cell unless it is there; whether it is there now."""
    if cell.file(folder).exists():
        return True
    with claimed(cell.claim(folder)) as mine:
        if mine and not cell.file(folder).exists():  # It may have been written just before the claim.
            subject = work.subject
            with policies.switched(cell.policy, subject.model, subject.context, heads):
                found = work.measure(cell.task, cell.size)
            _write(cell, folder, subject.study(work.settings), found)
        return mine


def _write(cell: Cell, folder: Path, study: Study, result: dict[str, Any]) -> None:
    content = {"settings": study.decides(cell), "result": result, "provenance": provenance()}
    write_text(cell.file(folder), json.dumps(content, indent=1) + "\n")


class _Work:
    """Prompts and text, made when they are first needed and kept for all policies."""

    def __init__(self, subject: Subject, settings: Settings) -> None:
        self.subject, self.settings = subject, settings
        self.ends = measures.stretch_ends(len(subject.text), settings.longest, settings.segments)
        self.questions: dict[tuple[str, int], list[measures.Question]] = {}

    def measure(self, task: str, size: int) -> dict[str, Any]:
        """One cell, with whatever policy is on."""
        s = self.subject
        if task == "perplexity":
            targets = self.settings.targets
            return measures.perplexity(s.model, s.text, self.ends, size, targets=targets, bos=s.bos, budget=s.budget)
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
