"""How the paper's exhibits look and are written: one style, one palette, files that come out whole."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.files import write_bytes, write_text
from ..provenance import provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.25, 6.75
"""Widths in inches of one column and of the whole page, as in the paper."""

BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7"
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""

INK, GREY = "#222222", "#7A7A7A"

HEAT = "cividis"
"""The colour map of heat maps: even in lightness, and the same to colour-blind readers."""

STYLE: Any = {
    "font.family": "STIXGeneral",  # comes with matplotlib, so figures are the same everywhere
    "mathtext.fontset": "stix",
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.labelspacing": 0.35,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "lines.linewidth": 1.3,
    "lines.solid_capstyle": "round",
    "hatch.linewidth": 0.4,
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "pdf.fonttype": 42,  # text stays text
    "savefig.dpi": 200,
}

NO_DATES: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""Metadata left out, so that the same data gives the same bytes."""

Draw = Callable[["Figure", Mapping[str, Any]], None]


def save_exhibit(out: Path, name: str, data: Mapping[str, Any], draw: Draw, size: tuple[float, float]) -> list[Path]:
    """Write ``name``.png, .pdf and .json into ``out`` and return their paths.

    ``draw`` puts ``data`` on an empty figure of ``size`` inches; it sees nothing else, so the JSON, which holds the
    data and its provenance, has all that is in the picture. The user's matplotlib settings are not read or changed.
    """
    pictures = render(data, draw, size)
    for suffix, content in pictures.items():
        write_bytes(out / f"{name}.{suffix}", content)
    write_text(out / f"{name}.json", to_json({"exhibit": name, **data, "provenance": provenance()}))
    return [out / f"{name}.{suffix}" for suffix in (*pictures, "json")]


def render(data: Mapping[str, Any], draw: Draw, size: tuple[float, float]) -> dict[str, bytes]:
    """The picture of ``data``, as PNG and as PDF."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot: no window, no global figure, no choice of backend

    pictures = {}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=size)
        draw(figure, data)
        for suffix, metadata in NO_DATES.items():
            buffer = io.BytesIO()
            figure.savefig(buffer, format=suffix, metadata=metadata)
            pictures[suffix] = buffer.getvalue()
    return pictures


def numbers(values: Any, digits: int = 6) -> Any:
    """``values`` as (nested) lists of floats of ``digits`` significant digits, for JSON."""
    if isinstance(values, np.ndarray | list | tuple):
        return [numbers(v, digits) for v in values]
    return float(f"{float(values):.{digits}g}")


def to_json(value: Any, indent: str = "") -> str:
    """``value`` as JSON that a person can read: dictionaries take a line for each entry, rows of numbers one line."""
    deeper = indent + "  "
    if isinstance(value, Mapping) and value:
        parts = [f"{json.dumps(str(key))}: {to_json(entry, deeper)}" for key, entry in value.items()]
        text = "{\n" + ",\n".join(deeper + part for part in parts) + f"\n{indent}}}"
    elif isinstance(value, list | tuple) and any(isinstance(entry, list | tuple | Mapping) for entry in value):
        text = "[\n" + ",\n".join(deeper + to_json(entry, deeper) for entry in value) + f"\n{indent}]"
    else:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    return text if indent else text + "\n"
