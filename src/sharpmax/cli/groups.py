"""The groups of commands, and the arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

DEFAULT_OUT = Path("report")

MOST_SETS, MOST_FIT_SETS = 1_000_000, 10_000
"""Larger numbers are refused: they would fill the memory, or take days."""


class Commands(typer.core.TyperGroup):
    """Commands in the order they are written; an unknown one is answered with those that there are."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that ``args`` names."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"expected one of {', '.join(self.list_commands(ctx))}, got {args[0]!r}")
        return super().resolve_command(ctx, args)


def group(text: str) -> typer.Typer:
    """A group of commands, which alone prints its help."""
    made = typer.Typer(cls=Commands, help=text, add_completion=False, pretty_exceptions_enable=False)
    made.callback(invoke_without_command=True)(help_if_alone)
    return made


def help_if_alone(context: typer.Context) -> None:
    """Print the help of a group that was given no command."""
    if context.invoked_subcommand is None:
        print(context.get_help())


Spread = Annotated[
    float, typer.Option(help="Difference between the largest and the smallest logit, delta in Lemma 2.1; at least 0.")
]
Theta = Annotated[float, typer.Option(help="Temperature, above 0.")]
Epsilon = Annotated[float, typer.Option(help="Every coefficient shall be below this; above 0 and at most 1.")]
Out = Annotated[Path, typer.Option(help="Folder for the files; made if it is not there.", file_okay=False)]
Seed = Annotated[int, typer.Option(help="Seed of the random logits.", min=0)]

HeadProtocol = Annotated[
    str | None, typer.Option(help="What the heads were trained with: paper (the default), sharp, or a JSON file.")
]
Heads = Annotated[
    Path | None,
    typer.Option("--checkpoint", help="Folder of trained heads; by default those shipped for the protocol."),
]
HeadSeed = Annotated[int | None, typer.Option(help="Which head; by default the first.", min=0)]
Sizes = Annotated[str | None, typer.Option(help="Numbers of items with commas between them, as in 16,32,64.")]
Sets = Annotated[
    int | None,
    typer.Option(help="Sets for each size and seed; by default 64 on a CPU, 2,048 on a GPU.", min=1, max=MOST_SETS),
]
FitSets = Annotated[
    int | None,
    typer.Option(help="Validation sets for each size and seed; by default 64.", min=1, max=MOST_FIT_SETS),
]
