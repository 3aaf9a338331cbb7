"""How far long work is: one look for all of it, on the standard error stream; a bar in a terminal, else lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .extras import require

Show = Callable[..., None]
"""``show(done, of, now="")``: how much is done of how much, and what there is to say at the moment (else the speed)."""

EVERY = 30.0
"""Seconds between two lines where there is no terminal, in a log say; what takes less says nothing there."""


@contextmanager
def progress_bar(what: str, *, shown: bool = True) -> Iterator[Show]:
    """A bar with what is done, what ``now`` says, and the time that has passed and is left; yields :data:`Show`."""
    rich = require("rich.progress", "experiments", "the progress bar")
    console = require("rich.console", "experiments", "the progress bar").Console(stderr=True)
    columns = (
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(bar_width=20),
        rich.MofNCompleteColumn(),
        rich.TextColumn("{task.fields[now]}", markup=False),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
    )
    if shown and not console.is_terminal:
        yield log_lines(what)
        return
    with rich.Progress(*columns, console=console, disable=not shown) as bar:
        task = bar.add_task(what, total=None, now="")

        def show(done: float, of: float, now: str = "") -> None:
            bar.update(task, total=of, completed=done)
            speed = bar.tasks[0].speed
            bar.update(task, now=now or (f"{speed:,.0f}/s" if speed else ""))

        yield show


def log_lines(what: str) -> Show:
    """A :data:`Show` for logs: a line now and then. What was done at the beginning does not count for the speed."""
    began = told = time.monotonic()
    first: float | None = None

    def show(done: float, of: float, now: str = "") -> None:
        nonlocal first, told
        first = done if first is None else first
        clock = time.monotonic()
        if clock - told >= EVERY:
            told = clock
            said = now or f"{(done - first) / (clock - began):,.0f}/s"
            print(f"{what}: {done:,.0f} of {of:,.0f}, {said}", file=sys.stderr, flush=True)

    return show
