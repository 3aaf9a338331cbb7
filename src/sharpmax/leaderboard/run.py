"""Filling the cells of a comparison: training, evaluation, and what heads trained with softmax reach with the rest."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..core.claims import claimed
from ..core.policies import policy_from_dict
from ..inputs import user_input
from ..paper.max_retrieval import SHIPPED
from ..provenance import continued, provenance
from ..tasks.max_retrieval import PRESETS, Checkpoint, find_begun, load_checkpoint, train
from ..tasks.max_retrieval.attention import Rule, simplest
from ..tasks.max_retrieval.checkpoint import SIDECAR, TensorsMissingError
from ..tasks.max_retrieval.data import QUERIES, Task
from ..tasks.max_retrieval.evaluation import evaluate_each
from ..tasks.max_retrieval.fitting import FIT_SIZES, fit
from ..tasks.max_retrieval.protocol import Protocol as TrainingProtocol
from ..tasks.max_retrieval.step import State
from .cells import FAILED, Cell, Result, Table, failed_since, load_result, note_failure
from .entries import BASELINE, REFITTED, mechanisms, switched_on
from .settings import Settings, begin


class OutOfTimeError(Exception):
    """The time is up; what was done is saved."""


class Watcher(Protocol):
    """Who is told where a comparison stands."""

    def cell(self, cell: Cell, number: int, cells: int) -> None:
        """A cell was begun."""

    def at(self, done: float, now: str) -> None:
        """So much of the cell is done, from 0 to 1, and what goes on."""

    def finished(self, cell: Cell, result: Result) -> None:
        """A cell is full."""

    def failed(self, cell: Cell, error: str) -> None:
        """A cell could not be filled; the others go on."""


TRAINING = 0.8
"""The share of a cell's time that training is taken to need, for the time left."""


class Run(NamedTuple):
    """One comparison at work."""

    out: Path
    settings: Settings
    names: tuple[str, ...]
    watcher: Watcher
    deadline: float

    def check_time(self) -> None:
        """Raise :class:`OutOfTimeError` if it is."""
        if time.monotonic() > self.deadline:
            raise OutOfTimeError


def compare(
    out: Path,
    settings: Settings,
    tasks: Sequence[Task],
    names: Sequence[str],
    watcher: Watcher,
    minutes: float | None = None,
) -> list[Cell]:
    """Fill the cells of ``tasks`` and mechanisms ``names`` in ``out``; go on with what is begun.

    Cells that another process works on are left to it, and returned. One that fails, for want of memory say, leaves the
    others alone: its error is kept in its folder, and whoever begins later tries again. :class:`OutOfTimeError` ends it
    after ``minutes``, between chunks of training or sizes of an evaluation.
    """
    began = time.time()
    deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    run = Run(out, settings, tuple(names), watcher, deadline)
    work = [Cell(task, name) for task in tasks for name in names]
    with user_input():
        for cell in work:
            check_cell(run, cell)
        begin(out, settings)
    taken: list[Cell] = []
    for attempt in (work, taken):  # Those that others hold are tried once more in the end.
        left, taken[:] = list(attempt), []
        for cell in left:
            watcher.cell(cell, work.index(cell), len(work))
            with claimed(cell.folder(out)) as mine:
                if not mine:
                    taken.append(cell)
                elif not failed_since(cell.folder(out), began):
                    _attempt(run, cell)
        if not taken:
            break
    return taken


def check_cell(run: Run, cell: Cell) -> None:
    """Refuse what is in the folder of a cell if it is of another run."""
    folder = cell.folder(run.out)
    find_begun(cell_protocol(run.settings, cell), range(run.settings.seeds), folder, tensors=False)
    for table in ("trained", "inference"):
        load_result(folder / f"{table}.json")


def cell_protocol(settings: Settings, cell: Cell) -> TrainingProtocol:
    """How the heads of a cell are trained."""
    return dataclasses.replace(settings.protocol, task=cell.task, mechanism=mechanisms()[cell.name])


