"""``sharpmax clrs-text``: samples of CLRS-Text, training and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .groups import DEFAULT_OUT, Out, group

clrs_text = group("CLRS-Text: samples of thirty algorithms, training on them, and evaluation.")

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
    size: Annotated[int, typer.Argument(help="From 4 to 256.")],
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


@clrs_text.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder of the run; a run that was stopped goes on.", file_okay=False)],
    model: Annotated[
        str | None, typer.Option(help="As for `sharpmax diagnose`; scratch, a small one; or a config, JSON.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Of every head: none, paper, paper-held, or a file.")] = None,
    settings: Annotated[Path | None, typer.Option(help="A JSON file with settings; options come before it.")] = None,
    tokens: Annotated[int | None, typer.Option(help="To train on, padding included; by default 100 million.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences in a step, over all processes; by default 64.")] = None,
    micro: Annotated[
        int | None, typer.Option(help="Sequences at a time in a process; by default 32, or the batch.")
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens in a sequence; by default 2,048.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="The highest; by default 3e-4.")] = None,
    answers_only: Annotated[
        bool | None, typer.Option("--answers-only/--all-tokens", help="What the loss is on; by default answers.")
    ] = None,
    traces: Annotated[
        bool | None, typer.Option("--traces/--no-traces", help="With the algorithms' steps, as by default, or without.")
    ] = None,
    algorithms: Annotated[str | None, typer.Option(help="Some of the thirty, with commas between them.")] = None,
    sizes: Annotated[str | None, typer.Option(help="Such as 4,5,10-12, instead of the benchmark's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the order of samples, and of random weights.")] = None,
    data: Annotated[str | None, typer.Option(help="A folder of samples; by default they are generated.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that make batches.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16 or float32; by default bf16 on a GPU.")] = None,
    compile: Annotated[bool | None, typer.Option("--compile/--no-compile", help="Compile the layers.")] = None,
    gradient_checkpointing: Annotated[
        bool | None, typer.Option("--gradient-checkpointing/--no-gradient-checkpointing", help="Less memory, slower.")
    ] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints; by default 200.")] = None,
    log_every: Annotated[int | None, typer.Option(help="Steps between lines of the log; by default 10.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Save and leave after so many; run again to go on.")] = None,
    save_dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of the trained model's folder.")] = "float32",
    cpu: Annotated[bool, typer.Option("--cpu", help="Stay on the CPU.")] = False,
) -> None:
    """Train a model, with adaptive temperature or without; goes on where it stopped, to the same bits."""
    from ..tasks.clrs_text.training_command import train_command

    for line in train_command(
        out, settings=settings, policy=policy, algorithms=algorithms, sizes=sizes, minutes=minutes,
        save_dtype=save_dtype, cpu=cpu, model=model, tokens=tokens, batch=batch, micro=micro, length=length,
        learning_rate=learning_rate, answers_only=answers_only, traces=traces, seed=seed, data=data, workers=workers,
        precision=precision, compile=compile, gradient_checkpointing=gradient_checkpointing,
        checkpoint_every=checkpoint_every, log_every=log_every,
    ):  # fmt: skip
        print(line)


@clrs_text.command()
def evaluate(
    model: Annotated[str, typer.Option(help="Folder of a run or of a model, or as for `sharpmax diagnose`.")],
    out: Annotated[Path, typer.Option(help="Folder for what is found; completed if begun.", file_okay=False)],
    algorithms: Annotated[str | None, typer.Option(help="Some of the thirty, with commas between them.")] = None,
    sizes: Annotated[str | None, typer.Option(help="Such as 4,5,10-12, instead of the benchmark's.")] = None,
    seeds: Annotated[str | None, typer.Option(help="The same, instead of the benchmark's five.")] = None,
    samples: Annotated[
        int | None, typer.Option(help="Of each algorithm, size and seed; by default 125.", min=1)
    ] = None,
    traces: Annotated[
        bool | None,
        typer.Option("--traces/--no-traces", help="With the algorithms' steps or without; by default as in training."),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens that a sample may have.", min=2)] = 2_048,
    dtype: Annotated[str | None, typer.Option(help="Of the weights; by default bfloat16 on a GPU.")] = None,
    device: Annotated[str | None, typer.Option(help="By default a GPU if there is one.")] = None,
    memory: Annotated[
        float | None, typer.Option(help="Part of a GPU's free memory for keys and values; by default 0.6.")
    ] = None,
) -> None:
    """Ask a model the questions of the evaluation set, and count right answers; goes on where it stopped."""
    from ..tasks.clrs_text.evaluation_command import evaluate_command

    for line in evaluate_command(
        model, out, algorithms=algorithms, sizes=sizes, seeds=seeds, samples=samples, traces=traces, length=length,
        dtype=dtype, device=device, memory=memory,
    ):  # fmt: skip
        print(line)
