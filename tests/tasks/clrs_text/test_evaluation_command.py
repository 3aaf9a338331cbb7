"""``sharpmax clrs-text evaluate``: what it takes of a training run, what it says before it asks, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from sharpmax.core.policies import PAPER
from sharpmax.huggingface import sharpen, weights
from sharpmax.huggingface.weights import model_folder
from sharpmax.inputs import InputError
from sharpmax.tasks import clrs_text
from sharpmax.tasks.clrs_text import CharacterTokenizer, Encoder, accuracy, outcomes
from sharpmax.tasks.clrs_text.accuracy import Settings
from sharpmax.tasks.clrs_text.evaluation_command import evaluate_command, find_subject
from sharpmax.tasks.clrs_text.models import character_tokenizer
from sharpmax.tasks.clrs_text.settings import Settings as TrainingSettings
from tests.tasks.clrs_text.students import Student, even, tiny_model


@pytest.fixture
def model() -> Any:
    return tiny_model()


@pytest.fixture
def trained(model: Any, tmp_path: Path) -> Path:
    """The folder of a training run, of a model that was trained with the paper's policy on one size that fitted."""
    run = tmp_path / "run"
    with sharpen(model, PAPER):
        model.save_pretrained(run / "model")
    character_tokenizer().save_pretrained(run / "model")
    report(run)
    return run


def report(run: Path, **changes: Any) -> None:
    """Write the report of a training run."""
    settings = TrainingSettings(policy=PAPER.to_dict(), tokens=1000).to_json() | changes
    split = clrs_text.training().only(["minimum"], [4, 5]).to_json()
    counts = {"tokens": 1024, "packed": {"minimum": {"5": 7}}, "dropped": {"minimum": {"4": 7}}}
    content = dict.fromkeys(outcomes.TRAINED, 1) | {"counts": counts, "config": {"model_type": "llama"}}
    (run / "training.json").write_text(json.dumps(content | {"settings": settings, "split": split}))


ASKED: dict[str, Any] = {"algorithms": "minimum,bfs", "sizes": "4-5", "seeds": "3,14", "samples": 2}


