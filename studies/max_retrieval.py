"""How to train the head of Appendix A: which reading of A.4 comes closest to Table 1, and which recipe goes furthest.

    python -m studies.max_retrieval {paper,precision,recipe,combined,policy} [--seeds 5] [--steps 100000]

All protocols of one policy and matmul precision train together in one program (about three minutes for a grid on one
H200), and every one is evaluated at that precision on the same 512 sets a size and seed, which nothing else is trained,
fitted or evaluated on. Only sizes 5 to 16 are ever trained on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import sharpmax
from sharpmax.core.files import write_text
from sharpmax.provenance import provenance
from sharpmax.tasks import max_retrieval
from sharpmax.tasks.max_retrieval import Protocol
from sharpmax.tasks.max_retrieval.data import Stream

RESULTS = Path(__file__).parents[1] / "results" / "studies"
SETS = 512
SIZES = (16, 64, 256, 512, 1024, 4096, 16384)
LONG_SIZES = (16, 1024, 16384, 131072)
LONG = ("combined", "policy")
"""Grids that are evaluated at the long sizes."""

POLICIES: dict[str, Any] = {
    "softmax": sharpmax.Constant(1),
    "PAPER": sharpmax.PAPER,
    "held": sharpmax.PAPER_HELD,
    "const4": sharpmax.Constant(4),
    "logn": sharpmax.LogLength.relative(16),
    "hard": sharpmax.Hard(),
}


def l2(strength: float, kind: Any = "sum", on: Any = "all", schedule: Any = "constant") -> Protocol:
    return Protocol(l2=strength, l2_kind=kind, l2_on=on, schedule=schedule)


def cosine(**fields: Any) -> Protocol:
    return Protocol(schedule="cosine", **fields)


GRIDS = {
    # What A.4 leaves open: how L2 enters, on which parameters, and whether the learning rate decays.
    "paper": {
        "const none": Protocol(),
        "const sum 1e-3": l2(1e-3),
        "const half 1e-3": l2(1e-3, "half"),
        "const sum 1e-3 kernels": l2(1e-3, on="kernels"),
        "const half 1e-3 kernels": l2(1e-3, "half", "kernels"),
        "const decoupled 1e-3": l2(1e-3, "decoupled"),
        "const decoupled 1e-3 kernels": l2(1e-3, "decoupled", "kernels"),
        "const sum 2.5e-4": l2(2.5e-4),
        "const sum 1e-4": l2(1e-4),
        "cos sum 1e-3": l2(1e-3, schedule="cosine"),
        "cos half 1e-3": l2(1e-3, "half", schedule="cosine"),
        "lin half 1e-3": l2(1e-3, "half", schedule="linear"),
        "const decoupled 1": l2(1.0, "decoupled"),
        "const decoupled 1e-1": l2(1e-1, "decoupled"),
    },
    # What A.4 also leaves open: the precision of matrix products, in training and evaluation ("highest" above).
    "precision": {
        f"const half 1e-3 kernels {precision}": Protocol(l2=1e-3, l2_kind="half", l2_on="kernels", precision=precision)
        for precision in ("high", "default")
    },
    # One idea at a time on top of a learning rate that decays to 0.
    "recipe": {
        "cos": cosine(),
        "cos lr3e-3": cosine(learning_rate=3e-3),
        "cos lr2e-3 warm": cosine(learning_rate=2e-3, warmup=1000),
        "lin": Protocol(schedule="linear"),
        "cos adamw 1e-2": cosine(l2=1e-2, l2_kind="decoupled"),
        "cos avg .999": cosine(average=0.999),
        "cos b2 .99": cosine(b2=0.99),
        "cos emphasis 1": cosine(emphasis=1.0),
        "cos anneal 1-.5": cosine(anneal=(1.0, 0.5)),
        "cos anneal 1-.25": cosine(anneal=(1.0, 0.25)),
        "cos anneal 4-1": cosine(anneal=(4.0, 1.0)),
        "cos attn .1": cosine(attention_loss=0.1),
        "cos attn 1": cosine(attention_loss=1.0),
        "cos focus 3": cosine(focus=3.0),
        "cos focus 6": cosine(focus=6.0),
        "cos focus 8 attn .1": cosine(focus=8.0, attention_loss=0.1),
        "cos focus 8": cosine(focus=8.0),
    },
    # What helped, together. `focus` changes how priorities are drawn in training; the others keep the sampler of A.2.
    "combined": {
        "lr3e-3 attn1": cosine(learning_rate=3e-3, attention_loss=1.0),
        "lr3e-3 attn1 emph1": cosine(learning_rate=3e-3, attention_loss=1.0, emphasis=1.0),
        "lr6e-3 attn1 emph1 warm": cosine(learning_rate=6e-3, warmup=1000, attention_loss=1.0, emphasis=1.0),
        "lr3e-3 focus8 attn1": cosine(learning_rate=3e-3, focus=8.0, attention_loss=1.0),
        "lr3e-3 focus8 attn1 emph1": cosine(learning_rate=3e-3, focus=8.0, attention_loss=1.0, emphasis=1.0),
        "lr3e-3 focus11 attn1 emph1": cosine(learning_rate=3e-3, focus=11.0, attention_loss=1.0, emphasis=1.0),
        "lr3e-3 focus8": cosine(learning_rate=3e-3, focus=8.0),
        "lr3e-3 emph1": cosine(learning_rate=3e-3, emphasis=1.0),
    },
    # The temperature in the loop: what the policies of evaluation do if training has them too.
    "policy": {
        f"lr3e-3 attn1 emph1 {name}": cosine(
            learning_rate=3e-3, attention_loss=1.0, emphasis=1.0, policy=POLICIES[name]
        )
        for name in ("softmax", "PAPER", "logn", "const4")
    },
}


def together(grid: dict[str, Protocol]) -> list[list[str]]:
    """The names of protocols that can train together: those of one policy and precision."""
    groups: dict[Any, list[str]] = {}
    for name, protocol in grid.items():
        groups.setdefault((protocol.policy, protocol.precision), []).append(name)
    return list(groups.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", choices=tuple(GRIDS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    seeds, sizes = range(arguments.seeds), LONG_SIZES if arguments.grid in LONG else SIZES
    grid = {name: dataclasses.replace(p, steps=arguments.steps) for name, p in GRIDS[arguments.grid].items()}
    runs = {}
    for names in together(grid):
        with max_retrieval.progress_bar(f"{len(names)} protocols") as show:
            trained = max_retrieval.train_together([grid[name] for name in names], seeds, progress=show)
        runs |= dict(zip(names, trained, strict=True))
    results = {}
    for name, run in runs.items():
        options = {"stream": Stream.STUDY, "precision": run.protocol.precision}
        found = max_retrieval.evaluate(run.params, run.seeds, sizes, SETS, POLICIES, **options)
        rows = {row: measured.accuracy.tolist() for row, measured in found.rows.items()}
        results[name] = {"protocol": run.protocol.to_dict(), "ceiling": found.ceiling.tolist(), **rows}
        means = "  ".join(
            f"{row} " + "/".join(f"{100 * m:.1f}" for m in found.rows[row].accuracy.mean(1)) for row in rows
        )
        print(f"{name:28} {means}", flush=True)
    content = {"sizes": sizes, "seeds": arguments.seeds, "steps": arguments.steps, "sets": SETS, "results": results}
    path = arguments.out / f"max_retrieval_{arguments.grid}.json"
    write_text(
        path,
        json.dumps(
            {**content, "provenance": provenance(["python", "-m", "studies.max_retrieval", *sys.argv[1:]])}, indent=1
        )
        + "\n",
    )


if __name__ == "__main__":
    main()
