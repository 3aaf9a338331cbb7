"""How often a model is right: greedy replies to every question of an evaluation set, scored and kept.

    OUT/cells/ALGORITHM_SEED.json        right or wrong for each sample, written when the last reply is there
    OUT/replies/ALGORITHM_SEED.jsonl.gz  what the model wrote
    OUT/evaluation.json                  accuracy by algorithm and size (outcomes.py), written last

A cell is an algorithm and a seed, at all sizes. Questions of several cells are answered together, so that batches are
full; a cell that is written is not asked again. A sample whose question and answer are longer than the context is left
out, as in training.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...core.files import write_bytes, write_text
from ...provenance import makers, provenance
from .benchmark import Split
from .benchmark import evaluation as upstream_set
from .cells import Asked, Cell, is_whole, made_samples
from .outcomes import Description, summarise
from .packing import LENGTH
from .tokens import Encoder

GROUP = 12_000
"""About how many samples are answered together: towards the end of a group fewer and fewer run side by side."""


@dataclass(frozen=True)
class Settings:
    """What is asked; the same settings give the same questions.

    Attributes:
      algorithms: some of the thirty; all if not given.
      sizes: for all of them, instead of the benchmark's.
      seeds: of the samplers.
      samples: of each algorithm, size and seed.
      traces: with traces or without.
      length: tokens that a question and its answer may have together.
    """

    algorithms: tuple[str, ...] | None = None
    sizes: tuple[int, ...] | None = None
    seeds: tuple[int, ...] = (3, 14, 35, 81, 94)
    samples: int = 125
    traces: bool = True
    length: int = LENGTH

    def __post_init__(self) -> None:
        _ = self.split  # which checks what it is made of
        if self.length < 2:
            raise ValueError(f"expected a length of at least 2 tokens, got {self.length}")

    @functools.cached_property
    def split(self) -> Split:
        """The samples that are asked for."""
        return upstream_set(self.traces).only(self.algorithms, self.sizes, seeds=self.seeds, samples=self.samples)


class Generate(Protocol):
    """Greedy continuations of prompts, without the token that ends them, in any order; each with its prompt's index."""

    def __call__(
        self, model: Any, prompts: Sequence[list[int]], limits: Sequence[int], *, end: Collection[int], pad: int
    ) -> Iterator[tuple[int, list[int]]]: ...


def evaluate(
    model: Any,
    encoder: Encoder,
    settings: Settings,
    out: str | Path,
    show: Callable[[int, int], None] | None = None,
    *,
    name: str = "model",
    training: dict[str, Any] | None = None,
    memory: float | None = None,
    generate: Generate | None = None,
) -> dict[str, Any]:
    """Ask a model every question of the settings, and write and give its accuracy by algorithm and size.

    Args:
      model: of transformers, with the attention that it shall have.
      encoder: makes tokens as in training.
      settings: what to ask.
      out: the folder. Cells that are there are taken as they are; those of other settings or weights raise ValueError.
      show: called with the samples done and the samples in all.
      name: of the model, for the report.
      training: how the model was trained, as :func:`.outcomes.training_summary` gives it.
      memory: the part of a GPU's free memory that keys and values may take, if not 0.6.
      generate: what writes replies, if not this package's own generation.
    """
    out = Path(out)
    described = describe(model, encoder, name)
    plan = _plan(settings)
    done = known_cells(out, described, settings)
    show = show or (lambda done, of: None)
    work = _Work(model, encoder, settings, out, described, generate or _generation(memory), show)
    work.run(plan, done)
    cells = {cell: done[cell] for cell in plan}
    report = summarise(cells, described, settings.split, settings.length, training)
    made = {"measured_by": makers(cell["provenance"] for cell in cells.values()), "provenance": work.provenance}
    write_text(out / "evaluation.json", json.dumps(report | made, indent=1) + "\n")
    return report


def _plan(settings: Settings) -> list[Cell]:
    return [Cell(algorithm, seed) for algorithm in settings.split.sizes for seed in settings.split.seeds]


def _generation(memory: float | None) -> Generate:
    from .generation import MEMORY, Generation

    return Generation(memory=memory or MEMORY)


def describe(model: Any, encoder: Encoder, name: str) -> Description:
    """What decides a model's replies: its weights, its policies, its type and its tokenizer."""
    from ...diagnostics.fingerprint import fingerprint

    tokens = json.dumps(encoder.settings(), sort_keys=True)
    return Description(
        name=name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights=fingerprint(model),
        dtype=str(model.dtype).removeprefix("torch."),
        policy=active_rules(model),
        tokenizer=hashlib.sha256(tokens.encode()).hexdigest()[:16],
    )


