"""sharpen, its undoing, and policies that travel with a saved model."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

import sharpmax.torch
from sharpmax import PAPER, PAPER_HELD, Constant, LearnableTemperature, LogLength, PerHead
from sharpmax.huggingface import Call, observe, register, sharpen, stored_rules, warn_if_idle
from tests.huggingface import families

register()
IDS = families.tokens(2, 21)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def policies(model: Any) -> list[Any]:
    """The policy of each layer, in order."""
    calls: list[Call] = []
    with observe(calls.append):
        logits(model)
    return [call.policy for call in calls]


def state(model: Any) -> list[Any]:
    """What undoing must restore: every config, the implementation of every submodel, and the modules' attributes."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return [
        [config and (config.to_dict(), config._attn_implementation, sorted(config.__dict__)) for config in configs],
        [sorted(module.__dict__) for module in model.modules()],
    ]


@pytest.mark.parametrize("make", [lambda: families.causal("gemma3", attention="sdpa"), families.t5, families.bert,
                                  families.gemma3_with_tower])  # fmt: skip
def test_undo_restores_the_model_exactly(make):
    model = make()
    before = copy.deepcopy(state(model))
    with sharpen(model, PAPER_HELD, impl="streaming") as outer:
        assert state(model) != before
        within = copy.deepcopy(state(model))
        with sharpen(model, Constant(2.0), layers=[1]):
            assert state(model) != within
        assert state(model) == within
    assert state(model) == before
    outer.undo()
    assert state(model) == before


def test_the_latest_call_is_undone_first():
    model = families.causal("llama", attention="sdpa")
    before = copy.deepcopy(state(model))
    first, second = sharpen(model, Constant(2.0), layers=[0]), sharpen(model, PAPER, layers=[1])
    both = copy.deepcopy(state(model))
    with pytest.raises(ValueError, match="expected later calls of sharpen on this model to be undone first"):
        first.undo()
    assert state(model) == both
    second.undo()
    first.undo()
    first.undo()  # nothing is left to do
    assert state(model) == before
    with sharpen(model, PAPER):
        pass
    assert state(model) == before


def test_the_order_of_undoing_holds_for_parts_of_a_model_too():
    for parts in (("model", ""), ("", "model")):
        model = families.causal("llama", attention="sdpa")
        before = copy.deepcopy(state(model))
        first, second = (sharpen(getattr(model, name) if name else model, PAPER) for name in parts)
        with pytest.raises(ValueError, match="to be undone first"):
            first.undo()
        second.undo()
        first.undo()
        assert state(model) == before


def test_a_call_that_nobody_holds_does_not_stand_in_the_way():
    model = families.causal("llama", attention="sdpa")
    before = copy.deepcopy(state(model))
    with sharpen(model, PAPER, layers=[0]):
        sharpen(model, Constant(2.0), layers=[1])
    assert state(model) == before


def test_the_error_of_a_block_is_not_hidden():
    model = families.causal("llama", attention="sdpa")
    later = None

    def block() -> None:
        nonlocal later
        with sharpen(model, PAPER, layers=[0]):
            later = sharpen(model, Constant(2.0), layers=[1])
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as raised:
        block()
    assert raised.value.__notes__ == [
        "the model stays sharpened: expected later calls of sharpen on this model to be undone first"
    ]
    assert later is not None


def test_a_model_that_is_gone_is_not_kept():
    model = families.causal("llama", attention="sdpa")
    sharpen(model, PAPER)
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None


def test_undo_after_an_error():
    model = families.causal("llama", attention="sdpa")
    stock = logits(model)
    with pytest.raises(RuntimeError), sharpen(model):
        model(IDS.float())
    assert torch.equal(logits(model), stock)


def test_without_a_policy_it_is_the_papers():
    assert policies(families.causal("llama")) == [PAPER, PAPER]
    model = families.causal("llama", attention="sdpa")
    model.set_attn_implementation("sharpmax")
    assert policies(model) == [PAPER, PAPER]


def test_layers_and_heads_that_are_not_named_keep_what_they_have():
    model, plain = families.causal("llama", attention="sdpa"), Constant(1.0)
    sharpen(model, PAPER, layers=[1])
    assert policies(model) == [plain, PAPER]
    sharpen(model, PAPER_HELD, heads=[0, 2])
    assert policies(model) == [
        PerHead((PAPER_HELD, plain, PAPER_HELD, plain)),
        PerHead((PAPER_HELD, PAPER, PAPER_HELD, PAPER)),
    ]
    sharpen(model, LogLength(), heads={0: [3]})
    assert policies(model)[0] == PerHead((PAPER_HELD, plain, PAPER_HELD, LogLength()))
    sharpen(model, Constant(2.0))
    assert policies(model) == [Constant(2.0), Constant(2.0)]


def test_a_model_that_runs_the_papers_policy_keeps_it_elsewhere():
    model = families.causal("llama")
    sharpen(model, Constant(3.0), layers=[0])
    assert policies(model) == [Constant(3.0), PAPER]


def test_a_head_without_the_policy_is_plain():
    """Output projections of single heads: only the head that was named differs from stock attention."""
    model = families.causal("llama", attention="sdpa")
    inputs: list[torch.Tensor] = []
    attention = model.model.layers[0].self_attn
    attention.o_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0].unflatten(-1, (4, 8))))
    logits(model)
    with sharpen(model, Constant(2.0), heads={0: [1]}):
        logits(model)
    differs = (inputs[0] - inputs[1]).abs().amax((0, 1, 3)) > 1e-9
    assert differs.tolist() == [False, True, False, False]


