"""Evaluation with replies that are known: scores, what does not fit, going on, refusals; the command on a folder."""

from __future__ import annotations

import dataclasses
import gzip
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax.core.policies import PAPER, Constant
from sharpmax.huggingface import register, sharpen
from sharpmax.tasks import clrs_text
from sharpmax.tasks.clrs_text import CharacterTokenizer, Encoder, Sample, accuracy, cells, generate_samples, outcomes
from sharpmax.tasks.clrs_text.accuracy import Settings, evaluate
from sharpmax.tasks.clrs_text.cells import Cell, cell_samples
from tests.tasks.clrs_text.students import Student, even, tiny_model

SETTINGS = Settings(algorithms=("minimum", "segments_intersect"), sizes=(4, 5, 6), seeds=(3, 14), samples=4)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(CharacterTokenizer())


@pytest.fixture
def model() -> Any:
    return tiny_model()


def test_answers_are_scored_sample_by_sample(model: Any, encoder: Encoder, tmp_path: Path) -> None:
    shown: list[tuple[int, int]] = []
    student = Student(encoder, SETTINGS, lambda s: s.answer if s.index != 1 else "1 | 99\n\n")
    report = evaluate(model, encoder, SETTINGS, tmp_path, lambda *c: shown.append(c), name="tiny", generate=student)
    row = report["algorithms"]["minimum"]["sizes"]["5"]
    assert (row["final"], row["trace"]) == (["1011"] * 2, ["1011"] * 2)
    assert (row["accuracy"], row["deviation"], row["by_seed"], row["n"]) == (0.75, 0.0, [0.75, 0.75], 8)
    assert (row["trace_accuracy"], row["in_distribution"]) == (0.75, True)
    assert report["algorithms"]["minimum"]["sizes"]["6"]["in_distribution"] is False
    assert report["algorithms"]["segments_intersect"]["sizes"]["4"]["trace"] is None
    assert report["model"]["name"] == "tiny"
    assert report["model"]["policy"] is None
    assert report["throughput"]["samples"] == 48
    assert shown[0] == (0, 48)
    assert shown[-1] == (48, 48)
    assert [done for done, _ in shown] == sorted(done for done, _ in shown)
    saved = json.loads((tmp_path / "evaluation.json").read_text())
    assert {k: v for k, v in saved.items() if k not in ("provenance", "measured_by")} == report
    assert sum(maker["cells"] for maker in saved["measured_by"]) == 4
    assert saved["provenance"]["versions"]["torch"] == torch.__version__
    assert outcomes.load_evaluation(tmp_path) == saved


def test_final_answers_and_traces_are_scored_apart(model: Any, encoder: Encoder, tmp_path: Path) -> None:
    def say(sample: Sample) -> str:
        final = sample.answer.rpartition("|")[2]
        return {0: sample.answer, 1: f"9, 9 |{final}", 2: sample.answer.replace(final, " 77\n\n")}.get(sample.index, "")

    few = Settings(algorithms=("minimum",), sizes=(8,), seeds=(3,), samples=4)
    report = evaluate(model, encoder, few, tmp_path, generate=Student(encoder, few, say))
    row = report["algorithms"]["minimum"]["sizes"]["8"]
    assert (row["final"], row["trace"]) == (["1100"], ["1010"])
    assert row["deviation"] is None
    with gzip.open(tmp_path / "replies" / "minimum_3.jsonl.gz", "rt") as file:
        lines = [json.loads(line) for line in file]
    samples = list(generate_samples("minimum", 8, 3, count=4))
    assert [line["reply"] for line in lines] == [say(sample) for sample in samples]
    assert [(line["final"], line["trace"]) for line in lines] == [
        (True, True), (True, False), (False, True), (False, False)
    ]  # fmt: skip


