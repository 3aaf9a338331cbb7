"""A tidy table: one row for each input, layer and head; pandas and Arrow where they are installed."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.files import write_text
from ..extras import require

INFINITE = "inf"
LONGEST = 1e300
"""Lengths beyond this are not written out."""


class Table:
    """Rows that are plain dictionaries with the same keys; numbers that are not known are ``None``."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = [dict(row) for row in rows]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dictionary for each row."""
        return self._rows

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self.rows[0]) if self.rows else []

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def where(self, **values: Any) -> Table:
        """The rows whose columns have these values, as in ``table.where(layer=0, head=3)``."""
        if self.rows and (unknown := sorted(set(values) - set(self.columns))):
            raise ValueError(f"there is no column {', '.join(unknown)}; the columns are {', '.join(self.columns)}")
        return Table([row for row in self.rows if all(row[name] == value for name, value in values.items())])

    def column(self, name: str) -> list[Any]:
        """One column, from the first row to the last."""
        return [row[name] for row in self.rows]

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame``."""
        return require("pandas", "diagnostics", "to_pandas").DataFrame(self.rows)

    def to_arrow(self) -> Any:
        """A ``pyarrow.Table``."""
        return require("pyarrow", "diagnostics", "to_arrow").Table.from_pylist(_narrow(self.rows))

    def to_csv(self, path: str | Path | None = None) -> str:
        """The table as CSV with a heading; written to ``path`` too, if one is given."""
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return _given(buffer.getvalue(), path)

    def to_json(self, path: str | Path | None = None) -> str:
        """The table as a JSON list of objects, ``"inf"`` for infinity; written to ``path`` too, if one is given."""
        rows = ({name: as_json(value) for name, value in row.items()} for row in self.rows)
        lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
        return _given(f"[\n{lines}\n]\n", path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows: {', '.join(self.columns)})"


def _narrow(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows whose whole numbers fit into 64 bits: larger ones, which Arrow does not take, become floats."""
    large = {key for row in rows for key, v in row.items() if isinstance(v, int) and abs(v) >= 1 << 63}
    return [{k: float(v) if k in large and v is not None else v for k, v in row.items()} for row in rows]


def _given(text: str, path: str | Path | None) -> str:
    if path is not None:
        write_text(path, text)
    return text


def table_of(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table from rows in JSON."""
    return Table([{name: from_json(value) for name, value in zip(columns, row, strict=True)} for row in rows])


def as_json(value: Any) -> Any:
    """A value of a table for JSON, which has no infinite numbers: ``"inf"`` for one."""
    return INFINITE if value == math.inf else value


def from_json(value: Any) -> Any:
    """The value that :func:`as_json` wrote."""
    return math.inf if value == INFINITE else value


def rounded(name: str, value: float, digits: int = 7) -> float | None:
    """:func:`number` for a column: beta alone may be infinite, under a policy that takes the largest logit."""
    return math.inf if value == math.inf and name.startswith("beta") else number(value, digits)


def number(value: float, digits: int = 7) -> float | None:
    """``value`` for a table, with ``digits`` significant digits; ``None`` for what is not a finite number."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