def test_saving_and_loading(tmp_path):
    model = families.causal("gemma3", attention="sdpa", dtype=torch.float32)
    policy = PerHead((PAPER, PAPER_HELD, Constant(1.5), LogLength.yarn(8)))
    rules = sharpen(model, policy, layers=[0]).rules
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert stored_rules(tmp_path) == stored_rules(model) == rules
    for request in ({}, {"attn_implementation": "sharpmax"}):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **request).eval()
        assert loaded.config._attn_implementation == "sharpmax"
        assert policies(loaded) == [policy, Constant(1.0)]
        assert torch.equal(logits(loaded), expected)
        warn_if_idle(loaded)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    assert stock.config._attn_implementation == "sdpa"
    assert stored_rules(stock) == rules
    assert not torch.allclose(logits(stock), expected)
    with pytest.warns(UserWarning, match="saved with sharpmax policies, but runs with sdpa attention"):
        warn_if_idle(stock)


def test_a_saved_model_is_not_loaded_with_stock_attention_unasked(tmp_path):
    """Where sharpmax is not registered, transformers refuses, and names it."""
    model = families.causal("llama", attention="sdpa", dtype=torch.float32)
    with sharpen(model):
        model.save_pretrained(tmp_path)
    program = f"from transformers import LlamaForCausalLM as M; M.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert 'attn_implementation="sharpmax"` is not supported' in done.stderr


def test_with_a_vision_tower_the_language_model_is_sharpened(tmp_path):
    model = families.gemma3_with_tower(dtype=torch.float32)
    ids = families.tokens(1, 20).clamp(max=57)
    ids[0, 5:9] = 60
    inputs = {"input_ids": ids, "token_type_ids": (ids == 60).long(), "pixel_values": torch.randn(1, 3, 16, 16)}
    with torch.no_grad():
        stock = model(**inputs).logits
        with sharpen(model, Constant(1.0)):
            torch.testing.assert_close(model(**inputs).logits, stock, rtol=1e-4, atol=1e-4)
        rules = sharpen(model, PAPER, layers=[1]).rules
        expected = model(**inputs).logits
        assert float((expected - stock).abs().max()) > 1e-2
        assert model.config.vision_config._attn_implementation == "sdpa"
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
        assert torch.equal(loaded(**inputs).logits, expected)
    assert stored_rules(tmp_path) == stored_rules(loaded) == rules


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(schema="sharpmax.huggingface/2"), "expected the config's 'sharpmax' to have schema"),
        (lambda c: c["rules"][0]["policy"].update(schema="sharpmax.policy/9"), "expected a policy with schema"),
        (lambda c: c["rules"][0]["policy"].update(kind="Mystery"), "unknown policy kind 'Mystery'"),
        (lambda c: c["rules"][0].pop("layers"), "are not complete"),
    ],
)
def test_policies_of_another_version_are_refused_before_weights_are_loaded(tmp_path, edit, message):
    model = families.causal("llama", dtype=torch.float32)
    sharpen(model)
    model.config.save_pretrained(tmp_path)
    path = Path(tmp_path) / "config.json"
    content = json.loads(path.read_text())
    text = json.loads(content["sharpmax"])
    edit(text)
    path.write_text(json.dumps({**content, "sharpmax": json.dumps(text)}))
    with pytest.raises(ValueError, match=message):
        stored_rules(tmp_path)
    model.config.sharpmax = json.dumps(text)
    with pytest.raises(ValueError, match=message):
        logits(model)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layers": [2]}, ValueError, r"layers of the model, which has 0 to 1, got \[2\]"),
        ({"layers": []}, ValueError, "got none"),
        ({"layers": 1}, TypeError, "expected layers to be a list of whole numbers, got 1"),
        ({"heads": [4]}, ValueError, r"heads of the model, which has 0 to 3, got \[4\]"),
        ({"heads": {5: [0]}}, ValueError, r"got \[5\]"),
        ({"heads": {0: [0]}, "layers": [0]}, ValueError, "leave layers out"),
        ({"policy": PerHead((PAPER, PAPER))}, ValueError, "each of 4 heads, got 2"),
        ({"policy": sharpmax.torch.Learnable(LearnableTemperature(heads=4))}, ValueError, "learnable policy"),
        ({"policy": LearnableTemperature(heads=4)}, ValueError, "learnable policy"),
        ({"policy": lambda stats: stats.sum}, TypeError, "policy of sharpmax's own"),
        ({"impl": "magic"}, ValueError, "impl to be one of auto"),
    ],
)  # fmt: skip
def test_bad_arguments_change_nothing(arguments, error, message):
    model = families.causal("llama", attention="sdpa")
    before = copy.deepcopy(state(model))
    with pytest.raises(error, match=message):
        sharpen(model, **arguments)
    assert state(model) == before


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="expected a transformers model, got Linear"):
        sharpen(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="expected a transformers model, got str"):
        sharpen("gpt2")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["Deberta", "FNet"])
def test_a_model_without_pluggable_attention_is_refused(name):
    config = getattr(transformers, f"{name}Config")(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
    )  # fmt: skip
    model = getattr(transformers, f"{name}Model")(config)
    with pytest.raises(ValueError, match=f"{name}Model has no attention that transformers can exchange"):
        sharpen(model)
