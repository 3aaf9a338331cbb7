"""The page: what each exhibit gives to it, and what stands around them. The style stands in page.css."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .runs import Origin, heads_table, origin, runs, shell, training
from .summary import Best, best_at_largest, sentences
from .table import tables
from .tags import escape, tag

PAPER_TITLE = "Softmax is not Enough (for Sharp Size Generalisation)"
PAPER_LINK = "https://arxiv.org/abs/2410.01104"


class Made(NamedTuple):
    """An exhibit that lies in the folder: its JSON, the bytes of its PNG, and the names of its files."""

    name: str
    title: str
    subtitle: str
    data: Mapping[str, Any]
    picture: bytes | None
    files: list[str]
    is_table: bool


class Missing(NamedTuple):
    """An exhibit that does not lie there, and the command that makes it."""

    title: str
    command: str


class Findings(NamedTuple):
    """What a Table 1 gives to the summary and to what was run."""

    sentences: list[str]
    best: Best
    training: dict[str, str]


class Part(NamedTuple):
    """What an exhibit gives to the page."""

    made: Made
    section: str
    origin: Origin
    findings: Findings | None


def part(made: Made) -> Part:
    """The pieces of one exhibit; where its data lacks something, this raises."""
    pieces = [tables(made.data)] if made.is_table else []
    section = _section(made.name, made.title, made.subtitle, *pieces, _figure(made), _files(made))
    findings = None
    if made.is_table:
        findings = Findings(sentences(made.data), best_at_largest(made.data), training(made.data))
    return Part(made, section, origin(made.title, made.data["provenance"]), findings)


def page(parts: Sequence[Part], missing: Sequence[Missing]) -> str:
    """The whole page."""
    contents = [("summary", "In short"), *((p.made.name, p.made.title) for p in parts)]
    contents += [("missing", "Not made")] if missing else []
    contents += [("run", "What was run")] if parts else []
    links = (tag("li", tag("a", escape(title), href=f"#{name}")) for name, title in contents)
    sections = [_header(), _summary(parts), *(p.section for p in parts), _missing(missing), _run(parts)]
    head = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="data:,">',
        tag("title", escape(f"sharpmax: {PAPER_TITLE}, reproduced")),
        tag("style", Path(__file__).with_name("page.css").read_text(encoding="utf-8")),
    ]
    body = [tag("nav", tag("ul", *links), aria_label="Contents"), tag("main", "\n".join(filter(None, sections)))]
    inner = tag("head", "\n".join(head)) + "\n" + tag("body", "\n".join(body))
    return f"<!doctype html>\n{tag('html', inner, lang='en')}\n"


def _section(name: str, title: str, subtitle: str, *content: str) -> str:
    heading = tag("h2", escape(title), id=f"{name}-title")
    below = tag("p", escape(subtitle), class_="subtitle") if subtitle else ""
    return tag("section", heading, below, "\n".join(content), id=name, aria_labelledby=f"{name}-title")


def _header() -> str:
    paper = tag("cite", tag("a", escape(PAPER_TITLE), href=PAPER_LINK))
    text = (
        f"Tables and figures of {paper} by Veličković, Perivolaropoulos, Barbero and Pascanu (ICML 2025), made again "
        "with sharpmax. Every number below, and every sentence of the summary, is computed from the JSON files that "
        "lie beside this page."
    )
    return tag("header", tag("h1", "Softmax is not enough, reproduced"), tag("p", text, class_="standfirst"))


def _summary(parts: Sequence[Part]) -> str:
    found = [(p.made, p.findings) for p in parts if p.findings is not None]
    said = [(made, findings.sentences) for made, findings in found]
    said += [(p.made, p.made.data["findings"]) for p in parts if "findings" in p.made.data]
    blocks, subtitle = [_cards(found)], "Best accuracy of max retrieval, and what comparisons say."
    if not found:
        blocks, subtitle = [tag("p", "Table 1 was not made, so there is nothing to say about max retrieval.")], ""
    for made, lines in said:
        blocks.append(tag("h3", tag("a", escape(made.title), href=f"#{made.name}")))
        blocks.append(tag("ul", *(tag("li", escape(line)) for line in lines), class_="findings"))
    return _section("summary", "In short", subtitle, *blocks)


def _cards(found: Sequence[tuple[Made, Findings]]) -> str:
    """The best accuracy at the largest size, in large digits: the paper's, and that of every table."""
    cards = []
    for made, (_, best, _) in found:
        if best.papers is not None and not cards:
            cards.append(_card("The paper's best row", best.papers, best.size, "as printed", "card papers"))
        policies = " / ".join(best.labels) if len(best.labels) < 3 else f"{len(best.labels)} policies alike"
        cards.append(_card(made.title, best.accuracy, best.size, policies, "card"))
    return tag("div", *cards, class_="cards")


def _card(title: str, accuracy: float, size: int, about: str, kind: str) -> str:
    number = tag("p", f"{accuracy:.1f}{tag('small', '%')}", class_="number")
    where = tag("p", f"at {size:,} items, {escape(about)}", class_="about")
    return tag("div", tag("p", escape(title), class_="what"), number, where, class_=kind)


def _figure(made: Made) -> str:
    caption = re.sub(r"(^|[.;:] )\(([a-h])\) ", r"\1<b>(\2)</b> ", escape(made.data["caption"]))
    if made.picture is None:
        return tag("p", caption) + tag("p", f"Its picture, {escape(made.name)}.png, is not there.", class_="note")
    width, height = (int.from_bytes(made.picture[i : i + 4], "big") for i in (16, 20))  # from the PNG's header
    source = "data:image/png;base64," + base64.b64encode(made.picture).decode("ascii")
    first = escape(re.split(r"(?<=[.!?])\s+(?=[A-Z(])", made.data["caption"])[0])
    image = f'<img src="{source}" width="{width}" height="{height}" alt="{first}">'
    return tag("figure", tag("a", image, href=f"{made.name}.png", class_="plate"), tag("figcaption", caption))


def _files(made: Made) -> str:
    links = (tag("a", escape(file), href=file) for file in made.files)
    return tag("p", "Files: ", " · ".join(links), class_="files")


def _missing(missing: Sequence[Missing]) -> str:
    if not missing:
        return ""
    lines = (tag("li", escape(m.title), ": ", shell(m.command)) for m in missing)
    text = tag("p", "These exhibits are not in the folder. Each command, given in the folder of this page, makes one.")
    return _section("missing", "Not made", "", text, tag("ul", *lines))


def _run(parts: Sequence[Part]) -> str:
    if not parts:
        return ""
    heads = [(p.made.data["name"], p.findings.training, p.made.data["protocol"]) for p in parts if p.findings]
    return _section("run", "What was run", "", runs(p.origin for p in parts), heads_table(heads) if heads else "")
