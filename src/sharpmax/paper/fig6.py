"""Figure 6: optimal temperatures against entropy on trained heads, the paper's polynomial and one refitted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.policies import PAPER, EntropyPolynomial
from ..core.stats import RowStats
from ..inputs import user_input
from ..tasks.max_retrieval.fitting import FIT_SETS, Fitted, fit
from .figures import BLUE, GREY, HEAT, INK, PAGE, VERMILION, numbers, save_exhibit
from .max_retrieval import Heads, file_name, find_heads, parse_sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST_ENTROPY, POINTS = math.log(16_384), 486
"""Curves run from entropy 0 to that of as many equally likely items as Table 1 goes to."""

TENTHS, FEWEST = 10, 5
"""Means of the samples are shown for so many groups of equal size, of at least so many samples."""

DASHED, DOTTED = (0, (4, 2)), (0, (1, 1.2))
CURVES: dict[str, dict[str, Any]] = {
    "paper": {"color": VERMILION, "label": "the paper's polynomial"},
    "refitted": {"color": BLUE, "linestyle": DASHED, "label": "ours, extrapolated"},
    "refitted_held": {"color": BLUE, "label": "ours"},
}

CAPTION = (
    "Samples (H, 1/theta_opt) of Appendix F: the entropy of softmax and the inverse of the temperature that gives the "
    "true maximum the most attention, for validation sets of {sizes} items and {seeds} heads (protocol {name}, "
    "{steps:,} steps), {sets} sets for each size and head. Of {total:,} sets {kept:,} were kept and {dropped:,} "
    "dropped: in {already_largest:,} the true maximum has the largest logit already, so that the best temperature is "
    "0, and in {no_optimum:,} no finite temperature is best. Optima are exact; the paper tries temperatures from 0 to "
    "10 in steps of 0.1. (a) Samples and polynomials: the paper's, whose samples are not published, and ours, "
    "{fitted}; circles are means of groups of equally many samples. (b) Beta as it is used: 1 up to the threshold H = "
    "{threshold:g}, and never below 1. The paper's polynomial exceeds 1 for H from {low:.2f} to {high:.2f} only. Ours "
    "is drawn twice: extrapolated beyond its samples, as the paper does, and held at its value at the end of their "
    "range."
)


def betas(policy: EntropyPolynomial, entropies: np.ndarray) -> np.ndarray:
    """Beta that ``policy`` gives rows of these entropies (those of exp(H) equally likely items)."""
    zero = np.zeros_like(entropies)
    return policy(RowStats(max=zero, sum=np.exp(entropies), moment=zero, min=None, count=np.ones_like(entropies, int)))


def above_one(policy: EntropyPolynomial) -> list[list[float]]:
    """The ranges of entropy above the threshold where the polynomial exceeds 1, cut at :data:`LARGEST_ENTROPY`."""
    roots = np.roots(np.append(policy.coefficients[:-1], policy.coefficients[-1] - 1.0))
    inside = {float(r.real) for r in roots if abs(r.imag) < 1e-9 and policy.threshold < r.real < LARGEST_ENTROPY}
    ends = [policy.threshold, *sorted(inside), LARGEST_ENTROPY]
    return [[low, high] for low, high in pairwise(ends) if np.polyval(policy.coefficients, (low + high) / 2) > 1]


def data(heads: Heads, sizes: Sequence[int] | None = None, sets: int = FIT_SETS) -> dict[str, Any]:
    """Samples of all heads and the curves; ``sizes`` and ``sets`` are those of :func:`max_retrieval.fit`."""
    fitted = fit(heads.checkpoint, sizes, sets)
    samples, ours = fitted.samples, fitted.polynomial
    entropies = np.linspace(0, LARGEST_ENTROPY, POINTS)
    policies = {"paper": PAPER, "refitted": dataclasses.replace(ours, beyond="extrapolate"), "refitted_held": ours}
    polynomials = {"paper": PAPER, "refitted": ours}
    return {
        "caption": _caption(heads, fitted),
        "name": heads.name,
        "seeds": list(samples.seeds),
        "sizes": list(samples.sizes),
        "fit": fitted.to_dict(),
        "threshold": PAPER.threshold,
        "samples": {
            "entropy": numbers(samples.entropies, 5),
            "beta": numbers(samples.betas, 5),
            "size": samples.size.astype(int).tolist(),
            "seed": samples.seed.astype(int).tolist(),
        },
        "means": _means(samples.entropies, samples.betas),
        "entropy": numbers(entropies),
        "polynomials": {
            name: {
                "coefficients": list(policy.coefficients),
                "above_1": numbers(above_one(policy)),
                "value": numbers(np.polyval(policy.coefficients, entropies)),
            }
            for name, policy in polynomials.items()
        },
        "policies": {
            name: {"policy": policy.to_dict(), "beta": numbers(betas(policy, entropies))}
            for name, policy in policies.items()
        },
    }


def _caption(heads: Heads, fitted: Fitted) -> str:
    ours, counts = fitted.polynomial, fitted.samples.counts.values()
    dropped = {key: sum(count[key] for count in counts) for key in ("already_largest", "no_optimum")}
    where = "" if ours.domain is None else " on entropies from {:.2f} to {:.2f}".format(*ours.domain)
    ((low, high),) = above_one(PAPER)
    caption = CAPTION.format(
        sizes=", ".join(f"{n:,}" for n in fitted.samples.sizes),
        seeds=len(fitted.samples.seeds),
        name=heads.name,
        steps=heads.checkpoint.step,
        sets=fitted.sets,
        total=sum(count["total"] for count in counts),
        kept=fitted.kept,
        dropped=sum(dropped.values()),
        **dropped,
        fitted=f"of degree {len(ours.coefficients) - 1}, fitted{where}",
        threshold=PAPER.threshold,
        low=low,
        high=high,
    )
    return " ".join([caption, *(f"Note: {note}." for note in fitted.notes)])


def _means(entropies: np.ndarray, betas: np.ndarray) -> dict[str, list[float]]:
    """Mean entropy and mean beta of groups of equally many samples, by ascending entropy."""
    groups = np.array_split(np.argsort(entropies, kind="stable"), max(1, min(TENTHS, len(entropies) // FEWEST)))
    filled = [group for group in groups if len(group)]
    return {
        "entropy": numbers([entropies[group].mean() for group in filled]),
        "beta": numbers([betas[group].mean() for group in filled]),
    }


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    """(a) samples and polynomials, beta on a logarithmic axis; (b) beta as the policies use it."""
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    entropy, domain = np.asarray(data["entropy"]), data["fit"]["domain"]
    inside = np.ones_like(entropy, bool) if domain is None else (entropy >= domain[0]) & (entropy <= domain[1])
    paper, ours = (np.asarray(data["polynomials"][name]["value"]) for name in ("paper", "refitted"))
    _draw_samples(figure, left, data)
    left.plot(entropy, paper, **CURVES["paper"])
    left.plot(entropy[inside], ours[inside], **CURVES["refitted_held"])
    left.plot(entropy, ours, **CURVES["refitted"])
    left.set_title("(a)  samples and polynomials", loc="left", pad=4)
    left.set_ylabel(r"optimal $\beta = 1/\theta_{\mathrm{opt}}$")

    used = {name: np.asarray(data["policies"][name]["beta"]) for name in CURVES}
    for name, beta in used.items():
        right.plot(entropy, beta, **CURVES[name])
    words: dict[str, Any] = {"fontsize": 7.5, "color": BLUE, "textcoords": "offset points"}
    if domain is not None:
        right.axvspan(*domain, color=BLUE, alpha=0.08, linewidth=0)
        right.annotate("our samples", (domain[0], 0), (2, 3), ("data", "axes fraction"), **words)
        right.annotate("ours, held", (entropy[-1], used["refitted_held"][-1]), (-4, 3), ha="right", **words)
    right.set_xlim(0, entropy[-1])
    right.set_ylim(0.8, 1.15 * max(used["paper"].max(), used["refitted_held"].max()))
    right.set_title(r"(b)  $\beta$ as it is used", loc="left", pad=4)
    right.set_ylabel(r"$\beta = 1/\theta$")
    for axis in (left, right):
        axis.axvline(data["threshold"], color=GREY, linewidth=0.7, linestyle=DOTTED)
        axis.set_xlabel(r"entropy $H$ (nats)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)


def _draw_samples(figure: Figure, axis: Axes, data: Mapping[str, Any]) -> None:
    """Samples by size, the means of groups, and where beta is left at 1."""
    from matplotlib.colors import LogNorm

    samples, means, threshold, sizes = (data[key] for key in ("samples", "means", "threshold", "sizes"))
    lowest, highest = min([*samples["beta"], 0.5]) / 1.3, max([*samples["beta"], 5]) * 1.4
    axis.axhspan(lowest, 1, color=GREY, alpha=0.13, linewidth=0)
    dots = axis.scatter(
        samples["entropy"],
        samples["beta"],
        c=samples["size"],
        s=6,
        alpha=0.7,
        linewidths=0,
        cmap=f"{HEAT}_r",
        norm=LogNorm(min(sizes) / 1.01, max(sizes)),
        rasterized=True,
    )
    marks: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 4, "color": INK, "markerfacecolor": "white"}
    axis.plot(means["entropy"], means["beta"], zorder=3, label="means of the samples", **marks)
    axis.set_yscale("log")
    axis.set_xlim(0, max([*samples["entropy"], 1.5]) * 1.08)
    axis.set_ylim(lowest, highest)
    axis.yaxis.set_major_formatter("{x:g}")
    words: dict[str, Any] = {"fontsize": 7.5, "color": GREY, "textcoords": "offset points"}
    axis.annotate("cut at 1", (0, 1), (3, -3), va="top", **words)
    axis.annotate(
        f"threshold {threshold:g}", (threshold, lowest), (-2, 4), ha="right", va="bottom", rotation=90, **words
    )
    bar = figure.colorbar(dots, ax=axis, pad=0.01, aspect=28, ticks=sizes[::2], format="{x:,.0f}")
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=7)
    bar.ax.set_title("$n$", fontsize=8, pad=4)
    bar.outline.set_linewidth(0.6)


def run(
    out: Path,
    protocol: str | None = None,
    checkpoint: Path | None = None,
    sets: int | None = None,
    sizes: str | None = None,
) -> list[Path]:
    """Write fig6.png, fig6.pdf and fig6.json into ``out``; for another protocol than ``paper``, fig6_NAME.

    Args:
      out: folder for the files.
      protocol: a preset or a protocol file; ``paper`` unless the checkpoint is of another.
      checkpoint: folder of the heads, if not the shipped ones.
      sets: validation sets for each size and head.
      sizes: numbers of items with commas between them; by default those that Table 1's policy is fitted on.
    """
    with user_input():
        chosen = None if sizes is None else parse_sizes(sizes)
        if sets is not None and sets < 1:
            raise ValueError(f"expected sets to be at least 1, got {sets}")
        heads = find_heads(protocol, checkpoint)
    return save_exhibit(
        out, file_name("fig6", heads), data(heads, chosen, FIT_SETS if sets is None else sets), draw, (PAGE, 3.0)
    )
