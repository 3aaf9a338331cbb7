"""Figure 8 to look at and to read: the grid of panels, the tables, and what they say in sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .figures import BLUE, GREEN, GREY, INK, PAGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 5
PANEL_HEIGHT = 1.2
RED = "#C8102E"
COLORS = {"baseline": BLUE, "adaptive": RED, "also": GREEN}
WORDS = {"baseline": "Blue", "adaptive": "Red", "also": "Green"}
SIGNIFICANT = 0.05
PARTS = {
    "in": "in distribution",
    "out": "out of distribution",
    "beyond": "at sizes larger than any of training",
}
IN_PANELS = ("in", "out")
FAINT = 0.35
SIGNED = "\N{MINUS SIGN}"
FEWEST = 20
"""Samples that an algorithm needs to be in the mean over algorithms, where each counts as much as any other."""

TITLES = {
    "bfs": "breadth-first search",
    "dag_shortest_paths": "DAG shortest paths",
    "dfs": "depth-first search",
    "bellman_ford": "Bellman-Ford",
    "dijkstra": "Dijkstra",
    "find_maximum_subarray_kadane": "maximum subarray (Kadane)",
    "floyd_warshall": "Floyd-Warshall",
    "graham_scan": "Graham scan",
    "jarvis_march": "Jarvis march",
    "kmp_matcher": "KMP string matcher",
    "lcs_length": "LCS length",
    "mst_kruskal": "spanning tree (Kruskal)",
    "mst_prim": "spanning tree (Prim)",
    "optimal_bst": "optimal search tree",
    "strongly_connected_components": "strong components",
}
"""Names in words, where the plain name without underscores would not do."""

CAPTION = (
    "Exact match of the final answer on CLRS-Text ({traces}) against size: {models}. {colors} {training} Greedy "
    "answers to {samples} samples of each size for each of {seeds} seeds, the same ones for every model; lines are "
    "means and bands standard deviations over the seeds. "
    "Dotted: sizes of training. Only samples that fit {length:,} tokens are asked; lines are faint where fewer than "
    "half of them do, which are then the ones with the shortest traces. The numbers in a panel are the differences "
    "of the red curve from the blue, in points, at sizes of training and at other sizes, a question that repeats "
    "counted once; a star means p < 0.05 (McNemar's exact test, Holm's correction over the algorithms). {findings}"
)


def color_sentence(name: str, variant: Mapping[str, Any]) -> str:
    """What a curve is of: the attention at inference, and in training as far as it is known."""
    where = {
        None: "at inference; its training is not known",
        True: "in training and at inference",
        False: f"at inference, after training with {variant['trained_as']}",
    }[variant["as_trained"]]
    return f"{WORDS[name]}: {variant['label']}, {where}."


def training_sentence(differs: Sequence[str] | None) -> str:
    """Whether models were trained in the same way."""
    if differs is None:
        return "Whether training differed in more than the policy is not known."
    if not differs:
        return "Training was from the same start, and differed in nothing but the policy."
    return f"Training differed in more than the policy: {', '.join(differs)}."


def title(algorithm: str) -> str:
    """An algorithm's name to read."""
    return TITLES.get(algorithm, algorithm.replace("_", " "))


def findings(data: Mapping[str, Any]) -> list[str]:
    """What the comparisons say, whichever way they went."""
    sentences = []
    for name, parts in data["comparisons"].items():
        who = data["variants"][name]["label"]
        for part, words in PARTS.items():
            sentences += _compared(who[:1].upper() + who[1:], words, parts[part])
    return [
        *sentences,
        "Each curve is of one model: tests and intervals are about other samples, not about other training runs.",
    ]


def _compared(who: str, words: str, found: Mapping[str, Any]) -> list[str]:
    rows, total = list(found["algorithms"].values()), found["total"]
    if not rows:
        return [f"No sample is {words}."]
    ahead, behind = ([row for row in rows if side * row["difference"] > 0] for side in (1, -1))
    sure = [sum(row["p_holm"] < SIGNIFICANT for row in side) for side in (ahead, behind)]
    return [
        f"{who}, {words}, is above softmax on {len(ahead)} of {len(rows)} algorithms ({sure[0]} with p < 0.05 after "
        f"Holm's correction) and below on {len(behind)} ({sure[1]}); {_mean(total, len(rows))}of all {total['n']:,} "
        f"samples {total['accuracy']:.1%} are right against {total['baseline_accuracy']:.1%} "
        f"(p = {p_text(total['p_value'])})."
    ]


def _mean(total: Mapping[str, Any], algorithms: int) -> str:
    """The mean over algorithms in words, with how many of them are in it if not all are."""
    if total["mean_interval"] is None:
        return ""
    low, high = (points(bound) for bound in total["mean_interval"])
    few = "" if total["mean_of"] == algorithms else f" over the {total['mean_of']} with at least {FEWEST} samples"
    return f"the mean difference{few} is {points(total['mean_difference'])} points (95% interval {low} to {high}), and "


