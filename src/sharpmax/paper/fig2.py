"""Figure 2: the attention coefficients of one trained head, dispersing as the number of items doubles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..inputs import user_input
from . import heatmaps
from .figures import PAGE, save_exhibit
from .max_retrieval import Heads, file_name, find_heads

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTION = (
    "Attention coefficients of one head trained on max retrieval for {steps:,} steps with sets of {smallest} to "
    "{largest} items (protocol {name}, seed {seed}). Each panel has {sets} evaluation sets of n items, one a row, and "
    "of every set the {shown} items with the largest priority, in ascending order: the rightmost column (marked) is "
    "the true maximum, on which a head that works puts its attention. The number below a panel is the mean coefficient "
    "there: {first:.1%} at n = {n_first:,}, {last:.1%} at n = {n_last:,}. One colour scale for all panels; colours "
    "follow the square root of a coefficient."
)


def data(heads: Heads, seed: int | None = None, **options: Any) -> dict[str, Any]:
    """The panels of one head; ``options`` are those of :func:`heatmaps.data`."""
    maps = heatmaps.data(heads, seed, {"softmax": heatmaps.SOFTMAX}, **options)
    on_maximum, sizes = maps["rows"]["softmax"]["on_maximum"], heads.checkpoint.protocol.sizes
    caption = CAPTION.format(
        smallest=sizes[0],
        largest=sizes[1],
        steps=heads.checkpoint.step,
        name=maps["name"],
        seed=maps["seed"],
        sets=maps["sets"],
        shown=heatmaps.SHOWN,
        first=on_maximum[0],
        last=on_maximum[-1],
        n_first=maps["sizes"][0],
        n_last=maps["sizes"][-1],
    )
    return {"caption": caption, **maps}


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    """One row of heat maps."""
    heatmaps.draw(figure, data, {"softmax": f"{data['sets']} sets"})


def run(out: Path, protocol: str | None = None, checkpoint: Path | None = None, seed: int | None = None) -> list[Path]:
    """Write fig2.png, fig2.pdf and fig2.json into ``out``; for another protocol than ``paper``, fig2_NAME.

    Args:
      out: folder for the files.
      protocol: a preset or a protocol file; ``paper`` unless the checkpoint is of another.
      checkpoint: folder of the heads, if not the shipped ones.
      seed: whose head to show; by default the first.
    """
    with user_input():
        heads = find_heads(protocol, checkpoint)
        heatmaps.head_of(heads, seed)
    return save_exhibit(out, file_name("fig2", heads), data(heads, seed), draw, (PAGE, 1.6))
