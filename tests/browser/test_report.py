"""The report in a real browser: what is laid out, at the widths of a desk and of a phone, and in the dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sharpmax.paper import report
from sharpmax.paper.published import TABLE1
from tests.browser.webdriver import CHROMIUM, DRIVER, Browser, browser
from tests.paper.test_report import fill, table

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver (Debian: chromium, chromium-driver)"
)
DESK, PHONE = 1200, 400
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    printed = table(sizes=TABLE1.sizes, softmax=TABLE1.softmax, adaptive=TABLE1.adaptive)
    return report.write(fill(tmp_path_factory.mktemp("report"), printed))


def boxes(chromium: Browser, selector: str) -> list[list[float]]:
    """Left, top, width and height of every element that ``selector`` finds, in the page."""
    return chromium.evaluate(
        f"[...document.querySelectorAll({selector!r})].map(e => e.getBoundingClientRect())"
        ".map(b => [b.left, b.top + scrollY, b.width, b.height])"
    )


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_pictures_and_tables_are_laid_out(chromium: Browser, page: Path, width: int) -> None:
    chromium.open(page, width)
    assert chromium.evaluate("innerWidth") == width
    natural = chromium.evaluate("[...document.images].map(i => i.complete && i.naturalWidth)")
    assert natural == [650, 1350, 1350, 650]
    for left, _, wide, high in boxes(chromium, "img"):
        assert wide > width / 2
        assert high > 100
        assert left >= 0
        assert left + wide <= width
    shown = boxes(chromium, "section > figure.grid table")
    assert len(shown) == 3
    assert all(wide > 200 and high > 100 for _, _, wide, high in shown)
    assert chromium.evaluate(OVERFLOW) <= 0
    assert chromium.messages() == []


def test_wide_tables_scroll_within_the_page(chromium: Browser, page: Path) -> None:
    chromium.open(page, PHONE)
    frame = "document.querySelector('#table1 .scroll')"
    assert chromium.evaluate(f"{frame}.scrollWidth") > chromium.evaluate(f"{frame}.clientWidth")
    label = "section#table1 tbody tr:nth-child(2) th"
    before = boxes(chromium, label)
    chromium.evaluate(f"{frame}.scrollLeft = 100")
    assert chromium.evaluate(f"{frame}.scrollLeft") > 0
    assert boxes(chromium, label) == before  # the names of the rows stay in view
    chromium.open(page, DESK)
    assert chromium.evaluate(f"{frame}.scrollWidth") == chromium.evaluate(f"{frame}.clientWidth")


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_what_is_folded_unfolds_within_the_page(chromium: Browser, page: Path, width: int) -> None:
    chromium.open(page, width)
    visible = "[...document.querySelectorAll('details table')].map(t => t.checkVisibility())"
    assert chromium.evaluate(visible) == [False] * 3
    chromium.evaluate("document.querySelectorAll('summary').forEach(s => s.click())")
    assert chromium.evaluate(visible) == [True] * 3
    assert all(wide > 200 and high > 100 for _, _, wide, high in boxes(chromium, "details table"))
    assert chromium.evaluate(OVERFLOW) <= 0


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_the_contents_lead_to_the_sections_and_cover_nothing(chromium: Browser, page: Path, width: int) -> None:
    chromium.open(page, width)
    chromium.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
    targets = chromium.evaluate("[...document.querySelectorAll('nav a')].map(a => a.getAttribute('href'))")
    sections = chromium.evaluate("[...document.querySelectorAll('section')].map(s => '#' + s.id)")
    assert targets == sections
    for target in sections:
        chromium.evaluate(f"document.querySelector('nav a[href=\"{target}\"]').click()")
        seen = f"document.querySelector('{target} h2').getBoundingClientRect()"
        assert 0 <= chromium.evaluate(f"{seen}.top") < 900, target
        if width == PHONE:
            bar = chromium.evaluate("document.querySelector('nav').getBoundingClientRect().bottom")
            assert chromium.evaluate(f"{seen}.top") >= bar, target


def test_dark_pages_keep_white_plates(chromium: Browser, page: Path) -> None:
    def colours() -> tuple[str, str, str]:
        style = "getComputedStyle(document.querySelector('{}')).{}"
        asked = (("body", "backgroundColor"), ("body", "color"), (".plate", "backgroundColor"))
        first, second, third = (chromium.evaluate(style.format(*pair)) for pair in asked)
        return first, second, third

    def lightness(colour: str) -> int:
        return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))

    chromium.open(page, DESK)
    ground, ink, plate = colours()
    assert lightness(ground) > 700
    assert lightness(ink) < 150
    chromium.open(page, DESK, dark=True)
    ground, ink, dark_plate = colours()
    assert lightness(ground) < 120
    assert lightness(ink) > 600
    assert plate == dark_plate == "rgb(255, 255, 255)"
