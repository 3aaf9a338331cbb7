"""Settings of a training run: where they come from, what they decide, and what cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sharpmax import PAPER
from sharpmax.inputs import InputError
from sharpmax.tasks.clrs_text.loss import Learner
from sharpmax.tasks.clrs_text.models import SCRATCH_CONFIG, find_model
from sharpmax.tasks.clrs_text.preparation import find_optimizer
from sharpmax.tasks.clrs_text.schedule import rate_at
from sharpmax.tasks.clrs_text.settings import Settings
from sharpmax.tasks.clrs_text.training_command import train_command


@pytest.fixture
def tiny(tmp_path) -> Settings:
    """Eight steps of a model with 20,000 parameters."""
    config = SCRATCH_CONFIG | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    return Settings(
        model=str(tmp_path / "tiny.json"), policy=PAPER.to_dict(), tokens=8 * 4 * 192, batch=4, micro=2, length=192,
        algorithms=("minimum",), sizes=(4, 5), checkpoint_every=3, log_every=2, precision="float32",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"policy": "sharp"}, "expected the policy to be none, paper, paper-held or a policy file, got 'sharp'"),
        ({"algorithms": "bogosort"}, "bogosort"),
        ({"sizes": "four"}, "expected sizes to be whole numbers"),
        ({"tokens": 0}, "expected tokens to be at least 1, got 0"),
        ({"precision": "fp8"}, "expected precision to be one of auto, bf16, float32, got 'fp8'"),
        (
            {"batch": 5, "micro": 2},
            "expected the batch to be a multiple of 2 sequences on each of 1 processes, got 5; a",
        ),
        ({"minutes": 0.0}, "expected more than 0 minutes, got 0"),
        ({"minutes": float("nan")}, "expected more than 0 minutes, got nan"),
        ({"algorithms": ","}, "expected names with commas between them, got ','"),
        ({"length": 8}, "expected samples that fit into 8 tokens, got only longer ones"),
        ({"save_dtype": "int8"}, "expected the saved weights to be float32 or bfloat16, got 'int8'"),
        ({"model": "nothing.json"}, "expected a file with the config of a model, got 'nothing.json'"),
        ({"settings": Path("nothing.json")}, "expected a file of settings, got 'nothing.json': No such file"),
        ({"data": "nothing"}, "nothing"),
        ({"seed": 2**63}, r"expected a seed from 0 to 2\*\*63 - 1, got 9223372036854775808"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_sentence(tmp_path, monkeypatch, options, match):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=match) as told:
        train_command(tmp_path / "run", cpu=True, **{"model": "scratch", **options})
    assert "\n" not in str(told.value)
    assert not (tmp_path / "run").exists()


def test_settings_of_a_file_come_after_options(tmp_path, tiny):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"model": tiny.model, "tokens": 768, "batch": 4, "micro": 2, "length": 192, "seed": 5}))
    said = train_command(tmp_path / "run", settings=path, cpu=True, seed=6, policy="none", algorithms="minimum")
    result = json.loads((tmp_path / "run" / "training.json").read_text())
    assert (result["settings"]["seed"], result["settings"]["policy"], result["steps"]) == (6, None, 1)
    assert "1 steps, 768 tokens" in said[0]
    path.write_text(json.dumps({"tokns": 768}))
    with pytest.raises(InputError, match=r"expected settings of a run to be among .*, got tokns"):
        train_command(tmp_path / "run", settings=path, cpu=True)
    path.write_text(json.dumps({"tokens": "many"}))
    with pytest.raises(InputError, match="expected tokens to be a whole number, got 'many'"):
        train_command(tmp_path / "run", settings=path, cpu=True)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"algorithms": "minimum"}, "expected algorithms to be a list of names or null, got 'minimum'"),
        ({"sizes": [4, "5"]}, "expected sizes to be a list of whole numbers or null"),
        ({"betas": 0.9}, "expected betas to be a list of two numbers, got 0.9"),
        ({"traces": 1}, "expected traces to be true or false, got 1"),
        ({"learning_rate": "high"}, "expected learning_rate to be a number, got 'high'"),
        ({"batch": 4.0}, "expected batch to be a whole number, got 4.0"),
        ({"model": None}, "expected model to be a text, got None"),
        ({"policy": "sharp"}, "expected the policy to be none, paper, paper-held or a policy file, got 'sharp'"),
        ({"policy": 3}, "expected policy to be a policy or null, got 3"),
    ],
)
def test_settings_of_a_file_have_the_types_of_their_fields(tmp_path, content, says):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=says):
        train_command(tmp_path / "run", settings=path, cpu=True)


def test_a_file_of_settings_may_name_a_policy(tmp_path, tiny):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(tiny.to_json() | {"model": tiny.model, "policy": "paper", "tokens": 768}))
    train_command(tmp_path / "run", settings=path, cpu=True)
    assert json.loads((tmp_path / "run" / "training.json").read_text())["settings"]["policy"] == PAPER.to_dict()


def test_settings_are_json_both_ways():
    settings = Settings(policy=PAPER.to_dict(), algorithms=("bfs", "minimum"), sizes=(4, 9))
    assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    assert Settings(tokens=2 * 64 * 2048 + 1).steps == 3


def test_only_matrices_decay(tiny):
    model, _ = find_model(tiny.model)
    decaying, others = find_optimizer(model, tiny, fused=False).param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert all("_proj" in names[id(p)] for p in decaying["params"])
    assert {names[id(p)].split(".")[-2] for p in others["params"]} == {
        "embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"
    }  # fmt: skip


def test_embeddings_of_the_output_do_not_decay_where_they_are_their_own(tmp_path, tiny):
    config = json.loads(Path(tiny.model).read_text()) | {"tie_word_embeddings": False}
    Path(tiny.model).write_text(json.dumps(config))
    model: Any
    model, _ = find_model(tiny.model)
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    decaying, others = find_optimizer(Learner(model), tiny, fused=False).param_groups
    assert any(p is model.lm_head.weight for p in others["params"])
    assert len(decaying["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_the_learning_rate_rises_and_falls():
    rates = [rate_at(step, 100, peak=2.0, warmup=0.1, final=0.25) for step in range(101)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == max(rates) == 2.0
    assert rates[55] == pytest.approx((2.0 + 0.5) / 2)
    assert rates[100] == pytest.approx(0.5)
    assert rate_at(0, 1, peak=2.0, warmup=0.0, final=0.1) == 2.0


def test_no_more_sequences_at_a_time_than_in_a_batch():
    assert Settings(batch=16).micro == 16
    assert Settings(batch=16).accumulation(1) == 1
    assert Settings(batch=64).micro == 32