def _attempt(run: Run, cell: Cell) -> None:
    """Fill a cell, or note why that failed."""
    folder = cell.folder(run.out)
    try:
        _fill(run, cell)
    except OutOfTimeError:
        raise
    except Exception as error:
        run.watcher.failed(cell, note_failure(folder, error))
    else:
        (folder / FAILED).unlink(missing_ok=True)


def _fill(run: Run, cell: Cell) -> None:
    full = _full(run, cell)
    if full is not None:
        run.watcher.finished(cell, full)
        return
    heads = _heads(run, cell)
    protocol = heads.protocol
    digest = _digest(cell.folder(run.out))
    assert digest is not None  # They were saved.
    result = _begun(run, cell, "trained", protocol.rule, digest)
    result.more["training"] = {
        "steps": heads.step, "seconds": heads.seconds, "accuracy": heads.history[-1].get("accuracy"),
    }  # fmt: skip
    rows = {cell.name: Row(protocol.rule, {cell.folder(run.out) / "trained.json": result})}
    if cell.name == BASELINE:
        _switch_on(run, cell.task, heads, digest, rows)
    now = provenance()
    for row in rows.values():
        for measured in row.results.values():
            before = measured.more.get("provenance", {}).get("evaluation", {}) if measured.measured else {}
            measured.more["provenance"] = {"training": heads.provenance, "evaluation": continued(now, before)}
    _measure(run, cell.task, heads, rows)
    run.watcher.finished(cell, result)


def _full(run: Run, cell: Cell) -> Result | None:
    """What the heads of a cell reach, if all of that is measured: they are needed no more, and may be gone."""
    folder, protocol = cell.folder(run.out), cell_protocol(run.settings, cell)
    trained = load_result(folder / "trained.json")
    if trained is None:
        return None
    digest = _digest(folder) or trained.heads
    results = [_begun(run, cell, "trained", protocol.rule, digest)]
    if cell.name == BASELINE:
        rules = _switchable(run, cell.task, digest)
        if not rules.keys() >= REFITTED.keys():
            return None
        results += [_begun(run, Cell(cell.task, name), "inference", rule, digest) for name, rule in rules.items()]
    return results[0] if all(n in result.measured for result in results for n in run.settings.sizes) else None


def _heads(run: Run, cell: Cell) -> Checkpoint:
    """The trained heads of a cell; those that come with a checkout are the same as training would make.

    Where their tensors are gone they are trained again, from the beginning.
    """
    folder, seeds = cell.folder(run.out), range(run.settings.seeds)
    protocol = cell_protocol(run.settings, cell)
    try:
        begun = find_begun(protocol, seeds, folder)
    except TensorsMissingError:
        (folder / SIDECAR).unlink()
        begun = None
    if begun is None and (shipped := _shipped(protocol, run.settings.seeds)) is not None:
        shipped.save(folder)

    def progress(p: Any) -> None:
        speed = f"{p.steps_per_second:,.0f} steps/s" if p.steps_per_second else "compiling"
        run.watcher.at(TRAINING * p.step / p.steps, f"step {p.step:,} of {p.steps:,}, {speed}")
        run.check_time()

    return train(protocol, seeds, folder, progress=progress, provenance=provenance())


def _shipped(protocol: TrainingProtocol, seeds: int) -> Checkpoint | None:
    """The heads of ``protocol`` that come with a checkout, if they do and are enough."""
    name = next((name for name, preset in PRESETS.items() if preset == protocol), None)
    if name is None or not (SHIPPED / name / SIDECAR).exists():
        return None
    heads = load_checkpoint(SHIPPED / name)
    if heads.protocol != protocol or not heads.finished or heads.seeds[:seeds] != tuple(range(seeds)):
        return None
    history = [
        {key: value[:seeds] if isinstance(value, list) else value for key, value in entry.items()}
        for entry in heads.history
    ]
    state = State(*(None if a is None else a[:seeds] for a in heads.state))
    return dataclasses.replace(heads, seeds=heads.seeds[:seeds], state=state, history=history)


