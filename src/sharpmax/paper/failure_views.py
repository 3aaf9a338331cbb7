"""The picture and the words of the failure exhibit; all of it is in the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .figures import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DASHED, DOTTED = (0, (4, 2)), (0, (1, 1.2))
STYLES: dict[str, tuple[str, str]] = {
    "softmax": (INK, "softmax"),
    "adaptive": (VERMILION, "adaptive, PAPER"),
    "adaptive_held": (BLUE, "adaptive, PAPER_HELD"),
    "log_n": (GREEN, r"$\log n / \log 16$"),
    "constant_4": (ORANGE, r"constant $\beta = 4$"),
    "hard": (PURPLE, r"hard ($\theta = 0$)"),
}
ARRANGEMENTS: dict[str, tuple[str, Any, str]] = {
    "gpt_last_residual": (VERMILION, DASHED, r"GPT, $(b, \ldots, b, a)$, residuals"),
    "gpt_first": (SKY, "-", r"GPT, $(a, b, \ldots, b)$"),
    "bert": (INK, "-", r"BERT, $\{a, b, \ldots, b\}$"),
    "bert_residual": (INK, DASHED, "BERT, residuals"),
    "gpt_last": (VERMILION, "-", r"GPT, $(b, \ldots, b, a)$"),
}
DTYPE_COLORS = {"bfloat16": GREY, "float32": INK}

CAPTION = (
    "Corollary B.1 on {seeds} trained heads (protocol {name}, {steps:,} steps): sets of one item a with priority "
    "{top:g} and n - 1 equal items b of another class, with a priority lower by the gap, for all {pairs} ordered pairs "
    "of classes. All b are alike, so everything follows from two logits and n, in closed form and float64, up to n = "
    "1e{digits}. In {plain:,} of {cases:,} cases a head answers with a's class while a's coefficient is above one "
    "value, {errs_below}, and not below it. {others}With softmax it errs before that coefficient is lost beside 1 in "
    "float32, the n that the corollary gives, in {before:,} of the {either:,} cases where one of both is up to "
    "1e{digits}. (At the machine epsilon of float32 no class score is more than {change:.1g} from that of b alone, "
    "where the smallest margin between the two best classes is {margin:.2g}.) (a) The coefficient for one head and "
    "pair (gap {gap:g}, logits {difference:.2f} apart); a dot marks the first n at which the head errs. Grey: the "
    "decay of Remark B.3, log n / n, from logits that grow apart by log log n; the first n at which it errs is "
    "{slow_errs} (softmax: {soft_errs}), and it is below the machine epsilon of float32 from {slow_epsilon} on "
    "(softmax: {soft_epsilon}). (b) Remark B.2 on {stacks} random stacks of {layers} layers, median and range: how far "
    "the output is from that of a set of b alone. Without residuals it decays as 1/n in a BERT-style stack; in a "
    "causal one with a last, the order the remark looks at, as 1/n^{layers}, since no other token carries anything of "
    "a; with a first as log n / n, since early tokens do. With residuals (dashed) a BERT-style stack read at a token b "
    "forgets a all the same, but a causal one whose last token is a itself keeps it: the remark's last step takes a "
    "read-out that sees a through attention alone. (c) The first n at which each head errs: median over the class "
    "pairs for every seed (dots) and range over pairs and seeds (bars); at the right those that do not up to "
    "1e{digits}, and their share where it is not all; upright marks show from which n a's coefficient is below the "
    "machine epsilon, the corollary's prediction (medians). Dotted: the largest size in training. At the gap {gap:g} "
    "the median of the first n is {medians}. PAPER is plain softmax on rows of more than 5.94 nats, so in the end it "
    "decays as softmax does; PAPER_HELD and a constant have a bounded beta, so at some n they must err too. How the "
    "first n at which a head errs compares with softmax's: {beside}. Where b has the larger logit, a larger beta takes "
    "from a. With log n / log 16 the coefficient of a tends to 1 where the logits differ by more than log 16 = 2.77, "
    "so no n need come at which it errs; where they differ by less it decays too. {again}{misread}Unless logits are "
    "equal, hard attention does not depend on n: it errs from n = 2 on or never, here in {hard} of {cases:,} cases; b "
    "has the larger logit in {larger}."
)


def caption(data: Mapping[str, Any]) -> str:
    """What the figure shows, with the numbers of these heads."""
    example, order, rows = data["example"], data["order"], data["mechanisms"]
    slow, at = example["log_decay"], data["gaps"].index(example["gap"])
    reading = data["reading"]
    below, cases = reading["errs_below"], reading["cases"]
    again = {row["label"]: sum(row["right_again"]) for row in rows.values() if sum(row["right_again"])}
    misread, before = reading["b_alone_is_misread"], rows["softmax"]["errs_before_epsilon"]["float32"]
    words = ", ".join(f"{label}: {count}" for label, count in again.items())
    return CAPTION.format(
        seeds=len(data["seeds"]),
        name=data["name"],
        steps=data["step"],
        top=data["priority_a"],
        pairs=data["class_pairs"],
        digits=round(math.log10(data["largest_n"])),
        plain=reading["plain"],
        others=_others(reading),
        before=before["earlier"],
        either=sum(before.values()) - before["beyond"],
        beside="; ".join(_beside(rows[name]) for name in ("adaptive", "adaptive_held", "constant_4")),
        errs_below=f"{below['median']:.2f} (median; {below['low']:.2g} to {below['high']:.2g})",
        change=data["at_epsilon"]["float32"]["largest_change_of_a_score"],
        margin=data["at_epsilon"]["smallest_margin_of_b_alone"],
        gap=example["gap"],
        difference=example["difference"],
        slow_errs=_count(slow["errs_from"]),
        soft_errs=_count(example["errs_from"]["softmax"]),
        slow_epsilon=_count(slow["epsilon"]["float32"]),
        soft_epsilon=_count(example["epsilon"]["softmax"]["float32"]),
        stacks=order["stacks"],
        layers=order["layers"],
        medians="; ".join(f"{row['label']}: {_count(row['errs_from'][at]['median'])}" for row in rows.values()),
        again=f"Of {cases:,} cases, some that err are right again at a larger n ({words}). " if words else "",
        misread=f"In {misread} cases b alone is misread, the corollary's other way to err. " if misread else "",
        hard=cases - sum(rows["hard"]["not_up_to_largest_n"]),
        cases=cases,
        larger=sum(data["b_has_the_larger_logit"]),
    )


def _others(reading: Mapping[str, int]) -> str:
    """What heads do in the other cases, if there are such."""
    words = {
        "never_changes": "does not change",
        "changes_more_than_once": "changes more than once",
        "the_other_way_round": "changes the other way round",
    }
    found = ", ".join(f"{text} ({reading[key]:,})" for key, text in words.items() if reading[key])
    return f"In the others its answer {found}. " if found else ""


def _beside(row: Mapping[str, Any]) -> str:
    words = "later in {later:,} cases, the same in {same:,}, earlier in {earlier:,} and beyond with both in {beyond:,}"
    return f"{row['label']}: {words.format(**row['beside_softmax'])}"


def _count(n: float | None) -> str:
    return "none" if n is None else f"{n:,.0f}" if n < 1e7 else f"{n:.2g}"


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    """(a) a's coefficient against n; (b) the order of the tokens; (c) where heads err."""
    parts: Any = figure.subfigures(2, 1, height_ratios=[1, 1.32])
    upper, lower = parts
    left, right = upper.subplots(1, 2)
    _draw_example(left, data)
    _draw_order(right, data)
    _draw_failures(lower.subplots(), data)


