"""The same as one picture: the heads on a map, and entropy against length as in Figure 3."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .findings import Heads, where_read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, GREY, INK = "#0072B2", "#7A7A7A", "#222222"
STYLE: Any = {
    "font.family": "STIXGeneral",
    "mathtext.fontset": "stix",
    "font.size": 9,
    "axes.linewidth": 0.6,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
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
    """Normalised entropy at the longest input on the left; curves of the first layer and of all heads on the right."""
    heads = Heads(data)
    left, *right = figure.subplots(1, 3, width_ratios=[1.15, 1, 1])
    unit = data["source"]["unit"]
    figure.suptitle(f"{data['model']['name']}, read {where_read(heads)}", fontsize=10, parse_math=False)
    _map(left, heads, f"H / log n at {heads.lengths[-1]:,} {unit}", figure)
    first = min(layer for layer, _ in heads.heads)
    chosen = [i for i, (layer, _) in enumerate(heads.heads) if layer == first]
    curves(right[0], heads.lengths, heads.read("entropy")[:, chosen], f"Layer {first}")
    curves(right[1], heads.lengths, heads.read("entropy"), "All heads")
    for axis in right:
        axis.set_xlabel("items in the sequence" if unit == "items" else "tokens")
    right[0].set_ylabel("entropy (nats)")
    top = max(axis.get_ylim()[1] for axis in right)
    for axis in right:
        axis.set_ylim(0, top)


def _map(axis: Axes, heads: Heads, title: str, figure: Figure) -> None:
    layers = sorted({layer for layer, _ in heads.heads})
    image = np.full((len(layers), 1 + max(head for _, head in heads.heads)), np.nan)
    for (layer, head), value in zip(heads.heads, heads.read("normalised")[-1], strict=True):
        image[layers.index(layer), head] = value
    shown = axis.imshow(image, cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axis.set_title(title, loc="left")
    axis.set_xlabel("head")
    axis.set_ylabel("layer")
    ticks = np.unique(np.linspace(0, len(layers) - 1, min(len(layers), 8)).round().astype(int))
    axis.set_yticks(ticks, [str(layers[i]) for i in ticks])
    figure.colorbar(shown, ax=axis, pad=0.02)


def curves(axis: Axes, lengths: list[int], values: np.ndarray, title: str) -> None:
    """One thin line for each head, and the mean with the standard deviation across them: the form of Figure 3."""
    mean, deviation = np.nanmean(values, axis=1), np.nanstd(values, axis=1)
    axis.fill_between(lengths, mean - deviation, mean + deviation, color=BLUE, alpha=0.2, linewidth=0)
    axis.plot(lengths, values, color=GREY, linewidth=0.7, alpha=0.6 if values.shape[1] < 40 else 0.25)
    axis.plot(lengths, mean, color=BLUE, linewidth=2.2, label=f"mean ± deviation of {values.shape[1]} heads")
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axis.minorticks_off()
    axis.set_title(title, loc="left")
    axis.legend(loc="upper left", fontsize=8)
    axis.set_ylim(0, 1.12 * float(np.nanmax(values)))
