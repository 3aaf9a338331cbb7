"""``sharpmax clrs-text``: samples of CLRS-Text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .groups import DEFAULT_OUT, Out, group

clrs_text = group("CLRS-Text: samples of thirty algorithms to train on and to evaluate with.")

Traces = Annotated[
    bool, typer.Option("--traces/--no-traces", help="With the steps of the algorithms, or answers only.")
]


@clrs_text.command()
def generate(
    out: Annotated[Path, typer.Option(help="Folder for train and evaluation; completed if begun.", file_okay=False)],
    split: Annotated[str, typer.Option(help="train, evaluation, or all.")] = "all",
    algorithms: Annotated[str | None, typer.Option(help="Some of the thirty, with commas between them.")] = None,
    sizes: Annotated[str | None, typer.Option(help="Such as 4,5,10-12, instead of the benchmark's.")] = None,
    seeds: Annotated[str | None, typer.Option(help="The same, instead of the split's own.")] = None,
    samples: Annotated[int | None, typer.Option(help="Of each algorithm, size and seed.", min=1)] = None,
    traces: Traces = True,
    processes: Annotated[int | None, typer.Option(help="By default as many as there are cores.", min=1)] = None,
    shard: Annotated[int, typer.Option(help="Samples in a file.", min=1)] = 1_000,
) -> None:
    """Make the benchmark's training and evaluation sets, as upstream does; goes on where it stopped."""
    from ..tasks.clrs_text.command import generate_command

    for line in generate_command(
        out, split=split, algorithms=algorithms, sizes=sizes, seeds=seeds, samples=samples, traces=traces,
        processes=processes, shard=shard,
    ):  # fmt: skip
        print(line)


@clrs_text.command()
def verify(folder: Annotated[Path, typer.Argument(help="A folder that generate made, such as data/train.")]) -> None:
    """Read every shard of a set; one that is missing or corrupt is named."""
    from ..tasks.clrs_text.command import verify_command

    for line in verify_command(folder):
        print(line)


@clrs_text.command()
def show(
    algorithm: Annotated[str, typer.Argument(help="One of the thirty.")],
    size: Annotated[int, typer.Argument(help="From 4 on.")],
    seed: Annotated[int, typer.Option(min=0)] = 0,
    index: Annotated[int, typer.Option(min=0)] = 0,
    traces: Traces = True,
) -> None:
    """Print one sample."""
    from ..tasks.clrs_text.command import show_command

    sample = show_command(algorithm, size, seed=seed, index=index, traces=traces)
    print(sample.question + sample.answer, end="")


@clrs_text.command()
def lengths(
    model: Annotated[str, typer.Option(help="characters, or as for `sharpmax diagnose`.")] = "smollm2-135m-instruct",
    out: Out = DEFAULT_OUT,
    length: Annotated[int, typer.Option(help="Tokens that a sample may have.", min=2)] = 2_048,
    samples: Annotated[int, typer.Option(help="How many of each algorithm and size to look at.", min=1)] = 8,
    traces: Traces = True,
) -> None:
    """How many tokens samples have, and which sizes fit; written as JSON."""
    from ..tasks.clrs_text.command import lengths_command

    for path in lengths_command(model, out, length=length, samples=samples, traces=traces):
        print(path)
