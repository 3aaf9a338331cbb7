"""MultiheadAttention against torch's module, whose state_dict it takes."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
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


def sharp_layer() -> torch.nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    layer.self_attn = MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        layer.self_attn.in_proj_weight.mul_(4)
    return layer.eval()


def by_hand(layer: torch.nn.TransformerEncoderLayer, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    x = layer.norm1(x + layer.self_attn(x, x, x, key_padding_mask=padding)[0])
    return layer.norm2(x + layer.linear2(torch.relu(layer.linear1(x))))


def saved_and_loaded(layer: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [lambda layer: layer, copy.deepcopy, saved_and_loaded])
@pytest.mark.parametrize("padded", [False, True])
def test_encoder_layer_in_evaluation_calls_the_module(copied: Any, padded: bool) -> None:
    layer, x = sharp_layer(), torch.randn(3, 6, 8)
    padding = torch.arange(6) >= torch.tensor([[6], [4], [2]]) if padded else None
    expected = by_hand(layer, x, padding)
    layer = copied(layer)
    assert torch.allclose(layer(x, src_key_padding_mask=padding), expected, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(layer(x, src_key_padding_mask=padding), expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*prototype")
@pytest.mark.parametrize("replaced", ["before", "after"])
def test_encoder_in_evaluation_calls_the_module(replaced: str) -> None:
    layer, x = sharp_layer(), torch.randn(3, 6, 8)
    if replaced == "before":
        encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    else:  # the encoder was built with torch's modules, and makes nested tensors of what is padded
        encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
        encoder.layers = torch.nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        encoder.eval()
    padding = torch.arange(6) >= torch.tensor([[6], [4], [2]])
    expected = by_hand(layer, by_hand(layer, x, padding), padding)
    with torch.no_grad():
        found = encoder(x, src_key_padding_mask=padding)
    assert torch.allclose(found[~padding], expected[~padding], atol=1e-6)
    found = encoder(x, src_key_padding_mask=padding)
    assert torch.allclose(found[~padding], expected[~padding], atol=1e-6)


def test_parameters_may_be_made_anew() -> None:
    for kdim in (None, 6):
        module = MultiheadAttention(8, 2, kdim=kdim)
        before = {name: p.clone() for name, p in module.named_parameters() if p.ndim == 2 and name[0] != "o"}
        module._reset_parameters()
        assert before
        assert not any(torch.equal(p, before[name]) for name, p in module.named_parameters() if name in before)


def test_compiles_whole() -> None:
    layer, x = sharp_layer(), torch.randn(3, 6, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(compiled(x), by_hand(layer, x, None), atol=1e-6)


def test_state_dict_of_torch_with_a_learnable_policy() -> None:
    theirs, _ = pair()
    module = MultiheadAttention(8, 2, policy=Learnable(sharpmax.LearnableTemperature(heads=2)))
    missing, unexpected = module.load_state_dict(theirs.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith("policy.") for name in missing)


@pytest.mark.parametrize(
    ("make", "call", "words"),
    [
        ({"num_heads": 3}, {}, "embed_dim to be a multiple of num_heads, got 8 and 3"),
        ({"kdim": 6}, {}, r"expected key with 6 columns, got \(3, 2, 8\)"),
        ({"num_heads": "two"}, {}, "multiple of num_heads, got 8 and 'two'"),
        ({"dropout": 2.0}, {}, "dropout_p to be between 0 and 1, got 2.0"),
        ({}, {"query": None}, "expected query to be a torch tensor, got NoneType"),
        (
            {},
            {"key": torch.randn(3, 2, 8).half()},
            "key of the module's type float32, got float16",
        ),
        (
            {},
            {"query": torch.randn(3, 2, 8, device="meta")},
            "query on the module's device cpu, got it on meta",
        ),
        (
            {},
            {"key": torch.randn(4, 2, 8)},
            r"key and value of the same shape .* got shapes \(4, 2, 8\) and \(3, 2, 8\)",
        ),
        ({}, {"query": torch.randn(3, 1, 8)}, r"one batch size, on axis 1, got shapes \(3, 1, 8\) and \(3, 2, 8\)"),
        ({"impl": "fast"}, {}, "auto, reference, streaming, triton, stock"),
        ({}, {"attn_mask": torch.zeros(2, 3, 3)}, r"\(3, 3\) or \(4, 3, 3\)"),
        ({}, {"key_padding_mask": torch.zeros(1, 3, dtype=torch.bool)}, r"key_padding_mask of shape \(2, 3\)"),
        ({}, {"key_padding_mask": torch.zeros(2, 3, dtype=torch.int64)}, "key_padding_mask to be boolean or floating"),
        ({}, {"attn_mask": torch.ones(3, 3, dtype=torch.int64)}, "attn_mask to be boolean or floating"),
        ({}, {"attn_mask": [[0.0]]}, "expected attn_mask to be a torch tensor, got list"),
        ({}, {"key_padding_mask": torch.eye(3).to_sparse()}, "expected key_padding_mask to be a dense tensor"),
        ({}, {"query": torch.randn(3, 2, 8).to_sparse()}, "expected query to be a dense tensor"),
        ({}, {"need_weights": True}, "need_weights=False"),
        ({"add_zero_attn": True}, {}, "add_zero_attn"),
        ({"add_bias_kv": True}, {}, "add_bias_kv"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(make: dict[str, Any], call: dict[str, Any], words: str) -> None:
    x = torch.randn(3, 2, 8)
    with pytest.raises((TypeError, ValueError), match=words):
        MultiheadAttention(8, **{"num_heads": 2, **make})(**{"query": x, "key": x, "value": x, **call})


def test_it_says_its_policy_its_mechanism_and_its_implementation() -> None:
    learnable = Learnable(sharpmax.LearnableTemperature(heads=2))
    for policy, words in ((sharpmax.Constant(2.0), "policy=Constant(beta=2.0)"), (learnable, "LearnableTemperature")):
        assert words in repr(MultiheadAttention(8, 2, policy=policy))
    shown = repr(MultiheadAttention(8, 2, mechanism="sparsemax", impl="reference"))
    assert "mechanism=Sparsemax" in shown
    assert "impl='reference'" in shown
    assert "policy" not in shown


def test_a_policy_with_parameters_becomes_a_module() -> None:
    module = MultiheadAttention(8, 2, policy=sharpmax.LearnableTemperature(heads=2), dtype=torch.float64)
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    module(x, x, x)[0].square().sum().backward()
    (learned,) = (p for name, p in module.named_parameters() if name.startswith("policy."))
    assert learned.dtype == torch.float64
    assert learned.grad is not None
    assert float(learned.grad.abs().sum()) > 0


@pytest.mark.parametrize("name", ["learned", "ssmax", "entmax", "asentmax", "differential", "threshold_relative"])
def test_parameters_of_a_mechanism_are_made_where_the_others_are(name: str) -> None:
    module = MultiheadAttention(8, 2, mechanism=name, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_output_lies_side_by_side_in_memory(batch_first: bool) -> None:
    _, ours = pair(batch_first=batch_first)
    x = torch.randn(5, 2, 8)
    assert ours(x, x, x)[0].is_contiguous()


class Wrapped(torch.nn.Module):
    """An output projection without weights of its own to look at."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_the_output_projection_may_be_any_module() -> None:
    """Inputs meet the other weights first."""
    sizes: Any = (np.int64(8), np.int64(2))
    x, module = torch.randn(3, 2, 8), MultiheadAttention(*sizes)
    expected = module(x, x, x)[0]
    wrapped: Any = Wrapped(module.out_proj)
    module.out_proj = wrapped
    assert torch.equal(module(x, x, x)[0], expected)
