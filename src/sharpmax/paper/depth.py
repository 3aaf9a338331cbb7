"""Remark C.1: without residual connections, one layer of uniform attention makes all later ones uniform."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..inputs import user_input
from ..theory import MACHINE_EPSILON
from .figures import BLUE, GREEN, GREY, INK, ORANGE, PAGE, VERMILION, numbers, save_exhibit
from .stacks import Attended, random_layers, stacked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZES = (16, 256, 4096, 2**40)
"""Numbers of tokens; at the last one every coefficient is far below the machine epsilon of float32."""

LAYERS, FEATURES, HEADS, KINDS = 8, 64, 4, 64
GAIN = 3.0
"""Standard deviation of the first layer's logits: their spread is then close to Gemma 2B's highest, 14.8."""

FLATTENED = 3
"""The layer, counted from 1, whose temperature is made infinite."""

STACKS = 10
STACK_KINDS = {"without": "without residuals", "with": "with residuals"}
METRICS = {
    "entropy": "mean entropy of the coefficients / log n",
    "largest": "n times the largest coefficient; 1 is uniform",
    "spread": "mean spread of the logits of a token",
    "distance": "mean distance of the embeddings after the layer to their mean / their mean norm",
}

COLORS = (INK, BLUE, GREEN, ORANGE)
DASHED = (0, (2.5, 1.5))
SMALLEST_SHOWN = 1e-17

CAPTION = (
    "Remark C.1 on stacks of {layers} BERT-style layers with random weights ({heads} heads, {features} features, "
    "layer normalisation and a feedforward network in every layer), without and with residual connections: means of "
    "{stacks} stacks, with their range. The n tokens are drawn from a vocabulary of {kinds}, without positions. "
    "Dashed, for n = {shown:,}: the same stacks with all heads of layer {flattened} made uniform. Without residuals "
    "its outputs are all equal to their average, so every later layer has equal logits and is uniform as well, up to "
    "rounding; with residuals the next layer is as sharp as if nothing had happened. Solid: the stacks as they are. "
    "Without residuals they come to the same within {collapsed} layers at every n (the mean of n max alpha is then "
    "below 1.001), since each layer averages what the one before left apart. Many tokens alone do not do it: at n = "
    "{most} the largest of all coefficients is {largest:.2g}, below the machine epsilon of float32 ({epsilon:.2g}),"
    " which the remark calls dispersed, and yet the first layer's outputs are as far apart as at n = {few:,}. Its "
    "coefficients are all small, but they still differ by factors of up to exp(spread), so different tokens take "
    "different averages. What the remark's conclusion takes is equal coefficients, a spread of 0, not small ones."
)


def data(
    seed: int = 0, sizes: Sequence[int] = SIZES, stacks: int = STACKS, kinds: int = KINDS, layers: int = LAYERS
) -> dict[str, Any]:
    """The metrics of every layer, ``[size][stack][layer]``, of stacks as they are and with a uniform layer."""
    shown = sizes[-2] if len(sizes) > 1 else sizes[0]
    found: dict[str, Any] = {}
    for name in STACK_KINDS:
        for state, flattened in (("as_is", None), ("flattened", FLATTENED)):
            by_stack = [
                [
                    measure(n, seed + i, kinds, layers, residual=name == "with", flattened=flattened)
                    for i in range(stacks)
                ]
                for n in sizes
            ]
            found.setdefault(name, {})[state] = {
                metric: numbers([[row[metric] for row in rows] for rows in by_stack]) for metric in METRICS
            }
    plain = found["without"]["as_is"]
    uniform = np.mean(plain["largest"], axis=1) < 1.001
    return {
        "caption": CAPTION.format(
            layers=layers,
            heads=HEADS,
            features=FEATURES,
            stacks=stacks,
            kinds=kinds,
            shown=shown,
            flattened=FLATTENED,
            collapsed=1 + int(np.max(np.argmax(uniform, axis=1))),
            most=f"{sizes[-1]:,}" if sizes[-1] < 1 << 20 else f"2^{math.log2(sizes[-1]):g}",
            few=sizes[min(1, len(sizes) - 1)],
            largest=np.max(plain["largest"][-1]) / sizes[-1],
            epsilon=MACHINE_EPSILON["float32"],
        ),
        "sizes": list(sizes),
        "seed": seed,
        "stacks": stacks,
        "layers": layers,
        "features": FEATURES,
        "heads": HEADS,
        "vocabulary": kinds,
        "gain": GAIN,
        "flattened_layer": FLATTENED,
        "flattened_shown_at": shown,
        "metrics": METRICS,
        "axes": ["size", "stack", "layer"],
        "machine_epsilon": MACHINE_EPSILON["float32"],
        "residuals": found,
    }


def measure(
    n: int, seed: int, kinds: int, layers: int, *, residual: bool, flattened: int | None
) -> dict[str, list[float]]:
    """The metrics of every layer of one stack on ``n`` tokens, both drawn from ``seed``."""
    generator = np.random.default_rng(seed)
    stack = random_layers(generator, layers, FEATURES, HEADS, GAIN)
    vocabulary = generator.standard_normal((kinds, FEATURES))
    counts = np.random.default_rng((seed, n)).multinomial(n, np.full(kinds, 1 / kinds))
    present = counts > 0
    counts = counts[present].astype(np.float64)
    betas = [0.0 if i + 1 == flattened else 1.0 for i in range(layers)]
    rows = [
        _metrics(found, counts) for found in stacked(stack, vocabulary[present], counts, residual=residual, betas=betas)
    ]
    return {metric: [row[metric] for row in rows] for metric in METRICS}


def _metrics(found: Attended, counts: np.ndarray) -> dict[str, float]:
    n = counts.sum()
    shares = counts / n
    logits = np.log(found.coefficients)
    distances = np.linalg.norm(found.h - shares @ found.h, axis=-1)
    return {
        "entropy": float(np.mean(found.entropy @ shares) / math.log(n)),
        "largest": float(n * found.coefficients.max()),
        "spread": float(np.mean((logits.max(axis=-1) - logits.min(axis=-1)) @ shares)),
        "distance": float(distances @ shares / (np.linalg.norm(found.h, axis=-1) @ shares)),
    }


PANELS = {
    "entropy": ("entropy of attention", r"mean entropy $/\,\log n$"),
    "largest": ("largest coefficient", r"$n \cdot \max_{ij}\,\alpha_{ij}$"),
    "distance": ("difference between tokens", "distance to mean / norm"),
}


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    """Rows: without and with residuals. Columns: entropy, largest coefficient, how far embeddings are apart."""
    axes = figure.subplots(2, len(PANELS), sharex=True, sharey="col")
    layers = np.arange(1, data["layers"] + 1)
    letters = iter("abcdef")
    for line, (name, words) in zip(axes, STACK_KINDS.items(), strict=True):
        for axis, (metric, (title, label)) in zip(line, PANELS.items(), strict=True):
            _plot(axis, layers, data, name, metric)
            axis.set_title(f"({next(letters)})  {title},\n{' ' * 7}{words}", loc="left", pad=4)
            axis.set_ylabel(label)
            if line is axes[-1]:
                axis.set_xlabel("layer")
    entropy, largest, distance = axes[0]
    lowest = min(np.min(by["as_is"]["entropy"]) for by in data["residuals"].values())
    entropy.set_ylim(lowest - 0.05, 1.05)
    largest.set_yscale("log")
    largest.set_ylim(0.7, 1.6 * np.max(data["residuals"]["with"]["as_is"]["largest"]))
    largest.set_yticks([1, 10, 100], ["1", "10", "100"])
    distance.set_yscale("log")
    distance.set_ylim(SMALLEST_SHOWN, 10)
    distance.set_yticks([1, 1e-4, 1e-8, 1e-12, 1e-16])
    for axis in (largest, distance):
        axis.minorticks_off()
    distance.text(layers[0], 2e-16, "rounding", color=GREY, fontsize=7, va="center")
    entropy.set_xticks(layers)
    figure.legend(*entropy.get_legend_handles_labels(), loc="outside lower center", ncols=len(data["sizes"]) + 1)


def _plot(axis: Axes, layers: np.ndarray, data: Mapping[str, Any], name: str, metric: str) -> None:
    by = data["residuals"][name]
    axis.axvline(data["flattened_layer"], color=GREY, linewidth=0.5, alpha=0.5, zorder=0)
    if metric != "distance":
        axis.axhline(1, color=GREY, linewidth=0.6, zorder=0)
    for i, n in enumerate(data["sizes"]):
        values = np.maximum(by["as_is"][metric][i], SMALLEST_SHOWN)
        color = COLORS[i % len(COLORS)]
        axis.fill_between(layers, values.min(axis=0), values.max(axis=0), color=color, alpha=0.12, linewidth=0)
        size = f"{n:,}".replace(",", "{,}") if n < 1 << 20 else f"2^{{{round(math.log2(n))}}}"
        axis.plot(layers, values.mean(axis=0), color=color, marker="o", markersize=2.2, label=f"$n = {size}$")
    shown = data["sizes"].index(data["flattened_shown_at"])
    values = np.maximum(np.mean(by["flattened"][metric][shown], axis=0), SMALLEST_SHOWN)
    words = f"layer {data['flattened_layer']} made uniform ($n$ = {data['flattened_shown_at']:,})"
    axis.plot(layers, values, color=VERMILION, linestyle=DASHED, marker="s", markersize=2.2, label=words, zorder=3)


def run(out: Path, seed: int = 0) -> list[Path]:
    """Write depth.png, depth.pdf and depth.json into ``out``."""
    with user_input():
        if seed < 0:
            raise ValueError(f"expected seed to be at least 0, got {seed}")
    return save_exhibit(out, "depth", data(seed), draw, (PAGE, 4.3))
