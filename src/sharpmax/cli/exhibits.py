"""``sharpmax reproduce``: the paper's tables and figures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..extras import require
from ..inputs import check_folder, user_input
from ..paper import EXHIBITS
from .bound import DEFAULT_SPREAD
from .groups import (
    DEFAULT_OUT,
    FitSets,
    HeadProtocol,
    Heads,
    HeadSeed,
    Out,
    Seed,
    Sets,
    Sizes,
    Spread,
    Theta,
    group,
)
from .heads import train_heads

Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="A packaged model, a folder, or a model on the Hugging Face hub; may be repeated."),
]

reproduce = group("Make tables and figures of the paper again, as PNG, PDF and JSON.")


@reproduce.command(help=EXHIBITS["dispersion"].description)
def dispersion(out: Out = DEFAULT_OUT, spread: Spread = DEFAULT_SPREAD, theta: Theta = 1.0, seed: Seed = 0) -> None:
    """The bounds of Lemma 2.1 and real rows."""
    _make("dispersion", out, spread=spread, theta=theta, seed=seed)


@reproduce.command(help=EXHIBITS["fig2"].description)
def fig2(
    out: Out = DEFAULT_OUT, protocol: HeadProtocol = None, checkpoint: Heads = None, seed: HeadSeed = None
) -> None:
    """Figure 2."""
    _make("fig2", out, protocol=protocol, checkpoint=checkpoint, seed=seed)


@reproduce.command(help=EXHIBITS["fig3"].description)
def fig3(
    out: Out = DEFAULT_OUT,
    model: Models = None,
    sizes: Sizes = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts for each number of items; by default 8.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts.", min=0)] = 0,
) -> None:
    """Figure 3."""
    _make("fig3", out, model=model, sizes=sizes, prompts=prompts, seed=seed)


@reproduce.command("spread-table", help=EXHIBITS["spread_table"].description)
def spread_table(out: Out = DEFAULT_OUT, model: Models = None) -> None:
    """The spreads of Section 2."""
    _make("spread_table", out, model=model)


@reproduce.command(help=EXHIBITS["fig5"].description)
def fig5(out: Out = DEFAULT_OUT) -> None:
    """Figure 5."""
    _make("fig5", out)


@reproduce.command(help=EXHIBITS["fig6"].description)
def fig6(
    out: Out = DEFAULT_OUT,
    protocol: HeadProtocol = None,
    checkpoint: Heads = None,
    sets: FitSets = None,
    sizes: Sizes = None,
) -> None:
    """Figure 6."""
    _make("fig6", out, protocol=protocol, checkpoint=checkpoint, sets=sets, sizes=sizes)


@reproduce.command(help=EXHIBITS["table1"].description)
def table1(
    out: Out = DEFAULT_OUT,
    protocol: HeadProtocol = None,
    checkpoint: Heads = None,
    sets: Sets = None,
    sizes: Sizes = None,
) -> None:
    """Table 1."""
    _make("table1", out, protocol=protocol, checkpoint=checkpoint, sets=sets, sizes=sizes, show=_show_table1)


@reproduce.command(help=EXHIBITS["fig7"].description)
def fig7(
    out: Out = DEFAULT_OUT, protocol: HeadProtocol = None, checkpoint: Heads = None, seed: HeadSeed = None
) -> None:
    """Figure 7."""
    _make("fig7", out, protocol=protocol, checkpoint=checkpoint, seed=seed)


@reproduce.command(help=EXHIBITS["fig8"].description)
def fig8(
    out: Out = DEFAULT_OUT,
    baseline: Annotated[
        Path | None, typer.Option(help="What `sharpmax clrs-text evaluate` wrote of a model with plain softmax.")
    ] = None,
    adaptive: Annotated[
        Path | None, typer.Option(help="The same of one with adaptive temperature, on the same samples.")
    ] = None,
    also: Annotated[Path | None, typer.Option(help="A third one, compared with the baseline too.")] = None,
) -> None:
    """Figure 8."""
    _make("fig8", out, baseline=baseline, adaptive=adaptive, also=also)


@reproduce.command(help=EXHIBITS["fig9"].description)
def fig9(out: Out = DEFAULT_OUT, protocol: HeadProtocol = None, checkpoint: Heads = None) -> None:
    """Figure 9."""
    _make("fig9", out, protocol=protocol, checkpoint=checkpoint)


@reproduce.command(help=EXHIBITS["failure"].description)
def failure(out: Out = DEFAULT_OUT, protocol: HeadProtocol = None, checkpoint: Heads = None) -> None:
    """Corollary B.1."""
    _make("failure", out, protocol=protocol, checkpoint=checkpoint)


@reproduce.command(help=EXHIBITS["depth"].description)
def depth(out: Out = DEFAULT_OUT, seed: Seed = 0) -> None:
    """Remark C.1."""
    _make("depth", out, seed=seed)


@reproduce.command("all")
def every(
    out: Out = DEFAULT_OUT,
    sets: Sets = None,
    retrain: Annotated[
        bool, typer.Option("--train", help="Train the heads first, into OUT/checkpoints; goes on where it stopped.")
    ] = False,
) -> None:
    """Every exhibit, for every protocol it is about, and one page with all of them: OUT/index.html.

    The heads are those that come with a checkout, or, with --train, newly trained ones.
    """
    require("jax", "experiments", "The paper's experiments")
    from ..paper import max_retrieval, report

    check_folder(out)
    protocols = tuple(dict.fromkeys(name for exhibit in EXHIBITS.values() for name in exhibit.heads))
    folders: dict[str, Path | None] = dict.fromkeys(protocols)
    if retrain:
        folders = {name: out / "checkpoints" / name for name in protocols}
        for name, folder in folders.items():
            assert folder is not None
            train_heads(name, folder)
    with user_input():
        for name, folder in folders.items():
            max_retrieval.find_heads(name, folder)
    for exhibit in EXHIBITS.values():
        for name in exhibit.heads:
            table = {"sets": sets, "show": _show_table1} if exhibit.name == "table1" else {}
            _make(exhibit.name, out, protocol=name, checkpoint=folders[name], **table)
        if exhibit.models and not _any_there(exhibit.models):
            print(f"{exhibit.command}: left out, since none of {', '.join(exhibit.models)} is installed")
        elif not exhibit.ready(out):
            options = " and ".join(f"--{name}" for name in exhibit.inputs)
            print(f"{exhibit.command}: left out, since it is made from results that {options} name")
        elif not exhibit.heads:
            _make(exhibit.name, out)
    print(report.write(out))


def _any_there(models: tuple[str, ...]) -> bool:
    """Whether the weights of one of the packaged models are here, and what runs them."""
    if not all(importlib.util.find_spec(package) for package in ("torch", "transformers")):
        return False
    from ..huggingface.weights import available

    return bool(set(models) & set(available()))


def _show_table1(data: dict[str, Any]) -> None:
    from ..paper.table1_views import rich_table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 130
    console.print(rich_table(data))
    for note in data["fit"]["notes"]:
        console.print(f"Refitted polynomial: {note}.", soft_wrap=True)


def _make(name: str, out: Path, **options: Any) -> None:
    """Make one exhibit; a page that is there already shows it."""
    for path in EXHIBITS[name].run(out, **options):
        print(path)
    if (out / "index.html").exists():
        from ..paper import report

        report.write(out)
