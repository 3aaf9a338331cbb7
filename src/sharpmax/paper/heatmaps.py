"""Attention coefficients of one trained max-retrieval head as heat maps: what Figures 2 and 7 share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.policies import Constant, Policy
from ..core.softmax import softmax
from ..core.stats import row_stats
from ..tasks.max_retrieval.data import Stream, sample_sets, stream_key
from ..tasks.max_retrieval.model import logits as model_logits
from .figures import HEAT, INK, numbers
from .max_retrieval import Heads
from .published import TABLE1

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZES, SETS, SHOWN = TABLE1.sizes, 32, 16
"""Numbers of items, doubling from 16; sets a panel, its rows; items of largest priority, its columns."""

ITEMS = 1 << 15
"""Items that are embedded at a time."""

SOFTMAX = Constant(1.0)
SHADES = 0.5
"""Colours follow this power of a coefficient, so that those far below 1 can be told from 0."""


_logits = jax.jit(model_logits)


def head_of(heads: Heads, seed: int | None) -> int:
    """Where the head of ``seed`` is among ``heads``; ``None`` is the first."""
    seeds = heads.checkpoint.seeds
    if seed is None:
        return 0
    if seed not in seeds:
        raise ValueError(
            f"expected seed to be one of {', '.join(map(str, seeds))}, of which there are heads, got {seed}"
        )
    return seeds.index(seed)


def ranked_logits(heads: Heads, index: int, n: int, sets: int = SETS) -> np.ndarray:
    """Logits ``[sets, n]`` in float64, items by ascending priority: the last one is the true maximum.

    The sets are the first of size ``n`` that Table 1 evaluates the head on.
    """
    params = jax.tree.map(lambda a: jnp.asarray(a[index]), heads.checkpoint.params)
    key = jax.random.fold_in(stream_key(heads.checkpoint.seeds[index], Stream.EVALUATION), n)
    batch = sample_sets(key, jnp.arange(sets), n)
    step = max(1, ITEMS // n)
    parts = (jax.tree.map(lambda a, i=i: a[i : i + step], batch) for i in range(0, sets, step))
    logits = np.concatenate([np.asarray(_logits(params, part), np.float64) for part in parts])
    later_first = np.broadcast_to(-np.arange(n), logits.shape)  # among equals the first is the target
    order = np.lexsort((later_first, np.asarray(batch.priority)), axis=-1)
    return np.take_along_axis(logits, order, axis=-1)


def data(
    heads: Heads, seed: int | None, policies: Mapping[str, Policy], sizes: Sequence[int] = SIZES, sets: int = SETS
) -> dict[str, Any]:
    """Coefficients on the items of largest priority, and what they come to, for every policy on the same sets."""
    index = head_of(heads, seed)
    names = ("coefficients", "on_maximum", "entropy", "beta")
    rows: dict[str, dict[str, list[Any]]] = {policy: {name: [] for name in names} for policy in policies}
    found = []
    for n in sizes:
        logits = ranked_logits(heads, index, n, sets)
        stats = row_stats(logits)
        found.append(float(np.mean(logits[:, -1] >= stats.max)))
        for name, policy in policies.items():
            beta = np.asarray(policy(stats))
            weights = softmax(logits, beta=beta)
            row = rows[name]
            row["coefficients"].append(numbers(weights[:, -SHOWN:], 4))
            row["on_maximum"].append(numbers(weights[:, -1].mean()))
            row["entropy"].append(numbers(row_stats(logits * beta[:, None]).entropy.mean()))
            row["beta"].append(numbers(beta.mean()))
    return {
        "name": heads.name,
        "seed": heads.checkpoint.seeds[index],
        "sets": sets,
        "sizes": list(sizes),
        "coefficients_axes": ["size", "set", "item, by ascending priority"],
        "means_note": "on_maximum, entropy (nats) and beta are means over the sets drawn",
        "maximum_has_largest_logit": found,
        "rows": {
            name: {"policy": policies[name].to_dict(), **row}  # pyright: ignore[reportAttributeAccessIssue]
            for name, row in rows.items()
        },
    }


def draw(figure: Figure, data: Mapping[str, Any], labels: Mapping[str, str]) -> None:
    """One row of panels for each row of ``data``, one column for each size, one colour scale from 0 to 1."""
    from matplotlib.colors import PowerNorm

    figure.set_layout_engine("compressed", w_pad=0.015, h_pad=0.03, wspace=0, hspace=0)
    shape = (len(labels), len(data["sizes"]))
    axes = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False)
    norm, image = PowerNorm(SHADES, 0, 1), None
    for line, (name, label) in zip(axes, labels.items(), strict=True):
        row = data["rows"][name]
        for axis, coefficients, mean in zip(line, row["coefficients"], row["on_maximum"], strict=True):
            image = axis.imshow(coefficients, cmap=HEAT, norm=norm, aspect="equal", interpolation="nearest")
            _mark_maximum(axis, mean)
        line[0].set_ylabel(label)
    for axis, n in zip(axes[0], data["sizes"], strict=True):
        axis.set_title(f"{n:,}", fontsize=8, pad=3)
    axes[0, 0].annotate(
        "$n=$", (0, 1), (-3, 3), "axes fraction", textcoords="offset points", ha="right", va="bottom", fontsize=8
    )
    figure.supxlabel(
        f"the {SHOWN} items with the largest priority, ascending; under the true maximum, its mean coefficient",
        fontsize=8,
    )
    assert image is not None
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=14 * len(labels), ticks=[0, 0.01, 0.1, 0.25, 0.5, 1])
    bar.ax.set_yticklabels(["0", ".01", ".1", ".25", ".5", "1"])
    bar.ax.tick_params(labelsize=7)
    bar.set_label("coefficient", fontsize=8, labelpad=2)
    bar.outline.set_linewidth(0.6)


def _mark_maximum(axis: Axes, mean: float) -> None:
    """A mark under the column of the true maximum, and the mean of that column in percent."""
    axis.set_xticks([])
    axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_linewidth(0.4)
    axis.plot(
        [SHOWN - 1],
        [-0.025],
        marker="^",
        markersize=2.6,
        color=INK,
        linewidth=0,
        clip_on=False,
        transform=axis.get_xaxis_transform(),
    )
    axis.set_xlabel(f"{100 * mean:.3g}%", fontsize=7, labelpad=4.5, loc="right")
