"""The same as one picture: the heads on a map, and entropy against length as in Figure 3."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .findings import Heads, counted, where_read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, GREY, INK = "#0072B2", "#7A7A7A", "#222222"
MOST_TICKS = 10
"""On any axis."""

STYLE: Any = {
    "font.family": "STIXGeneral",
    "mathtext.fontset": "stix",
    "font.size": 9,
    "axes.linewidth": 0.6,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.wspace": 0.04,
    "savefig.dpi": 200,
}


def png(data: Mapping[str, Any]) -> bytes:
    """The picture; the user's matplotlib settings are not read or changed."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(10, 4.6))
        draw(figure, data)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    """Normalised entropy at the longest input on the left; the first layer and all heads against length on the right.

    With a single length, heads stand in order instead.
    """
    heads = Heads(data)
    left, *right = figure.subplots(1, 3, width_ratios=[1.15, 1, 1])
    figure.suptitle(f"{data['model']['name']}, read {where_read(heads)}", fontsize=10, parse_math=False)
    longest = counted(heads.lengths[-1], data["source"]["unit"].removesuffix("s"))
    _map(left, heads, f"H / log n at {longest}", figure)
    first, entropy = min(layer for layer, _ in heads.heads), heads.read("entropy")
    chosen = [i for i, (layer, _) in enumerate(heads.heads) if layer == first]
    growing = len(heads.lengths) > 1
    for axis, values, title in ((right[0], entropy[:, chosen], f"Layer {first}"), (right[1], entropy, "All heads")):
        if growing:
            curves(axis, heads.lengths, values, title)
            axis.set_xlabel("items in the sequence" if data["source"]["unit"] == "items" else "tokens")
        else:
            in_order(axis, values[0], title)
    right[0].set_ylabel("entropy (nats)")
    top = max(axis.get_ylim()[1] for axis in right)
    for axis in right:
        axis.set_ylim(0, top)


def _map(axis: Axes, heads: Heads, title: str, figure: Figure) -> None:
    layers = sorted({layer for layer, _ in heads.heads})
    image = np.full((len(layers), 1 + max(head for _, head in heads.heads)), np.nan)
    places = [(layers.index(layer), head) for layer, head in heads.heads]
    for place, value in zip(places, heads.read("normalised")[-1], strict=True):
        image[place] = value
    shown = axis.imshow(image, cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    sinks = [place for place, is_sink in zip(places, heads.sinks(), strict=True) if is_sink]
    if sinks:
        rows, columns = zip(*sinks, strict=True)
        axis.scatter(columns, rows, s=5, color="white", linewidths=0)
        title += "; dots: attention sinks"
    axis.set_title(title, loc="left")
    axis.set_xlabel("head")
    axis.set_ylabel("layer")
    axis.set_yticks(*_ticks(layers))
    axis.set_xticks(*_ticks(range(image.shape[1])))
    figure.colorbar(shown, ax=axis, pad=0.02)


def _ticks(names: Sequence[int]) -> tuple[list[int], list[str]]:
    """Places and names of at most :data:`MOST_TICKS` ticks, evenly apart: every one, second, fifth, tenth, ..."""
    steps = (factor * 10**power for power in itertools.count() for factor in (1, 2, 5))
    step = next(step for step in steps if len(names) <= step * MOST_TICKS)
    places = list(range(0, len(names), step))
    return places, [str(names[i]) for i in places]


def curves(axis: Axes, lengths: list[int], values: np.ndarray, title: str) -> None:
    """One thin line for each head, and the mean with the standard deviation across them: the form of Figure 3."""
    mean, deviation = np.nanmean(values, axis=1), np.nanstd(values, axis=1)
    axis.fill_between(lengths, mean - deviation, mean + deviation, color=BLUE, alpha=0.2, linewidth=0)
    axis.plot(lengths, values, color=GREY, linewidth=0.7, alpha=0.6 if values.shape[1] < 40 else 0.25)
    axis.plot(lengths, mean, color=BLUE, linewidth=2.2, label=_of_heads(values.shape[1]))
    axis.set_xscale("log", base=2)
    named = _apart(lengths)
    axis.set_xticks(named, [f"{n:,}" for n in named])
    axis.minorticks_off()
    _finish(axis, values, title)


def in_order(axis: Axes, values: np.ndarray, title: str) -> None:
    """A dot for each head, from the smallest value to the largest, over the mean and the standard deviation."""
    mean, deviation = float(np.nanmean(values)), float(np.nanstd(values))
    axis.axhspan(mean - deviation, mean + deviation, color=BLUE, alpha=0.2, linewidth=0)
    axis.axhline(mean, color=BLUE, linewidth=2.2, label=_of_heads(len(values)))
    axis.scatter(range(len(values)), np.sort(values), s=9, color=INK, alpha=0.6, linewidths=0)
    axis.set_xticks([])
    axis.set_xlabel("heads in order")
    _finish(axis, values, title)


def _apart(lengths: Sequence[int]) -> list[int]:
    """Lengths whose names do not touch on a logarithmic axis, the longest among them."""
    span, named = math.log(lengths[-1] / lengths[0]), [lengths[-1]]
    for n in reversed(lengths[:-1]):
        if math.log(named[-1] / n) * MOST_TICKS >= span:
            named.append(n)
    return named[::-1]


def _of_heads(count: int) -> str:
    return f"mean ± deviation of {counted(count, 'head')}"


def _finish(axis: Axes, values: np.ndarray, title: str) -> None:
    axis.set_title(title, loc="left")
    axis.legend(loc="upper left", fontsize=8)
    axis.set_ylim(0, max(1.12 * float(np.nanmax(values)), 1e-3))
