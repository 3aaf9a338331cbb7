"""The bar of long work: what it says in a terminal, and that there are a few lines elsewhere."""

from __future__ import annotations

import pytest

from sharpmax.cli.compare import _watching
from sharpmax.diagnostics.progress import progress_bars
from sharpmax.progress import progress_bar


def test_it_says_what_is_done_and_what_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bar("work [of mine]") as show:
        show(3, 10, "loss [0.5]")
    out, err = capsys.readouterr()
    assert out == ""
    for words in ("work [of mine]", "3/10", "loss [0.5]"):
        assert words in err


@pytest.mark.parametrize("shown", [True, False])
def test_short_work_is_silent_where_nobody_looks(
    shown: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shown:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("work", shown=shown) as show:
        show(3, 10)
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the time is, for lines of a log: the only entry, to be changed."""
    now = [100.0]
    monkeypatch.setattr("sharpmax.progress.time.monotonic", lambda: now[0])
    return now


def test_in_a_log_there_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    with progress_bar("answers") as show:
        for seconds, done, now in (
            (1, 1000, ""),
            (19, 1500, ""),
            (20, 2000, ""),
            (5, 2100, ""),
            (25, 9000, "loss 0.5"),
        ):
            clock[0] += seconds
            show(done, 41150, now)
    assert capsys.readouterr() == ("", "answers: 2,000 of 41,150, 25/s\nanswers: 9,000 of 41,150, loss 0.5\n")


def test_so_there_is_of_a_comparison_and_of_a_diagnosis(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    with _watching() as watcher, progress_bars({64: 8}, lambda length: f"{length} tokens") as show:
        watcher.cell("recall/softmax", 3, 69)
        for seconds in (1, 30):
            clock[0] += seconds
            watcher.at(0.5, "step 5 of 9")
            show(64, 2.0, 8)
    assert capsys.readouterr().err == "cells: 3 of 69, recall/softmax: step 5 of 9\ninputs: 2 of 8, 64 tokens\n"
