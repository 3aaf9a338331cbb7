"""Evaluation with replies that are known: scores, what does not fit, going on, refusals; the command on a folder."""

from __future__ import annotations

import dataclasses
import gzip
import json
import multiprocessing
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sharpmax.core.policies import PAPER, Constant
from sharpmax.huggingface import register, sharpen
from sharpmax.inputs import InputError
from sharpmax.tasks import clrs_text
from sharpmax.tasks.clrs_text import CharacterTokenizer, Encoder, Sample, accuracy, cells, generate_samples, outcomes
from sharpmax.tasks.clrs_text.accuracy import Settings, evaluate
from sharpmax.tasks.clrs_text.cells import Cell, cell_samples
from sharpmax.tasks.clrs_text.evaluation_command import evaluate_command, find_subject
from sharpmax.tasks.clrs_text.models import character_tokenizer

SETTINGS = Settings(algorithms=("minimum", "segments_intersect"), sizes=(4, 5, 6), seeds=(3, 14), samples=4)
Say = Callable[[Sample], str]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(CharacterTokenizer())


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    vocabulary = len(CharacterTokenizer())
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    ).eval()  # fmt: skip


class Student:
    """Answers the questions of a set with what it was told to say, in any order; tells what it was asked."""

    def __init__(self, encoder: Encoder, settings: Settings, say: Say, *, stop_after: int | None = None) -> None:
        split = settings.split
        samples = [s for a in split.sizes for seed in split.seeds for s in cell_samples(Cell(a, seed), split)]
        self.known = {tuple(p): s for p, s in zip(encoder.prompts(samples), samples, strict=True)}
        self.encoder, self.say, self.stop_after = encoder, say, stop_after
        self.asked: list[Sample] = []
        self.limits: list[int] = []

    def __call__(
        self, model: Any, prompts: Sequence[list[int]], limits: Sequence[int], *, end: Collection[int], pad: int
    ) -> Iterator[tuple[int, list[int]]]:
        assert (set(end), pad) == ({2}, 0)
        order = list(range(len(prompts)))
        random.Random(0).shuffle(order)
        for done, i in enumerate(order if self.stop_after is None else sorted(order)):
            if done == self.stop_after:
                raise KeyboardInterrupt
            sample = self.known[tuple(prompts[i])]
            self.asked.append(sample)
            self.limits.append(limits[i])
            yield i, self.encoder.tokenizer(self.say(sample))["input_ids"][: limits[i]]


def even(sample: Sample) -> str:
    """Right for samples with an even index."""
    return "nonsense | 77\n\n" if sample.index % 2 else sample.answer


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
    assert {k: v for k, v in saved.items() if k != "provenance"} == report
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


@pytest.fixture
def trained(model: Any, tmp_path: Path) -> Path:
    """The folder of a training run, of a model that was trained with the paper's policy on one size."""
    run = tmp_path / "run"
    with sharpen(model, PAPER):
        model.save_pretrained(run / "model")
    character_tokenizer().save_pretrained(run / "model")
    training = {"settings": {"tokens": 1000, "policy": PAPER.to_dict()}, "split": {"sizes": {"minimum": [5]}}}
    training |= {"counts": {"tokens": 1024}, "provenance": None, "curve": {"loss": [3.0]}}
    (run / "training.json").write_text(json.dumps(training))
    return run


ASKED: dict[str, Any] = {"algorithms": "minimum,bfs", "sizes": "4-5", "seeds": "3,14", "samples": 2}


def test_the_command_evaluates_a_training_run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(("minimum", "bfs"), (4, 5), (3, 14), 2)
    models: list[Any] = []

    def generate(model: Any, *arguments: Any, **options: Any) -> Any:
        models.append(model)
        return Student(Encoder(CharacterTokenizer()), settings, even)(model, *arguments, **options)

    monkeypatch.setattr(accuracy, "_generate", generate)
    lines = evaluate_command(str(trained), tmp_path / "out", **ASKED)
    assert lines[0] == "run: 16 samples of 2 algorithms, 0 more are longer than 2,048 tokens and left out"
    assert lines[1] == "  right at training sizes: 50.0%, the mean over algorithms"
    assert "generated tokens/s" in lines[4]
    assert lines[-1] == str(tmp_path / "out" / "evaluation.json")
    report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert report["model"]["policy"] == [{"policy": PAPER.to_dict(), "layers": None, "heads": None}]
    assert report["training"]["counts"] == {"tokens": 1024}
    inside = {a: [row["in_distribution"] for row in e["sizes"].values()] for a, e in report["algorithms"].items()}
    assert inside == {"minimum": [False, True], "bfs": [False, False]}
    (model,) = models
    assert (model.config._attn_implementation, model.dtype, model.training) == ("sharpmax", torch.float32, False)
    assert evaluate_command(str(trained / "model"), tmp_path / "out", **ASKED) == lines
    assert len(models) == 1


def test_a_model_without_policies_has_plain_softmax(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "plain")
    character_tokenizer().save_pretrained(tmp_path / "plain")
    network, encoder = find_subject(str(tmp_path / "plain"))
    assert network.config._attn_implementation == "sharpmax"
    assert accuracy.active_rules(network) is None
    assert encoder.before == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"algorithms": "minimum,bogosort"}, "got 'bogosort'"),
        ({"sizes": "4,many"}, "expected sizes to be whole numbers"),
        ({"seeds": "x"}, "expected seeds to be whole numbers"),
        ({"samples": 0}, "at least one sample"),
        ({"length": 0}, "expected a length of at least 2"),
        ({"dtype": "int8"}, "expected dtype to be one of float32, bfloat16, float16, got 'int8'"),
        ({"device": "nowhere"}, "expected a device that torch has here, got 'nowhere'"),
        ({"model": "no/such/folder"}, "expected a packaged model"),
    ],
)
def test_bad_arguments_are_one_sentence(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], says: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given = {"model": str(trained), **ASKED, **options}
    with pytest.raises(InputError, match=says) as raised:
        evaluate_command(out=tmp_path / "out", **given)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_damaged_report_of_training_and_cells_of_another_model_are_refused(trained: Path, tmp_path: Path) -> None:
    cell = tmp_path / "out" / "cells" / "minimum_3.json"
    cell.parent.mkdir(parents=True)
    cell.write_text(json.dumps({"settings": {"weights": "others"}}))
    with pytest.raises(InputError, match=r"holds results with other .*weights"):
        evaluate_command(str(trained), tmp_path / "out", **ASKED)
    (trained / "training.json").write_text("[]")
    with pytest.raises(InputError, match="is not the report of a training run"):
        evaluate_command(str(trained), tmp_path / "out", **ASKED)


def test_the_sets_of_the_package_stay_functions() -> None:
    assert clrs_text.evaluation().name == "evaluation"
