"""Generation with caches against full recomputation, and padded prompts against the prompts one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, StaticCache

from sharpmax.huggingface import Call, interface, observe, register
from sharpmax.torch import decode_attention
from tests.huggingface import families

register()

LENGTH, NEW = 12, 9
STATIC = {"cache_implementation": "static", "disable_compile": True}


def generated(model: Any, ids: Tensor, mask: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The new tokens, and the logits they were chosen by."""
    settings = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, **kwargs}
    out = model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **settings)
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits)


@pytest.mark.parametrize("cache", [{}, STATIC], ids=["dynamic", "static"])
@pytest.mark.parametrize("family", families.CAUSAL)
def test_a_cache_changes_nothing(family, cache):
    model = families.causal(family)
    ids, mask = families.padded([LENGTH, 5, 9], LENGTH, "left")
    tokens, logits = generated(model, ids, mask, use_cache=False)
    found, found_logits = generated(model, ids, mask, **cache)
    assert torch.equal(found, tokens)
    torch.testing.assert_close(found_logits, logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", families.CAUSAL)
def test_a_padded_batch_is_its_prompts_one_by_one(family):
    model, lengths = families.causal(family), [LENGTH, 5, 9]
    ids, mask = families.padded(lengths, LENGTH, "left")
    tokens, logits = generated(model, ids, mask)
    for row, length in enumerate(lengths):
        alone, alone_logits = generated(model, ids[row : row + 1, LENGTH - length :])
        assert torch.equal(alone[0], tokens[row])
        torch.testing.assert_close(alone_logits[:, 0], logits[:, row], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"do_sample": True, "top_k": 5}], ids=["beams", "sampling"])
def test_beams_and_sampling(settings):
    model = families.causal("gemma3")
    ids, mask = families.padded([LENGTH, 5], LENGTH, "left")
    tokens = []
    for cache in ({"use_cache": False}, {}, STATIC):
        torch.manual_seed(1)
        tokens.append(generated(model, ids, mask, **settings, **cache)[0])
    assert torch.equal(tokens[0], tokens[1])
    assert torch.equal(tokens[0], tokens[2])


def test_t5_generates_with_a_cache_what_it_generates_without():
    model = families.t5()
    ids, mask = families.padded([LENGTH, 7], LENGTH, "right")
    sequences = [
        model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, use_cache=cached)
        for cached in (True, False)
    ]
    assert torch.equal(*sequences)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_prompt_in_pieces_is_the_whole_prompt(family, static):
    model, ids = families.causal(family), families.tokens(2, 23)
    with torch.no_grad():
        whole = model(ids).logits
        cache = StaticCache(config=model.config, max_cache_len=40) if static else None
        found = []
        for piece in ids.split([6, 5, 1, 9, 2], dim=1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cache", [{}, STATIC], ids=["dynamic", "static"])
def test_unpadded_decoding_has_no_mask(cache):
    """A static cache says how much of it is valid."""
    calls: list[Call] = []
    with observe(calls.append):
        generated(families.causal("llama"), families.tokens(2, LENGTH), **cache)
    steps = [call for call in calls if call.query.shape[2] == 1]
    assert len(steps) == 2 * (NEW - 1)
    for call in steps:
        assert call.options["attn_mask"] is None
        assert call.options["is_causal"] == "lower_right"
        assert (call.options["key_lengths"] is not None) == bool(cache)


@pytest.mark.parametrize("cache", [{}, STATIC], ids=["dynamic", "static"])
def test_padded_steps_are_served_by_the_kernels_for_decoding(cache, monkeypatch):
    masks = []

    def watched(query, *args, **kwargs):
        if query.shape[2] == 1:
            masks.append(kwargs["key_mask"])
        return decode_attention(query, *args, **kwargs)

    monkeypatch.setattr(interface, "decode_attention", watched)
    ids, mask = families.padded([LENGTH, 5], LENGTH, "left")
    generated(families.causal("llama"), ids, mask, **cache)
    assert len(masks) == 2 * (NEW - 1)
    assert all(m is not None and not m[1, :7].any() and m[1, 7:13].all() and m[0, :13].all() for m in masks)


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.thorough), "gemma3"])
def test_generate_compiles_steps_with_a_static_cache(family):
    model = families.causal(family)
    ids, mask = families.padded([LENGTH, 5], LENGTH, "left")
    tokens, logits = generated(model, ids, mask, use_cache=False)
    settings: Any = {"backend": "eager", "fullgraph": True, "mode": None}
    compiling: Any = CompileConfig(**settings)
    compiling._compile_all_devices = True
    found, found_logits = generated(model, ids, mask, cache_implementation="static", compile_config=compiling)
    assert model._compiled_call is not None
    assert torch.equal(found, tokens)
    torch.testing.assert_close(found_logits, logits, rtol=1e-9, atol=1e-9)
