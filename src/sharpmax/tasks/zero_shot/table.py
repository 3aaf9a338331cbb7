"""The results as tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .study import TASKS

HEADINGS = {
    "perplexity": "Perplexity, by tokens",
    "needle": "Needles found, %, by tokens",
    "maximum": "Maxima found, %, by items",
}


def value(cell: Mapping[str, Any]) -> float:
    """The number of a cell that is shown: a perplexity, or the share of right answers."""
    return cell["perplexity"] if cell["task"] == "perplexity" else cell["exact"]


def zero_shot_table(results: Mapping[str, Any]) -> str:
    """One table for each task: a row for each policy, a column for each size; sizes beyond the context are starred.

    Cells that are not measured have a dash, and are named below.
    """
    tables = [_one(results, task) for task in TASKS]
    lacking = [f"Not measured: {'; '.join(results['missing'])}."] if results["missing"] else []
    return "\n\n".join([table for table in tables if table] + lacking)


def _one(results: Mapping[str, Any], task: str) -> str:
    cells = {(c["size"], c["policy"]): c for c in results["cells"] if c["task"] == task}
    if not cells:
        return ""
    sizes = sorted({size for size, _ in cells})
    lines = [[f"{HEADINGS[task]}, {results['model']}", *(_heading(cells, n, results["context"]) for n in sizes)]]
    for policy, label in results["policies"].items():
        lines.append([label, *(_shown(cells.get((n, policy))) for n in sizes)])
    lines.insert(1, ["---"] + ["---:"] * len(sizes))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _heading(cells: Mapping[tuple[int, str], Mapping[str, Any]], size: int, context: int) -> str:
    tokens = next((c.get("tokens", n) for (n, _), c in cells.items() if n == size), size)
    return f"{size:,}{'*' if tokens > context else ''}"


def _shown(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "-"
    if cell["task"] == "perplexity":
        return f"{value(cell):,.{2 if value(cell) < 100 else 0}f}"
    return f"{100 * value(cell):.0f}"
