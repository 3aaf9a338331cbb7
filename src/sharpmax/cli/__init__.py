"""The commands of ``sharpmax``: they read arguments and print; what they compute stands in the layers below."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .bound import bound
from .clrs_text import clrs_text
from .compare import compare
from .exhibits import reproduce
from .groups import Commands, help_if_alone
from .heads import fit, train
from .models import diagnose, models, zero_shot

app = typer.Typer(
    cls=Commands,
    help="Attention that stays sharp as inputs grow: bounds, the sharpness of models, the paper's tables and figures.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"sharpmax {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _sharpmax(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    help_if_alone(context)


app.command()(bound)
app.command()(fit)
app.command()(compare)
app.add_typer(train, name="train")
app.command()(diagnose)
app.command("zero-shot")(zero_shot)
app.add_typer(models, name="models")
app.add_typer(clrs_text, name="clrs-text")
app.add_typer(reproduce, name="reproduce")
