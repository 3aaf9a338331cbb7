"""A comparison as Markdown and CSV. All of it is in the JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SIGNIFICANT = 0.05
ABOVE, BELOW = "*", "†"
"""Marks of a mean that is significantly above or below softmax's, after Holm's correction."""

HEADER = [
    "task", "table", "name", "size", "mean", "standard_deviation", "p", "p_holm", "entropy", "largest_coefficient",
]  # fmt: skip


def csv_text(data: Mapping[str, Any]) -> str:
    """One line for each task, table, row and size that was measured."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(HEADER)
    for task, content in data["tasks"].items():
        for table, part in content["tables"].items():
            for name, row in part["rows"].items():
                for i, n in enumerate(data["sizes"]):
                    if row["mean"][i] is not None:
                        values = (row[key][i] for key in ("mean", "deviation", "p_value", "p_holm"))
                        sharp = (mean(row[key][i]) for key in ("entropy", "largest"))
                        writer.writerow([task, table, name, n, *map(_text, values), *map(_text, sharp)])
    return buffer.getvalue()


def mean(seeds: Sequence[float | None] | None) -> float | None:
    """The mean over the seeds that have a number, if any has."""
    known = [value for value in seeds or () if value is not None]
    return float(np.mean(known)) if known else None


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def markdown(data: Mapping[str, Any]) -> str:
    """The tables, what each mechanism is, and what is missing."""
    lines, made = [f"# Mechanisms compared, protocol `{data['name']}`", "", *_caption(data)], tables(data)
    for task, content in data["tasks"].items():
        lines += ["", f"## {task}: {content['asks']}"]
        for name, table in content["tables"].items():
            lines += ["", f"### {table['title'].capitalize()}", "", made[task, name]]
    lines += ["", "## The mechanisms", "", *_about(data["mechanisms"])]
    if data["missing"]:
        lines += ["", "## Missing", "", *(f"- {text}" for text in data["missing"])]
    return "\n".join([*lines, ""])


def _caption(data: Mapping[str, Any]) -> list[str]:
    steps, (smallest, largest) = data["protocol"]["steps"], data["protocol"]["sizes"]
    return [
        f"Accuracy in % by number of items, the mean of {data['seeds']} seeds with {data['sets']:,} sets for each size "
        f"and seed, the same ones in every row. Heads are trained for {steps:,} steps on sets of {smallest} to "
        f"{largest} items; guessing gives 10 %. Rows are ordered by their mean over all sizes; bold: the best at a "
        f"size; \\{ABOVE} above and {BELOW} below softmax with p < {SIGNIFICANT:g}, paired t-test over the seeds with "
        "Holm's correction over the rows. The last two columns: the first of these sizes at which the mean is below "
        "90 % and 50 %. Heads that diverged count with what they answer, which is as good as guessing.",
    ]


def tables(data: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """By task and table, the table as Markdown has it."""
    return {
        (task, name): "\n".join(_table(data, table["rows"]))
        for task, content in data["tasks"].items()
        for name, table in content["tables"].items()
    }


def _table(data: Mapping[str, Any], rows: Mapping[str, Any]) -> list[str]:
    if not rows:
        return ["Nothing is measured yet."]
    sizes = range(len(data["sizes"]))
    best = [max((row["mean"][i] for row in rows.values() if row["mean"][i] is not None), default=None) for i in sizes]
    lines = [
        _line(["", *(f"{n:,}" for n in data["sizes"]), "< 90 %", "< 50 %"]),
        _line([":--", *["--:"] * (len(sizes) + 2)]),
    ]
    softmax = rows.get("softmax")
    for row in rows.values():
        texts = [_cell(row, softmax, i, best[i]) for i in sizes]
        below = ["-" if row[key] is None else f"{row[key]:,}" for key in ("below_90", "below_50")]
        diverged = f" ({row['diverged']} of {data['seeds']} diverged)" if row["diverged"] else ""
        lines.append(_line([row["label"] + diverged, *texts, *below]))
    return lines


def _cell(row: Mapping[str, Any], softmax: Mapping[str, Any] | None, i: int, best: float | None) -> str:
    value, p = row["mean"][i], row["p_holm"][i]
    if value is None:
        return "."
    text = f"{100 * value:.1f}"
    if best is not None and value >= best - 1e-12:
        text = f"**{text}**"
    if p is not None and p < SIGNIFICANT and softmax is not None:
        text += f"\\{ABOVE}" if value > softmax["mean"][i] else BELOW
    return text


def _about(known: Mapping[str, Any]) -> list[str]:
    lines = [_line(["", "paper", "weights", "Theorem 2.2"]), _line([":--"] * 4)]
    for name, about in known.items():
        cells = (about[key].replace("|", "\\|") for key in ("paper", "equation", "theorem"))
        lines.append(_line([name.replace("_", " "), *cells]))
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
