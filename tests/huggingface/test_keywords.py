"""Every keyword a model passes is served or refused; masks of users; what is watched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sharpmax.huggingface import Call, interface, keywords, observe, register, sharpen
from tests.huggingface import families
from tests.huggingface.oracle import figure_4

register()


class Attention(nn.Module):
    is_causal = True
    layer_idx = 0


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8))
    )
    return query, key, value


def added(seen: torch.Tensor) -> torch.Tensor:
    """A mask of numbers, as transformers makes them for eager attention."""
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)


def attend(mask: Any = None, **kwargs: Any) -> torch.Tensor:
    return interface.attention(Attention(), *tensors(), mask, **kwargs)[0]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("s_aux", torch.zeros(4), "attention sinks"),
        ("head_mask", torch.ones(4), "head_mask scales"),
        ("output_attentions", True, "output_attentions=True has nothing to return"),
        ("cache", object(), "paged caches"),
        ("indices", torch.zeros(1), "does not know the keyword indices"),
    ],
)
def test_what_is_not_served_is_refused_by_name(name, value, message):
    with pytest.raises(ValueError, match=message) as caught:
        attend(**{name: value})
    assert "\n" not in str(caught.value)
    attend(**{name: None})


def test_output_attentions_in_a_config_is_refused():
    model = families.causal("llama", attention="eager")
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions=True has nothing to return"):
        sharpen(model)
    assert model.config._attn_implementation == "eager"


def test_output_attentions_of_a_model_is_refused():
    with pytest.raises(ValueError, match="output_attentions"):
        families.causal("llama")(families.tokens(1, 5), output_attentions=True)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral", "gpt2", "llama"])
def test_every_keyword_of_the_families_is_known(family, monkeypatch):
    """Nothing that a model passes, in training and in evaluation, gets by without having been looked at."""
    passed: set[str] = set()
    monkeypatch.setattr(interface, "check_keywords", passed.update)
    model = families.causal(family)
    model(families.tokens(1, 5), labels=families.tokens(1, 5), num_items_in_batch=5, use_cache=False)
    model(families.tokens(1, 5), output_hidden_states=True)
    assert passed <= keywords.SERVED | keywords.WITHOUT_EFFECT
    assert not keywords.SERVED & keywords.WITHOUT_EFFECT


def test_softcap_and_scaling_are_served():
    causal = torch.ones(1, 1, 9, 9).tril().bool()
    expected = figure_4(Attention(), *tensors(), added(causal), scaling=0.7, softcap=2.0)[0]
    torch.testing.assert_close(attend(scaling=0.7, softcap=2.0), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["boolean", "floating-point"])
def test_masks_of_users_are_the_whole_truth(kind):
    """A 4D mask says what is seen, causality included, as in transformers' own implementations."""
    seen = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(1)) < 0.5
    seen[:, :, :, 3] = True
    expected = figure_4(Attention(), *tensors(), added(seen))[0]
    torch.testing.assert_close(attend(seen if kind == "boolean" else added(seen)), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mask", [torch.ones(2, 9), torch.ones(2, 1, 9, 9, dtype=torch.long), "causal"])
def test_masks_of_other_kinds_are_refused(mask):
    with pytest.raises(ValueError, match="expected a mask with 4 axes, boolean or floating-point"):
        attend(mask)


def test_a_window_that_no_one_names_is_refused():
    description = torch.full((2, 1, 2, 1), 9, dtype=torch.int32)
    with pytest.raises(ValueError, match="the mask has a sliding window, but Attention does not say which"):
        attend(description)
    assert attend(description, sliding_window=3).shape == (2, 9, 4, 8)


def test_causality_is_the_callers_where_it_says():
    full = torch.zeros(1, 1, 9, 9, dtype=torch.float64)
    expected = figure_4(Attention(), *tensors(), full)[0]
    torch.testing.assert_close(attend(is_causal=False), expected, rtol=1e-6, atol=1e-6)


def test_dropout_is_applied():
    torch.manual_seed(0)
    dropped = torch.stack([attend(dropout=0.5) for _ in range(300)])
    assert float(dropped.std(0).max()) > 0.1
    torch.testing.assert_close(dropped.mean(0), attend(), rtol=0, atol=0.6)


def test_watching_ends_with_its_block_and_sees_what_is_served():
    calls: list[Call] = []
    with observe(calls.append):
        served = attend(scaling=0.5)
    attend()
    assert len(calls) == 1
    call = calls[0]
    output = interface.scaled_dot_product_attention(
        call.query, call.key, call.value, policy=call.policy, **call.options
    )  # fmt: skip
    assert torch.equal(output.transpose(1, 2), served)
    assert set(call.options) == {"attn_mask", "is_causal", "window", "softcap", "scale", "key_lengths", "enable_gqa"}
