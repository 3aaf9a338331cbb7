"""Where a training run begins: the start that it keeps to, the folders that it takes, and samples it cannot use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from sharpmax import PAPER
from sharpmax.core.claims import claimed
from sharpmax.huggingface.weights import load
from sharpmax.inputs import InputError
from sharpmax.tasks.clrs_text import CharacterTokenizer, checkpoints, evaluation, generate, training
from sharpmax.tasks.clrs_text.fine_tuning import finished, train
from sharpmax.tasks.clrs_text.journal import NEEDED, read_lines
from sharpmax.tasks.clrs_text.models import SCRATCH_CONFIG, character_tokenizer, find_model, start_of
from sharpmax.tasks.clrs_text.outcomes import read_report
from sharpmax.tasks.clrs_text.settings import Settings
from sharpmax.tasks.clrs_text.training_command import train_command


@pytest.fixture
def settings(tmp_path) -> Settings:
    """Two steps of a model with 10,000 parameters, from a folder."""
    config = SCRATCH_CONFIG | {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    model, tokenizer = find_model(str(tmp_path / "tiny.json"))
    model.save_pretrained(tmp_path / "begin")
    tokenizer.save_pretrained(tmp_path / "begin")
    return Settings(
        model=str(tmp_path / "begin"), tokens=2 * 2 * 128, batch=2, micro=2, length=128, algorithms=("minimum",),
        sizes=(4, 5), log_every=1, precision="float32",
    )  # fmt: skip


def change_weights(settings: Settings) -> None:
    path = Path(settings.model) / "model.safetensors"
    tensors = {name: tensor + 1 for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def change_config(settings: Settings) -> None:
    path = Path(settings.model) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.5}))


@pytest.mark.parametrize(
    ("change", "says"),
    [(change_weights, "that began with other weights"), (change_config, "with rms_norm_eps 1e-06 in place of 0.5")],
)
@pytest.mark.parametrize("minutes", [None, 1e-9], ids=["finished", "stopped"])
def test_a_run_that_began_with_another_model_of_the_name_is_refused(tmp_path, settings, change, says, minutes):
    out = tmp_path / "run"
    result = train(settings, out, cpu=True, minutes=minutes)
    assert (result is None) == (minutes is not None)
    change(settings)
    with pytest.raises(ValueError, match=rf"expected .* to hold a run of the same model, got one.* {says}"):
        train(settings, out, cpu=True)


def test_runs_with_other_policies_have_the_same_start(tmp_path, settings):
    plain = train(settings, tmp_path / "plain", cpu=True)
    paper = train(replace(settings, policy=PAPER.to_dict()), tmp_path / "paper", cpu=True)
    assert plain is not None
    assert paper is not None
    assert plain["start"] == paper["start"] == start_of(find_model(settings.model)[0])
    assert read_report(tmp_path / "plain" / "training.json") == plain


def test_a_run_goes_on_from_the_model_of_another_run(tmp_path, settings):
    train(settings, tmp_path / "first", cpu=True)
    result = train(replace(settings, model=str(tmp_path / "first")), tmp_path / "second", cpu=True)
    assert result is not None
    assert result["settings"]["model"] == "first"
    assert result["start"] == start_of(find_model(str(tmp_path / "first" / "model"))[0])
    train(replace(settings, seed=1), tmp_path / "begun", cpu=True, minutes=1e-9)
    with pytest.raises(ValueError, match=r"expected a model whose training is finished, got .*begun"):
        train(replace(settings, model=str(tmp_path / "begun")), tmp_path / "third", cpu=True)


def test_a_damaged_report_or_log_is_named(tmp_path, settings):
    out = tmp_path / "run"
    train(settings, out, cpu=True, minutes=1e-9)
    line = json.dumps(dict.fromkeys(NEEDED, 1)) + "\n"
    (out / "log.jsonl").write_text(line + '{"step"\n' + line)
    with pytest.raises(ValueError, match=r"log\.jsonl is damaged in line 2: mend or delete the line"):
        train(settings, out, cpu=True)
    (out / "log.jsonl").write_text(line + '{"step"')  # cut off by a kill
    assert len(read_lines(out / "log.jsonl")) == 1
    for content in ("{", "[]", "{}"):
        (out / "training.json").write_text(content)
        with pytest.raises(ValueError, match=r"training\.json is not the report of a training run, or is damaged"):
            finished(settings, out)


@pytest.mark.parametrize("name", ["evaluation.json", "cells"])
def test_the_folder_of_an_evaluation_is_not_for_runs(tmp_path, settings, name):
    (tmp_path / "out" / name).mkdir(parents=True)
    with pytest.raises(InputError, match=r"expected a folder for a training run, got .*, an evaluation"):
        train_command(tmp_path / "out", model=settings.model, cpu=True)


def test_nobody_trains_on_questions_of_the_evaluation(tmp_path, settings):
    few = {"algorithms": ["minimum"], "sizes": [4], "samples": 2}
    generate(tmp_path / "asked", split=evaluation().only(**few, seeds=(7,)), processes=1)
    generate(tmp_path / "shared", split=training().only(**few, seeds=(0, 14)), processes=1)
    stored = replace(settings, algorithms=None, sizes=None)
    with pytest.raises(ValueError, match=r"not of an evaluation set, got '.*asked', which is one"):
        train(replace(stored, data=str(tmp_path / "asked")), tmp_path / "run", cpu=True)
    with pytest.raises(ValueError, match=r"not of an evaluation set, got '.*shared', with its seed 14"):
        train(replace(stored, data=str(tmp_path / "shared")), tmp_path / "run", cpu=True)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_a_shard_that_is_corrupt_or_missing_is_one_sentence(tmp_path, settings, workers):
    split = training().only(["minimum"], [4, 5], samples=200)
    generate(tmp_path / "data", split=split, processes=1, shard=100)
    stored = replace(
        settings, algorithms=None, sizes=None, data=str(tmp_path / "data"), workers=workers, tokens=100 * 2 * 128
    )
    late = sorted((tmp_path / "data" / "minimum" / "4").iterdir())[1]  # read when training is under way
    kept = late.read_bytes()
    late.write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"^the shard .* is corrupt, [^\n]*$"):
        train(stored, tmp_path / "run", cpu=True)
    if workers:
        return
    late.unlink()
    with pytest.raises(InputError, match=r"^the shard .* is missing: generate again, [^\n]*$"):
        train(stored, tmp_path / "run", cpu=True)
    late.write_bytes(kept)
    early = sorted((tmp_path / "data" / "minimum" / "5").iterdir())[0]
    early.unlink()
    with pytest.raises(InputError, match=r"^the shard .* is missing"):
        train_command(tmp_path / "other", model=settings.model, data=stored.data, workers=workers, cpu=True)
    assert not (tmp_path / "other").exists()


def test_a_model_without_so_many_positions_is_refused(tmp_path, settings):
    vocabulary = len(CharacterTokenizer())
    config = GPT2Config(vocab_size=vocabulary, n_embd=8, n_layer=1, n_head=1, n_positions=64, bos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "learned")
    character_tokenizer().save_pretrained(tmp_path / "learned")
    learned = replace(settings, model=str(tmp_path / "learned"))
    with pytest.raises(ValueError, match="expected a length of at most 64 tokens, since a GPT2LMHeadModel has learned"):
        train(learned, tmp_path / "run", cpu=True)


def test_progress_is_told_without_a_terminal(tmp_path, settings, capsys):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(settings.to_json() | {"model": settings.model}))
    train_command(tmp_path / "run", settings=path, cpu=True)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line.partition(": loss ")[0] for line in said] == ["step 1 of 2", "step 2 of 2"]


def test_a_model_that_no_run_made_is_not_replaced(tmp_path, settings):
    mine = tmp_path / "mine"
    (tmp_path / "begin").rename(tmp_path / "begin_")
    mine.mkdir()
    (tmp_path / "begin_").rename(mine / "model")
    before = (mine / "model" / "model.safetensors").read_bytes()
    for name in (str(mine / "model"), str(mine), str(tmp_path / "tiny.json")):
        with pytest.raises(ValueError, match=r"expected a folder for a new run, got .* would be replaced"):
            train(replace(settings, model=name), mine, cpu=True)
    (mine / "log.jsonl").write_text("")  # as if a run had been begun there
    with pytest.raises(ValueError, match="would be replaced"):
        train(replace(settings, model=str(mine / "model")), mine, cpu=True)
    assert (mine / "model" / "model.safetensors").read_bytes() == before


def test_one_run_at_a_time_in_a_folder(tmp_path, settings):
    out = tmp_path / "run"
    with claimed(out) as held:
        assert held
        with pytest.raises(ValueError, match="where a run is going on"):
            train(settings, out, cpu=True)
        with pytest.raises(InputError, match="where a run is going on"):
            train_command(out, cpu=True, **command_fields(settings, tmp_path))
    assert train(settings, out, cpu=True) is not None


def command_fields(settings: Settings, folder: Path) -> dict[str, Any]:
    path = folder / "settings.json"
    content = json.dumps(settings.to_json() | {"model": settings.model})
    path.write_text(content, encoding="utf-8-sig")  # as some editors begin a file
    return {"settings": path}


def test_the_folder_of_a_run_is_a_model(tmp_path, settings):
    train(settings, tmp_path / "run", cpu=True)
    network, _ = load(tmp_path / "run")
    again, _ = load(tmp_path / "run" / "model")
    assert start_of(network) == start_of(again)
    said = train_command(tmp_path / "run", cpu=True, save_dtype="bfloat16", **command_fields(settings, tmp_path))
    assert said[0].endswith("finished before, with weights in float32")


def test_a_full_disk_is_an_error_of_the_system(tmp_path):
    with pytest.raises(OSError, match=r"model.safetensors cannot be written: .*"):
        checkpoints.write_tensors(tmp_path / "no folder" / "model.safetensors", {})


def test_bad_news_tell_of_a_checkpoint_only_if_there_is_one(tmp_path, settings):
    wild = replace(settings, learning_rate=1e30, tokens=8 * settings.tokens)
    with pytest.raises(InputError, match=r"is no number after step .*: try a lower one; nothing is saved yet$"):
        train(wild, tmp_path / "run", cpu=True)
