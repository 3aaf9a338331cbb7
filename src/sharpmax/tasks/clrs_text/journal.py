"""``log.jsonl``: a line for every few steps of a run, and what the end of it says of all."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.files import write_text
from .packing import counted

NAME = "log.jsonl"
NEEDED = ("step", "tokens", "loss", "step_seconds", "tokens_per_second", "data_seconds", "memory")
CURVE = 200
"""Points of the loss curve that a run's summary holds."""


@dataclass
class Window:
    """What happens between two lines of the log; what is on the device is read when a line is made."""

    first: int
    began: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    losses: list[Any] = field(default_factory=list)
    norms: list[Any] = field(default_factory=list)

    def summary(self, step: int, tokens: int) -> dict[str, Any]:
        """Its part of a line that is made now, after a ``step``, where every step has so many ``tokens``."""
        spent, steps = time.monotonic() - self.began, step - self.first
        return {
            "tokens": step * tokens,
            "gradient_norm": self.norms[-1].item(),
            "tokens_per_second": steps * tokens / spent,
            "step_seconds": spent / steps,
            "data_seconds": self.waited / steps,
        }


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
        waits = [line["data_seconds"] for line in self.lines]
        every = -(-len(self.lines) // CURVE)
        thinned = self.lines[::-1][::every][::-1]
        return {
            "median_step_seconds": statistics.median(times),
            "median_data_seconds": statistics.median(waits),
            "median_tokens_per_second": statistics.median(rates),
            "peak_memory_bytes": max((line["memory"] or 0 for line in self.lines), default=0) or None,
            "curve": {name: [line[name] for line in thinned] for name in ("step", "tokens", "loss")},
        }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; a last one that a kill cut off is left out, and any other damage is told."""
    if not path.is_file():
        return []
    found = []
    lines = path.read_bytes().split(b"\n")
    for i, text in enumerate(lines[:-1]):  # what follows the last end of a line was cut off
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict) or not set(NEEDED) <= set(line):
            raise ValueError(f"{path} is damaged in line {i + 1}: mend or delete the line")
        found.append(line)
    return found


def totals(loaders: list[dict[str, Any]], length: int) -> dict[str, Any]:
    """What the loaders of all processes gave together, tokens with padding."""
    counts = counted(loaders)
    tokens = counts["sequences"] * length
    return counts | {"tokens": tokens, "padding": tokens - counts["tokens"]}
