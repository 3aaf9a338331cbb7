"""Figure 9: the logit spread against the bound of Proposition 3.1 while heads are trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..inputs import user_input
from ..tasks.max_retrieval.model import FEATURES
from .figures import BLUE, GREY, INK, PAGE, VERMILION, numbers, save_exhibit
from .max_retrieval import Heads, file_name, find_heads

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PROBE_SETS = 128
"""Sets that training records the spread and its bound on."""

CAPTION = (
    "Logit spread delta of heads trained on max retrieval (protocol {name}, {steps:,} steps) and its upper bound by "
    "Proposition 3.1, 2 sigma_max(Q) sigma_max(K) |y| max_i |x_i|: every one of {seeds} seeds (thin) and their median "
    "(thick), recorded at {records} steps up to {last:,}. The layers of the paper's listing have biases and its logits "
    "a factor 1/sqrt({features}), so Q and K here have their biases as one more column, y and all x_i a 1 at the end, "
    "and the bound is multiplied by 1/sqrt({features}). Each number is the mean over {sets} fixed sets of {items} "
    "items. (b) The mean bound over the mean spread: {above} of {known} exceed 1, and the smallest is {smallest:.2f}, "
    "rounded down. The median is {median:.1f} at step {at:,}."
)


def data(heads: Heads) -> dict[str, Any]:
    """What the checkpoint's history says, as it stands there; a number is missing where training diverged."""
    checkpoint = heads.checkpoint
    history = checkpoint.history
    spread, bound = ([entry[key] for entry in history] for key in ("spread", "bound"))
    ratio = [
        [None if s is None or b is None or s == 0 else b / s for s, b in zip(*pair, strict=True)]
        for pair in zip(spread, bound, strict=True)
    ]
    known = [value for row in ratio for value in row if value is not None]
    ratio_median = _medians(ratio)
    at, median = [(entry["step"], m) for entry, m in zip(history, ratio_median, strict=True) if m is not None][-1]
    return {
        "caption": CAPTION.format(
            name=heads.name,
            steps=checkpoint.step,
            seeds=len(checkpoint.seeds),
            records=len(history),
            last=history[-1]["step"],
            features=FEATURES,
            sets=PROBE_SETS,
            items=checkpoint.protocol.sizes[1],
            above=sum(value > 1 for value in known),
            known=len(known),
            smallest=math.floor(100 * min(known)) / 100,
            median=median,
            at=at,
        ),
        "name": heads.name,
        "seeds": list(checkpoint.seeds),
        "axes": ["step", "seed"],
        "step": [entry["step"] for entry in history],
        "spread": spread,
        "bound": bound,
        "bound_over_spread": [[None if value is None else numbers(value) for value in row] for row in ratio],
        "median": {"spread": _medians(spread), "bound": _medians(bound), "bound_over_spread": ratio_median},
        "protocol": checkpoint.protocol.to_dict(),
    }


def _medians(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The median over the seeds that have a number, for every step."""
    known = ([value for value in row if value is not None] for row in rows)
    return [numbers(np.median(values)) if values else None for values in known]


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    """(a) spread and bound; (b) how many times the spread the bound is. Logarithmic axes."""
    left, right = figure.subplots(1, 2, sharex=True, width_ratios=(1.15, 1))
    thousands = np.asarray(data["step"]) / 1000
    last = thousands[-1] or 1.0
    for axis, name, color in (
        (left, "bound", VERMILION),
        (left, "spread", BLUE),
        (right, "bound_over_spread", INK),
    ):
        axis.plot(thousands, _floats(data[name]), color=color, linewidth=0.5, alpha=0.45)
        axis.plot(thousands, _floats(data["median"][name]), color=color, linewidth=1.5, marker="o", markersize=2.2)
    _label(left, thousands, data["median"]["bound"], "bound of Proposition 3.1", VERMILION, above=True)
    _label(left, thousands, data["median"]["spread"], r"logit spread $\delta$", BLUE, above=False)
    ratios = _floats(data["bound_over_spread"])
    smallest, below = np.nanmin(ratios), int((ratios < 1).sum())
    right.axhline(1, color=GREY, linewidth=0.8, linestyle=(0, (4, 2)))
    right.annotate(
        f"{below} exceed their bound" if below else "no mean spread exceeds its mean bound",
        (1, 1),
        (-3, 3),
        ("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=7.5,
        color=GREY,
    )
    left.set_title("(a)  spread and bound", loc="left", pad=4)
    left.set_ylabel("difference of logits")
    right.set_title("(b)  how loose the bound is", loc="left", pad=4)
    right.set_ylabel("bound / spread")
    right.set_ylim(bottom=0.8 * min(1, smallest))
    for axis in (left, right):
        axis.set_yscale("log")
        axis.set_xlabel("training steps (thousands)")
        axis.set_xlim(-0.01 * last, 1.01 * last)
    left.set_ylim(top=10 * np.nanmax(_floats(data["bound"])))
    right.yaxis.set_major_formatter("{x:g}")


def _floats(values: Any) -> np.ndarray:
    """``values`` with NaN where there is no number."""
    return np.asarray(values, np.float64)


def _label(axis: Axes, x: np.ndarray, y: Any, text: str, color: str, *, above: bool) -> None:
    """``text`` by the curve, at two thirds of the way."""
    at = int(0.62 * (len(x) - 1))
    axis.annotate(
        text,
        (x[at], _floats(y)[at]),
        (0, 12 if above else -12),
        textcoords="offset points",
        ha="center",
        va="bottom" if above else "top",
        color=color,
    )


def run(out: Path, protocol: str | None = None, checkpoint: Path | None = None) -> list[Path]:
    """Write fig9.png, fig9.pdf and fig9.json into ``out``; for another protocol than ``paper``, fig9_NAME.

    Args:
      out: folder for the files.
      protocol: a preset or a protocol file; ``paper`` unless the checkpoint is of another.
      checkpoint: folder of the heads, if not the shipped ones.
    """
    with user_input():
        heads = find_heads(protocol, checkpoint)
        if not any(value for entry in heads.checkpoint.history for value in entry["spread"]):
            raise ValueError("expected a history of training with a spread that is a number, got one without")
    return save_exhibit(out, file_name("fig9", heads), data(heads), draw, (PAGE, 2.5))
