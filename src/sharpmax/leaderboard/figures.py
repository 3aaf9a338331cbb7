"""Pictures of a comparison: accuracy against the number of items, and how sharp attention stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..mechanisms import MECHANISMS
from ..paper.figures import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILION
from .entries import BASELINE, REFITTED
from .views import mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY)
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1, 1.2)), (0, (5, 1.4, 1, 1.4)))
"""Lines are told apart by colour and dashes together, and every mechanism looks the same in all figures."""

LEADER = {"arrowstyle": "-", "linewidth": 0.4, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 1}
"""The thin line from a name to the end of its line."""

TITLES = {"inference": "switched on at inference only", "trained": "trained with"}


def style(name: str) -> dict[str, Any]:
    """How the line of a mechanism looks."""
    if name == BASELINE:
        return {"color": INK, "linestyle": "-", "linewidth": 1.9, "zorder": 3}
    index = [*(known for known in MECHANISMS if known != BASELINE), *REFITTED].index(name)
    shape = DASHES[index // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": shape, "linewidth": 1.1}


LEAST_RANGE = 5.0
"""Points of difference that are shown on either side at least."""


def draw_accuracy(figure: Figure, data: Mapping[str, Any]) -> None:
    """Both tables side by side, every line named where it ends; below, how far each mechanism is from softmax."""
    above, below = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(1.7, 1))
    for axis, (table, part), letter in zip(above, data["tables"].items(), "ab", strict=True):
        ends = {}
        for name, row in part["rows"].items():
            n, values = _known(data["sizes"], [None if m is None else 100 * m for m in row["mean"]])
            if len(n):
                axis.plot(n, values, marker="o", markersize=2, **style(name))
                ends[name] = (row["label"], float(n[-1]), float(values[-1]))
        axis.axhline(100 * data["chance"], color=GREY, linewidth=0.6, linestyle=(0, (1, 2)))
        axis.set_ylim(0, 103)
        _frame(axis, data["sizes"], f"({letter})  {TITLES[table]}")
        axis.set_xlabel("")
        _name_ends(axis, ends)
    highest = LEAST_RANGE
    for axis, (table, part), letter in zip(below, data["tables"].items(), "cd", strict=True):
        for name, points in differences(part["rows"]).items():
            n, values = _known(data["sizes"], points)
            axis.plot(n, values, marker="_" if len(n) == 1 else "", **style(name))  # one size makes no line
            highest = max([highest, *(1.15 * values)])
        _frame(axis, data["sizes"], f"({letter})  {TITLES[table]}")
    below[0].set_ylim(-highest, highest)
    above[0].set_ylabel(f"{data['asks']}: right (%)")
    below[0].set_ylabel("points above softmax")


def differences(rows: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """By mechanism and size, by how many points the mean is above that of softmax, where both are there."""
    if BASELINE not in rows:
        return {}
    baseline = rows[BASELINE]["mean"]
    return {
        name: [None if None in pair else 100 * (pair[0] - pair[1]) for pair in zip(row["mean"], baseline, strict=True)]
        for name, row in rows.items()
    }


def _name_ends(axis: Axes, ends: Mapping[str, tuple[str, float, float]]) -> None:
    """Write the names of lines beside their ends, apart from each other, with a thin line from each to its end."""
    order = sorted(ends, key=lambda name: ends[name][2])
    places = spread_out([ends[name][2] for name in order], gap=min(4.0, 100 / max(len(order), 1)), low=1, high=101)
    for name, place in zip(order, places, strict=True):
        label, n, value = ends[name]
        looks = style(name)
        axis.annotate(
            label,
            xy=(n, value),
            xytext=(1.09, place / 103),
            textcoords="axes fraction",
            va="center",
            fontsize=6,
            color=looks["color"],
            fontweight="bold" if name == BASELINE else "normal",
            annotation_clip=False,
            arrowprops={**LEADER, "color": looks["color"]},
        )


def spread_out(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending ``values``, moved as little as needed (in squares) to lie ``gap`` apart and, if they fit, in bounds."""
    groups: list[list[float]] = []  # values that touch each other: each less its own share of the gaps
    for i, value in enumerate(values):
        groups.append([value - i * gap])
        while len(groups) > 1 and np.mean(groups[-2]) > np.mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    middle = [float(np.mean(group)) for group in groups for _ in group]
    highest = max(low, high - gap * (len(values) - 1))
    return [min(max(place, low), highest) + i * gap for i, place in enumerate(middle)]


def draw_sharpness(figure: Figure, data: Mapping[str, Any]) -> None:
    """Entropy above, the largest coefficient below, for both tables; one legend for all."""
    axes = figure.subplots(2, 2, sharex=True, sharey="row")
    handles: dict[str, Any] = {}
    for column, (table, part) in enumerate(data["tables"].items()):
        for line, (measure, title) in enumerate((("entropy", "entropy"), ("largest", "largest coefficient"))):
            axis = axes[line, column]
            for name, row in part["rows"].items():
                n, values = _known(data["sizes"], [mean(seeds) for seeds in row[measure]])
                (handles[row["label"]],) = axis.plot(n, values, **style(name))
            _frame(axis, data["sizes"], f"({'abcd'[2 * line + column]})  {title}, {TITLES[table]}")
    for axis in axes[0]:
        axis.plot(data["sizes"], np.log(data["sizes"]), color=GREY, linewidth=0.6, linestyle=(0, (1, 2)))
        axis.set_xlabel("")
    for axis in axes[1]:
        axis.set_ylim(0, 1.03)
    axes[0, 0].set_ylabel(r"nats; dotted: $\log n$")
    axes[1, 0].set_ylabel("share of the row")
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=5, fontsize=6.5)


def _known(sizes: Sequence[int], values: Sequence[float | None]) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(n, value) for n, value in zip(sizes, values, strict=True) if value is not None]
    return np.asarray([n for n, _ in pairs]), np.asarray([value for _, value in pairs])


def _frame(axis: Axes, sizes: Sequence[int], title: str) -> None:
    axis.set_title(title, loc="left", pad=4)
    axis.set_xlabel(r"number of items $n$")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes[:: max(1, -(-len(sizes) // 4))])
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.minorticks_off()
