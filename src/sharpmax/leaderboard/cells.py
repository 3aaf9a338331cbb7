"""A cell: a task and a mechanism. Its folder holds the heads and what was measured of them, each written whole.

    DIR/TASK/MECHANISM/checkpoint.json, checkpoint-....safetensors    heads trained with the mechanism
    DIR/TASK/MECHANISM/trained.json                                   what they reach
    DIR/TASK/MECHANISM/inference.json                                 what heads trained with softmax reach with it
    DIR/TASK/MECHANISM/failed.json                                    why the last attempt failed, if it did

Whoever works on a cell holds a lock on it, which ends with the process: several may fill one folder.
"""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ..core.files import write_text
from ..tasks.max_retrieval.data import Task
from ..tasks.max_retrieval.evaluation import Evaluation

SCHEMA = "sharpmax.leaderboard-cell/1"
FAILURE_SCHEMA = "sharpmax.leaderboard-failure/1"
FAILED = "failed.json"
MEASURES = ("accuracy", "entropy", "largest")

Table = Literal["inference", "trained"]


class Cell(NamedTuple):
    """A task and what turns logits into weights, by name."""

    task: Task
    name: str

    def folder(self, out: Path) -> Path:
        """Where it is kept."""
        return out / self.task / self.name

    def __str__(self) -> str:
        return f"{self.task}/{self.name}"


@dataclass
class Result:
    """What was measured of one row of a table, so far.

    Attributes:
      rule: the policy or mechanism, as JSON.
      heads: the SHA-256 of the heads' tensors.
      seeds, sets: how many heads there are, and sets for each size and head.
      measured: by size, a list over the seeds of each of accuracy, entropy and largest coefficient.
      more: what else there is to say.
    """

    rule: dict[str, Any]
    heads: str
    seeds: int
    sets: int
    measured: dict[int, dict[str, list[float | None]]] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)

    def add(self, n: int, evaluation: Evaluation, row: str, queries: int) -> None:
        """Take over what an evaluation at the size ``n`` alone says of a row."""
        found = evaluation.rows[row]
        asked = self.sets * queries
        accuracy = np.rint(np.asarray(found.accuracy[0], np.float64) * asked) / asked
        columns = {"accuracy": accuracy, "entropy": found.entropy[0], "largest": found.largest[0]}
        self.measured[n] = {name: [_number(v) for v in values] for name, values in columns.items()}

    def save(self, path: Path) -> None:
        """Write it, in place of what is there."""
        content = {
            "schema": SCHEMA,
            "rule": self.rule,
            "heads": self.heads,
            "seeds": self.seeds,
            "sets": self.sets,
            **self.more,
            "measured": {str(n): self.measured[n] for n in sorted(self.measured)},
        }
        write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _number(value: Any) -> float | None:
    """A number for JSON, which has no word for what heads that diverged give; six digits of it."""
    return float(f"{float(value):.6g}") if np.isfinite(value) else None


def load_result(path: Path) -> Result | None:
    """What was written to ``path``, if anything; refused in one sentence if it is not whole."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA!r}")
        rule, heads, seeds, sets = (content.pop(name) for name in ("rule", "heads", "seeds", "sets"))
        measured = {int(n): _checked(row, seeds) for n, row in content.pop("measured").items()}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not what a comparison wrote ({error}); remove it to measure again") from None
    return Result(rule, heads, seeds, sets, measured, content)


def _checked(row: Any, seeds: int) -> dict[str, list[float | None]]:
    for name in MEASURES:
        if len(row[name]) != seeds or not all(v is None or isinstance(v, float) for v in row[name]):
            raise ValueError(f"expected {name} to be {seeds} numbers")
    return row


LONGEST = 300
"""Characters of an error that are said; XLA's may fill pages."""


def note_failure(folder: Path, error: Exception) -> str:
    """Write why a cell failed into its folder; and in one line what happened."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    said = said if len(said) <= LONGEST else f"{said[:LONGEST]}..."
    content = {"schema": FAILURE_SCHEMA, "error": said, "traceback": traceback.format_exception(error)}
    write_text(folder / FAILED, json.dumps(content, indent=1) + "\n")
    return said


def load_failure(folder: Path) -> str | None:
    """Why the last attempt at a cell failed, if it did."""
    try:
        content = json.loads((folder / FAILED).read_text(encoding="utf-8"))
        return str(content["error"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (KeyError, TypeError, ValueError):
        return f"{FAILED} is not what a comparison wrote"


def failed_since(folder: Path, moment: float) -> bool:
    """Whether an attempt at a cell failed after ``moment``, in seconds since the epoch."""
    try:
        return (folder / FAILED).stat().st_mtime > moment
    except (FileNotFoundError, NotADirectoryError):
        return False
