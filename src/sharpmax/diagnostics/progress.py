"""How far a measurement is: bars in the terminal, and the layers of a forward that have run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..progress import log_lines

if TYPE_CHECKING:
    from torch import nn

Progress = Callable[[int, float, int], None]
"""Called with a length, how many of its inputs are done (a share of one too), and how many it has."""


@contextmanager
def progress_bars(inputs: Mapping[int, int], label: Callable[[int], str]) -> Iterator[Progress]:
    """A bar for every length, on the standard error stream; where that is no terminal, lines now and then.

    ``inputs`` says how many inputs a length has, ``label`` what to call it.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    words = TextColumn("{task.description:>14}", markup=False)
    columns = (words, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    if not console.is_terminal:
        tell = log_lines("inputs")
        yield lambda length, done, total: tell(done, total, label(length))
        return
    with Progress(*columns, console=console) as bars:
        tasks = {length: bars.add_task(label(length), total=total, start=False) for length, total in inputs.items()}

        def show(length: int, done: float, total: int) -> None:
            bars.start_task(tasks[length])
            bars.update(tasks[length], completed=done, total=total)

        yield show


@contextmanager
def layers_told(model: nn.Module, tell: Callable[[float], None] | None) -> Iterator[None]:
    """Within the block ``tell`` gets the share of layers that a forward has run, if modules say which they are."""
    layers: dict[Any, int] = {}
    if tell is not None:
        layers = {m: m.layer_idx for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int)}  # pyright: ignore[reportAssignmentType]
    total, ran = len(set(layers.values())), set[int]()

    def after(module: nn.Module, *_: Any) -> None:
        ran.add(layers[module])
        if tell is not None:
            tell(len(ran) / total)

    handles = [module.register_forward_hook(after) for module in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