def points(share: float) -> str:
    """A difference of shares in points, with its sign."""
    text = f"{100 * share:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", SIGNED)


def p_text(p: float) -> str:
    """A p-value with two digits."""
    return f"{p:.2f}" if p >= 0.1 else f"{p:.2g}"


def figure_size(data: Mapping[str, Any]) -> tuple[float, float]:
    """Width and height in inches."""
    rows = -(-len(data["algorithms"]) // COLUMNS)
    return PAGE, PANEL_HEIGHT * rows + 0.5


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    """A panel for each algorithm: accuracy against size, a line for each model."""
    from matplotlib.lines import Line2D

    names = list(data["algorithms"])
    columns = min(COLUMNS, len(names))
    rows = -(-len(names) // columns)
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False)
    flat = axes.ravel()
    for i, (axis, name) in enumerate(zip(flat, names, strict=False)):
        _panel(axis, name, data)
        if i + columns >= len(names):
            axis.set_xlabel("size", fontsize=7, labelpad=1)
    for axis in flat[len(names) :]:
        axis.set_axis_off()
    for row in axes:
        row[0].set_ylabel("right, %", fontsize=7, labelpad=1)
    lines: list[Any] = [
        Line2D([], [], color=COLORS[name], label=variant["label"]) for name, variant in data["variants"].items()
    ]
    lines.append(Line2D([], [], color=GREY, linestyle=(0, (1, 1.5)), linewidth=0.8, label="sizes of training"))
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines))
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.03, wspace=0.02, hspace=0.02)  # pyright: ignore


def _panel(axis: Axes, algorithm: str, data: Mapping[str, Any]) -> None:
    entry = data["algorithms"][algorithm]
    there = [i for i, n in enumerate(entry["n"]) if n]
    sizes = [entry["sizes"][i] for i in there]
    axis.set_title(title(algorithm), loc="left", fontsize=7.5, pad=2.5, parse_math=False)
    axis.tick_params(labelsize=6.5, pad=1.5)
    axis.set_ylim(-4, 104)
    axis.set_yticks([0, 50, 100])
    if not sizes:
        axis.text(0.5, 0.5, "nothing fits", transform=axis.transAxes, fontsize=6.5, color=GREY, ha="center")
        return
    left, right = sizes[0], sizes[-1]
    margin = max(0.5, 0.03 * (right - left))
    axis.set_xlim(left - margin, right + margin)
    axis.locator_params(axis="x", nbins=4, integer=True)
    for size in entry["training_sizes"]:
        if left <= size <= right:
            axis.axvline(size, color=GREY, linestyle=(0, (1, 1.5)), linewidth=0.6, zorder=0.5)
    many = [entry["n"][i] >= entry["too_long"][i] for i in there]
    few = not all(many)
    for name, curve in entry["curves"].items():
        mean = [100 * curve["accuracy"][i] for i in there]
        deviation = [100 * (curve["deviation"][i] or 0) for i in there]
        low, high = ([min(max(m + side * d, 0), 100) for m, d in zip(mean, deviation, strict=True)] for side in (-1, 1))
        axis.fill_between(sizes, low, high, color=COLORS[name], alpha=0.18, linewidth=0)
        marker = "o" if len(sizes) <= 10 else ""
        width = 2.2 if name == "baseline" else 1.0  # seen behind a curve that covers it
        style: dict[str, Any] = {"color": COLORS[name], "linewidth": width, "marker": marker, "markersize": 1.8 * width}
        axis.plot(sizes, mean, **style, alpha=FAINT if few else 1.0)
        if few:
            axis.plot(
                *([x if fits else math.nan for x, fits in zip(line, many, strict=True)] for line in (sizes, mean)),
                **style,
            )
    _differences(axis, algorithm, data)


def _differences(axis: Axes, algorithm: str, data: Mapping[str, Any]) -> None:
    """The differences between adaptive temperature and the baseline, in the corner with fewer points of curves."""
    texts = []
    for part in IN_PANELS:
        row = data["comparisons"]["adaptive"][part]["algorithms"].get(algorithm)
        if row is not None:
            texts.append(f"{part} {points(row['difference'])}{'*' if row['p_holm'] < SIGNIFICANT else ''}")
    box = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.8}
    x, y, side = _corner(data["algorithms"][algorithm])
    axis.text(
        x, y, "  ".join(texts), transform=axis.transAxes, fontsize=6, color=INK, bbox=box, ha=side, va="center",
        parse_math=False,
    )  # fmt: skip


