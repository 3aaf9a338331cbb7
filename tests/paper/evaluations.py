"""Evaluations of CLRS-Text that nobody made, for tests of what is drawn from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from sharpmax.tasks.clrs_text import Split
from sharpmax.tasks.clrs_text.outcomes import Description, summarise

Chance = Callable[[str, int], float]


def rule(policy: Any) -> list[dict[str, Any]]:
    return [{"policy": policy.to_dict(), "layers": None, "heads": None}]


def made_up(split: Split, chance: Chance, policy: Any = None, *, seed: int = 0, repeats: int = 0) -> dict[str, Any]:
    """An evaluation where answers are right with a chance that depends on algorithm and size.

    The last ``repeats`` samples of each size have one question; every other one of quicksort does not fit above 9.
    """
    drawn = np.random.default_rng(seed)
    cells = {}
    for (number, algorithm), start in product(enumerate(split.sizes), split.seeds):
        sizes = {}
        for size in split.sizes[algorithm]:
            right = drawn.random(split.samples) < chance(algorithm, size)
            texts = [
                "-" if algorithm == "quicksort" and size > 9 and i % 2 else "01"[int(r)] for i, r in enumerate(right)
            ]
            tags = [f"0000{start:02d}{number:02d}{size:02d}{i:02d}" for i in range(split.samples - repeats)]
            sizes[str(size)] = {
                "final": "".join(texts),
                "trace": "".join(texts) if algorithm != "segments_intersect" else None,
                "too_long": texts.count("-"),
                "cut": 1,
                "reply_tokens": 10.0,
                "questions": "".join(tags + [f"ffffffff{number:02d}{size:02d}"] * repeats),
            }
        totals = {"asked": 100, "prompt_tokens": 1000, "tokens": 500, "seconds": 2.0}
        cells[algorithm, start] = {
            "sizes": sizes,
            **totals,
            "provenance": {"device": {"gpus": ["NVIDIA H200"], "cpu": "a CPU"}},
        }
    described = Description("tiny", 1000, f"weights {seed}", "float32", policy and rule(policy), "tokens")
    return summarise(cells, described, split, 2048)


def falling(lead: float) -> Chance:
    """Right less and less often with size; a lead at large sizes."""
    return lambda algorithm, size: min(1.0, max(0.0, 1.05 - size / (20 + 3 * len(algorithm)) + lead * size / 64))


def saved(folder: Path, **evaluations: Any) -> dict[str, Path]:
    paths = {}
    for name, found in evaluations.items():
        paths[name] = folder / name
        paths[name].mkdir(parents=True, exist_ok=True)
        (paths[name] / "evaluation.json").write_text(json.dumps(found))
    return paths
