"""Figure 7: the same head and sets as in Figure 2, without and with adaptive temperature."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.policies import PAPER
from ..inputs import user_input
from . import heatmaps
from .figures import PAGE, save_exhibit
from .max_retrieval import Heads, file_name, find_heads

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICIES = {"softmax": heatmaps.SOFTMAX, "adaptive": PAPER}
LABELS = {"softmax": "softmax", "adaptive": "adaptive temperature"}

CAPTION = (
    "The head and the sets of Figure 2 (protocol {name}, {steps:,} steps, seed {seed}, {sets} sets a panel), with "
    "softmax above and with the paper's adaptive temperature below; the logits are the same. Columns are the {shown} "
    "items with the largest priority, in ascending order: the rightmost (marked) is the true maximum, and the number "
    "below a panel is the mean coefficient there. At n = {n:,} it is {softmax:.1%} with softmax and {adaptive:.1%} "
    "with adaptive temperature, and the mean entropy of the coefficients is {h_softmax:.2f} and {h_adaptive:.2f} nats; "
    "the true maximum has the largest logit in {found:.0%} of these sets. One colour scale for all panels; colours "
    "follow the square root of a coefficient."
)


def data(heads: Heads, seed: int | None = None, **options: Any) -> dict[str, Any]:
    """Both rows of panels of one head; ``options`` are those of :func:`heatmaps.data`."""
    maps = heatmaps.data(heads, seed, POLICIES, **options)
    last = {name: {key: row[key][-1] for key in ("on_maximum", "entropy")} for name, row in maps["rows"].items()}
    caption = CAPTION.format(
        sets=maps["sets"],
        name=maps["name"],
        steps=heads.checkpoint.step,
        seed=maps["seed"],
        shown=heatmaps.SHOWN,
        n=maps["sizes"][-1],
        found=maps["maximum_has_largest_logit"][-1],
        **{name: values["on_maximum"] for name, values in last.items()},
        **{f"h_{name}": values["entropy"] for name, values in last.items()},
    )
    return {"caption": caption, **maps}


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    """Two rows of heat maps, softmax above."""
    heatmaps.draw(figure, data, LABELS)


def run(out: Path, protocol: str | None = None, checkpoint: Path | None = None, seed: int | None = None) -> list[Path]:
    """Write fig7.png, fig7.pdf and fig7.json into ``out``; for another protocol than ``paper``, fig7_NAME.

    Args:
      out: folder for the files.
      protocol: a preset or a protocol file; ``paper`` unless the checkpoint is of another.
      checkpoint: folder of the heads, if not the shipped ones.
      seed: whose head to show; by default the first.
    """
    with user_input():
        heads = find_heads(protocol, checkpoint)
        heatmaps.head_of(heads, seed)
    return save_exhibit(out, file_name("fig7", heads), data(heads, seed), draw, (PAGE, 2.9))
