"""MultiheadAttention against torch's module, whose state_dict it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sharpmax
from sharpmax.torch import Learnable, MultiheadAttention


def pair(**kw: Any) -> tuple[torch.nn.MultiheadAttention, MultiheadAttention]:
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(8, 2, **kw)
    ours = MultiheadAttention(8, 2, **kw, policy=sharpmax.Constant(1))
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kw", [{}, {"bias": False}, {"kdim": 6, "vdim": 4}], ids=str)
@pytest.mark.parametrize("mask", ["none", "padding", "boolean", "float", "three", "both", "float_padding", "causal"])
def test_constant_one_is_torch_module(batch_first: bool, kw: dict[str, Any], mask: str) -> None:
    theirs, ours = pair(batch_first=batch_first, **kw)
    x = [torch.randn(3, n, d) for n, d in ((5, 8), (7, kw.get("kdim", 8)), (7, kw.get("vdim", 8)))]
    x = x if batch_first else [t.transpose(0, 1) for t in x]
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 4:] = True
    boolean, numbers = torch.ones(5, 7, dtype=torch.bool).triu(3), torch.randn(5, 7)
    call: dict[str, Any] = {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "boolean": {"attn_mask": boolean},
        "float": {"attn_mask": numbers},
        "three": {"attn_mask": torch.randn(6, 5, 7)},
        "both": {"attn_mask": boolean, "key_padding_mask": padding},
        "float_padding": {"attn_mask": numbers, "key_padding_mask": torch.randn(3, 7)},
        "causal": {"attn_mask": torch.ones(5, 7, dtype=torch.bool).triu(1), "is_causal": True},
    }[mask]
    expected, _ = theirs(*x, need_weights=False, **call)
    found, weights = ours(*x, **call)
    assert weights is None
    assert torch.allclose(found, expected, atol=1e-6)


def test_unbatched() -> None:
    theirs, ours = pair()
    x = torch.randn(5, 8)
    padding = torch.tensor([False, False, True, False, True])
    expected, _ = theirs(x, x, x, key_padding_mask=padding, need_weights=False)
    assert torch.allclose(ours(x, x, x, key_padding_mask=padding)[0], expected, atol=1e-6)


def test_policy_acts_and_a_learnable_one_is_a_submodule() -> None:
    plain, (_, constant) = MultiheadAttention(8, 2), pair()
    plain.load_state_dict(constant.state_dict())
    x = 4 * torch.randn(16, 2, 8)
    assert not torch.allclose(plain(x, x, x)[0], constant(x, x, x)[0], atol=1e-3)
    learnable = MultiheadAttention(8, 2, policy=Learnable(sharpmax.LearnableTemperature(heads=2)))
    names = {name for name, _ in learnable.named_parameters() if name.startswith("policy.")}
    assert names
    learnable(x, x, x)[0].square().sum().backward()
    assert all(p.grad is not None for p in learnable.parameters())


def test_dropout_only_in_training() -> None:
    module = MultiheadAttention(8, 2, dropout=0.5)
    x = torch.randn(6, 2, 8)
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    module.eval()
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])


@pytest.mark.parametrize(
    ("make", "call", "words"),
    [
        ({}, {"need_weights": True}, "need_weights=False"),
        ({"add_zero_attn": True}, {}, "add_zero_attn"),
        ({"add_bias_kv": True}, {}, "add_bias_kv"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(make: dict[str, Any], call: dict[str, Any], words: str) -> None:
    x = torch.randn(3, 2, 8)
    with pytest.raises(ValueError, match=words):
        MultiheadAttention(8, 2, **make)(x, x, x, **call)
