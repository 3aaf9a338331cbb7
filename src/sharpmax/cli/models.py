"""``sharpmax models``, ``diagnose`` and ``zero-shot``: real models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..extras import require
from ..inputs import check_folder, user_input
from .groups import DEFAULT_OUT, Out, group

models = group("Models whose weights come as Python packages.")

Model = Annotated[
    str, typer.Argument(help="A name that `sharpmax models list` shows, a folder, or a model on the Hugging Face hub.")
]


@models.command("list")
def list_models() -> None:
    """The packaged models, whether they are there, and how to get those that are not."""
    _require()
    from ..huggingface import weights

    for name, state in weights.states().items():
        model = weights.MODELS[name]
        print(f"{name:<24}{model.description}; context {model.context:,}\n{'':<24}{state}")


@models.command("path")
def model_path(name: Annotated[str, typer.Argument(help="A name that `sharpmax models list` shows.")]) -> None:
    """The folder of a packaged model, converted on the first call."""
    _require()
    from ..huggingface import weights

    with user_input():
        print(weights.directory(name))


def diagnose(
    model: Model,
    out: Out,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A prompt on every line (.jsonl: JSON strings); lengths are prefixes in tokens."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="max: the prompt of Figure 3, lengths are items. The default.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A file that is one input; lengths are prefixes in tokens.")] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Items of the task, or tokens of a text or prompts, as in 16,64,256.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Layers such as 0-3,8; by default all.")] = None,
    policy: Annotated[str, typer.Option(help="paper, paper-held, or a policy file, JSON.")] = "paper",
    count: Annotated[int, typer.Option(help="Prompts for each length of a task.", min=1)] = 8,
    seed: Annotated[int, typer.Option(help="Of the task's prompts.", min=0)] = 0,
    epsilon: Annotated[float, typer.Option(help="Of the length in Theorem 2.2; above 0 and at most 1.")] = 0.01,
    sample: Annotated[
        int | None, typer.Option(help="About how many rows of each input to compute; by default all.", min=1)
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to run; by default a GPU if there is one.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: float32, bfloat16 or float16.")] = "float32",
) -> None:
    """How sharp every head of a model is on growing inputs, and from what length on it cannot be.

    Prints what was found in a few lines, and writes report.html, and the same as PNG, CSV and JSON. Every length is
    saved when it is done: interrupt whenever you like and give the same command again.
    """
    from ..diagnostics.command import diagnose_command

    check_folder(out)
    written = diagnose_command(
        model, out, prompts=prompts, task=task, text=text, lengths=lengths, layers=layers, policy=policy, count=count,
        seed=seed, epsilon=epsilon, sample=sample, device=device, dtype=dtype,
    )  # fmt: skip
    print(*written.findings, sep="\n")
    for path in written.paths:
        print(path)


def zero_shot(
    out: Out = DEFAULT_OUT,
    model: Annotated[str, typer.Option(help="As for `sharpmax diagnose`.")] = "smollm2-135m-instruct",
    lengths: Annotated[str | None, typer.Option(help="Tokens of texts and needle prompts, as in 512,2048.")] = None,
    items: Annotated[str | None, typer.Option(help="Items of the maximum prompts, as in 4,16,64.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Some of perplexity, needle, maximum; by default all.")] = None,
    policies: Annotated[
        str | None,
        typer.Option(help="Some of off, paper, held, log_512, log_context; _sharp behind one for sharp heads only."),
    ] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts in each cell.", min=1)] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights; by default bfloat16 on a GPU.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few and short cells: a try of a few minutes.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Measure nothing; make the figure and tables of what is there.")
    ] = False,
) -> None:
    """What happens to a model that was not trained with a policy when it is switched on (Section 4.2).

    Perplexity of a text, and right answers to maximum and needle prompts, against length. Every cell is a file: the
    same command goes on where it stopped, and sizes may be added up to the longest. The command may run several times
    at once on one folder: each takes cells that no other works on, and the last writes the report.
    """
    _require()
    require("matplotlib", "experiments", "Drawing figures")
    from ..paper import zero_shot

    check_folder(out)
    made = zero_shot.run(
        out, model=model, lengths=lengths, items=items, tasks=tasks, policies=policies, prompts=prompts, dtype=dtype,
        quick=quick, report=report,
    )  # fmt: skip
    if made.left:
        print(f"left to other processes: {', '.join(made.left)}")
        return
    for path in made.paths:
        print(path)
    print(made.paths[-1].read_text(encoding="utf-8"))


def _require() -> None:
    for package in ("torch", "transformers"):
        require(package, "huggingface", "Running a model")
