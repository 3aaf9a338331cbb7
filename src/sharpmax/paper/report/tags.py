"""HTML from Python: elements whose attributes are escaped. Content is HTML already: text goes through ``escape``."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["escape", "grid", "row", "tag"]


def tag(name: str, *content: str, **attributes: str | bool) -> str:
    """An element. ``class_`` is ``class``, other underscores are hyphens; ``True`` is an attribute without a value."""
    words = [name]
    for key, value in attributes.items():
        word = key.rstrip("_").replace("_", "-")
        words.append(word if value is True else f'{word}="{escape(str(value))}"')
    return f"<{' '.join(words)}>{''.join(content)}</{name}>"


def row(label: str, entries: Sequence[str], **attributes: str | bool) -> str:
    """A line of a table, which ``label`` heads; entries that are elements already stay as they are."""
    data = (entry if entry.startswith("<td") else tag("td", entry) for entry in entries)
    return tag("tr", tag("th", label, scope="row"), *data, **attributes)


def grid(columns: Sequence[str], *bodies: str, legend: str, label: str, **attributes: str | bool) -> str:
    """A table with column headings, the first of them that of the rows', and its legend below.

    Where it is wider than the page it scrolls sideways, in a frame that ``label`` names to those who listen.
    """
    head = tag("tr", *(tag("th", column, scope="col") if column else "<td></td>" for column in columns))
    inner = tag("table", tag("thead", head), *bodies, **attributes)
    frame = tag("div", inner, class_="scroll", role="region", tabindex="0", aria_label=label)
    return tag("figure", frame, tag("figcaption", legend, class_="legend"), class_="grid")
