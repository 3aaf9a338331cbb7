"""``sharpmax clrs-text train``: reads arguments, checks them before any work, and trains."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...core.policies import PAPER, PAPER_HELD, Policy
from ...inputs import check_folder, find_policy, parse_numbers, user_input
from ...progress import progress_bar
from . import upstream
from .command import words_of
from .outcomes import FILE
from .settings import GENERATED, Settings

POLICIES: dict[str, Policy | None] = {"none": None, "paper": PAPER, "paper-held": PAPER_HELD}


def train_command(
    out: Path,
    *,
    settings: Path | None = None,
    policy: str | None = None,
    algorithms: str | None = None,
    sizes: str | None = None,
    minutes: float | None = None,
    save_dtype: str = "float32",
    cpu: bool = False,
    **given: Any,
) -> list[str]:
    """Train a model, or go on with a run that was stopped, and give what there is to say of it.

    Args:
      out: the folder of the run.
      settings: a JSON file with some of the fields of :class:`Settings`; what is given otherwise comes before it. Its
        policy may be a word or a file, as below.
      policy: ``none``, ``paper``, ``paper-held``, or a policy file.
      algorithms: some of the thirty, with commas between them.
      sizes: such as ``4,5,10-12``.
      minutes: save and leave after so many.
      save_dtype: of the model's weights.
      cpu: stay on the CPU.
      given: other fields of :class:`Settings`; ``None`` where they are not given.

    What cannot be used raises :class:`~sharpmax.inputs.InputError`, before the model is loaded where that can be told.
    """
    until = None if minutes is None else time.monotonic() + 60 * minutes
    given |= {"algorithms": words_of(algorithms), "sizes": None if sizes is None else parse_numbers(sizes, "sizes")}
    with user_input():
        fields = {} if settings is None else _read(settings)
        fields |= {name: value for name, value in given.items() if value is not None}
        if isinstance(named := policy or fields.get("policy"), str):
            chosen = find_policy(named, POLICIES)
            fields["policy"] = None if chosen is None else chosen.to_dict()
        asked = Settings.from_json(fields)
        if minutes is not None and not minutes > 0:
            raise ValueError(f"expected more than 0 minutes, got {minutes:g}")
        if (out / FILE).exists() or (out / "cells").exists():
            raise ValueError(f"expected a folder for a training run, got {str(out)!r}, an evaluation")
        if asked.data == GENERATED:
            upstream.find()
    if _is_main():
        check_folder(out)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers are processes already
    with user_input():
        from .checkpoints import kept
        from .fine_tuning import Run, finished
        from .models import check_dtype
        from .preparation import resolved

        check_dtype(save_dtype)
        asked = resolved(asked, cpu=cpu)
        if (result := finished(asked, out)) is not None:
            return [f"{out}: finished before, with weights in {_saved_dtype(out)}", *describe(out, result)]
        run = Run.begin(asked, out, cpu=cpu)
    with _progress() as show:
        try:
            found = run.complete(show, until, save_dtype)
        except KeyboardInterrupt:
            print(f"{out}: {kept(out)}; the same command goes on from there", file=sys.stderr)
            raise
    if not run.accelerator.is_main_process:
        return []
    return [f"{out}: time is up; the same command goes on"] if found is None else describe(out, found)


def describe(out: Path, result: dict[str, Any]) -> list[str]:
    """What there is to say of a finished run."""
    counts = result["counts"]
    dropped = sum(sum(sizes.values()) for sizes in counts["dropped"].values())
    memory = result["peak_memory_bytes"]
    return [
        f"{out / 'model'}: {result['steps']:,} steps, {counts['tokens']:,} tokens "
        f"({counts['padding'] / counts['tokens']:.1%} padding), {counts['documents']:,} samples, {dropped:,} too long",
        f"  loss {result['curve']['loss'][-1]:.4f}, {result['median_tokens_per_second']:,.0f} tokens/s"
        + (f", {memory / 2**30:.1f} GiB" if memory else ""),
    ]


def _saved_dtype(out: Path) -> str:
    """The type of the weights of a finished run, which another --save-dtype does not change."""
    try:
        return json.loads((out / "model" / "config.json").read_text(encoding="utf-8"))["dtype"]
    except (OSError, ValueError, LookupError):
        return "a type that is not known"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"expected a file of settings, got {str(path)!r}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"expected {path} to be JSON, got {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"expected {path} to hold settings by name, got a {type(content).__name__}")
    return content


def _is_main() -> bool:
    """Whether this is the first of the processes that ``accelerate launch`` or ``torchrun`` started."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar with loss, speed and the time that is left, on the standard error stream of the first process.

    Where that is no terminal, there is a line of text for each line of the log.
    """
    told = _is_main() and not sys.stderr.isatty()
    with progress_bar("steps", shown=_is_main() and not told) as bar:
        said = ""

        def show(step: int, steps: int, line: dict[str, Any] | None) -> None:
            nonlocal said
            if line is not None:
                said = f"loss {line['loss']:.4f}, {line['tokens_per_second']:,.0f} tokens/s"
                if told:
                    print(f"step {step:,} of {steps:,}: {said}", file=sys.stderr, flush=True)
            bar(step, steps, said)

        yield show
