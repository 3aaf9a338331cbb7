"""Table 1 to look at: Markdown, CSV, a table in the terminal, and a figure. All of it is in the JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from .figures import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, VERMILION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIGNIFICANT = 0.05
ABOVE, BELOW = "*", "†"
"""Marks of a mean that is significantly above or below softmax's."""

CEILING = (
    "The ceiling is how often the true maximum has the largest logit, which is what hard attention can reach; soft "
    "weights may be right without."
)

DASHED = (0, (4, 2))
STYLES: dict[str, tuple[str, Any]] = {
    "softmax": (INK, "-"),
    "adaptive": (VERMILION, "-"),
    "refitted": (BLUE, DASHED),
    "refitted_held": (BLUE, "-"),
    "log_n": (GREEN, "-"),
    "constant_4": (ORANGE, "-"),
    "hard": (PURPLE, "-"),
}
BANDS = ("softmax", "adaptive", "hard")
"""Rows whose deviation is drawn: more bands hide each other."""

LABELS = {"log_n": r"$\log n / \log 16$", "constant_4": r"constant $\beta = 4$", "hard": r"hard ($\theta = 0$)"}
MARKERS = {"softmax": ("o", INK), "adaptive": ("s", VERMILION)}


def means(accuracy: Any) -> np.ndarray:
    """Means over the seeds, by size."""
    return np.asarray(accuracy, np.float64).mean(axis=1)


def deviations(accuracy: Any) -> np.ndarray:
    """Standard deviations over the seeds (of a sample), by size; 0 for a single seed."""
    values = np.asarray(accuracy, np.float64)
    return values.std(axis=1, ddof=1) if values.shape[1] > 1 else np.zeros(len(values))


def csv_text(data: Mapping[str, Any]) -> str:
    """One line for each row and size: name, size, mean, standard deviation over the seeds, p-value."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["name", "size", "mean", "standard_deviation", "p"])
    alone = len(data["seeds"]) < 2
    no_p = [None for _ in data["sizes"]]
    rows = [(name, row["accuracy"], row["p_value"]) for name, row in data["rows"].items()]
    for name, accuracy, p_values in [*rows, ("ceiling", data["ceiling"], no_p)]:
        for n, mean, deviation, p in zip(data["sizes"], means(accuracy), deviations(accuracy), p_values, strict=True):
            spread = "" if alone else f"{deviation:.6g}"
            writer.writerow([name, n, f"{mean:.6g}", spread, "" if p is None else f"{p:.3g}"])
    paper = data["paper"]
    for name, row in paper["rows"].items():
        for n, mean, p in zip(paper["sizes"], row["accuracy"], paper["p_value"], strict=True):
            writer.writerow([f"paper_{name}", n, mean, "", p if name == "adaptive" else ""])
    return buffer.getvalue()


def cells(data: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str, bool]]]]:
    """Our rows as text: a label, and for each size the mean in percent, its mark, and whether it is the best."""
    by_row = {name: means(row["accuracy"]) for name, row in data["rows"].items()}
    best, softmax = np.max(list(by_row.values()), axis=0), by_row["softmax"]
    lines = []
    for name, row in data["rows"].items():
        line = []
        for i, (mean, p) in enumerate(zip(by_row[name], row["p_value"], strict=True)):
            mark = "" if p is None or p >= SIGNIFICANT else ABOVE if mean > softmax[i] else BELOW
            line.append((f"{100 * mean:.1f}", mark, bool(mean >= best[i] - 1e-12)))
        lines.append((row["label"], line))
    return lines


def comparison(data: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """The ceiling, the paper's rows, and how far ours are from them: a label and a text for each size."""
    paper = data["paper"]
    printed = {name: dict(zip(paper["sizes"], row["accuracy"], strict=True)) for name, row in paper["rows"].items()}
    lines = [("ceiling", [f"{100 * mean:.1f}" for mean in means(data["ceiling"])])]
    for name, label in (("softmax", "the paper's baseline"), ("adaptive", "the paper's adaptive")):
        lines.append((label, [_or_dash(printed[name].get(n), "{:.1%}").rstrip("%") for n in data["sizes"]]))
    for name in ("softmax", "adaptive"):
        points = paper["distance_points"][name]
        lines.append((f"{name}, ours - the paper's", [_or_dash(value, "{:+.1f}") for value in points]))
    return lines


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def markdown(data: Mapping[str, Any]) -> str:
    """The table, the p-values and how they were made, as Markdown."""
    sizes = [f"{n:,}" for n in data["sizes"]]
    lines = [
        f"# Table 1: max retrieval, protocol `{data['name']}`",
        "",
        data["caption"],
        "",
        f"Accuracy in %; bold: the best policy at this size; \\{ABOVE} above and {BELOW} below softmax with "
        f"p < {SIGNIFICANT:g}. The paper's rows are those it prints; the last two lines are in points.",
        "",
        *_head("", sizes),
    ]
    for label, line in cells(data):
        texts = [(f"**{text}**" if best else text) + mark.replace("*", r"\*") for text, mark, best in line]
        lines.append(_line(label, texts))
    lines += [_line(f"*{label}*", line) for label, line in comparison(data)]
    lines += ["", "Paired t-test against softmax, p-values:", "", *_head("", sizes)]
    for name, row in data["rows"].items():
        if name != "softmax":
            lines.append(_line(row["label"], [_or_dash(p, "{:.2g}") for p in row["p_value"]]))
    published = dict(zip(data["paper"]["sizes"], data["paper"]["p_value"], strict=True))
    lines.append(_line("*the paper's adaptive*", [_or_dash(published.get(n), "{:.2g}") for n in data["sizes"]]))
    return "\n".join([*lines, "", *_fit_lines(data["fit"]), ""])


