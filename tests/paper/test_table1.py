"""Table 1 on heads that were hardly trained: what is in its files, and the command that fits a policy."""

import csv
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from scipy import stats

import sharpmax
from sharpmax.__main__ import main
from sharpmax.inputs import InputError
from sharpmax.paper import max_retrieval, table1, table1_views
from sharpmax.paper.published import TABLE1
from sharpmax.tasks.max_retrieval import PRESETS, Samples, evaluate, fitting, load_checkpoint, train
from sharpmax.tasks.max_retrieval.step import State
from tests.paper.test_figures import strings

SEEDS, SIZES, SETS = (0, 3, 4), (16, 32), 8
NAME, FILES = "paper_60_steps", "table1_paper_60_steps"
ROWS = ["softmax", "adaptive", "refitted", "refitted_held", "log_n", "constant_4", "hard"]


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Compile fast, and fit at few sizes."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "FIT_SIZES", (16,))
        patch.setattr(fitting, "LARGEST_FIT_SIZE", 32)
        yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "my heads"
    train(dataclasses.replace(PRESETS["paper"], steps=60), SEEDS, folder, chunk=60)
    return folder


@pytest.fixture(scope="module")
def made(heads: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    out, shown = tmp_path_factory.mktemp("out"), []
    paths = table1.run(out, checkpoint=heads, sets=SETS, sizes="16,32", show=shown.append)
    return SimpleNamespace(paths=paths, shown=shown, json=json.loads((out / f"{FILES}.json").read_text()), out=out)


def test_files_and_structure(made: SimpleNamespace) -> None:
    data = made.json
    assert [path.name for path in made.paths] == [f"{FILES}.{s}" for s in ("png", "pdf", "json", "csv", "md")]
    assert sorted(path.name for path in made.out.iterdir()) == sorted(path.name for path in made.paths)
    assert made.paths[0].read_bytes().startswith(b"\x89PNG")
    assert (data["sizes"], data["seeds"], data["sets"], data["name"]) == (list(SIZES), list(SEEDS), SETS, NAME)
    assert list(data["rows"]) == ROWS
    for row in [*data["rows"].values(), {"accuracy": data["ceiling"], "p_value": SIZES}]:
        assert np.shape(row["accuracy"]) == (len(SIZES), len(SEEDS))
        assert len(row["p_value"]) == len(SIZES)
        counts = np.asarray(row["accuracy"]) * SETS
        np.testing.assert_array_equal(counts, np.rint(counts))
    assert data["protocol"] == load_protocol_dict()
    assert data["training"]["step"] == 60
    assert "Heads are trained for 60 steps" in data["caption"]
    assert "soft weights may be right without" in data["caption"]
    assert {"command", "time", "device", "versions", "git"} == set(data["provenance"])
    assert {"sizes", "sets", "counts", "kept", "coefficients", "domain", "notes"} <= set(data["fit"])
    assert not [s for s in strings(data) if s.startswith("/")]
    assert [shown["rows"] for shown in made.shown] == [data["rows"]]


def load_protocol_dict() -> dict[str, Any]:
    return dataclasses.replace(PRESETS["paper"], steps=60).to_dict()


def test_rows_were_evaluated_on_the_same_sets(made: SimpleNamespace, heads: Path) -> None:
    """Each row alone, with the policy that the file holds, gives what it gave among the others."""
    checkpoint = load_checkpoint(heads)
    policies = {name: sharpmax.policy_from_dict(row["policy"]) for name, row in made.json["rows"].items()}
    assert policies["softmax"] == sharpmax.Constant(1.0)
    assert policies["adaptive"] == sharpmax.PAPER
    assert policies["hard"] == sharpmax.Hard()
    for name in ("softmax", "refitted_held"):
        alone = evaluate(checkpoint.params, SEEDS, SIZES, SETS, {name: policies[name]})
        np.testing.assert_allclose(made.json["rows"][name]["accuracy"], alone.rows[name].accuracy, atol=1e-6)
        np.testing.assert_allclose(made.json["ceiling"], alone.ceiling, atol=1e-6)
        for key in ("entropy", "largest"):
            np.testing.assert_allclose(made.json["rows"][name][key], getattr(alone.rows[name], key), rtol=1e-4)


def test_p_values_are_those_of_scipy(made: SimpleNamespace) -> None:
    rows = made.json["rows"]
    assert rows["softmax"]["p_value"] == [None, None]
    compared = 0
    for name in ROWS[1:]:
        pairs = zip(rows[name]["accuracy"], rows["softmax"]["accuracy"], rows[name]["p_value"], strict=True)
        for ours, baseline, p in pairs:
            if np.ptp(np.subtract(ours, baseline)) > 0:
                compared += 1
                assert p == pytest.approx(stats.ttest_rel(ours, baseline).pvalue, rel=1e-9)
            else:
                assert p == float(np.array_equal(ours, baseline))
    assert compared


def test_the_refitted_polynomial(made: SimpleNamespace) -> None:
    fit, rows = made.json["fit"], made.json["rows"]
    dropped = sum(c["already_largest"] + c["no_optimum"] for c in fit["counts"].values())
    assert fit["kept"] + dropped == sum(c["total"] for c in fit["counts"].values())
    for name, beyond in (("refitted", "extrapolate"), ("refitted_held", "hold_end")):
        policy = rows[name]["policy"]
        assert (policy["coefficients"], policy["domain"]) == (fit["coefficients"], fit["domain"])
        assert policy["beyond"] == beyond


def test_the_papers_rows_stand_beside_ours(made: SimpleNamespace) -> None:
    paper = made.json["paper"]
    assert paper["sizes"] == list(TABLE1.sizes)
    for name in ("softmax", "adaptive"):
        printed = getattr(TABLE1, name)
        np.testing.assert_allclose(paper["rows"][name]["accuracy"], np.divide(printed, 100))
        ours = 100 * np.mean(made.json["rows"][name]["accuracy"], axis=1)
        np.testing.assert_allclose(paper["distance_points"][name], ours - printed[:2], atol=1e-3)


def test_csv_agrees_with_the_json(made: SimpleNamespace) -> None:
    with (made.out / f"{FILES}.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == ["name", "size", "mean", "standard_deviation", "p"]
    found = {(line["name"], int(line["size"])): line for line in lines}
    assert len(found) == len(lines) == (len(ROWS) + 1) * len(SIZES) + 2 * len(TABLE1.sizes)
    for name, row in made.json["rows"].items():
        for n, accuracy, p in zip(SIZES, row["accuracy"], row["p_value"], strict=True):
            line = found[name, n]
            assert float(line["mean"]) == pytest.approx(np.mean(accuracy), rel=1e-5)
            assert float(line["standard_deviation"]) == pytest.approx(np.std(accuracy, ddof=1), rel=1e-5)
            assert line["p"] == ("" if p is None else f"{p:.3g}")
    assert float(found["paper_adaptive", 16384]["mean"]) == 0.14


def test_markdown_agrees_with_the_json(made: SimpleNamespace) -> None:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in _table_lines(made.out / f"{FILES}.md")]
    assert lines[0] == ["", "16", "32"]
    by_label = {line[0]: line[1:] for line in reversed(lines)}  # the accuracies, which come before the p-values
    means = {name: 100 * np.mean(row["accuracy"], axis=1) for name, row in made.json["rows"].items()}
    best = np.max(list(means.values()), axis=0)
    for name, row in made.json["rows"].items():
        for i, cell in enumerate(by_label[row["label"]]):
            assert cell.strip("*†\\") == f"{means[name][i]:.1f}"
            assert cell.startswith("**") == (means[name][i] >= best[i] - 1e-9)
    assert by_label["*the paper's adaptive*"] == ["98.6", "97.1"]


def _table_lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith("|")]