def active_rules(model: Any) -> list[dict[str, Any]] | None:
    """The policies that a model runs with, as its config has them; ``None`` for plain softmax."""
    from ...core.policies import PAPER, Constant
    from ...huggingface.interface import NAME
    from ...huggingface.stored import Rule, stored_rules, written

    if model.config.get_text_config()._attn_implementation != NAME:
        return None
    rules = stored_rules(model) or (Rule(PAPER),)
    return None if all(rule.policy == Constant(1.0) for rule in rules) else json.loads(written(rules))["rules"]


def _cell_settings(cell: Cell, described: Description, settings: Settings) -> dict[str, Any]:
    """What decides a cell: a file that says otherwise is refused."""
    return {
        "weights": described.weights,
        "policy": described.policy,
        "dtype": described.dtype,
        "tokenizer": described.tokenizer,
        "sizes": list(settings.split.sizes[cell.algorithm]),
        "samples": settings.samples,
        "traces": settings.traces,
        "length": settings.length,
    }


def known_cells(out: Path, described: Description, settings: Settings) -> dict[Cell, dict[str, Any]]:
    """The cells that are written already; ValueError for one of other settings or weights, or a damaged one."""
    found: dict[Cell, dict[str, Any]] = {}
    for cell in _plan(settings):
        path = cell.file(out)
        if not path.exists():
            continue
        kept, other, whole = {}, [], False
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            known = dict(kept["settings"])
            asked = _cell_settings(cell, described, settings)
            other = sorted(key for key in {**known, **asked} if known.get(key) != asked.get(key))
            whole = bool(other) or is_whole(kept, asked["sizes"], settings.samples)
        except (ValueError, TypeError, LookupError, AttributeError):
            pass
        if not whole:
            raise ValueError(f"{path} is damaged: delete it, and the same command makes it again")
        if other:
            raise ValueError(f"{out} holds results with other {', '.join(other)}: choose another folder, or remove it")
        found[cell] = kept
    return found


class _Work:
    """Answers the cells that are missing, in groups."""

    def __init__(
        self,
        model: Any,
        encoder: Encoder,
        settings: Settings,
        out: Path,
        described: Description,
        generate: Generate,
        show: Callable[[int, int], None],
    ) -> None:
        self.model, self.encoder, self.settings, self.out = model, encoder, settings, out
        self.described, self.generate, self.show = described, generate, show
        self.done = 0
        self.provenance = provenance()

    def run(self, plan: Sequence[Cell], cells: dict[Cell, dict[str, Any]]) -> None:
        """Answer what ``cells`` lacks of the plan, and put it there."""
        split = self.settings.split
        self.done = sum(len(split.sizes[cell.algorithm]) * split.samples for cell in cells)
        self.show(self.done, len(split))
        group: list[Asked] = []
        with contextlib.closing(made_samples([cell for cell in plan if cell not in cells], split)) as made:
            for cell, samples in made:
                group.append(Asked(cell, samples, self.encoder, self.settings.length))
                if sum(len(asked.questions) for asked in group) >= GROUP:
                    cells.update(self.answer(group))
                    group = []
        cells.update(self.answer(group))

    def answer(self, group: list[Asked]) -> dict[Cell, dict[str, Any]]:
        """Answer some cells together; each is written as soon as its last reply is there."""
        began = time.perf_counter()
        kept = {asked.cell: self._keep(asked, 0.0) for asked in group if not asked.missing}
        everything = [(asked, question) for asked in group for question in asked.questions.values()]
        if not everything:
            return kept
        replies = self.generate(
            self.model,
            [question.prompt for _, question in everything],
            [question.limit for _, question in everything],
            end=set(self.encoder.after),
            pad=self.encoder.pad,
        )
        for index, reply in replies:
            asked, question = everything[index]
            self.done += 1
            self.show(self.done, len(self.settings.split))
            if asked.take(question, reply):
                now = time.perf_counter()
                kept[asked.cell] = self._keep(asked, now - began)
                began = now
        unanswered = sum(asked.missing for asked in group)
        if unanswered:
            raise RuntimeError(f"expected a reply to each of {len(everything)} questions, {unanswered} got none")
        return kept

    def _keep(self, asked: Asked, seconds: float) -> dict[str, Any]:
        """Write a cell. Its seconds are those since the one before it was done: only their sum means something."""
        cell, out = asked.cell, self.out
        self.done += len(asked.samples) - len(asked.questions)
        result = {
            "algorithm": cell.algorithm,
            "seed": cell.seed,
            "settings": _cell_settings(cell, self.described, self.settings),
            **asked.result(),
            "seconds": round(seconds, 3),
            "provenance": self.provenance,
        }
        write_bytes(cell.replies(out), asked.lines())
        write_text(cell.file(out), json.dumps(result, indent=1) + "\n")
        return result
