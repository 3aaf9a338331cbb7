"""The page in a real browser: clicks, keys and controls, at the widths of a desk and of a phone, and in the dark."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sharpmax import Hard
from sharpmax.diagnostics import Diagnosis, diagnose
from sharpmax.diagnostics.report import write
from sharpmax.diagnostics.report.page import page as page_of
from sharpmax.diagnostics.sources import MaximumPrompts, Prefixes
from sharpmax.theory import dispersion_length
from tests.browser.webdriver import CHROMIUM, DRIVER, Browser, browser
from tests.diagnostics.models import Characters, build
from tests.doc_tables import ROOT

DESK, PHONE = 1200, 390
LABELS_OUT = """(box => [...document.querySelectorAll('#curves svg text')]
.filter(t => (b => b.left < box.left - 0.5 || b.right > box.right + 0.5)(t.getBoundingClientRect()))
.map(t => t.textContent)
)(document.querySelector('#curves svg').getBoundingClientRect())"""
"""Labels of the curves that are cut off."""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver (Debian: chromium, chromium-driver)"
)


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return diagnose(build("gemma2"), Characters(), MaximumPrompts(2), [2, 8, 32], name="tiny <gemma>")


@pytest.fixture(scope="module")
def page(found: Diagnosis, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("report"), found.data)[0]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def text(chromium: Browser, selector: str) -> str:
    return chromium.evaluate(f"document.querySelector({selector!r}).textContent")


def click(chromium: Browser, selector: str) -> None:
    chromium.evaluate(f"document.querySelector({selector!r}).click()")


def choose(chromium: Browser, selector: str, value: str) -> None:
    part = f"document.querySelector({selector!r})"
    chromium.evaluate(
        f"({part}.value = {value!r}, ['change', 'input'].forEach(e => {part}.dispatchEvent(new Event(e))))"
    )


def cell(found: Diagnosis, name: str, layer: int, head: int, length: int = 32) -> Any:
    return found.table.where(layer=layer, head=head, length=length).rows[0][name]


def test_names_are_escaped(page: Path) -> None:
    content = page.read_text()
    assert "How sharp are the heads of tiny &lt;gemma&gt;?" in content
    assert "<gemma>" not in content


@needs_browser
def test_a_click_on_a_head_shows_it_everywhere(chromium: Browser, page: Path, found: Diagnosis) -> None:
    chromium.open(page, DESK)
    assert chromium.messages() == []
    assert chromium.evaluate("document.querySelectorAll('#map button').length") == 12
    click(chromium, '[data-key="1.2"]')
    assert text(chromium, "#head-title") == "Layer 1, head 2"
    assert text(chromium, "#head-about") == (
        "sees every key that no mask hides; numbers are means over 2 prompts of 32 items"
    )
    beta = f"{cell(found, 'beta_last', 1, 2):.2f} at the last token, the mean over 2 prompts; acts on"
    assert beta in text(chromium, "#head-facts")
    assert f"{cell(found, 'entropy_last', 1, 2):.2f} at the last token" in text(chromium, "#head-facts")
    assert "Layer 1, head 2" in text(chromium, "#curves-key")
    assert text(chromium, "#row-title").startswith("Layer 1, head 2, last of ")
    assert chromium.evaluate("document.querySelectorAll('#curves .other').length") == 3
    click(chromium, '[data-key="0.3"]')
    assert text(chromium, "#head-about").startswith("sees a window of 9 keys; ")
    assert "none: a window does not grow" in text(chromium, "#head-facts")
    uniform = chromium.evaluate("document.querySelector('#curves .uniform').getAttribute('points').split(' ')")
    assert len({point.partition(",")[2] for point in uniform}) == 1  # log 9 at every length
    click(chromium, '[name=scope][value="all"]')
    assert chromium.evaluate("document.querySelectorAll('#curves .other').length") == 11
    assert chromium.messages() == []


@needs_browser
def test_keys_walk_the_map(chromium: Browser, page: Path) -> None:
    chromium.open(page, DESK)
    click(chromium, '[data-key="0.0"]')
    chromium.evaluate("document.querySelector('[data-key=\"0.0\"]').focus()")
    for key, at in (
        ("ArrowDown", "1.0"),
        ("ArrowRight", "1.1"),
        ("ArrowUp", "0.1"),
        ("ArrowUp", "0.1"),
        ("ArrowLeft", "0.0"),
    ):
        chromium.evaluate(
            f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}))"
        )
        assert chromium.evaluate("document.activeElement.dataset.key") == at
        assert chromium.evaluate("document.querySelector('[aria-selected=true]').dataset.key") == at
    assert chromium.evaluate("document.querySelectorAll('#map [tabindex=\"0\"]').length") == 1


@needs_browser
def test_metrics_lengths_and_readings(chromium: Browser, page: Path, found: Diagnosis) -> None:
    chromium.open(page, DESK)
    click(chromium, '[data-key="1.1"]')
    for metric, column, digits in (("spread", "spread_last", 2), ("largest", "largest_last", 3), ("acts", "acts", 2)):
        choose(chromium, "#metric", metric)
        assert text(chromium, "#said") == f"Layer 1, head 1: {cell(found, column, 1, 1):.{digits}f}"
    choose(chromium, "#metric", "sink")
    choose(chromium, "#length", "8")
    click(chromium, '[name=reading][value="mean"]')
    assert text(chromium, "#said") == f"Layer 1, head 1: {cell(found, 'sink_mean', 1, 1, 8):.3f}"
    assert "mean over rows" in text(chromium, "#curves-title")
    assert chromium.messages() == []


@needs_browser
def test_spreads_and_ranking(chromium: Browser, page: Path, found: Diagnosis) -> None:
    chromium.open(page, DESK)
    values = found.table.where(length=32).column("spread_max")
    choose(chromium, "#spread-reading", "max")
    last = "document.querySelector('#spreads tbody tr:last-child').innerText.split('\\t')"
    mean = sum(values) / len(values)
    deviation = (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
    assert chromium.evaluate(last)[2:5] == [f"{min(values):.2f}", f"{max(values):.2f}", f"{mean:.2f} ± {deviation:.2f}"]
    growing = found.table.where(length=32, window=None).column("spread_max")
    n = dispersion_length(float(f"{sum(growing) / len(growing):.6g}"), 0.01).paper
    assert chromium.evaluate(last)[5] == f"{n:,}"
    note = "n is for the average of heads without a window (4 of 12); the rows of the others stop growing."
    assert text(chromium, "#spreads-note") == note
    sharpest = min(found.table.where(length=32).rows, key=lambda row: row["normalised_last"])
    first = "document.querySelector('#ranking tbody tr button').textContent"
    assert chromium.evaluate(first) == f"Layer {sharpest['layer']}, head {sharpest['head']}"
    click(chromium, '[name=rank][value="loss"]')
    slopes = "[...document.querySelectorAll('#ranking tbody tr td:last-child')].map(d => d.textContent)"
    shown = [float(slope.replace("\N{MINUS SIGN}", "-")) for slope in chromium.evaluate(slopes)]
    assert shown == sorted(shown, reverse=True)
    click(chromium, "#ranking tbody tr:nth-child(3) button")
    assert text(chromium, "#head-title") == chromium.evaluate(
        "document.querySelector('#ranking tr.current button').textContent"
    )


def ranking(chromium: Browser) -> dict[str, dict[str, str]]:
    """The table of heads in order: by head, what stands under each heading."""
    heading, *lines = chromium.evaluate(
        "[...document.querySelectorAll('#ranking tr')].map(r => [...r.children].map(c => c.textContent))"
    )
    return {line[0].partition(". ")[2]: dict(zip(heading, line, strict=True)) for line in lines}


@needs_browser
def test_attention_sinks_are_not_ranked_unless_asked_for(chromium: Browser, found: Diagnosis, tmp_path: Path) -> None:
    at = {name: i for i, name in enumerate(found.data["columns"])}
    rows = [list(row) for row in found.data["rows"]]
    for row in rows:
        if (row[at["layer"]], row[at["head"]]) == (1, 0):
            row[at["sink_last"]], row[at["normalised_last"]] = 0.875, 0.001
    chromium.open(write(tmp_path, {**found.data, "rows": rows})[0], DESK)
    assert len(ranking(chromium)) == 11
    assert "Layer 1, head 0" not in ranking(chromium)
    assert text(chromium, "#ranking-note").startswith("1 of 12 heads puts more than half of the weight on the first")
    assert chromium.evaluate("document.querySelectorAll('#map .sink').length") == 1
    choose(chromium, "#sinks", "marked")
    first, *_ = ranking(chromium)
    assert first == "Layer 1, head 0 sink"
    assert ranking(chromium)[first]["On the first token"] == "0.88"
    choose(chromium, "#sinks", "without")
    table = ranking(chromium)
    assert len(table) == 12
    row = table["Layer 1, head 1"]
    assert "Largest" not in row
    sinkless, n = cell(found, "sinkless_last", 1, 1), cell(found, "n", 1, 1)
    assert row["Entropy without the first token"] == f"{sinkless:.2f}"
    assert row["H / log (n \N{MINUS SIGN} 1)"] == f"{sinkless / math.log(n - 1):.3f}"
    assert row["Left out, on the first token"] == f"{cell(found, 'sink_last', 1, 1):.2f}"
    shares = [float(row["H / log (n \N{MINUS SIGN} 1)"]) for row in table.values()]
    assert shares == sorted(shares)


@needs_browser
def test_every_token_can_be_seen(chromium: Browser, page: Path, found: Diagnosis) -> None:
    chromium.open(page, PHONE)
    words = found.data["attention"]["words"]
    assert chromium.evaluate("document.querySelectorAll('#row-words span').length") == len(words) > 100
    assert text(chromium, "#row-about").startswith(f"All {len(words)} tokens, ")
    assert text(chromium, "#row-which") == "The first of 2 prompts of 32 items."
    position = chromium.evaluate("Number(document.querySelector('#row-top tbody td').textContent)")
    click(chromium, "#row-top tbody button")
    marked = "document.querySelector('#row-words .found')"
    assert chromium.evaluate(f"[...{marked}.parentNode.children].indexOf({marked})") == position
    frame, word = (
        chromium.evaluate(f"(b => [b.top, b.bottom])({part}.getBoundingClientRect())")
        for part in ("document.querySelector('#row-words')", marked)
    )
    assert frame[0] <= word[0] < word[1] <= frame[1]


@needs_browser
def test_beta_moves_the_row(chromium: Browser, page: Path, found: Diagnosis) -> None:
    chromium.open(page, DESK)
    click(chromium, '[data-key="1.2"]')

    def after() -> list[float]:
        return chromium.evaluate(
            "[...document.querySelectorAll('#row-top tbody td:last-child')].map(d => Number(d.textContent))"
        )

    choose(chromium, "#beta", "1")
    first = chromium.evaluate(
        "[...document.querySelectorAll('#row-top tbody td:nth-child(3)')].map(d => Number(d.textContent))"
    )
    assert after() == first
    choose(chromium, "#beta", "6")
    assert max(after()) > max(first)
    assert "β = 6.00" in text(chromium, "#row-facts")
    click(chromium, "#beta-reset")
    said = text(chromium, "#beta-policy")
    assert f"(its mean over 2 prompts of 32 items: {cell(found, 'beta_last', 1, 2):.2f})" in said
    assert text(chromium, "#beta-value") == said.partition("for this row: ")[2].split()[0]


@needs_browser
@pytest.mark.parametrize("width", [DESK, PHONE])
def test_everything_fits(chromium: Browser, page: Path, width: int) -> None:
    chromium.open(page, width)
    assert chromium.evaluate(OVERFLOW) <= 0
    sizes = chromium.evaluate(
        "[...document.querySelectorAll('#map button')].map(b => b.getBoundingClientRect())"
        ".map(b => [b.width, b.height, b.right])"
    )
    assert all(wide > 12 and high > 12 and right <= width for wide, high, right in sizes)
    left, wide = chromium.evaluate(
        "(b => [b.left, b.width])(document.querySelector('#curves svg').getBoundingClientRect())"
    )
    assert left >= 0
    assert left + wide <= width
    assert wide > 300
    assert chromium.evaluate(LABELS_OUT) == []
    tables = chromium.evaluate("[...document.querySelectorAll('.scroll')].map(s => s.scrollWidth - s.clientWidth)")
    assert tables == [0, 0, 0]


@needs_browser
def test_dark(chromium: Browser, page: Path) -> None:
    for dark, least, most in ((False, 700, 765), (True, 0, 120)):
        chromium.open(page, DESK, dark=dark)
        colour = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
        assert least <= sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))) <= most


@needs_browser
@pytest.mark.parametrize("width", [DESK, PHONE])
def test_a_length_of_many_digits_fits(chromium: Browser, tmp_path: Path, width: int) -> None:
    data = json.loads((ROOT / "results/diagnose/gemma-3-270m-131072/diagnosis.json").read_text(encoding="utf-8"))
    chromium.open(write(tmp_path, data)[0], width)
    labels = chromium.evaluate("[...document.querySelectorAll('#curves svg text')].map(t => t.textContent)")
    assert {"4,096", "131,072"} <= set(labels)
    assert chromium.evaluate(LABELS_OUT) == []


def test_no_head_loses_sharpness(found: Diagnosis) -> None:
    at = {name: i for i, name in enumerate(found.data["columns"])}
    rows = [list(row) for row in found.data["rows"]]
    for row in rows:
        row[at["entropy_last"]] = 5 - 0.1 * math.log(row[at["n"]])
    cards = page_of({**found.data, "rows": rows}).partition('class="findings"')[0]
    assert "no head gains entropy as n grows" in cards
    assert "+-" not in cards
    assert "+" in page_of(found.data).partition("Loses it fastest")[2][:60]


@needs_browser
def test_an_infinite_beta(chromium: Browser, tmp_path: Path) -> None:
    hard = diagnose(build("llama"), Characters(), MaximumPrompts(1), [2, 8], policy=Hard())
    chromium.open(write(tmp_path, hard.data)[0], DESK)
    assert text(chromium, "#beta-value") == "∞"
    assert text(chromium, "#beta-policy").endswith(": ∞")
    assert "∞ at the last token; acts on 100% of rows" in text(chromium, "#head-facts")
    assert "β = ∞: entropy 0.00, largest 1.000" in text(chromium, "#row-facts").replace("-0.00", "0.00")
    choose(chromium, "#metric", "beta")
    assert text(chromium, "#said").endswith(": ∞")
    assert "Infinite" in text(chromium, "#curves")
    choose(chromium, "#beta", "2")
    assert text(chromium, "#beta-value") == "2.00"
    assert chromium.messages() == []


@needs_browser
def test_one_length_without_attention_rows(chromium: Browser, tmp_path: Path) -> None:
    found = diagnose(build("llama"), Characters(), Prefixes(["some words " * 20], "words"), [50])
    page = write(tmp_path, {**found.data, "attention": None})[0]
    chromium.open(page, DESK)
    assert chromium.messages() == []
    assert "Not kept" in text(chromium, "#row-part")
    assert chromium.evaluate("document.querySelector('#row-title')") is None
    assert chromium.evaluate("document.querySelectorAll('#curves circle.dot').length") == 3
    assert chromium.evaluate("document.querySelectorAll('#curves circle.chosen').length") == 1
    assert not chromium.evaluate("document.querySelector('[name=rank]').checkVisibility()")
    assert "Nats per e-fold of n" not in text(chromium, "#ranking thead")
    choose(chromium, "#metric", "beta")
    assert chromium.messages() == []
    click(chromium, '[data-key="2.3"]')
    assert text(chromium, "#head-title") == "Layer 2, head 3"