def test_marks_say_above_and_below() -> None:
    rows = {
        name: {"label": name, "accuracy": [accuracy], "p_value": [p]}
        for name, accuracy, p in (
            ("softmax", [0.5, 0.5], None),
            ("up", [0.7, 0.8], 0.01),
            ("down", [0.1, 0.2], 0.01),
            ("unsure", [0.4, 0.8], 0.3),
        )
    }
    lines = dict(table1_views.cells({"rows": rows}))
    assert [lines[name][0] for name in rows] == [
        ("50.0", "", False),
        ("75.0", "*", True),
        ("15.0", "†", False),
        ("60.0", "", False),
    ]


@pytest.mark.thorough
def test_sizes_that_the_paper_has_not_and_a_single_seed(tmp_path: Path) -> None:
    heads = tmp_path / "one"
    train(dataclasses.replace(PRESETS["sharp"], steps=2, batch=8, l2=0.5), [7], heads, chunk=2)
    assert main_paths(tmp_path, heads, "8") == ["table1_one.png"]
    data = json.loads((tmp_path / "table1_one.json").read_text())
    assert data["paper"]["distance_points"] == {"softmax": [None], "adaptive": [None]}
    assert data["rows"]["hard"]["p_value"] == [None]
    assert " - |" in (tmp_path / "table1_one.md").read_text()


def main_paths(out: Path, heads: Path, sizes: str) -> list[str]:
    return [path.name for path in table1.run(out, checkpoint=heads, sets=2, sizes=sizes)][:1]


