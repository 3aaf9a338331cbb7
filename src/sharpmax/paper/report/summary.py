"""What Table 1 says, in sentences: each function reads the table's JSON and words whichever outcome it finds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...tasks.max_retrieval import paired_p_values
from ..table1_views import SIGNIFICANT, deviations, means

EQUAL = 1e-9
"""Means of shares that differ by less are equal."""

NEAR = 3.0
"""Points up to which a number counts as close to the one printed in the paper."""

OPEN = (
    "Appendix A.4 leaves open how L2 enters, whether the learning rate decays and how precise matrix products are; "
    "what other readings of it give is in studies/max_retrieval.py and results/studies."
)

ROWS = ("softmax", "adaptive")
"""The rows that the paper has."""

Table = Mapping[str, Any]


def sentences(table: Table) -> list[str]:
    """What there is to say of a table; the distance to the printed numbers only where the recipe is the paper's."""
    compared = [distance(table)] if table["name"] == "paper" else []
    return [
        in_distribution(table),
        significance(table),
        *compared,
        hard_attention(table),
        best(table),
        precision(table),
    ]


def in_distribution(table: Table) -> str:
    """Adaptive temperature against softmax at the sizes of training."""
    smallest, largest = table["protocol"]["sizes"]
    inside = [i for i, n in enumerate(table["sizes"]) if smallest <= n <= largest]
    if not inside:
        return f"No size of the table is one of training ({smallest:,} to {largest:,} items)."
    softmax, adaptive = (100 * means(table["rows"][name]["accuracy"]) for name in ROWS)
    i = max(inside, key=lambda i: abs(adaptive[i] - softmax[i]))
    where = f"In distribution ({table['sizes'][i]:,} items)"
    points = adaptive[i] - softmax[i]
    if abs(points) <= EQUAL:
        return f"{where}, softmax and adaptive temperature have the same accuracy, {softmax[i]:.1f}%."
    return (
        f"{where}, adaptive temperature is {_points(points)} {'above' if points > 0 else 'below'} softmax: "
        f"{adaptive[i]:.1f}% against {softmax[i]:.1f}%."
    )


def significance(table: Table) -> str:
    """Where adaptive temperature with the paper's polynomial is above softmax, and below, and with which p."""
    softmax, row = table["rows"]["softmax"]["accuracy"], table["rows"]["adaptive"]
    difference = means(row["accuracy"]) - means(softmax)
    text = _compare(table, "Adaptive temperature, with the paper's polynomial,", "softmax", difference, row["p_value"])
    paper = table["paper"]
    printed = zip(paper["sizes"], paper["p_value"], *(paper["rows"][r]["accuracy"] for r in ROWS), strict=True)
    there = {n for n, p, low, high in printed if n in table["sizes"] and high > low and p < SIGNIFICANT}
    if table["name"] != "paper" or not there:
        return text
    return f"{text} In the paper it is above with p < {SIGNIFICANT:g} at {sizes_text(there, table['sizes'])}."


def hard_attention(table: Table) -> str:
    """Where hard attention beats adaptive temperature with the paper's polynomial."""
    hard, adaptive = (table["rows"][name]["accuracy"] for name in ("hard", "adaptive"))
    difference = means(hard) - means(adaptive)
    text = _compare(
        table, "Hard attention (theta = 0)", "adaptive temperature", difference, paired_p_values(hard, adaptive)
    )
    if np.max(difference) <= EQUAL:
        return text
    i = int(np.argmax(difference))
    most = f"Its largest lead is {_points(100 * difference[i])}, at {table['sizes'][i]:,} items."
    return f"{text} {most}"


def _compare(table: Table, who: str, whom: str, difference: np.ndarray, p_values: Sequence[float | None]) -> str:
    """Sizes at which ``who`` has the higher and the lower mean, and those of them where the paired test is sure."""
    sizes = table["sizes"]
    above = {n for n, d in zip(sizes, difference, strict=True) if d > EQUAL}
    below = {n for n, d in zip(sizes, difference, strict=True) if d < -EQUAL}
    sure = {n for n, p in zip(sizes, p_values, strict=True) if p is not None and p < SIGNIFICANT}
    tested = any(p is not None for p in p_values)
    if not above and not below:
        return f"{who} and {whom} have the same mean at every size."
    parts = []
    for side, word in ((above, "above"), (below, "below")):
        if not side:
            continue
        text = f"{word} {whom} at {sizes_text(side, sizes)}"
        if tested:
            text += f" ({_surely(side & sure, side, sizes)})"
        parts.append(text)
    never = "" if above else f"; it is nowhere above {whom}"
    alone = "" if tested else " With fewer than three seeds there is no test."
    return f"{who} is {', and '.join(parts)}{never}.{alone}"


