"""What is compared: the mechanisms and tasks by name, and which table each mechanism is in."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

from ..mechanisms import MECHANISMS, Mechanism, Selective, find
from ..tasks.max_retrieval.attention import needs_training
from ..tasks.max_retrieval.data import Task

BASELINE = "softmax"

TASKS: dict[str, str] = {
    "max": "the class of the largest item",
    "second": "the class of the second largest item",
    "recall": "the class of the item whose key is asked for",
}
"""What each task asks for."""

REFITTED = {"refitted": "adaptive, refitted", "refitted_held": "adaptive, refitted, range-safe"}
"""Policies that Appendix F fits to the heads that were trained with softmax, as in Table 1."""


def mechanisms() -> dict[str, Mechanism]:
    """Every mechanism by name. Sets have no first item that is to stay, so selective attention may remove any."""
    return {
        name: dataclasses.replace(m, first_stays=False) if isinstance(m, Selective) else m
        for name, m in MECHANISMS.items()
    }


def switched_on(names: Any) -> list[str]:
    """Those of ``names`` that can be switched on in heads that were trained with softmax."""
    known = mechanisms()
    return [name for name in names if known[name].inference and not needs_training(known[name])]


def chosen_mechanisms(text: str | None) -> tuple[str, ...]:
    """Mechanisms as the command line has them, ``softmax,sparsemax``, the baseline first; all without ``text``."""
    words = list(MECHANISMS) if text is None else _words(text, "mechanisms")
    for word in words:
        find(word)
    return (BASELINE, *(word for word in words if word != BASELINE))


def chosen_tasks(text: str | None) -> tuple[Task, ...]:
    """Tasks as the command line has them; all without ``text``."""
    words = list(TASKS) if text is None else _words(text, "tasks")
    if unknown := [word for word in words if word not in get_args(Task)]:
        raise ValueError(f"expected tasks to be among {', '.join(TASKS)}, got {', '.join(map(repr, unknown))}")
    return tuple(words)  # pyright: ignore[reportReturnType]


def begun(out: Path) -> tuple[str | None, str | None]:
    """Mechanisms and tasks that ``out`` has a folder of, as the command line has them; ``None`` where there is none."""
    tasks = [task for task in TASKS if (out / task).is_dir()]
    names = [name for name in MECHANISMS if any((out / task / name).is_dir() for task in tasks)]
    return ",".join(names) or None, ",".join(tasks) or None


def _words(text: str, what: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if len(set(words)) != len(words):
        raise ValueError(f"expected {what} to be named once each, got {text!r}")
    return words
