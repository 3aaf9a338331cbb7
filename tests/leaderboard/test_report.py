"""Tables from cells that are there: statistics against SciPy and by hand, and what is said to be missing."""

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from sharpmax.core.claims import claimed
from sharpmax.leaderboard import assemble, write_report
from sharpmax.leaderboard.cells import Cell, Result, load_result
from sharpmax.leaderboard.figures import differences, spread_out, style
from sharpmax.leaderboard.settings import Settings
from sharpmax.mechanisms import MECHANISMS
from sharpmax.tasks.max_retrieval import Protocol

SIZES = (16, 64, 256)
SETTINGS = Settings("paper", Protocol(steps=5), seeds=5, sizes=SIZES, sets=100)
NAMES = ("softmax", "sparsemax", "window", "linear")
LEVELS = {"softmax": (0.99, 0.8, 0.3), "sparsemax": (0.99, 0.95, 0.9), "window": (0.97, 0.3, 0.6)}


def _accuracy(name: str, table: str) -> np.ndarray:
    """``[sizes, seeds]``, with noise that seeds share, so that paired tests see more than others."""
    shared = np.random.default_rng(1).normal(size=(3, 5))
    own = np.random.default_rng(len(name) + len(table)).normal(size=(3, 5))
    return np.round(np.array(LEVELS[name])[:, None] + 0.02 * shared + 0.01 * own, 2).clip(0, 1)


def _write(out: Path, name: str, table: str, sizes: tuple[int, ...] = SIZES, **change: Any) -> Result:
    result = Result({"kind": name}, "abc", 5, change.get("sets", 100))
    for i, n in enumerate(SIZES):
        if n in sizes:
            accuracy: list[float | None] = [float(a) for a in _accuracy(name, table)[i]]
            result.measured[n] = {"accuracy": accuracy, "entropy": [0.1 * n] * 4 + [None], "largest": [1 / n] * 5}
    result.save(Cell("max", name).folder(out) / f"{table}.json")
    return result


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    for name in LEVELS:
        _write(tmp_path, name, "trained")
    for name in ("softmax", "sparsemax"):
        _write(tmp_path, name, "inference")
    _write(tmp_path, "window", "inference", sizes=(16, 256))
    return tmp_path


def _holm(p_values: list[float]) -> list[float]:
    """The smallest level at which the step-down procedure rejects each, found by trying all that matter."""
    order, found = np.argsort(p_values), [1.0] * len(p_values)
    for k, i in enumerate(order):
        needed = [p_values[order[m]] * (len(p_values) - m) for m in range(k + 1)]
        found[i] = min(1.0, max(needed))
    return found


def test_statistics_are_those_of_scipy_and_by_hand(filled: Path) -> None:
    rows = assemble(filled, SETTINGS, ("max",), NAMES)["tasks"]["max"]["tables"]["trained"]["rows"]
    assert list(rows) == ["sparsemax", "softmax", "window"]  # by the mean over all sizes
    for name, row in rows.items():
        values = _accuracy(name, "trained")
        np.testing.assert_allclose(row["mean"], values.mean(1), rtol=1e-5)
        np.testing.assert_allclose(row["deviation"], values.std(1, ddof=1), rtol=1e-5)
    for i in range(3):
        p = [
            float(stats.ttest_rel(_accuracy(name, "trained")[i], _accuracy("softmax", "trained")[i]).pvalue)
            for name in ("sparsemax", "window")
        ]
        assert [rows[name]["p_value"][i] for name in ("sparsemax", "window")] == pytest.approx(p, rel=1e-4)
        assert [rows[name]["p_holm"][i] for name in ("sparsemax", "window")] == pytest.approx(_holm(p), rel=1e-4)
    assert rows["softmax"]["p_value"] == [None] * 3
    assert (rows["softmax"]["below_90"], rows["softmax"]["below_50"]) == (64, 256)
    assert (rows["window"]["below_90"], rows["window"]["below_50"]) == (64, 64)  # the first, though it rises again
    assert rows["sparsemax"]["below_50"] is None
    assert [row["diverged"] for row in rows.values()] == [1, 1, 1]  # The last seed has no entropy.
    points = differences(rows)
    assert points["softmax"] == [0.0] * 3
    expected = 100 * (_accuracy("sparsemax", "trained") - _accuracy("softmax", "trained")).mean(1)
    np.testing.assert_allclose(np.array(points["sparsemax"], float), expected, atol=1e-3)


