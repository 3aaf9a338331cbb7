"""How many tokens samples have, and so which of them fit a context: by algorithm and size, for a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .benchmark import Split
from .packing import LENGTH
from .text import generate_samples
from .tokens import Encoder


def token_lengths(
    split: Split,
    encoder: Encoder,
    *,
    samples: int = 8,
    length: int = LENGTH,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Tokens of the first ``samples`` of each pair, and the share that is longer than ``length`` and would be dropped.

    ``fits`` is the largest size of the split up to which no sample that was looked at is longer; ``None`` if the
    smallest already is.
    """
    report: dict[str, Any] = {}
    done = 0
    for algorithm, sizes in split.sizes.items():
        rows: dict[str, dict[str, float]] = {}
        for size in sizes:
            made = generate_samples(algorithm, size, split.seeds[0], count=samples, traces=split.traces)
            tokens = [len(document.ids) for document in encoder(list(made))]
            over = sum(n > length for n in tokens) / samples
            rows[str(size)] = {"mean": sum(tokens) / samples, "longest": max(tokens), "over": over}
            done += 1
            if progress is not None:
                progress(done, len(split.pairs))
        fits = [size for i, size in enumerate(sizes) if not any(rows[str(n)]["over"] for n in sizes[: i + 1])]
        over = sum(row["over"] for row in rows.values()) / len(rows)
        report[algorithm] = {"over": over, "fits": max(fits, default=None), "sizes": rows}
    shares = [row["over"] for entry in report.values() for row in entry["sizes"].values()]
    return {
        "split": split.name,
        "traces": split.traces,
        "seed": split.seeds[0],
        "samples": samples,
        "length": length,
        "over": sum(shares) / len(shares),
        "algorithms": report,
    }