def test_the_command_evaluates_a_training_run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(("minimum", "bfs"), (4, 5), (3, 14), 2)
    models: list[Any] = []

    def generate(model: Any, *arguments: Any, **options: Any) -> Any:
        models.append(model)
        return Student(Encoder(CharacterTokenizer()), settings, even)(model, *arguments, **options)

    memories: list[float | None] = []
    monkeypatch.setattr(accuracy, "_generation", lambda memory: memories.append(memory) or generate)
    lines = evaluate_command(str(trained), tmp_path / "out", **ASKED, memory=0.4)
    assert memories == [0.4]
    assert lines[0] == "run: 16 samples of 2 algorithms, 0 more are longer than 2,048 tokens and left out"
    assert lines[1] == "  right at training sizes: 50.0%, the mean over algorithms"
    assert "generated tokens/s" in lines[4]
    assert lines[-1] == str(tmp_path / "out" / "evaluation.json")
    report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert report["model"]["policy"] == [{"policy": PAPER.to_dict(), "layers": None, "heads": None}]
    assert report["training"]["counts"]["tokens"] == 1024
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
        ({"algorithms": ","}, "expected names with commas between them, got ','"),
        ({"memory": 1.5}, "expected a part of the memory between 0 and 1, got 1.5"),
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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Settings that the command would have asked with, instead of asking."""
    found: list[Settings] = []

    def note(model: Any, encoder: Any, settings: Settings, *_: Any, **options: Any) -> Any:
        found.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(accuracy, "evaluate", note)
    return found


def noted(run: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    with pytest.raises(KeyboardInterrupt):
        evaluate_command(str(run), run.parent / "out", **ASKED | options)
    return capsys.readouterr().err


def test_questions_are_as_in_training(trained: Path, asked: list[Settings], capsys: Any) -> None:
    report(trained, traces=False, length=512)
    said = noted(trained, capsys)
    assert "run: samples may have 2,048 tokens, and training had sequences of 512" in said
    noted(trained, capsys, traces=False, length=512)
    assert [settings.traces for settings in asked] == [False, False]
    with pytest.raises(InputError, match="expected questions without traces, as in the model's training, got with"):
        evaluate_command(str(trained), trained.parent / "out", traces=True, **ASKED)


def test_what_is_assumed_of_training_is_said(trained: Path, asked: list[Settings], capsys: Any) -> None:
    assert "nothing is known" not in noted(trained, capsys)
    assert "at training sizes, samples of seed 0 are those of training" in noted(trained, capsys, seeds="0,3")
    moved = trained.rename(trained.parent / "other") / "model"
    copied = moved.rename(trained.parent / "copied")  # beside a training.json that is not its own
    (copied.parent / "training.json").write_text("{}")
    said = noted(copied, capsys)
    assert "copied: nothing is known of its training; the benchmark's training sizes are taken for its own" in said


def test_nothing_is_known_of_a_model_that_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report(tmp_path)
    assert outcomes.training_summary("smollm2-135m-instruct") is None
    assert outcomes.training_summary("model") is None
    (tmp_path / "model").mkdir()
    found = outcomes.training_summary("model")
    assert found is not None
    assert found["seeds"] == [0]
    assert {"start", "processes"} <= set(found)


def test_the_report_of_an_earlier_version_is_called_that(trained: Path, tmp_path: Path) -> None:
    known = json.loads((trained / "training.json").read_text())
    for lacking in (
        {**known, "counts": {"tokens": 1024}},
        {k: v for k, v in known.items() if k != "median_data_seconds"},
    ):
        (trained / "training.json").write_text(json.dumps(lacking))
        with pytest.raises(InputError, match="was written by an earlier version, which did not count the sizes"):
            evaluate_command(str(trained), tmp_path / "out", **ASKED)


def test_a_run_that_is_not_finished_is_refused(trained: Path, tmp_path: Path) -> None:
    (trained / "training.json").rename(trained / "checkpoint.json")
    for place in (trained, trained / "model"):
        with pytest.raises(InputError, match=r"expected a model whose training is finished, got .*, a run that is not"):
            evaluate_command(str(place), tmp_path / "out", **ASKED)
    report(trained)  # as if the run had been killed just before its last checkpoint was removed
    assert model_folder(str(trained)) == ("run", str(trained / "model"))
    assert model_folder(str(trained / "model")) == ("run", str(trained / "model"))


def test_the_folder_of_a_run_is_not_for_evaluations(trained: Path) -> None:
    with pytest.raises(InputError, match=r"expected a folder for an evaluation, got .*, a training run with training"):
        evaluate_command(str(trained), trained, **ASKED)


def test_a_device_without_memory_is_one_sentence(trained: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nMany lines.")

    monkeypatch.setattr(accuracy, "evaluate", full)
    with pytest.raises(InputError, match="no memory for this: free some, or take a smaller --length"):
        evaluate_command(str(trained), tmp_path / "out", **ASKED)


def test_a_model_without_so_many_positions_is_refused(tmp_path: Path) -> None:
    vocabulary = len(CharacterTokenizer())
    config = GPT2Config(vocab_size=vocabulary, n_embd=8, n_layer=1, n_head=1, n_positions=64, bos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "learned")
    character_tokenizer().save_pretrained(tmp_path / "learned")
    with pytest.raises(InputError, match="expected a length of at most 64 tokens, since a GPT2LMHeadModel has learned"):
        evaluate_command(str(tmp_path / "learned"), tmp_path / "out", **ASKED)


def test_layers_that_generation_does_not_know_are_refused(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.config.layer_types = ["chunked_attention"]
    monkeypatch.setattr(weights, "load", lambda *_, **__: (model, character_tokenizer()))
    with pytest.raises(InputError, match=r"expected layers of .* got llama with chunked_attention"):
        evaluate_command("anything", tmp_path / "out", **ASKED)
