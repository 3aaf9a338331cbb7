"""``log.jsonl``: a line for every few steps of a run, and what the end of it says of all."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from ...core.files import write_text

NAME = "log.jsonl"
CURVE = 200
"""Points of the loss curve that a run's summary holds."""


class Journal:
    """The lines of a run; one that goes on drops those after the step it goes on from."""

    def __init__(self, out: Path, step: int) -> None:
        self.path = out / NAME
        kept = [line for line in read_lines(self.path) if line["step"] <= step]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self.lines = kept

    def add(self, line: dict[str, Any]) -> None:
        """Write a line."""
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def summary(self) -> dict[str, Any]:
        """Throughput, memory and the loss curve, thinned."""
        times = [line["step_seconds"] for line in self.lines]
        rates = [line["tokens_per_second"] for line in self.lines]
        every = -(-len(self.lines) // CURVE)
        thinned = self.lines[::-1][::every][::-1]
        return {
            "median_step_seconds": statistics.median(times),
            "median_tokens_per_second": statistics.median(rates),
            "peak_memory_bytes": max((line["memory"] or 0 for line in self.lines), default=0) or None,
            "curve": {name: [line[name] for line in thinned] for name in ("step", "tokens", "loss")},
        }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; a last one that a kill cut off is left out."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def totals(loaders: list[dict[str, Any]], length: int) -> dict[str, Any]:
    """What the loaders of all processes gave together: ``counts`` and ``dropped`` of each."""
    counts = {k: sum(part["counts"][k] for part in loaders) for k in ("sequences", "documents", "tokens")}
    dropped: dict[str, dict[str, int]] = {}
    for part in loaders:
        for algorithm, sizes in part["dropped"].items():
            row = dropped.setdefault(algorithm, {})
            for size, count in sizes.items():
                row[size] = row.get(size, 0) + count
    tokens = counts["sequences"] * length
    return counts | {"tokens": tokens, "padding": tokens - counts["tokens"], "dropped": dropped}
