"""The logit spreads of section 2, "Practical values of delta": real models on a source file of about 4,000 tokens.

The paper took Gemma's modules file. Here the text is a file of this repository as it was at one commit, kept beside
this module so that it never changes.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.files import write_text
from ..inputs import user_input
from .fig3 import MODELS, chosen_models, exhibit_name, load_model
from .figures import BLUE, GREY, ORANGE, PAGE, VERMILION, numbers, save_exhibit
from .published import GEMMA_SPREADS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE = Path(__file__).with_name("spread_table_source.txt")
SOURCE_PATH = "src/sharpmax/torch/decode.py"
SOURCE_COMMIT = "d878206f1994dd1808438ec2e0c1d5ce170a0785"
"""Where the text comes from."""

READINGS = {
    "spread_last": "last token's row",
    "spread_mean": "average row",
    "spread_max": "row with the largest",
}
"""The paper does not say which of a head's rows it took: all three are given."""

COLUMNS: tuple[str, ...] = ("model", "reading", "min", "max", "average", "deviation", "heads", "tokens")
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
CAPTION = (
    "Logit spread, max - min of a row's logits, of every attention head of {models} on {path} of this repository at "
    "commit {commit} ({tokens} tokens); one dot a head. Which of a head's rows the paper took is not said, so three "
    "readings are given. The paper's own numbers, for Gemma 2B and 7B on another file of about 4,000 tokens, are drawn "
    "beside them as printed: average with deviation, and the range. {found}"
)


def data(models: Sequence[str]) -> dict[str, Any]:
    """Spreads by model and reading, next to the paper's."""
    text = SOURCE.read_text(encoding="utf-8")
    found = [_model(name, text) for name in models]
    sentences = []
    for model in found:
        last = model["readings"]["spread_last"]
        sentences.append(
            f"{model['model']}: {last['min']:.2f} to {last['max']:.2f}, average {last['average']:.2f} ± "
            f"{last['deviation']:.2f} at the last token."
        )
    caption = CAPTION.format(
        models=" and ".join(m["model"] for m in found),
        path=SOURCE_PATH,
        commit=SOURCE_COMMIT[:12],
        tokens=" and ".join(f"{m['tokens']:,}" for m in found),
        found=" ".join(sentences + _cuts(found)),
    )
    return {
        "caption": caption,
        "source": {
            "path": SOURCE_PATH,
            "commit": SOURCE_COMMIT,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        },
        "readings": READINGS,
        "models": found,
        "paper": [spread._asdict() for spread in GEMMA_SPREADS],
    }