def _surely(sure: Collection[int], side: Collection[int], sizes: Sequence[int]) -> str:
    test = f"p < {SIGNIFICANT:g}"
    if not sure:
        return f"nowhere with {test}"
    if len(sure) == len(side):
        return f"with {test}" if len(side) == 1 else f"with {test} at each"
    return f"with {test} at {sizes_text(sure, sizes)}"


def distance(table: Table) -> str:
    """The largest distance to a number printed in the paper, where it is, and how many are close."""
    found = [
        (points, name, i)
        for name, row in table["paper"]["distance_points"].items()
        for i, points in enumerate(row)
        if points is not None
    ]
    if not found:
        return "None of these sizes has a number printed in the paper."
    points, name, i = max(found, key=lambda entry: abs(entry[0]))
    accuracy, n = table["rows"][name]["accuracy"], table["sizes"][i]
    ours = 100 * means(accuracy)[i]
    seeds = len(table["seeds"])
    error = f" (standard error over the seeds: {100 * deviations(accuracy)[i] / seeds**0.5:.1f})" if seeds > 1 else ""
    far = {table["sizes"][i] for points, _, i in found if abs(points) > NEAR}
    close = sum(abs(points) <= NEAR for points, _, _ in found)
    rest = f"; the others are at {sizes_text(far, table['sizes'])}. {OPEN}" if far else "."
    row = "adaptive temperature" if name == "adaptive" else name
    return (
        f"The largest distance to a number printed in the paper is {_points(points)}: {row} at {n:,} items has "
        f"{ours:.1f}%{error}, the paper {ours - points:.1f}%. Of {len(found)} printed numbers, {close} are within "
        f"{NEAR:g} points{rest}"
    )


class Best(NamedTuple):
    """The best policy at one size: labels of all that have the highest mean, and that mean in percent."""

    size: int
    labels: list[str]
    accuracy: float
    ceiling: float
    papers: float | None
    """The better of the paper's two rows at this size, in percent."""


def best_at_largest(table: Table) -> Best:
    """The best policy at the largest size that the paper has too, or else at the largest."""
    printed = [dict(zip(table["paper"]["sizes"], r["accuracy"], strict=True)) for r in table["paper"]["rows"].values()]
    n = max([n for n in table["sizes"] if n in printed[0]] or table["sizes"])
    i = table["sizes"].index(n)
    by_row = {row["label"]: means(row["accuracy"])[i] for row in table["rows"].values()}
    top = max(by_row.values())
    papers = max(100 * row[n] for row in printed) if n in printed[0] else None
    labels = [label for label, mean in by_row.items() if mean >= top - EQUAL]
    return Best(n, labels, 100 * float(top), 100 * float(means(table["ceiling"])[i]), papers)


def best(table: Table) -> str:
    """The best policy at the largest size beside the paper's best and the ceiling."""
    found = best_at_largest(table)
    if len(found.labels) == len(table["rows"]):
        who = f"At {found.size:,} items, all policies reach {found.accuracy:.1f}%"
    else:
        names = " and ".join(f"“{label}”" for label in found.labels)
        who = f"At {found.size:,} items, the best of our rows is {names} with {found.accuracy:.1f}%"
    papers = "" if found.papers is None else f"; the best that the paper prints there is {found.papers:.1f}%"
    return f"{who}{papers}. The true maximum has the largest logit in {found.ceiling:.1f}% of the sets."


def precision(table: Table) -> str:
    """How far chance moves the means."""
    seeds, sets = len(table["seeds"]), f"{table['sets']:,} set{'s' if table['sets'] > 1 else ''} of each size"
    if seeds < 2:
        return f"These are numbers of a single seed on {sets}, which do not tell how far chance moves them."
    error = max(np.max(deviations(row["accuracy"])) for row in table["rows"].values()) / seeds**0.5
    most = math.ceil(1000 * error - EQUAL) / 10
    return f"Each number is the mean of {seeds} seeds on {sets}; its standard error is at most {most:.1f} points."


def sizes_text(chosen: Collection[int], every: Collection[int]) -> str:
    """``chosen`` out of ``every``, to read: neighbours are put together, as in "32 and 128 to 1,024"."""
    runs: list[list[int]] = []
    before = False
    for n in sorted(every):
        if n in chosen:
            runs = [*runs[:-1], [*runs[-1], n]] if before else [*runs, [n]]
        before = n in chosen
    if len(runs) == 1 and len(runs[0]) == len(every) > 2:
        return "every size"
    words = [w for run in runs for w in ([f"{run[0]:,} to {run[-1]:,}"] if len(run) > 2 else [f"{n:,}" for n in run])]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _points(points: float) -> str:
    return "less than 0.05 points" if abs(points) < 0.05 else f"{abs(points):.1f} points"
