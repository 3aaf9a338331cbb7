"""The report: every exhibit in a folder on one page, ``index.html``, that needs no other file and no network."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ...core.files import write_text
from ...inputs import InputError
from .. import EXHIBITS
from .page import Made, Missing, Part, page, part

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
TABLE = "table1"
PLAIN = "paper"
"""The protocol whose files have the plain name of the exhibit."""

SUFFIXES = ("pdf", "png", "json", "csv", "md")


def write(out: Path) -> Path:
    """Write ``index.html`` from the exhibits in the folder ``out`` and return its path.

    They come in the order of :data:`EXHIBITS`. An exhibit's file that is damaged raises :class:`InputError`; files that
    no exhibit writes are left alone.
    """
    of_exhibits = (path for path in out.glob("*.json") if named(path.stem).exhibit in EXHIBITS)
    made = sorted((_read(path) for path in of_exhibits), key=_order)
    parts = [_part(out, exhibit) for exhibit in made]
    path = out / "index.html"
    write_text(path, page(parts, missing(exhibit.name for exhibit in made)))
    return path


class Named(NamedTuple):
    """A file name taken apart: ``table1_sharp`` is the exhibit ``table1`` of the heads ``sharp``."""

    exhibit: str
    heads: str


def named(name: str) -> Named:
    """The exhibit and the heads that ``name`` means; a name that begins with no registered exhibit is taken whole."""
    begins = [exhibit for exhibit in EXHIBITS if name == exhibit or name.startswith(f"{exhibit}_")]
    exhibit = max(begins, key=len, default=name)
    return Named(exhibit, name[len(exhibit) + 1 :])


def _order(made: Made) -> tuple[int, Named]:
    names = named(made.name)
    return list(EXHIBITS).index(names.exhibit), names


def missing(names: Iterable[str]) -> list[Missing]:
    """Registered exhibits that are not among ``names``, each for every protocol that it is about."""
    found = {named(name) for name in names}
    lines = []
    for exhibit in EXHIBITS.values():
        for protocol in exhibit.heads or (PLAIN,):
            wanted = Named(exhibit.name, "" if protocol == PLAIN else protocol)
            if wanted not in found:
                option = f" --protocol {wanted.heads}" if wanted.heads else ""
                made_from = "".join(f" --{name} ..." for name in exhibit.inputs)
                command = f"sharpmax reproduce {exhibit.command}{option} --out .{made_from}"
                lines.append(Missing(_titles(wanted)[0], command))
    return lines


def _titles(name: Named) -> tuple[str, str]:
    """What the description says before its colon, with the heads if there may be several, and what it says after it."""
    exhibit = EXHIBITS[name.exhibit]
    title, _, subtitle = (text.strip() for text in exhibit.description.partition(":"))
    if name.heads or len(exhibit.heads) > 1:
        heads = name.heads or PLAIN
        title = f"{title.rstrip('.')}, {'protocol' if heads in exhibit.heads else 'heads'} {heads}"
    return title.rstrip("."), subtitle[:1].upper() + subtitle[1:]


def _read(path: Path) -> Made:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}); make it again or take it away") from error
    of_exhibit = isinstance(data, dict) and data.get("exhibit") == path.stem
    if not (of_exhibit and isinstance(data.get("caption"), str) and isinstance(data.get("provenance"), dict)):
        raise InputError(f"{path} is not the JSON of an exhibit called {path.stem!r}; make it again or take it away")
    title, subtitle = _titles(named(path.stem))
    return Made(
        name=path.stem,
        title=title,
        subtitle=subtitle,
        data=data,
        picture=_picture(path.with_suffix(".png")),
        files=[f"{path.stem}.{suffix}" for suffix in SUFFIXES if path.with_suffix(f".{suffix}").exists()],
        is_table=named(path.stem).exhibit == TABLE,
    )


def _picture(path: Path) -> bytes | None:
    if not path.exists():
        return None
    content = path.read_bytes()
    if not content.startswith(PNG_SIGNATURE) or len(content) < 24:
        raise InputError(f"{path} is not a PNG picture; make it again or take it away")
    return content


def _part(out: Path, made: Made) -> Part:
    try:
        return part(made)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        path = out / f"{made.name}.json"
        raise InputError(f"{path} lacks something that the report shows ({error!r}); make it again") from error
