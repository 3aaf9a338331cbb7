"""Reading golden cases: one :class:`Case` per row of logits, from ``cases/*.json``.

A case holds its row as numbers or as a recipe (see :mod:`.recipes`; the digest in the file is checked), its policy in
JSON form, and what is expected: every statistic, beta, and weights and gradient at ``indices`` (all of them for short
rows) and as dot products with seeded vectors of +-1 (long rows).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from . import recipes

FOLDER = Path(__file__).parent / "cases"


@dataclass(frozen=True, eq=False)
class Case:
    """One row of logits, and the truth about it, in float64; ``logits`` and ``cotangent`` are exact in ``dtype``."""

    id: str
    dtype: str
    policy: dict[str, Any]
    logits: np.ndarray
    where: np.ndarray | None
    cotangent: np.ndarray
    stats: dict[str, float]
    beta: float
    beta_terms: dict[str, float]
    indices: np.ndarray
    probe_seeds: tuple[int, ...]
    weights: np.ndarray
    weight_probes: np.ndarray
    gradient: np.ndarray
    gradient_probes: np.ndarray

    @property
    def n(self) -> int:
        """The length of the row."""
        return len(self.logits)

    @property
    def kept(self) -> np.ndarray:
        """Which logits are not masked, in any of the ways to mask."""
        kept = self.logits > recipes.LOWEST[self.dtype] / 2
        return kept if self.where is None else kept & self.where

    def probes(self) -> list[np.ndarray]:
        """The vectors of +-1."""
        return [recipes.make_probe(seed, self.n) for seed in self.probe_seeds]


def numbers(values: Any) -> np.ndarray:
    """A JSON list of numbers, with infinities and NaN as strings, as float64."""
    return np.array([float(value) for value in values], np.float64)


def inputs(row: dict[str, Any]) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Logits, ``where`` and cotangent of a case as it is in the file."""
    if "values" in row["row"]:
        where = None if row["where"] is None else np.array([bool(keep) for keep in row["where"]], np.bool_)
        return numbers(row["row"]["values"]), where, numbers(row["cotangent"])
    logits = recipes.make_logits(row["row"], row["dtype"])
    if recipes.digest(logits) != row["digest"]:
        raise ValueError(f"the recipe of case {row['id']} no longer gives the logits that its results belong to")
    n = len(logits)
    return logits, recipes.make_where(row["where"], n), recipes.make_cotangent(int(row["cotangent"]), n)


def parse(row: dict[str, Any]) -> Case:
    """A case from its JSON form."""
    logits, where, cotangent = inputs(row)
    expect = row["expect"]
    indices = np.arange(len(logits)) if expect["indices"] == "all" else np.array(expect["indices"], np.int64)
    return Case(
        id=row["id"],
        dtype=row["dtype"],
        policy=row["policy"],
        logits=logits,
        where=where,
        cotangent=cotangent,
        stats={name: float(value) for name, value in expect["stats"].items()},
        beta=float(expect["beta"]),
        beta_terms={name: float(value) for name, value in expect["beta_terms"].items()},
        indices=indices,
        probe_seeds=tuple(expect["probes"]),
        weights=numbers(expect["weights"]),
        weight_probes=numbers(expect["weight_probes"]),
        gradient=numbers(expect["gradient"]),
        gradient_probes=numbers(expect["gradient_probes"]),
    )


@cache
def raw_cases() -> dict[str, dict[str, Any]]:
    """Every case in JSON form, by id."""
    rows = [row for path in sorted(FOLDER.glob("*.json")) for row in json.loads(path.read_text("utf-8"))["cases"]]
    by_id = {row["id"]: row for row in rows}
    if len(by_id) != len(rows):
        raise ValueError("two conformance cases have the same id")
    return by_id


@cache
def load(case_id: str) -> Case:
    """The case of this id."""
    return parse(raw_cases()[case_id])
