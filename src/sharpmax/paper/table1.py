"""Table 1: accuracy of trained max-retrieval heads against the number of items, under many policies at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ..core.files import write_text
from ..core.policies import PAPER, Constant, EntropyPolynomial, Hard, LogLength, Policy
from ..inputs import user_input
from ..progress import progress_bar
from ..tasks.max_retrieval import evaluate, fit, paired_p_values
from .figures import PAGE, numbers, save_exhibit
from .max_retrieval import Heads, file_name, find_heads, parse_sizes
from .published import TABLE1
from .table1_views import CEILING, csv_text, draw, markdown

SETS = {"cpu": 64, "gpu": 2048}
"""Sets for each size and seed unless another number is asked for, by platform."""

BASELINE = "softmax"


class RowOf(NamedTuple):
    """A row of the table: what it is called, and how beta is chosen."""

    label: str
    policy: Policy


def rows_of(refitted: EntropyPolynomial) -> dict[str, RowOf]:
    """The rows by name; ``refitted`` is the polynomial of Appendix F for the heads in question."""
    return {
        "softmax": RowOf("softmax", Constant(1.0)),
        "adaptive": RowOf("adaptive, the paper's polynomial", PAPER),
        "refitted": RowOf("adaptive, refitted", dataclasses.replace(refitted, beyond="extrapolate")),
        "refitted_held": RowOf("adaptive, refitted, range-safe", refitted),
        "log_n": RowOf("log n / log 16", LogLength.relative(16)),
        "constant_4": RowOf("constant beta = 4", Constant(4.0)),
        "hard": RowOf("hard (theta = 0)", Hard()),
    }


def data(
    heads: Heads, sizes: Sequence[int], sets: int, progress: Callable[[str, int], None] | None = None
) -> dict[str, Any]:
    """The whole table: every row on the same ``sets`` sets of every size and seed.

    Beside the accuracy, a row has the means over the sets of the entropy of the coefficients, in nats, and of the
    largest one.
    ``progress`` is called with what was begun or done, and with the number of items that is done with it.
    """
    tell = progress or (lambda what, items: None)
    checkpoint = heads.checkpoint
    fitted = fit(checkpoint, progress=lambda n: tell(f"fitting at n = {n:,}", 0))
    rows = rows_of(fitted.polynomial)
    tell(f"n = {sizes[0]:,}", 0)
    following = dict(zip(sizes, [*(f"n = {n:,}" for n in sizes[1:]), "done"], strict=True))
    measured = evaluate(
        checkpoint.params,
        checkpoint.seeds,
        sizes,
        sets,
        {name: row.policy for name, row in rows.items()},
        progress=lambda n: tell(following[n], n),
    )
    accuracy = {name: _shares(row.accuracy, sets) for name, row in measured.rows.items()}
    return {
        "caption": CAPTION.format(
            seeds=len(checkpoint.seeds),
            sets=sets,
            ceiling=CEILING,
            smallest=checkpoint.protocol.sizes[0],
            largest=checkpoint.protocol.sizes[1],
            steps=checkpoint.step,
        ),
        "name": heads.name,
        "sizes": list(sizes),
        "seeds": list(checkpoint.seeds),
        "sets": sets,
        "rows": {
            name: {
                "label": row.label,
                "policy": row.policy.to_dict(),  # pyright: ignore[reportAttributeAccessIssue]
                "accuracy": accuracy[name].tolist(),
                "entropy": numbers(measured.rows[name].entropy),
                "largest": numbers(measured.rows[name].largest),
                "p_value": [None for _ in sizes]
                if name == BASELINE
                else paired_p_values(accuracy[name], accuracy[BASELINE]),
            }
            for name, row in rows.items()
        },
        "ceiling": _shares(measured.ceiling, sets).tolist(),
        "paper": _published(sizes, accuracy),
        "fit": fitted.to_dict(),
        "protocol": checkpoint.protocol.to_dict(),
        "training": {
            "step": checkpoint.step,
            "seconds": checkpoint.seconds,
            "provenance": checkpoint.provenance,
        },
    }


CAPTION = (
    "Accuracy of max retrieval by number of items, the mean of {seeds} seeds, {sets:,} sets for each size and seed, "
    "the same ones for every row. Heads are trained for {steps:,} steps on sets of {smallest} to {largest} items; only "
    "the temperature differs between rows. {ceiling} The p-values are those of the paired t-test against softmax over "
    "the seeds. Bands in the figure, drawn for some rows, are one standard deviation over the seeds."
)


def _shares(values: np.ndarray, sets: int) -> np.ndarray:
    """Shares of ``sets`` sets, which the engine gives in float32, exactly."""
    return np.rint(np.asarray(values, np.float64) * sets) / sets


def _published(sizes: Sequence[int], accuracy: dict[str, np.ndarray]) -> dict[str, Any]:
    """The printed rows as shares, and ours less theirs in points, for every size (``None`` where none is printed)."""
    at = {n: i for i, n in enumerate(TABLE1.sizes)}
    where = [at.get(n) for n in sizes]
    printed = {name: getattr(TABLE1, name) for name in ("softmax", "adaptive")}
    return {
        "source": "the paper, Table 1",
        "sizes": list(TABLE1.sizes),
        "rows": {name: {"accuracy": [round(v / 100, 3) for v in row]} for name, row in printed.items()},
        "p_value": list(TABLE1.p_value),
        "distance_points": {
            name: [
                None if i is None else round(100 * float(mean) - row[i], 3)
                for i, mean in zip(where, accuracy[name].mean(axis=1), strict=True)
            ]
            for name, row in printed.items()
        },
    }


def run(
    out: Path,
    protocol: str | None = None,
    checkpoint: Path | None = None,
    sets: int | None = None,
    sizes: str | None = None,
    show: Callable[[dict[str, Any]], None] | None = None,
) -> list[Path]:
    """Write the table of the chosen heads into ``out``: PNG, PDF, JSON, CSV and Markdown.

    Args:
      out: folder for the files. They are called ``table1`` for the protocol ``paper``, else ``table1_NAME``.
      protocol: a preset or a protocol file; without it and ``checkpoint``, ``paper``.
      checkpoint: folder of the heads, if not the shipped ones.
      sets: sets for each size and seed; by default as many as :data:`SETS` says.
      sizes: numbers of items with commas between them; by default those of the paper.
      show: called with the data of the table.
    """
    with user_input():
        chosen = TABLE1.sizes if sizes is None else parse_sizes(sizes)
        if sets is not None and sets < 1:
            raise ValueError(f"expected sets to be at least 1, got {sets}")
        heads = find_heads(protocol, checkpoint)
    sets = SETS.get(jax.default_backend(), SETS["gpu"]) if sets is None else sets
    name = file_name("table1", heads)
    with progress_bar(f"{name}, {sets:,} sets a size and seed") as show_progress:
        done = 0

        def tell(now: str, items: int) -> None:
            nonlocal done
            done += items
            show_progress(done, sum(chosen), now)

        table = data(heads, chosen, sets, tell)
    paths = save_exhibit(out, name, table, draw, (PAGE, 3.2))
    for suffix, text in (("csv", csv_text(table)), ("md", markdown(table))):
        write_text(out / f"{name}.{suffix}", text)
        paths.append(out / f"{name}.{suffix}")
    if show is not None:
        show(table)
    return paths
