"""What happens to a model that was trained without adaptive temperature when it is switched on (Section 4.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
    "solved examples; the largest item is drawn first, evenly from 1 to 99. Around off, Wilson's 68 % interval of "
    "such a share. The model was trained for {context:,} tokens; what is longer is extrapolation."
)


def data(results: Mapping[str, Any]) -> dict[str, Any]:
    """The measurement, as :func:`sharpmax.tasks.zero_shot.measure` returns it, with its caption."""
    heads, settings = results["heads"], results["settings"]
    caption = CAPTION.format(
        model=results["model"],
        dtype=results["dtype"],
        sharp=sum(map(len, heads["sharp"].values())),
        heads=heads["of"][0] * heads["of"][1],
        targets=results["text"]["targets"],
        segments=results["text"]["segments"],
        prompts=settings["prompts"],
        shots=settings["shots"],
        context=results["context"],
    )
    if results["missing"]:
        caption += f" Not measured: {'; '.join(results['missing'])}."
    return {"caption": caption, **results}


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    """A panel for each task, with the caption's letter for it: size against result, a line for each policy."""
    letters = {task: letter for task, letter in zip(PANELS, "abc", strict=True) if task in data["settings"]["tasks"]}
    axes = figure.subplots(1, len(letters), squeeze=False)[0]
    for axis, (task, letter) in zip(axes, letters.items(), strict=True):
        title, label, unit = PANELS[task]
        _panel(axis, data, task)
        axis.set_title(f"({letter})  {title}", loc="left")
        axis.set_ylabel(label)
        axis.set_xlabel(unit)
    handles = next((handles for axis in axes if (handles := axis.get_legend_handles_labels())[0]), ([], []))
    figure.legend(*handles, loc="outside lower center", ncols=3)


def _panel(axis: Axes, data: Mapping[str, Any], task: str) -> None:
    """What there is of a task; sizes that nothing was measured at are marked."""
    cells = {(c["size"], c["policy"]): c for c in data["cells"] if c["task"] == task}
    asked = data["settings"]["items" if task == "maximum" else "lengths"]
    axis.set_xscale("log", base=2)
    axis.set_xticks(asked, [_short(n) for n in asked])
    axis.minorticks_off()
    axis.set_xlim(asked[0] / 1.25, asked[-1] * 1.25)
    if task != "maximum" and asked[-1] > data["context"]:
        axis.axvspan(data["context"], asked[-1] * 1.25, color=GREY, alpha=0.12, linewidth=0)
    for policy, label in data["policies"].items():
        _line(axis, policy, label, [cells[n, policy] for n in asked if (n, policy) in cells])
    if task == "perplexity":
        _perplexities(axis, list(cells.values()), data["context"])
    else:
        highest = [100 * c["exact"] for c in cells.values()]
        highest += [100 * interval(c["right"], c["prompts"])[1] for c in cells.values() if c["policy"] == "off"]
        axis.set_ylim(-3, 10 * math.ceil(max(highest, default=100) / 10) + 3)
    lacking = [n for n in asked if all(n != size for size, _ in cells)]
    if lacking:
        place, turned = math.sqrt(lacking[0] * lacking[-1]), 90 if cells else 0
        _note(axis, place, "not measured", rotation=turned, color=GREY)


def _note(axis: Axes, size: float, text: str, rotation: float, color: str) -> None:
    """A word in the middle of the panel's height."""
    middle = axis.get_xaxis_transform()
    axis.text(size, 0.5, text, transform=middle, ha="center", va="center", rotation=rotation, color=color)


