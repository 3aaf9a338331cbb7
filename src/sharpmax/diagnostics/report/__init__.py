"""The report of a diagnosis: one page that needs no other file, and the same as PNG, JSON and CSV."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.files import write_bytes, write_text
from ...extras import require
from ..table import table_of
from .page import page


def write(out: Path, data: Mapping[str, Any]) -> list[Path]:
    """Write the report's files into the folder ``out`` and return their paths."""
    require("matplotlib", "experiments", "Drawing figures")
    from .pictures import png

    table = table_of(data["columns"], data["rows"])
    paths = [out / name for name in ("report.html", "diagnosis.png", "diagnosis.csv", "diagnosis.json")]
    write_text(paths[0], page(data))
    write_bytes(paths[1], png(data))
    table.to_csv(paths[2])
    write_text(paths[3], to_json(data))
    return paths


def to_json(data: Mapping[str, Any]) -> str:
    """``data`` as JSON with a line for each row."""
    lines = []
    for key, value in data.items():
        rows = isinstance(value, list) and value and isinstance(value[0], list | dict)
        text = "[\n" + ",\n".join(_dump(row) for row in value) + "\n]" if rows else _dump(value)
        lines.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)
