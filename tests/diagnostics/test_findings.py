"""What a diagnosis says in words, on the page and in the terminal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sharpmax.diagnostics import Diagnosis, diagnose
from sharpmax.diagnostics.report.findings import Heads, counted, fastest, long, sentences, sharpest, theorem
from sharpmax.diagnostics.report.page import page
from sharpmax.diagnostics.report.pictures import png
from sharpmax.diagnostics.sources import MaximumPrompts, Prefixes
from tests.diagnostics.models import Characters, build


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return diagnose(build("gemma2"), Characters(), MaximumPrompts(2), [2, 8, 32], name="tiny")


def changed(found: Diagnosis, head: tuple[int, int] | None = None, **columns: float) -> Diagnosis:
    """The same diagnosis with other numbers, for one head or for all."""
    at = {name: i for i, name in enumerate(found.data["columns"])}
    rows = [list(row) for row in found.data["rows"]]
    for row in rows:
        if head is None or head == (row[at["layer"]], row[at["head"]]):
            for name, value in columns.items():
                row[at[name]] = value
    return Diagnosis({**found.data, "rows": rows})


def only(found: Diagnosis, length: int, **entries: Any) -> Diagnosis:
    """The diagnosis of one of its lengths."""
    rows = [row for row in found.data["rows"] if row[0] == length]
    lengths = [entry for entry in found.data["lengths"] if entry["length"] == length]
    return Diagnosis({**found.data, "rows": rows, "lengths": lengths, **entries})


def test_attention_sinks_are_told_apart(found: Diagnosis) -> None:
    heads = Heads(found.data)
    first, second = sharpest(heads, 2)
    sunk = changed(found, heads.heads[first], sink_last=0.9)
    assert sharpest(Heads(sunk.data), 1) == [second]
    said = "\n".join(sunk.findings)
    assert heads.name(second) in said
    assert heads.name(first) not in said.partition("losing it")[0]
    assert "(1 of 12 heads is an attention sink, and not ranked)" in said
    worst = fastest(heads)
    assert worst is not None
    other = fastest(Heads(changed(found, heads.heads[worst], sink_last=0.9).data))
    assert other is not None
    assert other != worst
    everything = changed(found, sink_last=0.9)
    assert sharpest(Heads(everything.data), 1) == [first]
    assert "(12 of 12 heads are attention sinks, so they are ranked all the same)" in "\n".join(everything.findings)


def test_lines_for_the_terminal_agree_with_the_page(found: Diagnosis) -> None:
    heads, lines = Heads(found.data), found.findings
    assert lines[0] == "tiny: 3 layers, 12 heads, 2 to 32 items, read at the last token"
    assert max(map(len, lines)) < 120
    (spread,) = (line.split(None, 2)[2] for line in lines if "logit spread" in line)
    lowest, highest, average, deviation = heads.over_heads("spread_last")[-1]
    assert spread == f"{lowest:.2f} to {highest:.2f}, average {average:.2f} +- {deviation:.2f}"
    gaining = int((heads.slopes().round(2) > 0).sum())
    said = f"{gaining} of 4 heads whose rows grow gain entropy"  # the rows of the others are at their window's 9 keys
    assert f"{said}, " in "\n".join(lines)
    assert any(sentence.startswith(f"{said} as inputs grow, ") for sentence in sentences(heads))
    best = sharpest(heads, 1)[0]
    assert f"{heads.name(best)}: {heads.read('entropy')[-1][best]:.2f} nats" in lines[1]
    assert f'>{heads.read("entropy")[-1][best]:.2f}<small>nats</small></p><p class="about">{heads.name(best)}' in page(
        found.data
    )


def test_a_single_length_says_nothing_about_growth(found: Diagnosis) -> None:
    single = only(found, 8)
    assert not any("losing" in line or "gain" in line for line in single.findings)
    assert single.findings[0] == "tiny: 3 layers, 12 heads, 8 items, read at the last token"
    made = page(single.data)
    assert "on 2 prompts of 8 items. The prompt" in made
    assert "Loses it fastest" not in made
    assert png(single.data).startswith(b"\x89PNG")


def test_one_is_not_several() -> None:
    found = diagnose(build("llama"), Characters(), MaximumPrompts(1), [1], layers=[0])
    assert "1 layer with 4 attention heads, on 1 prompt of 1 item. The prompt" in page(found.data)
    assert found.findings[0].endswith("1 layer, 4 heads, 1 item, read at the last token")
    lines = diagnose(build("llama"), Characters(), Prefixes(["some words", "and more words"], "a.txt"), [4, 8])
    assert "on the first 4 to 8 tokens of 2 lines of <code>a.txt</code>" in page(lines.data)
    assert (counted(1, "head"), counted(1200, "head")) == ("1 head", "1,200 heads")


def test_lengths_beyond_reading(found: Diagnosis) -> None:
    assert long(999_999) == "999,999"
    assert long(7_200_000_000) == "7.2 \N{MULTIPLICATION SIGN} 10⁹"
    wide = changed(found, spread_last=800.0)
    result = theorem(Heads(wide.data))
    assert result is not None
    assert result.n is None
    assert "from over 10³⁰⁰ keys on" in "".join(sentences(Heads(wide.data)))
    assert "n = over 1e300" in "\n".join(wide.findings)
    windows = changed(found, window=9)
    assert theorem(Heads(windows.data)) is None
    assert "says nothing: all heads have a window" in "\n".join(windows.findings)


def test_a_picture_of_many_layers_and_lengths(found: Diagnosis) -> None:
    from matplotlib.figure import Figure

    from sharpmax.diagnostics.report.pictures import draw

    at = {name: i for i, name in enumerate(found.data["columns"])}
    template = found.data["rows"][0]
    lengths, rows = list(range(2, 60)), []
    for n in lengths:
        for layer in range(80):
            row = list(template)
            row[at["length"]], row[at["layer"]], row[at["n"]] = n, layer, n
            rows.append(row)
    many = {**found.data, "rows": rows, "lengths": [{"length": n, "tokens": [n]} for n in lengths]}
    figure = Figure(figsize=(10, 4.6))
    draw(figure, many)
    layers, curves = figure.axes[0], figure.axes[1]
    assert [label.get_text() for label in layers.get_yticklabels()] == ["0", "10", "20", "30", "40", "50", "60", "70"]
    named = [int(label.get_text()) for label in curves.get_xticklabels()]
    assert named[-1] == 59
    assert len(named) <= 11
    assert np.diff(np.log(named)).min() > 0.3