def _corner(entry: Mapping[str, Any]) -> tuple[float, float, str]:
    """Lower left or upper right: a place, and the side that the text is aligned to."""
    curves = [curve["accuracy"] for curve in entry["curves"].values()]
    wide = -(-2 * len(entry["sizes"]) // 3)
    low = sum(share is not None and share < 0.2 for curve in curves for share in curve[:wide])
    high = sum(share is not None and share > 0.8 for curve in curves for share in curve[-wide:])
    return (0.03, 0.09, "left") if low <= high else (0.97, 0.91, "right")


def markdown(data: Mapping[str, Any]) -> str:
    """The findings and the tables."""
    lines = ["# Figure 8: CLRS-Text with and without adaptive temperature", "", data["caption"]]
    for name, parts in data["comparisons"].items():
        lines += ["", f"## {_capital(data['variants'][name]['label'])} against softmax", *_totals(parts)]
        for part, words in PARTS.items():
            if parts[part]["algorithms"]:
                lines += ["", f"### {_capital(words)}", "", *_table(parts[part]["algorithms"])]
    lines += ["", "## The models", "", *_models(data["variants"])]
    return "\n".join([*lines, ""])


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _totals(parts: Mapping[str, Any]) -> list[str]:
    lines = [
        "",
        *_head(["", "samples", "softmax, %", "this model, %", "points", "95%", "p", *MEAN_COLUMNS]),
    ]
    for part, words in PARTS.items():
        if (total := parts[part]["total"]) is not None:
            lines.append(
                _line(
                    [
                        words,
                        f"{total['n']:,}",
                        f"{100 * total['baseline_accuracy']:.1f}",
                        f"{100 * total['accuracy']:.1f}",
                        points(total["difference"]),
                        " to ".join(map(points, total["interval"])),
                        p_text(total["p_value"]),
                        *_mean_cells(total),
                    ]
                )
            )
    return lines


MEAN_COLUMNS = (f"algorithms with {FEWEST} samples or more", "their mean", "95%")


def _mean_cells(total: Mapping[str, Any]) -> list[str]:
    if total["mean_interval"] is None:
        return ["0", "-", "-"]
    return [
        str(total["mean_of"]),
        points(total["mean_difference"]),
        " to ".join(map(points, total["mean_interval"])),
    ]


def _table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Algorithms from the largest lead to the largest lag. Bold: sure after the correction."""
    head = ["", "samples", "softmax, %", "this model, %", "points", "softmax alone", "this alone", "p", "p, Holm"]
    lines = _head(head)
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["difference"]):
        difference = points(row["difference"])
        lines.append(
            _line(
                [
                    title(name),
                    f"{row['n']:,}",
                    f"{100 * row['baseline_right'] / row['n']:.1f}",
                    f"{100 * row['right'] / row['n']:.1f}",
                    f"**{difference}**" if row["p_holm"] < SIGNIFICANT else difference,
                    f"{row['baseline_alone']:,}",
                    f"{row['alone']:,}",
                    p_text(row["p_value"]),
                    p_text(row["p_holm"]),
                ]
            )
        )
    return lines


def _models(variants: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What was trained, how fast, in how much memory, to what loss; and how fast it answers."""
    lines = _head(
        [
            "", "model", "parameters", "trained on tokens", "at tokens/s", "ms a step", "step against softmax",
            "ms of it for data", "GiB", "last loss", "traces right, in and out of distribution", "generated tokens/s",
            "samples/s",
        ]
    )  # fmt: skip
    plain = (variants["baseline"]["training"] or {}).get("median_step_seconds")
    for variant in variants.values():
        speed, training = variant["throughput"], variant["training"] or {}
        step, memory = training.get("median_step_seconds"), training.get("peak_memory_bytes")
        waited = training.get("median_data_seconds")
        losses = training.get("curve", {}).get("loss")
        lines.append(
            _line(
                [
                    variant["label"],
                    variant["name"],
                    f"{variant['parameters']:,}",
                    _count(training.get("counts", {}).get("tokens")),
                    _count(training.get("median_tokens_per_second")),
                    "-" if step is None else f"{1000 * step:.1f}",
                    "-" if step is None or plain is None else f"{step / plain:.2f}x",
                    "-" if waited is None else f"{1000 * waited:.1f}",
                    "-" if memory is None else f"{memory / 2**30:.1f}",
                    f"{losses[-1]:.4f}" if losses else "-",
                    ", ".join("-" if x is None else f"{x:.1%}" for x in variant["trace_accuracy"].values()),
                    _count(speed["generated_tokens_per_second"]),
                    _count(speed["samples_per_second"]),
                ]
            )
        )
    return lines


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _head(columns: Sequence[str]) -> list[str]:
    return [_line(columns), _line([":--", *["--:"] * (len(columns) - 1)])]


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"
