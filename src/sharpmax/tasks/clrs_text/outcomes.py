"""What an evaluation found: cells put together into accuracy by algorithm and size, with the outcome of each sample."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .benchmark import TRAINING_SIZES, Split
from .benchmark import training as training_split

FORMAT = 2
FILE = "evaluation.json"

LEFT_OUT = "-"
"""In the place of a sample that is longer than the context; 1 is right and 0 wrong."""

DIGITS = 12
"""Of the digest of a question, in a cell."""


class Description(NamedTuple):
    """A model, as far as its replies depend on it."""

    name: str
    parameters: int
    weights: str
    """The fingerprint of its weights."""

    dtype: str
    policy: list[dict[str, Any]] | None
    """The rules of its config; ``None`` for plain softmax."""

    tokenizer: str
    """A digest of what decides the tokens."""


def summarise(
    cells: Mapping[Any, Mapping[str, Any]],
    described: Description,
    split: Split,
    length: int,
    training: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The report of an evaluation, ready for JSON; ``cells`` are by (algorithm, seed).

    ``final`` and ``trace`` of a size have a text for each seed, with a character for each sample. ``distinct`` tells in
    the same way which samples have a question that no sample of the algorithm before them has.
    """
    trained = training_sizes(training)
    algorithms, digests = {}, hashlib.sha256()
    for algorithm, sizes in split.sizes.items():
        rows, seen = {}, set[str]()
        for size in sizes:
            found = [cells[algorithm, seed]["sizes"][str(size)] for seed in split.seeds]
            for entry in found:
                digests.update(entry["questions"].encode())
            rows[str(size)] = _row(found, size in trained.get(algorithm, ()), seen)
        algorithms[algorithm] = {"training_sizes": list(trained.get(algorithm, ())), "sizes": rows}
    return {
        "format": FORMAT,
        "model": described._asdict(),
        "training": training,
        "settings": {"split": split.to_json(), "length": length, "questions": digests.hexdigest()},
        **{
            name: {
                "in_distribution": _overall(algorithms, name, True),
                "out_of_distribution": _overall(algorithms, name, False),
            }
            for name in ("accuracy", "trace_accuracy")
        },
        "throughput": _throughput(cells.values()),
        "algorithms": algorithms,
    }


def _row(found: Sequence[Mapping[str, Any]], in_distribution: bool, seen: set[str]) -> dict[str, Any]:
    """A size of an algorithm, over the seeds; ``seen`` collects its questions."""
    final, traces = [entry["final"] for entry in found], [entry["trace"] for entry in found]
    traced = any(trace is not None for trace in traces)
    by_seed = [_share(text) for text in final]
    trace_by_seed = [_share(trace or "") for trace in traces]
    replies = [(entry["reply_tokens"], _count(entry["final"])) for entry in found if _count(entry["final"])]
    return {
        "in_distribution": in_distribution,
        "n": sum(map(_count, final)),
        "too_long": sum(entry["too_long"] for entry in found),
        "accuracy": _mean(by_seed),
        "deviation": _deviation(by_seed),
        "by_seed": by_seed,
        "trace_accuracy": _mean(trace_by_seed) if traced else None,
        "trace_deviation": _deviation(trace_by_seed) if traced else None,
        "cut": sum(entry["cut"] for entry in found),
        "reply_tokens": sum(mean * n for mean, n in replies) / sum(n for _, n in replies) if replies else None,
        "final": final,
        "trace": [trace if trace is not None else LEFT_OUT * len(f) for trace, f in zip(traces, final, strict=True)]
        if traced
        else None,
        "distinct": [_first(entry["questions"], seen) for entry in found],
    }


def _count(text: str) -> int:
    return len(text) - text.count(LEFT_OUT)


def _share(text: str) -> float | None:
    return text.count("1") / _count(text) if _count(text) else None


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def _deviation(values: Sequence[float | None]) -> float | None:
    """The standard deviation over the seeds, of a sample; ``None`` for fewer than two."""
    there = [value for value in values if value is not None]
    return statistics.stdev(there) if len(there) > 1 else None


def _first(questions: str, seen: set[str]) -> str:
    """1 for each question that is not in ``seen``, to which it is added, and 0 for one that is."""
    marks = []
    for i in range(0, len(questions), DIGITS):
        digest = questions[i : i + DIGITS]
        marks.append("0" if digest in seen else "1")
        seen.add(digest)
    return "".join(marks)


