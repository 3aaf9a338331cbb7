"""Mechanisms switched on in models: against dense attention, with padding and caches, saved, undone and refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, StaticCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask

import sharpmax
from sharpmax.huggingface import Call, Rule, observe, register, sharpen, stored_rules
from sharpmax.mechanisms import MECHANISMS, Mechanism, Temperature, TopK, Window, find
from tests.huggingface import families
from tests.huggingface.test_switch import state
from tests.torch.test_mechanism_page import switches

register()
IDS = families.tokens(2, 13)
PADDED = torch.ones_like(IDS)
PADDED[0, :4] = 0
CHOSEN: dict[str, Mechanism] = {"top_k": TopK(3), "window": Window(4)}
SERVED = ("sparsemax", "entmax15", "sigmoid", "stick_breaking", "top_k", "window", "linear", "linear_elu", "selective")


def dense(mechanism: Mechanism) -> str:
    """An implementation that holds all logits, made with transformers' own dense masks; its name."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
        position_bias: Any = None, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        groups = query.shape[1] // key.shape[1]
        q, k, v = (x.numpy().astype(np.float64) for x in (query, key, value))
        k, v = (np.repeat(x, groups, axis=1) for x in (k, v))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if mechanism.features is not None:
            q, k, scale = mechanism.features(np, q), mechanism.features(np, k), 1.0
        logits = q @ np.swapaxes(k, -1, -2) * scale
        if position_bias is not None:
            logits = logits + position_bias.numpy()
        seen = np.ones(logits.shape, bool)
        if attention_mask is not None:
            seen &= attention_mask.numpy() > np.finfo(np.float32).min / 2
        return torch.from_numpy(mechanism(logits, seen) @ v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("dense_oracle", attention)
    AttentionMaskInterface.register("dense_oracle", eager_mask)
    return "dense_oracle"


def logits(model: Any, ids: Tensor = IDS, mask: Tensor | None = PADDED) -> Tensor:
    """What a model says of tokens that are no padding."""
    with torch.no_grad():
        found = model(ids, attention_mask=mask, use_cache=False).logits
    return found if mask is None else found[mask.bool()]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("name", SERVED)
def test_a_switched_model_is_the_dense_one(name: str, family: str) -> None:
    mechanism = CHOSEN.get(name, find(name))
    model = families.causal(family, attention=dense(mechanism))
    for mask in (None, PADDED):
        expected = logits(model, mask=mask)
        with sharpen(model, mechanism=mechanism):
            torch.testing.assert_close(logits(model, mask=mask), expected, rtol=1e-9, atol=1e-9)
            if mechanism.folds:
                with sharpen(model, mechanism=mechanism, impl="streaming"):
                    torch.testing.assert_close(logits(model, mask=mask), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["sparsemax", "stick_breaking", "window"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_decoding_is_what_whole_sequences_are(name: str, cache: str) -> None:
    model = families.causal("llama", attention="sdpa")
    with sharpen(model, mechanism=CHOSEN.get(name, name)):
        given: Any = {"attention_mask": PADDED, "max_new_tokens": 5, "do_sample": False}
        found = model.generate(IDS, cache_implementation=cache, disable_compile=True, **given)
        whole = model.generate(IDS, use_cache=False, **given)
    assert torch.equal(found, whole)
    assert not torch.equal(found, model.generate(IDS, **given))


def test_softmax_and_policies_are_policies() -> None:
    model = families.causal("llama", attention="sdpa")
    stock = logits(model)
    with sharpen(model, mechanism="softmax"):
        torch.testing.assert_close(logits(model), stock)
    with sharpen(model, copy.deepcopy(sharpmax.PAPER), mechanism="adaptive_held", heads=[1]) as handle:
        assert handle.rules == (Rule(MECHANISMS["adaptive_held"].policy, None, frozenset({1})),)


def test_a_position_bias_is_part_of_the_logits() -> None:
    model = families.t5(attention=dense(find("sigmoid")))
    given = {"input_ids": IDS, "attention_mask": PADDED, "decoder_input_ids": families.tokens(2, 6, seed=1)}
    with torch.no_grad():
        expected = model(**given, use_cache=False).logits
        with sharpen(model, mechanism="sigmoid"):
            torch.testing.assert_close(model(**given, use_cache=False).logits, expected, rtol=1e-9, atol=1e-9)


def test_layers_keep_what_they_have() -> None:
    model = families.causal("llama", attention="sdpa")
    calls: list[Call] = []
    with sharpen(model, mechanism="sparsemax", layers=[1]), observe(calls.append):
        logits(model)
        with sharpen(model, mechanism="sigmoid", layers=[0]):
            logits(model)
    assert [call.mechanism for call in calls] == [None, *(find(name) for name in ("sparsemax", "sigmoid", "sparsemax"))]


def test_undo_is_exact() -> None:
    model = families.causal("gpt2", attention="sdpa")
    before, stock = state(model), logits(model)
    with sharpen(model, mechanism="sparsemax", impl="reference"):
        assert not torch.allclose(logits(model), stock)
    assert state(model) == before
    assert torch.equal(logits(model), stock)


def test_a_saved_model_has_its_mechanism(tmp_path: Path) -> None:
    model = families.causal("llama", attention="sdpa")
    handle = sharpen(model, mechanism=TopK(3), layers=[1])
    model.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["sharpmax"]
    assert json.loads(text)["rules"][0]["mechanism"] == {"schema": "sharpmax.mechanism/1", "kind": "TopK", "k": 3}
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert stored_rules(tmp_path) == stored_rules(again) == handle.rules == (Rule(None, frozenset({1}), None, TopK(3)),)
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-12, atol=1e-12)
    assert repr(handle).endswith("TopK(k=3) in layers 1)")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "differential": ({"mechanism": "differential"}, "differential attention has parameters, which transformers'"),
    "asentmax": ({"mechanism": "asentmax"}, "has parameters, .*; build the model with sharpmax.torch.Multihead"),
    "ssmax": ({"mechanism": "ssmax"}, "has parameters, .*"),
    "learned": ({"mechanism": Temperature(sharpmax.LearnableTemperature())}, "has parameters, "),
    "step": ({"mechanism": "step"}, "does not reach the feed-forward layers"),
    "heads": ({"mechanism": "sparsemax", "heads": [0]}, "is for all heads of a layer; expected layers in place of"),
    "both": ({"mechanism": "sparsemax", "policy": MECHANISMS["hard"].policy}, "a mechanism or a policy, got both"),
    "a mechanism as policy": ({"policy": find("sparsemax")}, "got the mechanism Sparsemax"),
    "a name": ({"mechanism": "softermax"}, "expected a mechanism to be one of softmax, .* got 'softermax'"),
    "triton": ({"mechanism": "sparsemax", "impl": "fast"}, "expected impl to be one of"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    given, sentence = REFUSED[what]
    model = families.causal("llama", attention="sdpa")
    before = state(model)
    with pytest.raises((TypeError, ValueError), match=sentence):
        sharpen(model, **given)
    assert state(model) == before


def test_heads_of_a_layer_with_a_mechanism_get_no_policy() -> None:
    model = families.causal("llama", attention="sdpa")
    with sharpen(model, mechanism="sparsemax", layers=[1]):
        within = state(model)
        with pytest.raises(ValueError, match="expected sparsemax for all heads of a layer, got other heads"):
            sharpen(model, heads={1: [0]})
        assert state(model) == within
        sharpen(model, heads={0: [0]}).undo()


def test_selective_attention_needs_whole_sequences() -> None:
    model = families.causal("llama", attention="sdpa")
    with sharpen(model, mechanism="selective"):
        with pytest.raises(ValueError, match=r"reads the logits of earlier queries, .* got 1 and 14; call"):
            model.generate(IDS, max_new_tokens=3)
        positions = torch.arange(13).remainder(6)[None]
        with pytest.raises(ValueError, match="packed documents do not keep apart: expected one document in a row"):
            model(IDS[:1], position_ids=positions, use_cache=False)


@pytest.mark.parametrize("name", ["selective", "stick_breaking", "window"])
def test_padding_before_a_sequence_changes_nothing(name: str) -> None:
    model = families.causal("llama", attention="sdpa")
    positions = (PADDED.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), sharpen(model, mechanism=CHOSEN.get(name, name)):
        padded = model(IDS, attention_mask=PADDED, position_ids=positions, use_cache=False).logits[0, 4:]
        alone = model(IDS[:1, 4:], use_cache=False).logits[0]
    torch.testing.assert_close(padded, alone, rtol=1e-9, atol=1e-9)


def test_a_window_needs_the_place_of_its_queries() -> None:
    """A dense mask over a cache of 20 places does not say which of them are taken."""
    model = families.causal("llama", attention="sdpa")
    mask = torch.zeros(2, 1, 13, 20, dtype=torch.bool)
    mask[..., :13] = torch.ones(13, 13, dtype=torch.bool).tril()
    with torch.no_grad(), sharpen(model, mechanism=Window(4)):
        cache = StaticCache(config=model.config, max_cache_len=20)
        with pytest.raises(ValueError, match=r"counts back from a query's own key, .* got 13 and 20"):
            model(IDS, attention_mask=mask, past_key_values=cache, use_cache=True)
        whole = model(IDS, attention_mask=mask[..., :13], use_cache=False).logits
        torch.testing.assert_close(whole, model(IDS, use_cache=False).logits)


def test_packed_documents_do_not_see_each_other_also_compiled() -> None:
    model = families.causal("llama", attention="sdpa")
    positions = torch.cat([torch.arange(5), torch.arange(8)])[None].expand(2, -1)
    with torch.no_grad(), sharpen(model, mechanism="sigmoid"):
        packed = model(IDS, position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(part, use_cache=False).logits for part in IDS.split([5, 8], dim=1)], 1)
        torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-9)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits)


def test_what_switches_is_what_the_table_says() -> None:
    """The column "Hugging Face" of docs/mechanisms.md, which tests/torch/test_mechanism_page.py makes."""
    model = families.causal("llama", attention="sdpa")
    for name, mechanism in MECHANISMS.items():
        try:
            sharpen(model, mechanism=name).undo()
        except ValueError:
            assert switches(mechanism) == "no", name
        else:
            assert switches(mechanism) != "no", name
