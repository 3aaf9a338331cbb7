"""What may be asked for: checked without PyTorch, so that a mistake is answered at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..core.policies import PAPER, PAPER_HELD
from ..inputs import find_policy, parse_numbers
from .sources import MaximumPrompts, Prefixes, Source

POLICIES = {"paper": PAPER, "paper-held": PAPER_HELD}
TASKS = ("max",)
DTYPES = ("float32", "bfloat16", "float16")

EPSILON = 0.01
LONGEST_INPUT = 9_999_999


class Asked(NamedTuple):
    """What to measure, as far as that can be told before there is a model."""

    source: Source
    lengths: list[int]
    layers: list[int] | None
    policy: Any


def read_arguments(
    *,
    prompts: Path | None = None,
    task: str | None = None,
    text: Path | None = None,
    lengths: str | None = None,
    layers: str | None = None,
    policy: str = "paper",
    count: int = 8,
    seed: int = 0,
    epsilon: float = EPSILON,
    sample: int | None = None,
    dtype: str = "float32",
) -> Asked:
    """What the words of a command line mean; see :func:`sharpmax.diagnostics.command.diagnose_command`."""
    check_numbers(epsilon, sample)
    if dtype not in DTYPES:
        raise ValueError(f"expected dtype to be one of {', '.join(DTYPES)}, got {dtype!r}")
    chosen_policy = find_policy(policy, POLICIES)
    source = _source(prompts, task, text, count, seed)
    asked = list(source.lengths) if lengths is None else parse_numbers(lengths, "lengths")
    check_lengths(asked)
    chosen_layers = None if layers is None else parse_numbers(layers, "layers")
    if isinstance(source, Prefixes):
        asked = _within(source, asked, given=lengths is not None)
    return Asked(source, asked, chosen_layers, chosen_policy)


def check_lengths(lengths: Sequence[int]) -> None:
    """Refuse lengths that are no numbers of items or tokens."""
    if not lengths or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in lengths):
        raise ValueError(f"expected lengths to be whole numbers of at least 1, got {list(lengths)!r}")
    if max(lengths) > LONGEST_INPUT:
        raise ValueError(f"expected lengths of at most {LONGEST_INPUT:,}, got {max(lengths)}")


def check_numbers(epsilon: float, sample: int | None) -> None:
    """Refuse an epsilon that no coefficient can be, and a sample of nothing."""
    if not 0 < epsilon <= 1:
        raise ValueError(f"expected epsilon to be above 0 and at most 1, got {epsilon!r}")
    if sample is not None and sample < 1:
        raise ValueError(f"expected a sample of at least one row, got {sample!r}")


def _source(prompts: Path | None, task: str | None, text: Path | None, count: int, seed: int) -> Source:
    if sum(given is not None for given in (prompts, task, text)) > 1:
        raise ValueError("expected one of --prompts, --task and --text, got several")
    if prompts is not None:
        content = _read(prompts)
        if prompts.suffix == ".jsonl":  # a JSON string may hold what splitlines takes for the end of a line
            texts = [_string(line, prompts) for line in content.split("\n") if line.strip()]
        else:
            texts = [line for line in content.splitlines() if line.strip()]
        return Prefixes(texts or [""], prompts.name)
    if text is not None:
        return Prefixes([_read(text)], text.name)
    if task not in (None, *TASKS):
        raise ValueError(f"expected the task to be {', '.join(TASKS)}, got {task!r}")
    return MaximumPrompts(count, seed)


def _read(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"expected a text file, got {str(path)!r}, which is none")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"expected {path} to be text in UTF-8, and it is not") from None


def _string(line: str, path: Path) -> str:
    """A line of a file of JSON strings, which may have line breaks of their own."""
    try:
        text = json.loads(line)
    except ValueError:
        text = None
    if not isinstance(text, str):
        shown = line if len(line) <= 40 else f"{line[:40]}..."
        raise ValueError(f"expected every line of {path} to be a JSON string, got {shown}")
    return text


def _within(source: Prefixes, lengths: list[int], *, given: bool) -> list[int]:
    """Lengths that a text may have, told from its bytes; the default ones are cut where it ends."""
    if given:
        source.check_bytes(lengths)
        return lengths
    most = max(len(text.encode()) for text in source.texts)
    return sorted({min(n, most) for n in lengths})