def _digest(folder: Path) -> str | None:
    """The SHA-256 of the heads' tensors as their checkpoint has it, if there is one."""
    try:
        return str(json.loads((folder / SIDECAR).read_text(encoding="utf-8"))["sha256"])
    except FileNotFoundError:
        return None


def _begun(run: Run, cell: Cell, table: Table, rule: Rule, heads: str) -> Result:
    """The result of a row as far as it is there; anew where it was measured of other heads, or of fewer sets."""
    result = load_result(cell.folder(run.out) / f"{table}.json")
    plain: dict[str, Any] = rule.to_dict()  # pyright: ignore[reportAttributeAccessIssue]
    fresh = Result(plain, heads, run.settings.seeds, run.settings.sets)
    same = result is not None and all(
        getattr(result, name) == getattr(fresh, name) for name in ("rule", "heads", "seeds", "sets")
    )
    return result if same and result is not None else fresh


class Row(NamedTuple):
    """A rule, and where what is measured of it goes."""

    rule: Rule
    results: dict[Path, Result]

    def lacks(self, n: int) -> bool:
        """Whether the size ``n`` is still to be measured."""
        return any(n not in result.measured for result in self.results.values())


def _measure(run: Run, task: Task, heads: Checkpoint, rows: Mapping[str, Row]) -> None:
    """Evaluate ``heads`` under the rules of ``rows`` at every size that one of them lacks, and save each size."""
    sizes = [n for n in run.settings.sizes if any(row.lacks(n) for row in rows.values())]
    lacking = {name: row for name, row in rows.items() if any(row.lacks(n) for n in sizes)}
    if not sizes:
        return
    run.watcher.at(TRAINING, "compiling the evaluation")
    rules = {name: row.rule for name, row in lacking.items()}
    for i, found in enumerate(evaluate_each(heads.params, heads.seeds, sizes, run.settings.sets, rules, task=task)):
        for name, row in lacking.items():
            for path, result in row.results.items():
                result.add(sizes[i], found, name, QUERIES if task == "recall" else 1)
                result.save(path)
        run.watcher.at(TRAINING + (1 - TRAINING) * (i + 1) / len(sizes), f"evaluated at {sizes[i]:,} items")
        run.check_time()


def _switch_on(run: Run, task: Task, heads: Checkpoint, digest: str, rows: dict[str, Row]) -> None:
    """Add to ``rows`` of heads trained with softmax all mechanisms that need no training, and refitted policies."""
    rules = _switchable(run, task, digest)
    if not rules.keys() >= REFITTED.keys():
        rules |= _refitted(run, heads)
    for name, rule in rules.items():
        cell = Cell(task, name)
        result = _begun(run, cell, "inference", rule, digest)
        rows.setdefault(name, Row(rule, {})).results[cell.folder(run.out) / "inference.json"] = result


def _switchable(run: Run, task: Task, digest: str) -> dict[str, Rule]:
    """What can be switched on in heads trained with softmax; refitted policies if both were measured of these heads."""
    known = mechanisms()
    rules: dict[str, Rule] = {name: simplest(known[name]) for name in switched_on(run.names)}
    there = {name: load_result(Cell(task, name).folder(run.out) / "inference.json") for name in REFITTED}
    fitted = {name: policy_from_dict(r.rule) for name, r in there.items() if r is not None and r.heads == digest}
    return rules | (fitted if len(fitted) == len(REFITTED) else {})


def _refitted(run: Run, heads: Checkpoint) -> dict[str, Rule]:
    """The policies that Appendix F fits to ``heads``."""
    sizes = None
    if run.settings.sizes[-1] < FIT_SIZES[-1]:
        sizes = tuple(n for n in FIT_SIZES if n <= max(run.settings.sizes[-1], FIT_SIZES[0]))

    def progress(n: int) -> None:
        run.watcher.at(TRAINING, f"fitting at {n:,} items")
        run.check_time()

    held = fit(heads, sizes, progress=progress).polynomial
    return {"refitted": dataclasses.replace(held, beyond="extrapolate"), "refitted_held": held}
