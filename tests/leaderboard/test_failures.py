"""A cell that fails: it is said and kept, the others go on, and the same command tries again."""

from pathlib import Path
from typing import Any

import pytest

from sharpmax.__main__ import main
from sharpmax.leaderboard import assemble, run, settle
from sharpmax.leaderboard.cells import FAILED, Cell, load_failure

NAMES = ("softmax", "sparsemax", "linear")
MEMORY = "RESOURCE_EXHAUSTED: Out of memory while\n trying to allocate [1 TiB]."


class Filling:
    """Stands in for filling cells; those named in ``fail`` raise, after another process had its turn if asked for."""

    def __init__(self, *fail: str, error: Exception | None = None, meanwhile: Any = None) -> None:
        self.fail, self.tried = fail, []
        self.error, self.meanwhile = error or RuntimeError(MEMORY), meanwhile
        self.left: list[Cell] = []

    def __call__(self, state: Any, cell: Cell) -> None:
        self.tried.append(cell.name)
        if cell.name in self.fail:
            if self.meanwhile is not None:
                self.meanwhile()
            raise self.error


class Listener:
    def __init__(self) -> None:
        self.failures: list[tuple[str, str]] = []

    def cell(self, cell: Cell, number: int, cells: int) -> None:
        pass

    def at(self, done: float, now: str) -> None:
        pass

    def finished(self, cell: Cell, result: Any) -> None:
        pass

    def failed(self, cell: Cell, error: str) -> None:
        self.failures.append((str(cell), error))


def _compare(out: Path, monkeypatch: pytest.MonkeyPatch, filling: Filling) -> Listener:
    listener = Listener()
    with monkeypatch.context() as patch:
        patch.setattr(run, "_fill", filling)
        filling.left = run.compare(out, settle(out, steps=1), ("max",), NAMES, listener)
    return listener


def test_the_others_go_on_and_the_same_command_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Filling("sparsemax")
    heard = _compare(tmp_path, monkeypatch, first)
    assert first.tried == list(NAMES)
    said = "RuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate [1 TiB]."
    assert heard.failures == [("max/sparsemax", said)]
    missing = assemble(tmp_path, settle(tmp_path), ("max",), NAMES)["missing"]
    assert f"max/sparsemax, trained: not begun; failed with {said}" in missing
    assert "max/linear, trained: not begun" in missing

    second = Filling()
    assert _compare(tmp_path, monkeypatch, second).failures == []
    assert second.tried == list(NAMES)
    assert load_failure(tmp_path / "max" / "sparsemax") is None


def test_processes_that_run_already_do_not_try_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many would lose the same minutes to it."""
    inner = Filling("linear")

    def another_process() -> None:
        _compare(tmp_path, monkeypatch, inner)

    outer = Filling("softmax", meanwhile=another_process)
    _compare(tmp_path, monkeypatch, outer)
    assert inner.tried == ["sparsemax", "linear"]  # The first is held by the outer one.
    assert inner.left == [Cell("max", "softmax")]
    assert outer.tried == ["softmax", "sparsemax"]


@pytest.mark.parametrize("error", [run.OutOfTimeError(), KeyboardInterrupt()])
def test_being_stopped_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    with pytest.raises(type(error)):
        _compare(tmp_path, monkeypatch, Filling("softmax", error=error))
    assert not (tmp_path / "max" / "softmax" / FAILED).exists()


def test_the_command_says_what_failed_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_fill", Filling("linear", error=ValueError("x" * 1000)))
    arguments = ["compare", "--out", str(tmp_path), "--mechanisms", "linear", "--tasks", "max", "--steps", "1"]
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 1
    said = capsys.readouterr()
    assert "max/linear failed: ValueError: xxx" in said.out
    assert "failed: max/linear; the same command tries again\n" in said.err
    assert len(load_failure(tmp_path / "max" / "linear") or "") < 400
    (tmp_path / "max" / "linear" / FAILED).write_text("{")
    assert load_failure(tmp_path / "max" / "linear") == "failed.json is not what a comparison wrote"
