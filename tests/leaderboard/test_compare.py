"""``sharpmax compare``: the whole command on two mechanisms, stopped and resumed, and what it refuses."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharpmax.__main__ import main
from sharpmax.leaderboard import OutOfTimeError, compare, report, settle
from sharpmax.leaderboard.cells import Cell, load_result
from sharpmax.leaderboard.run import _shipped
from sharpmax.mechanisms import MECHANISMS
from sharpmax.tasks.max_retrieval import PRESETS, Protocol, evaluate, load_checkpoint, model, training
from sharpmax.tasks.max_retrieval.data import Stream, sample, stream_key

TINY = ["--steps", "10", "--seeds", "2", "--sizes", "16", "--sets", "8", "--tasks", "second"]
SMALL = {"steps": 4, "seeds": 2, "sets": 3, "sizes": "4,6"}


def _forget(path: Path, n: int) -> None:
    """Take the size ``n`` out of a result, as if it had been stopped before."""
    result = load_result(path)
    assert result is not None
    del result.measured[n]
    result.save(path)


def commits(made: dict[str, Any]) -> str:
    """Of what made something, then of what made what it went on from."""
    return "".join(maker["git"]["commit"] for maker in (made, *made.get("before", ())))


class Quiet:
    """Hears everything, says nothing, and stops where it is told to."""

    def __init__(self, stop: str = "", error: type[BaseException] = KeyboardInterrupt) -> None:
        self.heard: list[str] = []
        self.stop, self.error = stop, error

    def cell(self, cell: Cell, number: int, cells: int) -> None:
        self._hear(f"{cell} {number}/{cells}")

    def at(self, done: float, now: str) -> None:
        assert 0 <= done <= 1
        self._hear(now)

    def finished(self, cell: Cell, result: Any) -> None:
        self._hear(f"{cell} is full")

    def failed(self, cell: Cell, error: str) -> None:
        raise AssertionError(f"{cell} failed: {error}")

    def _hear(self, what: str) -> None:
        self.heard.append(what)
        if self.stop and self.stop in what:
            raise self.error


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["compare", *arguments])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def test_the_command_makes_both_tables_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "board"
    arguments = ["--mechanisms", "softmax,sparsemax", *TINY, "--out", str(out)]
    assert run(*arguments) == 0
    said = capsys.readouterr().out
    assert "missing" not in said
    assert str(out / "leaderboard_second.png") in said
    data = json.loads((out / "leaderboard.json").read_text())
    for makers in (data["trained_by"], data["measured_by"]):  # four rows switched on, two trained
        assert sum(maker["cells"] for maker in makers) == 6
        assert all(maker["versions"]["jax"] == jax.__version__ for maker in makers)
    tables = data["tasks"]["second"]["tables"]
    assert sorted(tables["inference"]["rows"]) == ["refitted", "refitted_held", "softmax", "sparsemax"]
    assert sorted(tables["trained"]["rows"]) == ["softmax", "sparsemax"]
    assert tables["inference"]["rows"]["softmax"]["accuracy"] == tables["trained"]["rows"]["softmax"]["accuracy"]
    assert tables["inference"]["rows"]["sparsemax"] != tables["trained"]["rows"]["sparsemax"]
    assert data["missing"] == []

    heads = load_checkpoint(out / "second" / "sparsemax")
    found = evaluate(heads.params, heads.seeds, (16,), 8, {"own": heads.protocol.rule}, task="second")
    np.testing.assert_allclose(tables["trained"]["rows"]["sparsemax"]["accuracy"], found.rows["own"].accuracy)

    monkeypatch.setattr(report, "render", lambda *_: {})  # once is enough
    _forget(out / "second" / "sparsemax" / "inference.json", 16)
    files = {path: path.stat().st_mtime_ns for path in out.glob("second/*/*") if path.name != ".lock"}
    assert run("--out", str(out), "--mechanisms", "sparsemax", "--tasks", "second") == 0  # all else is as it was
    again = json.loads((out / "leaderboard.json").read_text())["tasks"]["second"]["tables"]
    assert again == tables
    changed = [path for path, time in files.items() if path.stat().st_mtime_ns != time]
    assert changed == [out / "second" / "sparsemax" / "inference.json"]

    for tensors in out.glob("second/*/*.safetensors"):  # What was measured counts without the heads,
        tensors.unlink()
    files = {path: path.stat().st_mtime_ns for path in out.glob("second/*/*.json")}
    assert run("--out", str(out), "--mechanisms", "sparsemax", "--tasks", "second") == 0
    assert files == {path: path.stat().st_mtime_ns for path in out.glob("second/*/*.json")}
    seconds = tables["trained"]["rows"]["sparsemax"]["training"]["seconds"]
    _forget(out / "second" / "sparsemax" / "trained.json", 16)  # and only those that are needed are trained again.
    assert run("--out", str(out), "--mechanisms", "sparsemax", "--tasks", "second") == 0
    again = json.loads((out / "leaderboard.json").read_text())["tasks"]["second"]["tables"]
    again["trained"]["rows"]["sparsemax"]["training"]["seconds"] = seconds
    assert again == tables
    assert [path.parent.name for path in out.glob("second/*/*.safetensors")] == ["sparsemax"]

    (out / "second" / "sparsemax" / "trained.json").unlink()
    assert run("--out", str(out), "--report", "--mechanisms", "sparsemax,linear", "--tasks", "second") == 0
    said = capsys.readouterr().out
    assert "second/sparsemax, trained: trained, not measured" in said
    assert "second/linear, trained: not begun" in said
    assert run("--out", str(out), "--report") == 0  # of what was begun, and nothing else
    said = capsys.readouterr().out
    assert "second/sparsemax, trained: trained, not measured" in said
    assert said.count("trained: ") == 1
    assert list(json.loads((out / "leaderboard.json").read_text())["tasks"]) == ["second"]
    for wrong, sentence in (
        (["--steps", "60"], "another comparison (steps 10 there and 60 here)"),
        (["--protocol", "sharp"], "another comparison (learning_rate 0.001 there and 0.003 here"),
        (["--sizes", "16,64"], "evaluation sizes [16] there and [16, 64] here"),
        (["--seeds", "3"], "seeds 2 there and 3 here"),
    ):
        assert run("--out", str(out), *wrong) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("error", [pytest.param(KeyboardInterrupt, marks=pytest.mark.thorough), OutOfTimeError])
def test_a_comparison_that_was_stopped_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Within training, between two sizes, and not at all: with parameters that only this mechanism has."""
    monkeypatch.setitem(training.CHUNK, "cpu", 2)
    folders = []
    for name, stops in (("whole", ("",)), ("parts", ("step 2 of", "evaluated at 4", ""))):
        out = tmp_path / name
        for commit, stop in zip("abc", stops, strict=False):
            monkeypatch.setenv("SHARPMAX_COMMIT", commit)
            settings, watcher = settle(out, **SMALL), Quiet(stop, error)
            if stop:
                with pytest.raises(error):
                    compare(out, settings, ("recall",), ("differential",), watcher)
            else:
                assert compare(out, settings, ("recall",), ("differential",), watcher) == []
                assert "recall/differential is full" in watcher.heard
        folders.append(out / "recall" / "differential")
    whole, parts = (load_checkpoint(folder) for folder in folders)
    np.testing.assert_array_equal(whole.state.theta, parts.state.theta)
    assert whole.history == parts.history
    assert np.all(np.abs(whole.params[model.MECHANISM]["learned"]["lambda"] - 0.2) > 1e-5)
    first, second = (load_result(folder / "trained.json") for folder in folders)
    assert first is not None
    assert second is not None
    assert (first.measured, first.heads) == (second.measured, second.heads)
    assert not (folders[0] / "inference.json").exists()
    assert {part: commits(made) for part, made in first.more["provenance"].items()} == {
        "training": "a",
        "evaluation": "a",
    }
    assert {part: commits(made) for part, made in second.more["provenance"].items()} == {
        "training": "ba",
        "evaluation": "cb",
    }

    for j, seed in enumerate(whole.seeds):
        batch = sample(jax.random.fold_in(stream_key(seed, Stream.EVALUATION), 6), 3, 6, task="recall")
        head = jax.tree.map(lambda a, j=j: jnp.asarray(a[j]), whole.params)
        scores = FORWARD(head, batch)
        right = np.argmax(np.asarray(scores), -1) == np.asarray(batch.label)
        assert first.measured[6]["accuracy"][j] == pytest.approx(right.mean(), rel=1e-5)