def _draw_example(axis: Axes, data: Mapping[str, Any]) -> None:
    example = data["example"]
    n = np.asarray(example["n"])
    marks = []
    for name, (color, label) in STYLES.items():
        axis.plot(n, example["coefficient"][name], color=color, label=label)
        marks.append((example["errs_from"][name], example["coefficient"][name], color))
    slow = example["log_decay"]
    axis.plot(n, slow["coefficient"], color=GREY, linestyle=DASHED, label=r"Remark B.3: $\log n / n$")
    marks.append((slow["errs_from"], slow["coefficient"], GREY))
    for first, coefficient, color in marks:
        if first is not None and first <= n[-1]:
            at = math.exp(np.interp(math.log(first), np.log(n), np.log(np.maximum(coefficient, 1e-300))))
            axis.plot([first], [at], "o", color=color, markersize=4, markeredgecolor="white", markeredgewidth=0.6)
    for dtype, epsilon in data["machine_epsilon"].items():
        _name_epsilon(axis, dtype, epsilon)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(n[0], n[-1])
    axis.set_ylim(data["machine_epsilon"]["float32"] / 30, 4)
    axis.set_xlabel(r"number of items $n$")
    axis.set_ylabel(r"coefficient $\alpha_a^{(n)}$")
    axis.set_title(rf"(a)  one head, $e_a - e_b = {example['difference']:.2f}$", loc="left", pad=4)
    axis.legend(loc="lower left", fontsize=6.5, borderaxespad=0.3)


