"""The commands of ``sharpmax``: they read arguments and print; what they compute stands in the layers below."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.table import Table

from . import __version__
from .extras import require
from .paper import EXHIBITS, InputError, check_folder, user_input
from .paper.bound import bound_report
from .paper.published import GEMMA_SPREADS

DEFAULT_SPREAD = GEMMA_SPREADS[0].average
DEFAULT_OUT = Path("report")

MOST_HEADS, MOST_SETS, MOST_FIT_SETS = 10_000, 1_000_000, 10_000
"""Larger numbers are refused: they would fill the memory, or take days."""


class Commands(typer.core.TyperGroup):
    """Commands in the order they are written; an unknown one is answered with those that there are."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that ``args`` names."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"expected one of {', '.join(self.list_commands(ctx))}, got {args[0]!r}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    help="Attention that stays sharp as inputs grow: dispersion bounds, and the paper's tables and figures.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
train = typer.Typer(cls=Commands, help="Train the heads that the paper's experiments are about.")
app.add_typer(train, name="train")
reproduce = typer.Typer(cls=Commands, help="Make tables and figures of the paper again, as PNG, PDF and JSON.")
app.add_typer(reproduce, name="reproduce")

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
    _help_if_alone(context)


@train.callback(invoke_without_command=True)
@reproduce.callback(invoke_without_command=True)
def _group(context: typer.Context) -> None:
    _help_if_alone(context)