FORWARD = jax.jit(lambda head, batch: model.forward(head, batch, MECHANISMS["differential"])[0])


def test_time_that_is_up_stops_it_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--out", str(tmp_path), *TINY, "--mechanisms", "linear", "--minutes", "0") == 0
    said = capsys.readouterr().out
    assert "stopped after 0 minutes; the same command goes on from there" in said
    assert "second/softmax, trained: not begun" in said


def test_a_cell_that_another_process_holds_is_left_to_it(tmp_path: Path) -> None:
    from sharpmax.core.claims import claimed

    settings = settle(tmp_path, **SMALL)
    with claimed(tmp_path / "max" / "softmax"):
        assert compare(tmp_path, settings, ("max",), ("softmax",), Quiet()) == [Cell("max", "softmax")]
    assert not (tmp_path / "max" / "softmax" / "checkpoint.json").exists()


def test_shipped_heads_are_taken_where_they_are_the_same() -> None:
    heads = _shipped(PRESETS["sharp"], 3)
    assert heads is not None
    assert (heads.seeds, heads.finished, len(heads.state.theta)) == ((0, 1, 2), True, 3)
    assert all(len(entry["spread"]) == 3 for entry in heads.history)
    assert _shipped(dataclasses.replace(PRESETS["sharp"], steps=10), 3) is None
    assert _shipped(dataclasses.replace(PRESETS["sharp"], task="second"), 3) is None
    assert _shipped(PRESETS["sharp"], 11) is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--mechanisms", "softmax,sparsmax"], "expected a mechanism to be one of softmax, adaptive"),
        (["--mechanisms", "window,window"], "expected mechanisms to be named once each"),
        (["--tasks", "max,third"], "expected tasks to be among max, second, recall, got 'third'"),
        (["--sizes", "16,1"], "expected sizes to be different whole numbers from 2"),
        (["--protocol", "papper"], "expected a protocol to be one of paper, sharp, or a JSON file"),
        (["--protocol", "own.json"], "expected a protocol without mechanism, policy and task"),
        (["--report"], "holds no comparison to report on"),
        (["--sets", "0"], "--sets"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Protocol(task="second").save("own.json")
    assert run("--out", "board", *arguments) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not Path("board").exists()


def test_cells_of_another_protocol_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = _shipped(PRESETS["sharp"], 2)
    assert heads is not None
    heads.save(tmp_path / "max" / "softmax")
    assert run("--out", str(tmp_path), "--protocol", "paper", "--seeds", "2", "--mechanisms", "linear") == 2
    assert "holds a checkpoint of another protocol" in capsys.readouterr().err
    assert not (tmp_path / "settings.json").exists()