def _line(axis: Axes, policy: str, label: str, cells: list[Mapping[str, Any]]) -> None:
    """One policy; the model as it is lies wide below the others, with an interval for its shares."""
    from ..tasks.zero_shot import value

    off, sizes = policy == "off", [cell["size"] for cell in cells]
    factor = 1 if not cells or cells[0]["task"] == "perplexity" else 100
    values = [factor * value(cell) for cell in cells]
    axis.plot(
        sizes,
        values,
        color=COLORS[policy.removesuffix(SHARP)],
        linestyle=DASHED if policy.endswith(SHARP) else "-",
        linewidth=3.2 if off else None,
        alpha=0.35 if off else None,
        marker=None if off else "o",
        markersize=2.2,
        label=label,
    )
    if off and factor == 100:
        low, high = zip(*(interval(c["right"], c["prompts"]) for c in cells), strict=True) if cells else ((), ())
        axis.fill_between(sizes, [100 * x for x in low], [100 * x for x in high], color=INK, alpha=0.1, linewidth=0)


def interval(right: int, of: int, deviations: float = 1.0) -> tuple[float, float]:
    """Wilson's interval of a share, which has a width where none or all are right too."""
    share, more = right / of, deviations**2 / of
    middle = (share + more / 2) / (1 + more)
    half = math.sqrt(more * (share * (1 - share) + more / 4)) / (1 + more)
    return middle - half, middle + half


def _perplexities(axis: Axes, cells: list[Mapping[str, Any]], context: int) -> None:
    """A scale for perplexities; where all of those beyond the context are above the others, a note in their place."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())
    within, beyond = ([c["perplexity"] for c in cells if (c["size"] > context) == longer] for longer in (False, True))
    if within and beyond and min(beyond) > 1.15 * max(within):
        axis.set_ylim(min(within) / 1.15, 1.15 * max(within))
        longest = max(cell["size"] for cell in cells)
        _note(axis, longest, f"{min(beyond):,.0f} to {max(beyond):,.0f}", rotation=90, color=INK)


def _short(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else f"{n}"


class Made(NamedTuple):
    """What a run wrote, and what it left to other processes, which write in its place."""

    paths: list[Path]
    left: list[str]


def run(
    out: Path,
    model: str = MODEL,
    lengths: str | None = None,
    items: str | None = None,
    tasks: str | None = None,
    policies: str | None = None,
    prompts: int | None = None,
    dtype: str | None = None,
    quick: bool = False,
    report: bool = False,
) -> Made:
    """Measure a model and write zero_shot_MODEL.png, .pdf, .json and .md into ``out``.

    Cells are kept in OUT/zero_shot: a run that was interrupted goes on from there, and several may share a folder.
    Lists are written with commas. ``report`` measures nothing, and reports on what is there.
    """
    require("torch", "huggingface", "Measuring a model")
    from ..tasks import zero_shot

    folder = out / "zero_shot" / Path(model).name
    if report:
        return Made(_report(out, folder), [])
    with user_input():
        there = zero_shot.load_study(folder)
        settings = zero_shot.settle(
            folder,
            quick,
            lengths=None if lengths is None else tuple(parse_numbers(lengths, "lengths")),
            items=None if items is None else tuple(parse_numbers(items, "items")),
            tasks=None if tasks is None else tuple(tasks.split(",")),
            policies=None if policies is None else tuple(policies.split(",")),
            prompts=prompts,
        )
        subject = zero_shot.find_subject(model, dtype or (there.dtype if there else None))
        zero_shot.prepare(subject, settings, out / "zero_shot")
    with progress_bar(subject.name) as show:
        left = zero_shot.measure(subject, settings, out / "zero_shot", show)
    return Made([] if left else _report(out, folder), list(map(str, left)))


def _report(out: Path, folder: Path) -> list[Path]:
    from ..core.files import write_text
    from ..tasks import zero_shot

    with user_input():
        results = zero_shot.collect(folder)
    name = f"zero_shot_{folder.name}"
    paths = save_exhibit(out, name, data(results), draw, (PAGE, 2.9))
    write_text(out / f"{name}.md", zero_shot.zero_shot_table(results) + "\n")
    return [*paths, out / f"{name}.md"]