def _help_if_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def bound(
    spread: Spread = DEFAULT_SPREAD,
    theta: Theta = 1.0,
    epsilon: Epsilon = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """From how many items on softmax must have dispersed (Theorem 2.2).

    Given how far apart logits can be, softmax cannot keep any coefficient above epsilon once there are enough of
    them. This prints that number, the one that some logits really reach, and both for the spreads that the paper
    reports of Gemma.
    """
    report = bound_report(spread, theta, epsilon)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print_bound(report)


@train.command("max-retrieval")
def train_max_retrieval(
    out: Annotated[
        Path,
        typer.Option(help="Folder for the checkpoint; training goes on from one that is there.", file_okay=False),
    ],
    protocol: Annotated[str, typer.Option(help="How to train: paper, sharp, or a JSON file.")] = "paper",
    seeds: Annotated[int, typer.Option(help="How many heads, seeded 0, 1, 2, ...", min=1, max=MOST_HEADS)] = 10,
    steps: Annotated[int | None, typer.Option(help="Gradient steps instead of the protocol's.", min=1)] = None,
) -> None:
    """Train the single-head network of Appendix A to find the class of the largest of 5 to 16 items.

    Uses a GPU if JAX has one. A checkpoint is written after every 250 steps on a CPU and every 5,000 on a GPU:
    interrupt training whenever you like and give the same command again.
    """
    _train(protocol, out, seeds, steps)


def _train(protocol: str, out: Path, seeds: int = 10, steps: int | None = None) -> None:
    require("jax", "experiments", "Training")
    from .provenance import provenance
    from .tasks import max_retrieval

    with user_input():
        chosen = max_retrieval.load_protocol(protocol)
        if steps is not None:
            chosen = dataclasses.replace(chosen, steps=steps)
        max_retrieval.find_begun(chosen, range(seeds), out)
    check_folder(out)
    try:
        with max_retrieval.progress_bar(Path(protocol).stem) as show:
            run = max_retrieval.train(chosen, range(seeds), out, progress=show, provenance=provenance())
    except KeyboardInterrupt:
        begun = max_retrieval.find_begun(chosen, range(seeds), out)
        kept = "nothing is saved yet" if begun is None else f"step {begun.step:,} is saved"
        print(f"{out}: {kept}; the same command goes on from there", file=sys.stderr)
        raise
    last = run.history[-1]
    print(f"{out}: {seeds} heads after {run.step:,} steps, {_mean(last['accuracy']):.2%} right in training")


@app.command()
def fit(
    checkpoint: Annotated[Path, typer.Option(help="Folder of trained max-retrieval heads.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the policy, JSON.", dir_okay=False)],
    sizes: Sizes = None,
    sets: FitSets = None,
    monotone: Annotated[
        bool, typer.Option("--monotone", help="Fit a curve that never decreases instead of a polynomial.")
    ] = False,
) -> None:
    """Fit a policy to trained heads (Appendix F): the best temperature as a function of the entropy.

    Sizes are 16 to 1,024 by default, and larger ones for heads that err too seldom there. The policy holds its value
    beyond the entropies it was fitted on. Load it with sharpmax.load_policy.
    """
    require("jax", "experiments", "Fitting")
    from .paper import max_retrieval

    with user_input():
        chosen = None if sizes is None else max_retrieval.parse_sizes(sizes)
        heads = max_retrieval.find_heads(None, checkpoint)
    check_folder(output.parent)
    fitted = max_retrieval.fit(heads.checkpoint, chosen, max_retrieval.FIT_SETS if sets is None else sets)
    if not fitted.kept:
        raise InputError(
            "the true maximum had the largest logit in every validation set, so there is nothing to fit; "
            "ask for larger --sizes or more --sets"
        )
    policy = fitted.samples.fit_monotone() if monotone else fitted.polynomial
    policy.save(output)
    _print_fit(fitted.to_dict(), policy, output)


def _print_fit(report: dict[str, Any], policy: Any, output: Path) -> None:
    counts = report["counts"].values()
    total, largest, none = (sum(c[key] for c in counts) for key in ("total", "already_largest", "no_optimum"))
    print(f"{len(counts)} sizes, {', '.join(f'{n:,}' for n in report['sizes'])}: {total:,} validation sets")
    print(
        f"kept {report['kept']:,}, dropped {total - report['kept']:,} "
        f"({largest:,} where the true maximum has the largest logit already, {none:,} without a finite optimum)"
    )
    if hasattr(policy, "coefficients"):
        print("coefficients, highest power first: " + ", ".join(f"{c:.6g}" for c in policy.coefficients))
        for note in report["notes"]:
            print(f"note: {note}")
    else:
        pairs = zip(policy.entropies, policy.betas, strict=True)
        print("entropy, beta: " + "; ".join(f"{h:.4g}, {b:.4g}" for h, b in pairs))
    print(output)


def _mean(values: list[float | None]) -> float:
    return statistics.fmean(float("nan") if v is None else v for v in values)


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
    from .paper import max_retrieval, report

    check_folder(out)
    protocols = tuple(dict.fromkeys(name for exhibit in EXHIBITS.values() for name in exhibit.heads))
    folders: dict[str, Path | None] = dict.fromkeys(protocols)
    if retrain:
        folders = {name: out / "checkpoints" / name for name in protocols}
        for name, folder in folders.items():
            assert folder is not None
            _train(name, folder)
    with user_input():
        for name, folder in folders.items():
            max_retrieval.find_heads(name, folder)
    for exhibit in EXHIBITS.values():
        for name in exhibit.heads:
            table = {"sets": sets, "show": _show_table1} if exhibit.name == "table1" else {}
            _make(exhibit.name, out, protocol=name, checkpoint=folders[name], **table)
        if not exhibit.heads:
            _make(exhibit.name, out)
    print(report.write(out))


def _show_table1(data: dict[str, Any]) -> None:
    from .paper.table1_views import rich_table

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
        from .paper import report

        report.write(out)


def _print_bound(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    spread, theta, epsilon, n = (report[key] for key in ("spread", "theta", "epsilon", "n"))
    console.print(
        f"Of [bold]{_digits(n['paper'])}[/bold] or more logits within a spread of {spread:g}, "
        f"softmax at temperature {theta:g} gives none a coefficient of {epsilon:g} or more (Theorem 2.2).\n"
        f"The same holds from {_digits(n['attained'])} on, but not before: one logit at the top and all others at the "
        "bottom reach that extreme.\n"
        "It falls below the machine epsilon (Corollary B.1) from "
        + ", ".join(f"{_digits(v)} in {dtype}" for dtype, v in report["machine_epsilon_n"].items())
        + ".\n"
    )
    table = Table(title=f"Spreads that the paper reports for all heads, at temperature {theta:g}, epsilon {epsilon:g}")
    table.add_column("Model")
    table.add_column("Head")
    for heading in ("Spread", "n, Theorem 2.2", "n, attained"):
        table.add_column(heading, justify="right")
    for example in report["examples"]:
        for which in ("lowest", "average", "highest"):
            entry = example[which]
            deviation = f" ± {example['deviation']:g}" if which == "average" else ""
            lengths = (_digits(entry["n"][kind]) for kind in ("paper", "attained"))
            table.add_row(
                example["model"], which, f"{entry['spread']:g}{deviation}", *lengths, end_section=which == "highest"
            )
    console.print(table)


def _digits(n: int | None) -> str:
    """``n`` to read: in full as long as that is short."""
    if n is None:
        return "over 10^300"
    return f"{n:,}" if n < 10**15 else f"about {n // 10 ** (len(str(n)) - 3) / 100:g}e{len(str(n)) - 1}"