def test_what_does_not_fit_is_left_out_and_replies_are_limited(model: Any, encoder: Encoder, tmp_path: Path) -> None:
    base = Settings(algorithms=("quickselect",), sizes=(4, 9), seeds=(3,), samples=6)
    lengths = [len(d.ids) for d in encoder(cell_samples(Cell("quickselect", 3), base.split))]
    middle = sorted(lengths)[7]
    settings = Settings(algorithms=("quickselect",), sizes=(4, 9), seeds=(3,), samples=6, length=middle)
    student = Student(encoder, settings, lambda s: s.answer + "9" * 5000)
    report = evaluate(model, encoder, settings, tmp_path, generate=student)
    rows = report["algorithms"]["quickselect"]["sizes"]
    kept = ["-" if n > middle else "1" for n in lengths]
    assert [rows["4"]["final"][0], rows["9"]["final"][0]] == ["".join(kept[:6]), "".join(kept[6:])]
    assert rows["9"]["too_long"] == kept[6:].count("-") > 0
    assert rows["4"]["cut"] + rows["9"]["cut"] == len(student.asked) == kept.count("1")
    for sample, limit in zip(student.asked, student.limits, strict=True):
        (document,) = encoder([sample])
        answer = len(document.ids) - document.question
        assert answer <= limit == min(answer + answer // 4 + 16, middle - document.question)


def test_nothing_fits(model: Any, encoder: Encoder, tmp_path: Path) -> None:
    settings = Settings(algorithms=("minimum",), sizes=(4,), seeds=(3, 14), samples=2, length=10)
    report = evaluate(model, encoder, settings, tmp_path, generate=Student(encoder, settings, lambda s: s.answer))
    row = report["algorithms"]["minimum"]["sizes"]["4"]
    assert (row["final"], row["n"], row["too_long"], row["accuracy"]) == (["--", "--"], 0, 4, None)
    assert report["throughput"]["samples_per_second"] is None


def test_an_interrupted_evaluation_goes_on(
    model: Any, encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "GROUP", 20)  # two cells at a time
    whole = evaluate(model, encoder, SETTINGS, tmp_path / "whole", generate=Student(encoder, SETTINGS, even))
    student = Student(encoder, SETTINGS, even, stop_after=15)
    monkeypatch.setattr(cells, "FEW", 0)  # samples come from other processes
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, encoder, SETTINGS, tmp_path / "cut", generate=student)
    assert multiprocessing.active_children() == []
    kept = sorted(path.name for path in (tmp_path / "cut" / "cells").iterdir())
    assert kept == ["minimum_3.json"]
    assert not (tmp_path / "cut" / "evaluation.json").exists()
    with pytest.raises(ValueError, match="whose evaluation is not complete"):
        outcomes.load_evaluation(tmp_path / "cut")
    student = Student(encoder, SETTINGS, even)
    again = evaluate(model, encoder, SETTINGS, tmp_path / "cut", generate=student)
    assert {(s.algorithm, s.seed) for s in student.asked} == {
        ("minimum", 14), ("segments_intersect", 3), ("segments_intersect", 14)
    }  # fmt: skip
    assert again["algorithms"] == whole["algorithms"]
    student = Student(encoder, SETTINGS, even)
    assert evaluate(model, encoder, SETTINGS, tmp_path / "cut", generate=student) == again
    assert student.asked == []


def test_parts_in_one_folder_make_the_whole(model: Any, encoder: Encoder, tmp_path: Path) -> None:
    whole = evaluate(model, encoder, SETTINGS, tmp_path / "whole", generate=Student(encoder, SETTINGS, even))
    parts = [dataclasses.replace(SETTINGS, algorithms=("minimum",), seeds=(seed,)) for seed in (14, 3)]
    parts.append(dataclasses.replace(SETTINGS, algorithms=("segments_intersect",)))
    for part in parts:
        asked = Student(encoder, part, even)
        evaluate(model, encoder, part, tmp_path / "parts", generate=asked)
        assert len(asked.asked) == len(part.split)
    nobody = Student(encoder, SETTINGS, even, stop_after=0)
    found = evaluate(model, encoder, SETTINGS, tmp_path / "parts", generate=nobody)
    assert {k: v for k, v in found.items() if k != "throughput"} == {
        k: v for k, v in whole.items() if k != "throughput"
    }
    assert outcomes.load_evaluation(tmp_path / "parts")["settings"] == whole["settings"]