def _overall(algorithms: Mapping[str, Any], name: str, inside: bool) -> float | None:
    """The mean over the algorithms of the mean over their sizes."""
    means = [
        _mean([row[name] for row in entry["sizes"].values() if row["in_distribution"] == inside])
        for entry in algorithms.values()
    ]
    return _mean(means)


def _throughput(cells: Any) -> dict[str, Any]:
    total = {key: sum(cell[key] for cell in cells) for key in ("asked", "prompt_tokens", "tokens", "seconds")}
    devices = [cell["provenance"]["device"] for cell in cells]
    seconds = total["seconds"]
    return {
        "samples": total["asked"],
        "prompt_tokens": total["prompt_tokens"],
        "generated_tokens": total["tokens"],
        "seconds": round(seconds, 3),
        "samples_per_second": total["asked"] / seconds if seconds else None,
        "generated_tokens_per_second": total["tokens"] / seconds if seconds else None,
        "devices": sorted({", ".join(device["gpus"]) or device["cpu"] for device in devices}),
    }


def load_evaluation(path: str | Path) -> dict[str, Any]:
    """What ``sharpmax clrs-text evaluate`` wrote: its folder, or the evaluation.json in it."""
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        hint = ", whose evaluation is not complete" if (path.parent / "cells").is_dir() else ""
        raise ValueError(
            f"expected a folder that `sharpmax clrs-text evaluate` made, or its {FILE}, got {str(path)!r}{hint}"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or not {"model", "settings", "algorithms", "trace_accuracy"} <= set(found):
        raise ValueError(
            f"{path} is not an evaluation, or is damaged: evaluate again, which takes the cells as they are"
        )
    if found.get("format") != FORMAT:
        raise ValueError(
            f"expected an evaluation in format {FORMAT}, got format {found.get('format')} in {path}: evaluate again, "
            "which takes the cells as they are"
        )
    return found


TRAINED = (
    "start",
    "parameters",
    "processes",
    "steps",
    "counts",
    "seconds",
    "median_step_seconds",
    "median_data_seconds",
    "median_tokens_per_second",
    "peak_memory_bytes",
    "curve",
)
"""What an evaluation repeats of the report of a training run, beside its settings."""
NEW = ("median_data_seconds",)
"""What reports of earlier versions lack."""


def read_report(path: Path) -> dict[str, Any]:
    """The training.json of a run."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = [key for key in TRAINED if key not in NEW]
        whole = all(key in found for key in known) and dict(found["counts"])
        if not (whole and dict(found["settings"]) and dict(found["config"]) and Split.from_json(found["split"])):
            raise KeyError
    except (OSError, ValueError, TypeError, LookupError):
        raise ValueError(f"{path} is not the report of a training run, or is damaged: move it away") from None
    if not (set(NEW) <= set(found) and "packed" in found["counts"]):
        raise ValueError(
            f"{path} was written by an earlier version, which did not count the sizes that were trained on: train again"
        )
    return found


def training_summary(folder: str | Path) -> dict[str, Any] | None:
    """How the model in a folder called model was trained, from the training.json beside it, where there is one."""
    place = Path(folder).resolve()
    path = place.parent / "training.json"
    if place.name != "model" or not place.is_dir() or not path.is_file():
        return None
    found = read_report(path)
    return {
        "settings": found["settings"],
        "sizes": found["split"]["sizes"],
        "seeds": found["split"]["seeds"],
        **{key: found[key] for key in TRAINED},
        "provenance": found.get("provenance"),
    }


def training_sizes(training: Mapping[str, Any] | None) -> Mapping[str, Sequence[int]]:
    """The sizes that a model was trained on; the benchmark's where nothing is known of its training.

    A size of which no sample came into a sequence of training, because none was drawn or none fitted, is none of them.
    """
    if training is None:
        return TRAINING_SIZES
    packed = training["counts"]["packed"]
    return {name: [n for n in sizes if str(n) in packed.get(name, {})] for name, sizes in training["sizes"].items()}


def training_seeds(training: Mapping[str, Any] | None) -> Sequence[int]:
    """The seeds of the samples that a model was trained on; the benchmark's where nothing is known of its training."""
    return training_split().seeds if training is None else training["seeds"]
