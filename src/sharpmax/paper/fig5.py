"""Figure 5: the entropy of softmax over a power series, as its base and the temperature vary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.stats import row_stats
from .figures import HEAT, INK, PAGE, numbers, save_exhibit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPONENTS = tuple(range(1, 11))
"""The paper calls lambda near 0 degenerate, all logits equal: that holds for exponents from 1, not from 0."""

BASES = {"below 1": (0.0, 1.0), "above 1": (1.0, 1.5)}
TEMPERATURES = {"below 1": (0.01, 1.0), "above 1": (1.0, 10.0)}
POINTS = 81
LEVELS = {0.5: "white", 1.0: "white", 1.5: INK, 2.0: INK, 2.25: INK, 2.3: INK}
"""Contour lines and colours that stand out against the map."""

CAPTION = (
    "Entropy (nats) of softmax_theta(a) for the 10 elements a_i = lambda^i, i = 1..10, of a power series, in four "
    "regions of (lambda, theta). Near lambda = 0 and at lambda = 1 all logits are equal and the entropy is log 10 "
    "at every temperature; elsewhere it never rises as the temperature falls (Proposition 3.2)."
)


def entropies(bases: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    r"""Entropy of :math:`\mathrm{softmax}_\theta(\lambda^i)`, by temperature (rows) and base (columns)."""
    logits = bases[:, None] ** np.asarray(EXPONENTS)
    return row_stats(logits / temperatures[:, None, None], with_min=False).entropy


def data(points: int = POINTS) -> dict[str, Any]:
    """The four panels, each ``points`` by ``points``, the upper temperatures first."""
    panels = []
    for theta_region in ("above 1", "below 1"):
        for lambda_region in ("below 1", "above 1"):
            bases = np.linspace(*BASES[lambda_region], points)
            temperatures = np.geomspace(*TEMPERATURES[theta_region], points)
            panels.append(
                {
                    "region": f"lambda {lambda_region}, theta {theta_region}",
                    "lambda": numbers(bases),
                    "theta": numbers(temperatures),
                    "entropy": numbers(entropies(bases, temperatures)),
                }
            )
    return {
        "caption": CAPTION,
        "exponents": list(EXPONENTS),
        "entropy_axes": ["theta", "lambda"],
        "largest_entropy": math.log(len(EXPONENTS)),
        "panels": panels,
    }


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    """Heat maps with contour lines, one colour scale from 0 to log 10."""
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    heat = None
    for letter, axis, panel in zip("abcd", axes.flat, data["panels"], strict=True):
        bases, temperatures, entropy = (np.asarray(panel[key]) for key in ("lambda", "theta", "entropy"))
        heat = axis.pcolormesh(
            bases,
            temperatures,
            entropy,
            cmap=HEAT,
            vmin=0,
            vmax=data["largest_entropy"],
            shading="gouraud",
            rasterized=True,
        )
        lines = axis.contour(
            bases, temperatures, entropy, levels=list(LEVELS), colors=list(LEVELS.values()), linewidths=0.7
        )
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xlim(bases[0], bases[-1])
        axis.set_ylim(temperatures[0], temperatures[-1])
        axis.clabel(lines, fmt="%g", fontsize=7, inline_spacing=2, manual=_label_places(bases, temperatures, entropy))
        below, above = r"\leq 1", r"\geq 1"
        title = rf"$\lambda {below if bases[0] < 1 else above}$, $\theta {below if temperatures[0] < 1 else above}$"
        axis.set_title(f"({letter})  {title}", loc="left", pad=3)
    for axis in axes[-1]:
        axis.set_xlabel(r"base $\lambda$")
    for axis in axes[:, 0]:
        axis.set_ylabel(r"temperature $\theta$")
    assert heat is not None
    bar = figure.colorbar(heat, ax=axes, aspect=30, pad=0.02, ticks=[0, 0.5, 1, 1.5, 2, data["largest_entropy"]])
    bar.ax.set_yticklabels(["0", "0.5", "1", "1.5", "2", r"$\log 10$"])
    bar.set_label(r"entropy of $\mathrm{softmax}_\theta(\lambda^1, \ldots, \lambda^{10})$ (nats)")
    bar.outline.set_linewidth(0.6)


def _label_places(bases: np.ndarray, temperatures: np.ndarray, entropy: np.ndarray) -> list[tuple[float, float]]:
    """Where the contour lines are far enough apart: up a column for lambda <= 1, along a row for lambda >= 1."""
    if bases[0] < 1:
        column = int(0.65 * len(bases))
        along, places = entropy[:, column], [(bases[column], theta) for theta in temperatures]
    else:
        row = int(0.85 * len(temperatures))
        along, places = entropy[row], [(base, temperatures[row]) for base in bases]
    nearest = ((level, int(np.argmin(abs(along - level)))) for level in LEVELS if along.min() < level < along.max())
    return [places[i] for _, i in nearest]


def run(out: Path) -> list[Path]:
    """Write fig5.png, fig5.pdf and fig5.json into ``out``."""
    return save_exhibit(out, "fig5", data(), draw, (PAGE, 4.4))
