"""Figure 1 with numbers: the largest softmax coefficient against n, between the bounds of Lemma 2.1."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.policies import PAPER, PAPER_HELD
from ..core.stats import RowStats, row_stats
from ..inputs import user_input
from ..theory import coefficient_bounds, dispersion_length
from .bound import check_exponent
from .figures import BLUE, GREEN, GREY, INK, PAGE, VERMILION, numbers, save_exhibit
from .published import GEMMA_SPREADS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LENGTHS = tuple(dict.fromkeys(round(10 ** (i / 8)) for i in range(49)))
"""n from 1 to a million, eight a decade."""

MOST_ROWS, LEAST_ROWS, LOGITS = 64, 4, 1 << 18
"""Random rows for each n: as many as have about this many logits together, within these limits."""

QUANTILES = {"low": 0.0, "median": 0.5, "high": 1.0}
EPSILON = 0.01
SPREAD = GEMMA_SPREADS[0].average
POLICIES: dict[str, Callable[[RowStats], Any]] = {"PAPER": PAPER, "PAPER_HELD": PAPER_HELD}

SERIES = {"softmax": (INK, "softmax"), "PAPER": (VERMILION, "PAPER"), "PAPER_HELD": (GREEN, "PAPER_HELD")}
DOTTED = (0, (1, 1.2))

CAPTION = (
    "The largest softmax coefficient of n logits whose spread is {spread:g}, at temperature {theta:g}. (a) It "
    "decays as 1/n between the bounds of Lemma 2.1 (dashed), whatever the logits. One item at the top of the spread "
    "and all others at the bottom attain the tighter upper bound; one item at the bottom and all others at the top "
    "give the smallest coefficient that any item can have. Random rows are uniform within the spread: median and "
    "range. From n = {n:,} on, every coefficient is below {epsilon:g} (Theorem 2.2). (b) The same rows with an "
    "adaptive temperature. It depends on the row, so the bound at a fixed temperature does not apply. PAPER is the "
    "polynomial as printed, which returns to plain softmax on rows of high entropy; PAPER_HELD stays at the "
    "polynomial's peak. Its beta is bounded, so it disperses too, only later."
)


def random_rows(n: int, exponent: float, seed: int) -> Iterator[np.ndarray]:
    """Rows of ``n`` logits, uniform in 0 to ``exponent``, one at a time so that memory stays at one row."""
    generator = np.random.default_rng((seed, n))
    for _ in range(min(MOST_ROWS, max(LEAST_ROWS, LOGITS // n))):
        yield generator.random(n) * exponent


def two_point_row(n: int, exponent: float, *, top: bool) -> np.ndarray:
    """One item at the top (or bottom) of the spread, all others at the other end: the extremes of Lemma 2.1."""
    row = np.full(n, 0.0 if top else exponent)
    row[0] = exponent if top else 0.0
    return row


def largest_coefficients(row: np.ndarray) -> tuple[dict[str, float], dict[str, float]]:
    """The largest coefficient of ``row`` under softmax and every policy, and each one's beta.

    Every coefficient is ``exp(s - m) / L``, so the largest is ``1 / L``: RowStats are enough, no weights are made.
    """
    stats = row_stats(row, with_min=False)
    betas = {"softmax": 1.0} | {name: float(policy(stats)) for name, policy in POLICIES.items()}
    sums = {
        b: float(row_stats(row * b, with_min=False).sum) if b != 1 else float(stats.sum) for b in set(betas.values())
    }
    return {name: 1 / sums[beta] for name, beta in betas.items()}, betas


def data(
    spread: float = SPREAD, theta: float = 1.0, seed: int = 0, lengths: tuple[int, ...] = LENGTHS
) -> dict[str, Any]:
    """Bounds, attained extremes and the coefficients of real rows for every n in ``lengths``."""
    with user_input():
        check_exponent(spread, theta)
        dispersed_from = dispersion_length(spread, EPSILON, theta)
    exponent = spread / theta
    names = ("softmax", *POLICIES)
    one_item: dict[str, list[float]] = {name: [] for name in names}
    random: dict[str, dict[str, list[float]]] = {name: {q: [] for q in QUANTILES} for name in names}
    betas: dict[str, dict[str, list[float]]] = {name: {"one_item": [], "random": []} for name in POLICIES}
    smallest, rows = [], []
    for n in lengths:
        coefficients, used = largest_coefficients(two_point_row(n, exponent, top=True))
        for name in names:
            one_item[name].append(coefficients[name])
        drawn = [largest_coefficients(row) for row in random_rows(n, exponent, seed)]
        rows.append(len(drawn))
        for name in names:
            values = [of_row[name] for of_row, _ in drawn]
            for quantile, at in QUANTILES.items():
                random[name][quantile].append(float(np.quantile(values, at)))
        for name in POLICIES:
            betas[name]["one_item"].append(used[name])
            betas[name]["random"].append(float(np.median([of_row[name] for _, of_row in drawn])))
        stats = row_stats(two_point_row(n, exponent, top=False))
        smallest.append(math.exp(-float(stats.spread)) / float(stats.sum))
    return {
        "caption": CAPTION.format(spread=spread, theta=theta, n=dispersed_from.paper, epsilon=EPSILON),
        "spread": spread,
        "theta": theta,
        "n": list(lengths),
        "bounds": {key: numbers(value) for key, value in coefficient_bounds(lengths, spread, theta)._asdict().items()},
        "dispersed": {"epsilon": EPSILON, "n": dispersed_from._asdict()},
        "two_point_rows": {"smallest": numbers(smallest), "largest": {k: numbers(v) for k, v in one_item.items()}},
        "random_rows": {
            "distribution": "uniform in [0, spread]",
            "rows": rows,
            "seed": seed,
            "quantiles": QUANTILES,
            "largest": {k: {q: numbers(v) for q, v in by.items()} for k, by in random.items()},
        },
        "beta": {k: {kind: numbers(v) for kind, v in by.items()} for k, by in betas.items()},
        "beta_note": "policies see logits / theta, and beta multiplies those; of random rows, the median is given",
    }


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    """(a) softmax between the bounds; (b) the same rows with adaptive temperatures."""
    left, right = figure.subplots(1, 2, sharex=True)
    n, bounds = np.asarray(data["n"]), data["bounds"]
    one_item, random = data["two_point_rows"]["largest"], data["random_rows"]["largest"]
    bound_style: dict[str, Any] = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 0.9}

    left.fill_between(n, bounds["attained_lower"], bounds["attained_upper"], color=BLUE, alpha=0.08, linewidth=0)
    left.plot(n, bounds["upper"], label=r"Lemma 2.1:  $\frac{1}{n}\,e^{\pm\delta/\theta}$", **bound_style)
    left.plot(n, bounds["lower"], **bound_style)
    left.plot(n, bounds["attained_upper"], color=BLUE, label="attained extremes")
    left.plot(n[1:], bounds["attained_lower"][1:], color=BLUE)
    marks: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 3, "markerfacecolor": "white", "color": BLUE}
    left.plot(n[1::4], one_item["softmax"][1::4], label="two-point rows", **marks)
    left.plot(n[1::4], data["two_point_rows"]["smallest"][1::4], **marks)
    _plot_random(left, n, random["softmax"], INK, "random rows, largest")
    _mark_dispersed(left, data)
    left.set_title("(a)  softmax: every coefficient decays as $1/n$", loc="left", pad=4)
    left.set_ylabel(r"coefficient $\alpha_k^{(n)}$")
    left.set_ylim(max(bounds["lower"][-1] / 3, 1e-12), 3)
    left.legend(loc="lower left")

    right.plot(n, bounds["upper"], **bound_style, label=rf"bound at $\theta = {data['theta']:g}$: for softmax only")
    for name, (color, label) in SERIES.items():
        right.plot(n, one_item[name], color=color, label=label)
        _plot_random(right, n, random[name], color, None)
    right.set_title("(b)  adaptive temperature: sharp for longer", loc="left", pad=4)
    right.set_ylabel(r"largest coefficient $\max_k\,\alpha_k^{(n)}$")
    right.set_ylim(random["softmax"]["median"][-1] / 100, 3)
    right.plot([], [], color=GREY, label="one item at the top, others at the bottom")
    right.plot([], [], color=GREY, linestyle=DOTTED, label="random rows")
    right.legend(loc="lower left")
    for axis in (left, right):
        axis.set_xlabel(r"number of items $n$")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(1, n[-1])


def _plot_random(axis: Axes, n: np.ndarray, quantiles: Mapping[str, Any], color: str, label: str | None) -> None:
    axis.fill_between(n, quantiles["low"], quantiles["high"], color=color, alpha=0.2, linewidth=0)
    axis.plot(n, quantiles["median"], color=color, linestyle=DOTTED, label=label)


def _mark_dispersed(axis: Axes, data: Mapping[str, Any]) -> None:
    """Theorem 2.2: the corner that no coefficient of any row enters."""
    n, epsilon, last = data["dispersed"]["n"]["paper"], data["dispersed"]["epsilon"], data["n"][-1]
    if not 1 < n <= last / 10:  # no room for it
        return
    axis.fill_between([n, last], epsilon, 3, color=VERMILION, alpha=0.12, linewidth=0)
    axis.plot([n, n, last], [3, epsilon, epsilon], color=VERMILION, linewidth=0.8)
    words = f"Theorem 2.2:\nfor $n \\geq {n:,}$\nevery $\\alpha_k < {epsilon:g}$".replace(",", "{,}")
    axis.text(math.sqrt(n * last), math.sqrt(3 * epsilon), words, color=VERMILION, fontsize=7, ha="center", va="center")


def run(out: Path, spread: float = SPREAD, theta: float = 1.0, seed: int = 0) -> list[Path]:
    """Write dispersion.png, dispersion.pdf and dispersion.json into ``out``."""
    return save_exhibit(out, "dispersion", data(spread, theta, seed), draw, (PAGE, 3.0))
