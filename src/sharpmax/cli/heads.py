"""``sharpmax train`` and ``sharpmax fit``: the heads of max retrieval, and policies fitted to them."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..extras import require
from ..inputs import InputError, check_folder, user_input
from .groups import FitSets, Sizes, group

MOST_HEADS = 10_000
"""More would fill the memory."""

train = group("Train the heads that the paper's experiments are about.")


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
    train_heads(protocol, out, seeds, steps)


def train_heads(protocol: str, out: Path, seeds: int = 10, steps: int | None = None) -> None:
    """Train, or go on with, the heads in the folder ``out``."""
    require("jax", "experiments", "Training")
    from ..provenance import provenance
    from ..tasks import max_retrieval

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
    from ..paper import max_retrieval
    from ..tasks.max_retrieval.fitting import FIT_SETS, fit

    with user_input():
        chosen = None if sizes is None else max_retrieval.parse_sizes(sizes)
        heads = max_retrieval.find_heads(None, checkpoint)
    check_folder(output.parent)
    fitted = fit(heads.checkpoint, chosen, FIT_SETS if sets is None else sets)
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