def _cuts(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each model that was given a part of the text."""
    return [
        f"{m['model']} has learned positions for {m['tokens']:,} tokens, and was given the first of {m['cut_from']:,}."
        for m in models
        if "cut_from" in m
    ]


def _model(name: str, text: str) -> dict[str, Any]:
    from ..diagnostics import diagnose
    from ..diagnostics.positions import learned_positions
    from ..diagnostics.progress import progress_bars
    from ..diagnostics.report.findings import spread_of
    from ..diagnostics.sources import Prefixes

    model, tokenizer = load_model(name)
    source = Prefixes([text], SOURCE_PATH)
    tokens = len(source.tokens(tokenizer)[0])
    length = min(tokens, learned_positions(model) or tokens)
    with progress_bars({length: 1}, lambda n: f"{Path(name).name}, {n:,} tokens") as show, user_input():
        table = diagnose(model, tokenizer, source, [length], name=name, progress=show).table
    readings = {}
    for reading in READINGS:
        values = table.column(reading)
        lowest, highest, average, deviation = spread_of(values)
        readings[reading] = {
            "min": round(lowest, 4),
            "max": round(highest, 4),
            "average": round(average, 4),
            "deviation": round(deviation, 4),
            "heads": numbers(values, 5),
        }
    found = {"model": Path(name).name, "tokens": length, "heads": len(table), "readings": readings}
    return found if length == tokens else {**found, "cut_from": tokens}


def rows(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The table: ours, then the paper's."""
    made = [
        {
            "model": model["model"],
            "reading": data["readings"][reading],
            **{key: f"{found[key]:.2f}" for key in ("min", "max", "average", "deviation")},
            "heads": model["heads"],
            "tokens": model["tokens"],
        }
        for model in data["models"]
        for reading, found in model["readings"].items()
    ]
    return made + [
        {
            "model": f"{p['model']} (the paper's)",
            "reading": "not said",
            "min": f"{p['lowest']:.2f}",
            "max": f"{p['highest']:.2f}",
            "average": f"{p['average']:.2f}",
            "deviation": f"{p['deviation']:.2f}",
            "heads": "",
            "tokens": "about 4,000",
        }
        for p in data["paper"]
    ]


def markdown(data: Mapping[str, Any]) -> str:
    """The table in the paper's form: min, max, average ± deviation."""
    lines = ["| model | delta of a head | min | max | average ± deviation | tokens |", "|---|---|---|---|---|---|"]
    for row in rows(data):
        spread = f"{row['average']} ± {row['deviation']}"
        tokens = f"{row['tokens']:,}" if isinstance(row["tokens"], int) else row["tokens"]
        lines.append(f"| {row['model']} | {row['reading']} | {row['min']} | {row['max']} | {spread} | {tokens} |")
    return "\n".join([*lines, *(f"\n{sentence}" for sentence in _cuts(data["models"]))]) + "\n"


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    """Every head as a dot, the mean with the deviation beside it; the paper's numbers on the right."""
    axis = figure.subplots()
    place, labels = 0.0, []
    colours = dict(zip(data["readings"], (BLUE, VERMILION, ORANGE), strict=True))
    for model in data["models"]:
        for reading, found in model["readings"].items():
            count = len(found["heads"])
            across = [place + 0.5 * ((i * 0.618034) % 1 - 0.5) for i in range(count)]
            axis.scatter(across, found["heads"], s=4, color=colours[reading], alpha=0.45, linewidths=0)
            axis.errorbar(place + 0.36, found["average"], found["deviation"], fmt="o", color="black", ms=3, capsize=2)
            labels.append((place, data["readings"][reading]))
            place += 1
        middle = place - (len(model["readings"]) + 1) / 2
        axis.text(middle, 150, model["model"], ha="center", va="top", parse_math=False)
        place += 0.3
    for paper in data["paper"]:
        axis.vlines(place, paper["lowest"], paper["highest"], color=GREY, linewidth=4, alpha=0.35)
        axis.errorbar(place, paper["average"], paper["deviation"], fmt="o", color="black", ms=3, capsize=2)
        labels.append((place, paper["model"]))
        place += 1
    axis.text(place - (len(data["paper"]) + 1) / 2, 150, "the paper's, as printed", ha="center", va="top")
    axis.set_xticks(
        [x for x, _ in labels], [text.replace(" row", "\nrow").replace("row ", "row\n") for _, text in labels]
    )
    axis.set_yscale("log")
    axis.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axis.minorticks_off()
    axis.set_ylabel(r"logit spread $\delta$")
    axis.set_ylim(0.07, 180)


def run(out: Path, model: Sequence[str] | None = None) -> list[Path]:
    """Write spread_table.png, .pdf, .json, .csv and .md into ``out``; for models asked for, spread_table_NAME.

    Args:
      out: folder for the files.
      model: packaged names, folders or names on the hub, by default the two that install from PyPI,
        where they are installed.
    """
    with user_input():
        models = chosen_models(model, MODELS)
    content = data(models)
    name = exhibit_name("spread_table", model)
    paths = save_exhibit(out, name, content, draw, (PAGE, 3.0))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(content))
    write_text(out / f"{name}.csv", buffer.getvalue())
    write_text(out / f"{name}.md", markdown(content))
    return [*paths, out / f"{name}.csv", out / f"{name}.md"]