def test_the_command_prints_table_and_paths(heads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--checkpoint", str(heads), "--sets", str(SETS), "--sizes", "16,32", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as stopped:
        main(["reproduce", "table1", *arguments])
    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "hard (theta = 0)" in printed
    assert str(tmp_path / f"{FILES}.md") in printed


@pytest.mark.parametrize("curve", [[], ["--monotone"]])
def test_fit_writes_a_policy_that_loads(
    heads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], curve: list[str]
) -> None:
    output = tmp_path / "new" / "policy.json"
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--checkpoint", str(heads), "-o", str(output), "--sizes", "16,32", "--sets", "64", *curve])
    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "kept" in printed
    assert "dropped" in printed
    policy = sharpmax.load_policy(output)
    fitted = fitting.fit(load_checkpoint(heads), (16, 32), 64)
    assert policy == (fitted.samples.fit_monotone() if curve else fitted.polynomial)
    if not curve:
        assert policy.beyond == "hold_end"
        assert f"{policy.coefficients[0]:.6g}" in printed
    weights = sharpmax.adaptive_temperature_softmax(np.linspace(0, 1, 50), policy=policy)
    assert weights.sum() == pytest.approx(1)


def samples(n: int, kept: int) -> Samples:
    x = np.linspace(1, 2, kept) + n
    counts = {n: {"total": 64, "already_largest": 64 - kept, "no_optimum": 0}}
    return Samples(x, x, np.zeros(kept), np.full(kept, n), counts, (0,), (n,))


@pytest.mark.parametrize(("kept", "degree", "says"), [(0, 0, "nothing to fit"), (6, 1, "too few"), (60, 4, None)])
def test_heads_with_few_samples(
    monkeypatch: pytest.MonkeyPatch, kept: int, degree: int, says: str | None, heads: Path
) -> None:
    monkeypatch.setattr(fitting, "collect", lambda params, seeds, sizes, sets, **_: samples(sizes[0], kept))
    fitted = fitting.fit(load_checkpoint(heads))
    assert fitted.samples.sizes == (16, 32)
    assert fitted.kept == 2 * kept
    assert len(fitted.polynomial.coefficients) == degree + 1
    assert fitted.notes[0].startswith(f"sizes up to 16 gave {kept} samples")
    assert [says in note for note in fitted.notes[1:]] == [True] if says else len(fitted.notes) == 1
    assert fitting.fit(load_checkpoint(heads), (16,)).samples.sizes == (16,)  # asked for: nothing is added


def test_the_name_of_a_preset_is_for_what_it_stands_for(heads: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(heads)
    unfinished = dataclasses.replace(checkpoint, protocol=PRESETS["paper"])
    other = dataclasses.replace(checkpoint, protocol=dataclasses.replace(checkpoint.protocol, l2=0.5))
    theta = checkpoint.state.theta
    moments = State(theta, theta, theta, None)
    dataclasses.replace(unfinished, state=moments).save(tmp_path / "paper")
    other.save(tmp_path / "sharp")
    other.protocol.save(tmp_path / "sharp.json")
    assert max_retrieval.find_heads(None, tmp_path / "paper").name == "paper_60_of_100000_steps"
    assert max_retrieval.find_heads("paper", tmp_path / "paper").name == "paper_60_of_100000_steps"
    assert max_retrieval.find_heads(None, tmp_path / "sharp").name == "heads_sharp"
    assert max_retrieval.find_heads(str(tmp_path / "sharp.json"), tmp_path / "sharp").name == "heads_sharp"


def test_which_heads(heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert max_retrieval.find_heads(None, heads).name == NAME
    assert max_retrieval.find_heads("paper", heads).name == NAME
    protocol = tmp_path / "my way.json"
    load_checkpoint(heads).protocol.save(protocol)
    assert max_retrieval.find_heads(str(protocol), heads).name == "my_way"
    with pytest.raises(ValueError, match="not trained with the protocol sharp: learning_rate, schedule"):
        max_retrieval.find_heads("sharp", heads)
    with pytest.raises(ValueError, match="--checkpoint"):
        max_retrieval.find_heads(str(protocol), None)
    for name in ("paper", "sharp"):
        assert max_retrieval.find_heads(name, None).name == name
        assert max_retrieval.find_heads(None, max_retrieval.SHIPPED / name).name == name
    monkeypatch.setattr(max_retrieval, "SHIPPED", tmp_path)
    with pytest.raises(InputError, match="sharpmax train max-retrieval --protocol paper"):
        table1.run(tmp_path / "out", protocol="paper")
    with pytest.raises(InputError, match="sharpmax train max-retrieval --protocol paper"):
        table1.run(tmp_path / "out")
    assert not (tmp_path / "out").exists()