def _fit_lines(fit: Mapping[str, Any]) -> list[str]:
    total = sum(counts["total"] for counts in fit["counts"].values())
    terms = ", ".join(f"{c:.6g}" for c in fit["coefficients"])
    domain = "" if fit["domain"] is None else " on entropies {:.3f} to {:.3f}".format(*fit["domain"])
    return [
        f"The refitted polynomial (Appendix F) has the coefficients {terms}, highest power first{domain}. It was "
        f"fitted on {fit['kept']:,} of {total:,} validation sets of {', '.join(f'{n:,}' for n in fit['sizes'])} items; "
        "in the others the true maximum has the largest logit already, or no finite temperature is best. Beyond that "
        "range it is extrapolated, as in the paper; range-safe, it holds its value.",
        *(f"Note: {note}." for note in fit["notes"]),
    ]


def _head(first: str, columns: Sequence[str]) -> list[str]:
    return [_line(first, columns), _line(":--", ["--:"] * len(columns))]


def _line(first: str, others: Sequence[str]) -> str:
    return f"| {' | '.join([first, *others])} |"


def rich_table(data: Mapping[str, Any]) -> Table:
    """The table for the terminal."""
    title = (
        f"Max retrieval, protocol {data['name']}: accuracy in %, {len(data['seeds'])} seeds, {data['sets']:,} sets "
        f"each\n{ABOVE} above and {BELOW} below softmax with p < {SIGNIFICANT:g}"
    )
    table = Table(title=title, padding=(0, 1, 0, 0))
    table.add_column("")
    for n in data["sizes"]:
        table.add_column(f"{n:,}", justify="right", no_wrap=True)
    lines = cells(data)
    for i, (label, line) in enumerate(lines):
        texts = [f"[bold]{text}{mark}[/bold]" if best else text + mark for text, mark, best in line]
        table.add_row(label, *texts, end_section=i == len(lines) - 1)
    for label, line in comparison(data):
        table.add_row(label, *line)
    return table


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    """(a) accuracy against n; (b) what each policy adds to softmax. Bands: see :data:`BANDS`."""
    left, right = figure.subplots(1, 2, sharex=True)
    sizes = np.asarray(data["sizes"])
    order = np.argsort(sizes)
    n, softmax = sizes[order], np.asarray(data["rows"]["softmax"]["accuracy"])[order]
    alone: dict[str, Any] = {"marker": "_"} if len(n) == 1 else {}  # one size makes no line
    ceiling: dict[str, Any] = {"color": GREY, "linestyle": (0, (1, 1.2)), "zorder": 2.5, "label": "ceiling"}
    for name, row in data["rows"].items():
        color, dashes = STYLES[name]
        accuracy = np.asarray(row["accuracy"])[order]
        panels = [(left, accuracy)] if name == "softmax" else [(left, accuracy), (right, accuracy - softmax)]
        for axis, values in panels:
            middle, band = 100 * means(values), 100 * deviations(values)
            if name in BANDS:
                top = np.minimum(middle + band, 100)
                axis.fill_between(n, middle - band, top, color=color, alpha=0.13, linewidth=0)
            axis.plot(n, middle, color=color, linestyle=dashes, label=LABELS.get(name, row["label"]), **alone)
    left.plot(n, 100 * means(data["ceiling"])[order], **ceiling, **alone)
    paper = data["paper"]
    shown = [i for i, size in enumerate(paper["sizes"]) if n[0] <= size <= n[-1]]
    at = np.asarray(paper["sizes"])[shown]
    printed = {name: 100 * np.asarray(row["accuracy"])[shown] for name, row in paper["rows"].items()}
    for name, (marker, color) in MARKERS.items():
        style: dict[str, Any] = {"linestyle": "", "marker": marker, "markersize": 3.5, "color": color}
        style |= {"markerfacecolor": "white", "markeredgewidth": 0.8, "zorder": 3}
        left.plot(at, printed[name], label=f"the paper's {'baseline' if name == 'softmax' else name}", **style)
        if name == "adaptive":
            right.plot(at, printed[name] - printed["softmax"], **style)
    right.axhline(0, color=INK, linewidth=0.8)
    left.set_title("(a)  accuracy", loc="left", pad=4)
    left.set_ylabel("sets classified right (%)")
    left.set_ylim(0, 102)
    right.set_title("(b)  accuracy above softmax's, seed by seed", loc="left", pad=4)
    right.set_ylabel("points above softmax")
    for axis in (left, right):
        axis.set_xlabel(r"number of items $n$")
        axis.set_xscale("log", base=2)
        axis.set_xticks(n[:: max(1, -(-len(n) // 6))])
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.minorticks_off()
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
