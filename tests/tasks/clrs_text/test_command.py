"""The functions behind ``sharpmax clrs-text``: what they make, and that mistakes are one sentence."""

from __future__ import annotations

import json

import pytest

from sharpmax.inputs import InputError
from sharpmax.tasks.clrs_text import benchmark, command, generate_samples, load_manifest
from sharpmax.tasks.clrs_text.command import generate_command, lengths_command, show_command, verify_command

SMALL = {"algorithms": "naive_string_matcher, segments_intersect", "sizes": "4-5", "samples": 30, "processes": 1}


def test_both_sets_are_made_and_compared(tmp_path):
    lines = generate_command(tmp_path, **SMALL)
    train, evaluation = load_manifest(tmp_path / "train"), load_manifest(tmp_path / "evaluation")
    assert train["split"]["seeds"] == [0]
    assert evaluation["split"]["seeds"] == [3, 14, 35, 81, 94]
    assert evaluation["samples"] == 5 * train["samples"] == 600
    assert evaluation["against"]["seen"] > 0
    assert len(lines) == 5
    assert "120 samples in 4 shards" in lines[0]
    assert "repeat another sample's question" in lines[1]
    assert "segments_intersect 30" in lines[1]
    assert "have a question of the training set" in lines[4]
    assert generate_command(tmp_path, **SMALL) == lines
    assert verify_command(tmp_path / "train") == lines[:2]


def test_one_set_is_made_alone(tmp_path):
    generate_command(tmp_path, split="evaluation", seeds="7", traces=False, **SMALL)
    assert not (tmp_path / "train").exists()
    manifest = load_manifest(tmp_path / "evaluation")
    assert manifest["split"]["seeds"] == [7]
    assert manifest["split"]["traces"] is False
    assert manifest["against"] is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"split": "test"}, "expected a split to be one of all, train, evaluation, got 'test'"),
        ({"seeds": "1"}, "expected seeds for one split"),
        ({"algorithms": "minimum,bogosort"}, "got 'bogosort'"),
        ({"algorithms": ""}, "got ''"),
        ({"sizes": "4,many"}, "expected sizes to be whole numbers or ranges with commas between them, got '4,many'"),
        ({"sizes": "3"}, "from 4 to 256, got 3"),
        ({"sizes": "9-4"}, "got '9-4'"),
        ({"sizes": "4-99999999999"}, "got '4-99999999999'"),
        ({"samples": 0}, "at least one sample"),
        ({"processes": 0}, "at least one process"),
        ({"shard": 0}, "at least one sample in a shard"),
    ],
)
def test_bad_arguments_are_one_sentence(tmp_path, options, says):
    with pytest.raises(InputError, match=says) as raised:
        generate_command(tmp_path / "out", **(SMALL | options))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="expected a folder that files can be written to"):
        generate_command(tmp_path / "file", **SMALL)
    with pytest.raises(InputError, match="expected a folder that `sharpmax clrs-text generate` made"):
        verify_command(tmp_path)


def test_a_sample_is_shown():
    sample = show_command("minimum", 4, index=2, traces=False)
    assert sample.question.startswith("minimum:\nkey: [")
    assert sample.index == 2
    with pytest.raises(InputError, match="got 'bogosort'"):
        show_command("bogosort", 4)
    with pytest.raises(InputError, match="at least 0, got -1"):
        show_command("minimum", 4, index=-1)


def test_lengths_say_what_fits(tmp_path, monkeypatch):
    small = {name: lambda t, made=made: made(t).only(["minimum", "dfs"], [4, 5, 12]) for name, made in SPLITS.items()}
    monkeypatch.setattr(command, "SPLITS", small)
    (path,) = lengths_command("characters", tmp_path, length=600, samples=3)
    found = json.loads(path.read_text())
    assert path.name == "clrs_text_lengths_characters.json"
    assert found["train"]["algorithms"]["minimum"]["fits"] == 12
    dfs = found["train"]["algorithms"]["dfs"]
    texts = [len(s.question + s.answer) + 1 for s in generate_samples("dfs", 12, 0, count=3)]
    assert dfs["sizes"]["12"] == {"mean": sum(texts) / 3, "longest": max(texts), "over": 1.0}
    assert dfs["fits"] == 5
    assert dfs["over"] == pytest.approx(1 / 3)
    assert found["train"]["over"] == pytest.approx(1 / 6)
    assert found["evaluation"]["seed"] == 3
    with pytest.raises(InputError, match="at least one sample and two tokens, got 0 and 2048"):
        lengths_command("characters", tmp_path, samples=0)


SPLITS = dict(benchmark.SPLITS)