def test_samples_made_by_other_processes_are_the_same(
    model: Any, encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = [Cell(a, s) for a in SETTINGS.split.sizes for s in (3, 14)]
    here = list(cells.made_samples(plan, SETTINGS.split))
    monkeypatch.setattr(cells, "FEW", 0)
    assert list(cells.made_samples(plan, SETTINGS.split)) == here


def test_repeated_questions_are_told(model: Any, encoder: Encoder, tmp_path: Path) -> None:
    settings = Settings(algorithms=("naive_string_matcher", "segments_intersect"), sizes=(4, 5), samples=20)
    report = evaluate(model, encoder, settings, tmp_path, generate=Student(encoder, settings, lambda s: s.answer))
    for algorithm, entry in report["algorithms"].items():
        seen: set[str] = set()
        for size, row in entry["sizes"].items():
            for seed, marks in zip(settings.seeds, row["distinct"], strict=True):
                samples = generate_samples(algorithm, int(size), seed, count=20)
                expected = ""
                for sample in samples:
                    expected += "0" if sample.question in seen else "1"
                    seen.add(sample.question)
                assert marks == expected
    assert report["algorithms"]["segments_intersect"]["sizes"]["5"]["distinct"] == ["0" * 20] * 5
    assert any("0" in marks for marks in report["algorithms"]["naive_string_matcher"]["sizes"]["4"]["distinct"])


def test_other_settings_weights_and_policies_are_refused_by_name(model: Any, encoder: Encoder, tmp_path: Path) -> None:
    few = Settings(algorithms=("minimum",), sizes=(4,), seeds=(3,), samples=2)
    evaluate(model, encoder, few, tmp_path, generate=Student(encoder, few, even))
    kept = {path: path.read_bytes() for path in tmp_path.glob("*/*")}

    def refused(says: str, **changes: Any) -> None:
        settings = dataclasses.replace(few, **changes)
        with pytest.raises(ValueError, match=f"holds results with other {says}: choose another folder"):
            evaluate(model, encoder, settings, tmp_path, generate=Student(encoder, settings, even))

    refused("samples", samples=3)
    refused("sizes", sizes=(4, 5), seeds=(3, 14))
    refused("traces", traces=False)
    refused("length", length=1000)
    with sharpen(model, PAPER):
        refused("policy")
    with torch.no_grad():
        next(model.parameters()).add_(1)
    refused("weights")
    model.to(torch.bfloat16)
    refused("dtype, weights")
    assert {path: path.read_bytes() for path in tmp_path.glob("*/*")} == kept
    (tmp_path / "cells" / "minimum_3.json").write_text("{")
    with pytest.raises(ValueError, match=r"minimum_3.json is damaged: delete it"):
        evaluate(model, encoder, few, tmp_path, generate=Student(encoder, few, even))


def test_the_policies_that_a_model_runs_with_are_told(model: Any) -> None:
    assert accuracy.active_rules(model) is None
    with sharpen(model, Constant(1.0)):
        assert accuracy.active_rules(model) is None
    with sharpen(model, PAPER, heads=[1]):
        assert accuracy.active_rules(model) == [{"policy": PAPER.to_dict(), "layers": None, "heads": [1]}]
    register()
    model.set_attn_implementation("sharpmax")  # without a policy of its own: the paper's
    assert accuracy.active_rules(model) == [{"policy": PAPER.to_dict(), "layers": None, "heads": None}]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"samples": 0}, "at least one sample"),
        ({"seeds": ()}, "seeds to be different and at least one"),
        ({"algorithms": ("bogosort",)}, "got 'bogosort'"),
        ({"length": 1}, "expected a length of at least 2 tokens, got 1"),
    ],
)
def test_settings_that_cannot_be_asked_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Settings(**changes)


@pytest.mark.parametrize(
    "change",
    [
        lambda cell: cell["sizes"]["4"].update(final="10"),
        lambda cell: cell["sizes"]["5"].update(trace="1"),
        lambda cell: cell["sizes"]["4"].update(questions="0123"),
        lambda cell: cell["sizes"]["4"].update(final="1?1"),
        lambda cell: cell["sizes"].pop("5"),
        lambda cell: cell.pop("seconds"),
    ],
)
def test_a_cell_that_lost_outcomes_is_named(model: Any, encoder: Encoder, tmp_path: Path, change: Any) -> None:
    few = Settings(algorithms=("minimum",), sizes=(4, 5), seeds=(3,), samples=3)
    evaluate(model, encoder, few, tmp_path, generate=Student(encoder, few, even))
    path = tmp_path / "cells" / "minimum_3.json"
    cell = json.loads(path.read_text())
    change(cell)
    path.write_text(json.dumps(cell))
    with pytest.raises(ValueError, match=r"minimum_3\.json is damaged: delete it"):
        evaluate(model, encoder, few, tmp_path, generate=Student(encoder, few, even))


def test_a_reply_that_was_cut_off_is_right_only_with_its_end(model: Any, encoder: Encoder, tmp_path: Path) -> None:
    few = Settings(algorithms=("minimum",), sizes=(4,), seeds=(3,), samples=2)
    (first, *_) = generate_samples("minimum", 4, 3, count=1)
    (document,) = encoder([first])
    final = first.answer.rpartition("|")[2].strip()

    def say(sample: Sample) -> str:
        if sample.index:
            return sample.answer + "9" * 1000  # cut off, but after its end
        limit = cells.longest_reply(len(document.ids) - document.question)
        return "1" * (limit - len(final) - 3) + " | " + final + "77"  # all that is read of it is the right answer

    rows = evaluate(model, encoder, few, tmp_path, generate=Student(encoder, few, say))["algorithms"]["minimum"]
    assert (rows["sizes"]["4"]["final"], rows["sizes"]["4"]["cut"]) == (["01"], 2)


def test_the_sets_of_the_package_stay_functions() -> None:
    assert clrs_text.evaluation().name == "evaluation"