def test_what_is_missing_is_said_and_the_rest_is_there(filled: Path) -> None:
    data = assemble(filled, SETTINGS, ("max", "second"), NAMES)
    missing = "\n".join(data["missing"])
    assert "max/window, inference: not yet measured at 64 items" in missing
    assert "max/linear, trained: not begun" in missing
    assert "max/refitted, inference: not measured" in missing
    assert "second/softmax, trained: not begun" in missing
    assert "max/softmax, trained" not in missing
    assert "linear, inference" not in missing  # it makes no sense there
    window = data["tasks"]["max"]["tables"]["inference"]["rows"]["window"]
    assert window["mean"][1] is window["p_value"][1] is None
    assert window["p_holm"][0] is not None
    inference = data["tasks"]["max"]["tables"]["inference"]["rows"]
    assert [points is None for points in differences(inference)["window"]] == [False, True, False]
    assert differences({"window": window}) == {}
    assert list(data["tasks"]["max"]["tables"]["inference"]["rows"])[-1] == "window"  # not complete
    _write(filled, "sparsemax", "trained", sets=50)
    again = assemble(filled, SETTINGS, ("max",), NAMES)
    assert "max/sparsemax, trained: not begun" in again["missing"]  # of another number of sets


def test_files_hold_what_the_data_says(filled: Path) -> None:
    paths, data = write_report(filled, SETTINGS, ("max", "second"), NAMES)
    assert {p.name for p in paths} == {
        *(f"leaderboard.{suffix}" for suffix in ("json", "md", "csv")),
        *(f"leaderboard_max{part}.{suffix}" for part in ("", "_sharpness") for suffix in ("png", "pdf")),
    }
    rows = list(csv.DictReader(io.StringIO((filled / "leaderboard.csv").read_text())))
    assert len(rows) == 3 * 3 + 3 * 3 - 1
    (one,) = (r for r in rows if (r["table"], r["name"], r["size"]) == ("trained", "sparsemax", "256"))
    assert float(one["mean"]) == pytest.approx(_accuracy("sparsemax", "trained")[2].mean(), rel=1e-5)
    assert float(one["entropy"]) == pytest.approx(25.6)
    text = (filled / "leaderboard.md").read_text()
    best = f"**{100 * _accuracy('sparsemax', 'trained')[2].mean():.1f}**\\*"
    assert best in text
    assert "| sparsemax (1 of 5 diverged) | " in text
    assert "Nothing is measured yet." in text
    assert all(f"- {line}" in text for line in data["missing"])


def test_names_beside_lines_lie_apart() -> None:
    values = [9.0, 9.5, 10.0, 50.0, 99.0, 100.0, 100.0]
    places = spread_out(values, 4.0, 1, 101)
    assert np.all(np.diff(places) >= 4 - 1e-9)
    assert max(places) <= 101
    assert places[3] == 50.0
    looks = {(style(name)["color"], str(style(name)["linestyle"])) for name in (*MECHANISMS, "refitted")}
    assert len(looks) == len(MECHANISMS) + 1


def test_a_cell_is_claimed_once(tmp_path: Path) -> None:
    with claimed(tmp_path / "max" / "softmax") as mine, claimed(tmp_path / "max" / "softmax") as other:
        assert (mine, other) == (True, False)
    with claimed(tmp_path / "max" / "softmax") as again:
        assert again


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "other/1"}', '{"schema": "sharpmax.leaderboard-cell/1"}'])
def test_results_that_are_not_whole_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "trained.json").write_text(text)
    with pytest.raises(ValueError, match="is not what a comparison wrote") as raised:
        load_result(tmp_path / "trained.json")
    assert "\n" not in str(raised.value)