def _name_epsilon(axis: Axes, dtype: str, epsilon: float) -> None:
    """A line at the machine epsilon, with its name at the right edge."""
    axis.axhline(epsilon, color=GREY, linestyle=DOTTED, linewidth=0.8, zorder=0)
    words = rf"$\epsilon_{{\mathrm{{{dtype}}}}}$"
    axis.text(1.015, epsilon, words, color=GREY, fontsize=8, va="center", transform=axis.get_yaxis_transform())


def _draw_order(axis: Axes, data: Mapping[str, Any]) -> None:
    for name, (color, dashes, label) in ARRANGEMENTS.items():
        row = data["order"]["arrangements"][name]
        axis.fill_between(row["n"], row["low"], row["high"], color=color, alpha=0.12, linewidth=0)
        axis.plot(row["n"], row["median"], color=color, linestyle=dashes, label=label)
    epsilon = data["machine_epsilon"]["float32"]
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(2, 1e9)
    axis.set_ylim(epsilon / 30, 4)
    _name_epsilon(axis, "float32", epsilon)
    axis.set_xlabel(r"number of tokens $n$")
    axis.set_ylabel(r"distance from $\{b, \ldots, b\}$")
    axis.set_title("(b)  Remark B.2: random stacks", loc="left", pad=4)
    axis.legend(loc="upper right", fontsize=6.5, borderaxespad=0.3, bbox_to_anchor=(1.0, 0.9))


def _draw_failures(axis: Axes, data: Mapping[str, Any]) -> None:
    """Positions are log10 n on a logarithmic axis; a column at the right is for what does not err up to the largest."""
    from matplotlib import colormaps

    gaps, most = data["gaps"], math.log10(data["largest_n"])
    colors = [colormaps["viridis"](0.9 * i / max(len(gaps) - 1, 1)) for i in range(len(gaps))]
    never = 1.6 * most
    step, cases = 0.84 / len(gaps), len(data["seeds"]) * data["class_pairs"]

    def place(n: float | None) -> float:
        return never if n is None else math.log10(n)

    for i, name in enumerate(STYLES):
        row = data["mechanisms"][name]
        for g, gap in enumerate(gaps):
            y = i + (g - (len(gaps) - 1) / 2) * step
            low, high = (place(row["errs_from"][g][end]) for end in ("low", "high"))
            axis.plot([low, high], [y, y], color=colors[g], linewidth=2.2, alpha=0.3, solid_capstyle="butt")
            dots = [place(of_seed["median"]) for of_seed in row["errs_from_by_seed"][g]]
            label = f"gap {gap:g}" if i == 0 else None
            axis.plot(dots, [y] * len(dots), "o", color=colors[g], markersize=2.8, markeredgewidth=0, label=label)
            for dtype, color in DTYPE_COLORS.items():
                if (n := row["epsilon"][dtype][g]["median"]) is not None:
                    axis.plot([place(n)], [y], "|", color=color, markersize=4.5, markeredgewidth=1.0)
            if 0 < row["not_up_to_largest_n"][g] < cases:
                words = f"{row['not_up_to_largest_n'][g] / cases:.0%}"
                axis.text((1.1, 1.4)[g % 2] * never, y, words, fontsize=6, va="center_baseline")
        if i:
            axis.axhline(i - 0.5, color=GREY, linewidth=0.4, alpha=0.6)
    for dtype, color in DTYPE_COLORS.items():
        axis.plot([], [], "|", color=color, markersize=5, markeredgewidth=1.0, label=rf"$\alpha_a < \epsilon$, {dtype}")
    axis.axvspan(1.15 * most, 4 * most, color=GREY, alpha=0.1, linewidth=0)
    axis.axvline(math.log10(data["trained_up_to"]), color=GREY, linestyle=DOTTED, linewidth=0.8, zorder=0)
    axis.set_xscale("log")
    axis.set_xlim(0.26, 3 * most)
    ticks = [k for k in (1, 2, 4, 8, 16, 32, 64, 100) if k <= most]
    trained = data["trained_up_to"]
    positions = [math.log10(2), math.log10(4), math.log10(trained), *ticks[1:], never]
    axis.set_xticks(positions, ["2", "4", f"{trained}", *(f"$10^{{{k}}}$" for k in ticks[1:]), "beyond"])
    axis.minorticks_off()
    axis.set_ylim(len(STYLES) - 0.5, -0.5)
    axis.set_yticks(range(len(STYLES)), [label for _, label in STYLES.values()])
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel(r"number of items $n$ ($\log \log n$ scale)")
    axis.set_title(r"(c)  the first $n$ at which $\{a, b, \ldots, b\}$ is misread", loc="left", pad=4)
    handles, labels = axis.get_legend_handles_labels()
    figure = axis.figure
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), columnspacing=1.1, handletextpad=0.3)
