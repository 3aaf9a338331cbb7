"""What happens to a model that was trained without adaptive temperature when it is switched on (Section 4.2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..extras import require
from ..inputs import parse_numbers, user_input
from ..progress import progress_bar
from .figures import BLUE, GREEN, GREY, INK, PAGE, PURPLE, VERMILION, save_exhibit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODEL = "smollm2-135m-instruct"
COLORS = {"off": INK, "paper": VERMILION, "held": PURPLE, "log_512": BLUE, "log_context": GREEN}
SHARP = "_sharp"
DASHED = (0, (2.5, 1.5))
PANELS = {
    "perplexity": ("perplexity of a text", "perplexity", "tokens"),
    "needle": ("a number in a text", "found, %", "tokens"),
    "maximum": ("the largest of a list", "found, %", "items"),
}

CAPTION = (
    "{model} ({dtype}), not trained with any policy, with each of them switched on: in all heads (solid) and in the "
    "{sharp} of {heads} heads that are sharpest on short prompts and no attention sinks (dashed). (a) Perplexity of "
    "the same {targets} tokens of a text (the reference manual of Python) in each of {segments} places, with more and"
    " more of the text before them. (b) Greedy answers that are right, of {prompts}, to the question for a number "
    "hidden in plain sentences, at evenly spaced depths. (c) The same for Figure 3's prompt after {shots} short "
    "solved examples; the largest item is drawn first, evenly from 1 to 99. The model was trained for {context:,} "
    "tokens; what is longer is extrapolation."
)


def data(results: Mapping[str, Any]) -> dict[str, Any]:
    """The measurement, as :func:`sharpmax.tasks.zero_shot.measure` returns it, with its caption."""
    heads, settings = results["heads"], results["settings"]
    targets = [cell["targets"] for cell in results["cells"] if cell["task"] == "perplexity"]
    caption = CAPTION.format(
        model=results["model"],
        dtype=results["dtype"],
        sharp=sum(map(len, heads["sharp"].values())),
        heads=heads["of"][0] * heads["of"][1],
        targets=max(targets),
        segments=len(next(c for c in results["cells"] if c["task"] == "perplexity")["nll_by_segment"]),
        prompts=settings["prompts"],
        shots=settings["shots"],
        context=results["context"],
    )
    return {"caption": caption, **results}


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    """A panel for each task: size against result, a line for each policy."""
    axes = figure.subplots(1, len(PANELS))
    for axis, letter, (task, (title, label, unit)) in zip(axes, "abc", PANELS.items(), strict=True):
        _panel(axis, data, task)
        axis.set_title(f"({letter})  {title}", loc="left")
        axis.set_ylabel(label)
        axis.set_xlabel(unit)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def _panel(axis: Axes, data: Mapping[str, Any], task: str) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    from ..tasks.zero_shot import value

    cells = {(c["size"], c["policy"]): c for c in data["cells"] if c["task"] == task}
    sizes = sorted({size for size, _ in cells})
    factor = 1 if task == "perplexity" else 100
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [_short(n) for n in sizes])
    axis.minorticks_off()
    axis.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.25)
    if task == "perplexity":
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(NullLocator())
    else:
        axis.set_ylim(-3, 103)
    if task != "maximum" and sizes[-1] > data["context"]:
        axis.axvspan(data["context"], sizes[-1] * 1.25, color=GREY, alpha=0.12, linewidth=0)
    for policy, label in data["policies"].items():
        dashed = policy.endswith(SHARP)
        axis.plot(
            sizes,
            [factor * value(cells[n, policy]) for n in sizes],
            color=COLORS[policy.removesuffix(SHARP)],
            linestyle=DASHED if dashed else "-",
            marker="o",
            markersize=2.2,
            label=label,
        )


def _short(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else f"{n}"


def run(
    out: Path,
    model: str = MODEL,
    lengths: str | None = None,
    items: str | None = None,
    policies: str | None = None,
    prompts: int | None = None,
    dtype: str | None = None,
    quick: bool = False,
) -> list[Path]:
    """Measure a model and write zero_shot_MODEL.png, .pdf, .json and .md into ``out``.

    Cells are kept in OUT/zero_shot: a run that was interrupted goes on from there. Lists are written with commas.
    """
    require("torch", "huggingface", "Measuring a model")
    from ..core.files import write_text
    from ..tasks import zero_shot

    given: dict[str, Any] = {"prompts": prompts}
    with user_input():
        given["lengths"] = None if lengths is None else tuple(parse_numbers(lengths, "lengths"))
        given["items"] = None if items is None else tuple(parse_numbers(items, "items"))
        given["policies"] = None if policies is None else tuple(policies.split(","))
        settings = dataclasses.replace(
            zero_shot.QUICK if quick else zero_shot.Settings(), **{k: v for k, v in given.items() if v is not None}
        )
        subject = zero_shot.find_subject(model, dtype)
        zero_shot.check_cells(subject, settings, out / "zero_shot")
    with progress_bar(subject.name) as show:
        results = zero_shot.measure(subject, settings, out / "zero_shot", show)
    name = f"zero_shot_{subject.name}"
    paths = save_exhibit(out, name, data(results), draw, (PAGE, 2.9))
    write_text(out / f"{name}.md", zero_shot.zero_shot_table(results) + "\n")
    return [*paths, out / f"{name}.md"]
