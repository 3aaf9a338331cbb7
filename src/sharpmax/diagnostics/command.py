"""``sharpmax diagnose``: reads arguments, checks them before anything is loaded, and writes the report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.policies import PAPER, PAPER_HELD, load_policy
from ..inputs import InputError
from .measure import Diagnosis, Progress, check_lengths, diagnose
from .record import EPSILON
from .sources import MaximumPrompts, Prefixes, Source

POLICIES = {"paper": PAPER, "paper-held": PAPER_HELD}
TASKS = ("max",)
DTYPES = ("float32", "bfloat16", "float16")
MOST_NUMBERS = 10_000


@contextmanager
def usable() -> Iterator[None]:
    """Around checks of what the user gave, and the loading of it."""
    try:
        yield
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise InputError(" ".join(str(error).split())) from error


def diagnose_command(
    model: str,
    out: Path,
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
    device: str | None = None,
    dtype: str = "float32",
) -> list[Path]:
    """Measure how sharp every head of MODEL is on growing inputs, and write a report into the folder ``out``.

    Args:
      model: a packaged model, a folder, or a name on the hub, as for :func:`sharpmax.huggingface.weights.load`.
      out: the folder for report.html, diagnosis.png, .csv and .json; every length is saved there when it is done, so
        the same command goes on where it stopped.
      prompts: a file with a prompt on every line; lengths are prefixes in tokens.
      task: ``max``, the prompt of Figure 3; lengths are numbers of items. What is taken if nothing is asked for.
      text: a file that is one input; lengths are prefixes in tokens.
      lengths: whole numbers with commas between them.
      layers: the same, or ranges such as ``0-3``; all layers if not given.
      policy: ``paper``, ``paper-held`` or a policy file, JSON.
      count: prompts for each length of a task.
      seed: of the task's prompts.
      epsilon: for the n of Theorem 2.2.
      sample: about how many rows of each input to compute; all if not given.
      device: where to run; a GPU if there is one.
      dtype: of the weights.

    What cannot be used raises :class:`InputError`, before the model is loaded where that can be told.
    """
    with usable():
        chosen_policy = named_policy(policy)
        source = _source(prompts, task, text, count, seed)
        asked = list(source.lengths) if lengths is None else parse_numbers(lengths, "lengths")
        check_lengths(asked)
        chosen_layers = None if layers is None else parse_numbers(layers, "layers")
        if isinstance(source, Prefixes):
            asked = _within(source, asked, given=lengths is not None)
        if not 0 < epsilon <= 1:
            raise ValueError(f"expected epsilon to be above 0 and at most 1, got {epsilon:g}")
        if sample is not None and sample < 1:
            raise ValueError(f"expected a sample of at least one row, got {sample}")
        if dtype not in DTYPES:
            raise ValueError(f"expected dtype to be one of {', '.join(DTYPES)}, got {dtype!r}")
        network, tokenizer = _load(model, device, dtype)
        _check_layers(network, chosen_layers)
        if isinstance(source, Prefixes) and lengths is None:
            longest = max(map(len, source.tokens(tokenizer)))
            asked = sorted({min(n, longest) for n in asked})
        source.check(tokenizer, asked)
    with _progress(asked) as show:
        try:
            found = _diagnosed(
                network, tokenizer, source, asked, name=Path(model).name, policy=chosen_policy, layers=chosen_layers,
                epsilon=epsilon, sample=sample, out=out, progress=show,
            )  # fmt: skip
        except KeyboardInterrupt:
            print(f"{out}: lengths that are done are saved; the same command goes on from there", file=sys.stderr)
            raise
    return found.save(out)


def named_policy(name: str) -> Any:
    """The policy that a name or a file means."""
    if name in POLICIES:
        return POLICIES[name]
    if not Path(name).is_file():
        raise ValueError(f"expected the policy to be {', '.join(POLICIES)} or a policy file, got {name!r}")
    return load_policy(name)


def parse_numbers(text: str, what: str) -> list[int]:
    """``"16,64,256"`` or ``"0-3,8"`` as numbers, sorted."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not first.isdecimal() or (dash and not (last.isdecimal() and int(last) >= int(first))):
            raise ValueError(f"expected {what} to be whole numbers with commas between them, got {text!r}")
        several = range(int(first), int(last if dash else first) + 1)
        if several.stop - several.start + len(found) > MOST_NUMBERS:
            raise ValueError(f"expected at most {MOST_NUMBERS:,} {what}, got {text!r}")
        found.update(several)
    return sorted(found)


def _source(prompts: Path | None, task: str | None, text: Path | None, count: int, seed: int) -> Source:
    if sum(given is not None for given in (prompts, task, text)) > 1:
        raise ValueError("expected one of --prompts, --task and --text, got several")
    if prompts is not None:
        lines = [line for line in _read(prompts).splitlines() if line.strip()]
        return Prefixes(lines or [""], prompts.name)
    if text is not None:
        return Prefixes([_read(text)], text.name)
    if task not in (None, *TASKS):
        raise ValueError(f"expected the task to be {', '.join(TASKS)}, got {task!r}")
    return MaximumPrompts(count, seed)


def _read(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"expected a text file, got {str(path)!r}, which is none")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"expected {path} to be text in UTF-8, and it is not") from None


def _within(source: Prefixes, lengths: list[int], *, given: bool) -> list[int]:
    """Lengths that a text may have, told from its bytes; the default ones are cut where it ends."""
    if given:
        source.check_bytes(lengths)
        return lengths
    most = max(len(text.encode()) for text in source.texts)
    return sorted({min(n, most) for n in lengths})


def _load(model: str, device: str | None, dtype: str) -> tuple[Any, Any]:
    import torch

    from ..core.policies import Constant
    from ..huggingface import sharpen
    from ..huggingface.weights import load

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=where).item()
    except (RuntimeError, AssertionError):
        raise ValueError(f"expected a device that torch has here, got {where!r}") from None
    network: Any
    network, tokenizer = load(model, dtype=dtype)
    if network.config.is_encoder_decoder:
        raise ValueError(
            f"{model} has an encoder and a decoder, which take two inputs: run it within sharpmax.diagnostics.record"
        )
    with sharpen(network, Constant(1)):
        pass
    return network.to(where), tokenizer


def _check_layers(network: Any, layers: list[int] | None) -> None:
    known = sorted({m.layer_idx for m in network.modules() if isinstance(getattr(m, "layer_idx", None), int)})
    if layers and known and (unknown := [layer for layer in layers if layer not in known]):
        raise ValueError(f"expected layers from {known[0]} to {known[-1]}, got {', '.join(map(str, unknown))}")


def _diagnosed(*arguments: Any, **options: Any) -> Diagnosis:
    """The diagnosis; a folder that holds another one is what the user gave."""
    try:
        return diagnose(*arguments, **options)
    except ValueError as error:
        raise InputError(" ".join(str(error).split())) from error


@contextmanager
def _progress(lengths: list[int]) -> Iterator[Progress]:
    """A bar for every length, on the standard error stream."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks = {length: bars.add_task(f"{length:,}", total=None, start=False) for length in lengths}

        def show(length: int, done: int, total: int) -> None:
            bars.start_task(tasks[length])
            bars.update(tasks[length], completed=done, total=total)

        yield show
