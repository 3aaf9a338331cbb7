"""The bar of long work: what it says in a terminal, and that it is silent elsewhere."""

from __future__ import annotations

import pytest

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
def test_it_is_silent_where_nobody_looks(
    shown: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shown:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("work", shown=shown) as show:
        show(3, 10)
    assert capsys.readouterr() == ("", "")
