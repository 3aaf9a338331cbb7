"""How far long work is: one look for all of it, on the standard error stream where that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .extras import require

Show = Callable[..., None]
"""``show(done, of, now="")``: how much is done of how much, and what there is to say at the moment (else the speed)."""


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
    with rich.Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(what, total=None, now="")

        def show(done: float, of: float, now: str = "") -> None:
            bar.update(task, total=of, completed=done)
            speed = bar.tasks[0].speed
            bar.update(task, now=now or (f"{speed:,.0f}/s" if speed else ""))

        yield show
