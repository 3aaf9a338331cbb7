"""``sharpmax compare``: the leaderboard of mechanisms."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ..extras import require
from ..inputs import check_folder, user_input
from ..progress import log_lines
from .groups import Sets, Sizes
from .heads import MOST_HEADS


def compare(
    out: Annotated[Path, typer.Option(help="Folder for cells and tables; goes on from there.", file_okay=False)],
    mechanisms: Annotated[
        str | None, typer.Option(help="Names with commas between them; by default all. Softmax is always among them.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Of max, second, recall; by default all three.")] = None,
    protocol: Annotated[
        str | None, typer.Option(help="How to train: paper (the default), sharp, or a JSON file.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Heads a cell, seeded 0, 1, 2, ...; by default 10.", min=1, max=MOST_HEADS),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Gradient steps instead of the protocol's.", min=1)] = None,
    sets: Sets = None,
    sizes: Sizes = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after so many minutes; the same command goes on from there.", min=0)
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Train and evaluate nothing; make the tables of what was begun.")
    ] = False,
) -> None:
    """Train and evaluate a head with every mechanism, on every task, from the same seeds: two tables for each task.

    The one is about mechanisms switched on in heads that were trained with softmax, the other about heads trained with
    them. Interrupt it whenever you like and give the same command again. The command may run several times at once on
    one folder: each takes cells that no other works on. A cell that fails is said to, and tried again the next time.
    """
    require("jax", "experiments", "Comparing mechanisms")
    from .. import leaderboard
    from ..leaderboard.settings import load_settings

    with user_input():
        if report:  # what was begun, unless more is asked for
            mechanisms, tasks = (a or b for a, b in zip((mechanisms, tasks), leaderboard.begun(out), strict=True))
        names, chosen = leaderboard.chosen_mechanisms(mechanisms), leaderboard.chosen_tasks(tasks)
        if report and load_settings(out) is None:
            raise ValueError(f"{out} holds no comparison to report on; leave --report out to begin one")
        settings = leaderboard.settle(out, protocol, seeds, steps, sets, sizes)
    check_folder(out)
    stopped, watcher = None, None
    if not report:
        try:
            with _watching() as watcher:
                taken = leaderboard.compare(out, settings, chosen, names, watcher, minutes)
            if taken:
                print(f"left to other processes: {', '.join(map(str, taken))}")
        except leaderboard.OutOfTimeError:
            stopped = f"stopped after {minutes:g} minutes; the same command goes on from there"
        except KeyboardInterrupt:
            print(f"{out}: what was done is saved; the same command goes on from there", file=sys.stderr)
            raise
    with user_input():
        paths, data = leaderboard.write_report(out, settings, chosen, names)
    for path in paths:
        print(path)
    for line in _missing(data["missing"]):
        print(line)
    if stopped:
        print(stopped)
    if watcher is not None and watcher.failures:
        print(f"failed: {', '.join(watcher.failures)}; the same command tries again", file=sys.stderr)
        raise typer.Exit(1)


MOST_LINES = 20


def _missing(lines: list[str]) -> list[str]:
    if not lines:
        return []
    more = [f"  and {len(lines) - MOST_LINES} more, in leaderboard.md"] if len(lines) > MOST_LINES else []
    return ["missing:", *(f"  {line}" for line in lines[:MOST_LINES]), *more]


class _Watcher:
    """Two bars, of all cells and of this one, and a line for every cell that is full; in a log, lines now and then."""

    def __init__(self, bar: Any) -> None:
        self.bar, self.number, self.cells, self.name = bar, 0, 0, ""
        self.tell = None if bar.console.is_terminal else log_lines("cells")
        self.failures: list[str] = []
        self.all = bar.add_task("all cells", total=1.0, now="")
        self.one = bar.add_task("", total=1.0, now="")

    def cell(self, cell: Any, number: int, cells: int) -> None:
        """A cell was begun."""
        self.number, self.cells, self.name = number, cells, str(cell)
        self.bar.update(self.all, total=cells, completed=number, now=f"{number} of {cells}")
        self.bar.reset(self.one, description=str(cell), now="")

    def at(self, done: float, now: str) -> None:
        """So much of it is done."""
        self.bar.update(self.all, completed=self.number + done)
        self.bar.update(self.one, completed=done, now=now)
        if self.tell is not None:
            self.tell(self.number, self.cells, f"{self.name}: {now}")

    def finished(self, cell: Any, result: Any) -> None:
        """It is full."""
        self.bar.update(self.all, completed=self.number + 1, now=f"{self.number + 1} of {self.cells}")
        sizes = sorted(result.measured)
        accuracy = [sum(v or 0.0 for v in result.measured[n]["accuracy"]) / result.seeds for n in sizes]
        shown = dict(zip(sizes, accuracy, strict=True))
        ends = ", ".join(f"{shown[n]:.1%} at {n:,}" for n in dict.fromkeys((sizes[0], sizes[-1])))
        self.bar.console.print(f"{cell}: {ends} items", highlight=False)

    def failed(self, cell: Any, error: str) -> None:
        """It could not be filled."""
        self.failures.append(str(cell))
        self.bar.console.print(f"{cell} failed: {error}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _watching() -> Iterator[_Watcher]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns) as bar:
        yield _Watcher(bar)
