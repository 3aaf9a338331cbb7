"""The tables of a comparison, with statistics, from whatever cells are there; and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.files import write_bytes, write_text
from ..paper.figures import PAGE, numbers, render, to_json
from ..paper.paired import holm
from ..provenance import makers, provenance
from ..tasks.max_retrieval import find_begun, paired_p_values
from ..tasks.max_retrieval.data import CLASSES, Task
from .cells import MEASURES, Cell, Result, Table, load_failure, load_result
from .entries import BASELINE, REFITTED, TASKS, mechanisms, switched_on
from .figures import draw_accuracy, draw_sharpness
from .run import cell_protocol
from .settings import Settings
from .views import csv_text, markdown

THRESHOLDS = (0.9, 0.5)
"""The first size at which the mean accuracy is below each of these is reported."""

TABLES: dict[Table, str] = {
    "inference": "switched on at inference only: heads trained with softmax",
    "trained": "trained with: heads trained with the mechanism they are evaluated with",
}


def assemble(out: Path, settings: Settings, tasks: Sequence[Task], names: Sequence[str]) -> dict[str, Any]:
    """All that is known of ``tasks`` and mechanisms ``names``, as ``leaderboard.json`` has it."""
    known, missing = mechanisms(), []
    by_task: dict[str, Any] = {}
    made: list[dict[str, Any]] = []
    for task in tasks:
        tables = {}
        for table, title in TABLES.items():
            wanted = [*switched_on(names), *REFITTED] if table == "inference" else list(names)
            found, lacking = _found(out, settings, task, table, wanted)
            missing += lacking
            made += [result.more["provenance"] for result in found.values() if "provenance" in result.more]
            tables[table] = {"title": title, "rows": _rows(found, settings)}
        by_task[task] = {"asks": TASKS[task], "chance": 1 / CLASSES, "tables": tables}
    return {
        "name": settings.name,
        "sizes": list(settings.sizes),
        "seeds": settings.seeds,
        "sets": settings.sets,
        "protocol": settings.protocol.to_dict(),
        "tasks": by_task,
        "mechanisms": {name: {**known[name].about._asdict(), "definition": known[name].to_dict()} for name in names},
        "missing": missing,
        "trained_by": makers(part["training"] for part in made if part["training"]),
        "measured_by": makers(part["evaluation"] for part in made),
    }


def _found(
    out: Path, settings: Settings, task: Task, table: Table, names: Sequence[str]
) -> tuple[dict[str, Result], list[str]]:
    """What there is of a table, and in words what is missing of it."""
    found: dict[str, Result] = {}
    missing = []
    for name in names:
        cell = Cell(task, name)
        result = load_result(cell.folder(out) / f"{table}.json")
        if result is not None and (result.seeds, result.sets) == (settings.seeds, settings.sets):
            found[name] = result
        if lacking := _lacking(out, settings, cell, table, found.get(name)):
            missing.append(f"{cell}, {table}: {lacking}")
    return found, missing


def _rows(found: dict[str, Result], settings: Settings) -> dict[str, Any]:
    """The rows of a table, best first."""
    rows = {name: _row(name, result, settings) for name, result in found.items()}
    _test(rows, settings)
    return dict(sorted(rows.items(), key=lambda item: _order(item[1])))


def _lacking(out: Path, settings: Settings, cell: Cell, table: Table, result: Result | None) -> str:
    """In words, what is missing of a row, and why if that is known; empty where nothing is."""
    lacking = _stage(out, settings, cell, table, result)
    failed = load_failure(cell.folder(out)) if lacking and table == "trained" else None
    return lacking if failed is None else f"{lacking}; failed with {failed}"


def _stage(out: Path, settings: Settings, cell: Cell, table: Table, result: Result | None) -> str:
    if result is not None:
        sizes = [n for n in settings.sizes if n not in result.measured]
        return f"not yet measured at {', '.join(f'{n:,}' for n in sizes)} items" if sizes else ""
    if table == "inference":
        return "not measured"
    begun = find_begun(cell_protocol(settings, cell), range(settings.seeds), cell.folder(out), tensors=False)
    if begun is None:
        return "not begun"
    steps = begun.protocol.steps
    return "trained, not measured" if begun.finished else f"trained up to step {begun.step:,} of {steps:,}"


def _row(name: str, result: Result, settings: Settings) -> dict[str, Any]:
    """What is measured, by size (``None`` where it is not), and what follows from it."""
    row: dict[str, Any] = {"label": _label(name), "rule": result.rule}
    for measure in MEASURES:
        row[measure] = [result.measured.get(n, {}).get(measure) for n in settings.sizes]
    means = [None if seeds is None else float(np.mean(_filled(seeds))) for seeds in row["accuracy"]]
    row["mean"] = [None if m is None else numbers(m) for m in means]
    row["deviation"] = [
        None if seeds is None or len(seeds) < 2 else numbers(np.std(_filled(seeds), ddof=1))
        for seeds in row["accuracy"]
    ]
    for threshold in THRESHOLDS:
        below = [n for n, mean in zip(settings.sizes, means, strict=True) if mean is not None and mean < threshold]
        row[f"below_{threshold:.0%}".rstrip("%")] = below[0] if below else None
    row["diverged"] = sum(None in seeds for seeds in zip(*filter(None, row["entropy"]), strict=True))
    row["training"] = result.more.get("training")
    return row


def _filled(seeds: Sequence[float | None]) -> list[float]:
    """Accuracies; heads that diverged have one all the same, so that none is missing."""
    return [0.0 if value is None else value for value in seeds]


def _label(name: str) -> str:
    return REFITTED.get(name) or name.replace("_", " ")


def _order(row: dict[str, Any]) -> tuple[float, str]:
    """Rows by their mean accuracy over all sizes, those that are not complete last."""
    return (-sum(row["mean"]) if None not in row["mean"] else 1.0, row["label"])


def _test(rows: dict[str, Any], settings: Settings) -> None:
    """Add p-values of the paired t-test against softmax to ``rows``, as they are and by Holm's correction over rows."""
    for row in rows.values():
        row["p_value"], row["p_holm"] = ([None for _ in settings.sizes] for _ in range(2))
    if BASELINE not in rows:
        return
    for i in range(len(settings.sizes)):
        baseline = rows[BASELINE]["accuracy"][i]
        tested = {}
        for name, row in rows.items():
            if name != BASELINE and row["accuracy"][i] is not None and baseline is not None:
                (p,) = paired_p_values([_filled(row["accuracy"][i])], [_filled(baseline)])
                if p is not None:
                    tested[name] = p
        for name, corrected in zip(tested, holm(list(tested.values())), strict=True):
            rows[name]["p_value"][i], rows[name]["p_holm"][i] = numbers(tested[name]), numbers(corrected)


def write_report(
    out: Path, settings: Settings, tasks: Sequence[Task], names: Sequence[str]
) -> tuple[list[Path], dict[str, Any]]:
    """Write leaderboard.json, .md and .csv into ``out``, and for every task with a row two figures; and their data."""
    data = assemble(out, settings, tasks, names)
    texts = {"json": to_json({**data, "provenance": provenance()}), "md": markdown(data), "csv": csv_text(data)}
    paths = []
    for suffix, text in texts.items():
        paths.append(out / f"leaderboard.{suffix}")
        write_text(paths[-1], text)
    for task, content in data["tasks"].items():
        lines = max(len(table["rows"]) for table in content["tables"].values())
        if not lines:
            continue
        one = {**data, "task": task, **content}
        tall = 1.9 + max(3.0, 0.7 + 0.125 * lines)
        for name, draw, height in (
            (f"leaderboard_{task}", draw_accuracy, tall),
            (f"leaderboard_{task}_sharpness", draw_sharpness, 5.0 + 0.04 * lines),
        ):
            for suffix, picture in render(one, draw, (PAGE, height)).items():
                paths.append(out / f"{name}.{suffix}")
                write_bytes(paths[-1], picture)
    return paths, data
