"""Mechanisms in modules: multi-head attention, learned parameters, copies."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import sharpmax
from sharpmax.mechanisms import Mechanism, Window, find
from sharpmax.torch import Learnable, MultiheadAttention
from tests.torch.mechanism_cases import attend


def test_multihead() -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, 5, 16), torch.rand(2 * 4, 5, 5) > 0.6
    for name in ("sigmoid", "differential", "learned"):
        maps = find(name).maps
        layer = MultiheadAttention(16, 4, batch_first=True, mechanism=name)
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, heads in zip(layer._projected(x, x, x), (4 * maps, 4 * maps, 4), strict=True)
        )
        shown = ~mask.view(2, 4, 5, 5).repeat_interleave(maps, dim=1)
        out = attend(q, k, v, shown, mechanism=find(name))
        expected = layer.out_proj(out.transpose(1, 2).flatten(-2))
        got = layer(x, x, x, attn_mask=mask)[0]
        torch.testing.assert_close(got, expected)
        learned = {n: p for n, p in layer.named_parameters() if n.startswith("mechanism")}
        assert len(learned) == len(find(name).initial())
        got.square().sum().backward()
        assert all(p.grad is not None and bool(p.grad) for p in learned.values())
    with pytest.raises(ValueError, match="columns can be split in 2, got 3 columns"):
        MultiheadAttention(12, 4, mechanism="differential")
    with pytest.raises(ValueError, match="expected a mechanism or a policy, got both"):
        MultiheadAttention(16, 4, mechanism="sigmoid", policy=sharpmax.Constant(2.0))


def test_learned_parameters_are_held_by_the_module() -> None:
    held = Learnable(find("differential"))
    assert list(held.state_dict()) == ["lambda"]
    logits = torch.randn(4, 3, 5)
    torch.testing.assert_close(held(logits).detach(), find("differential")(logits))
    with torch.no_grad():
        held.get_parameter("lambda").fill_(0.0)
    torch.testing.assert_close(held(logits).detach(), torch.softmax(logits[::2], -1))


@pytest.mark.parametrize("name", ["sigmoid", "differential", "window", "learned"])
def test_copies_are_the_same(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    layer = MultiheadAttention(16, 4, batch_first=True, mechanism=name)
    expected = layer(x, x, x)[0]
    assert torch.equal(copy.deepcopy(layer)(x, x, x)[0], expected)
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved, weights_only=False)(x, x, x)[0], expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mechanism", [Window(2), find("selective"), find("stick_breaking")])
def test_nested_tensors_are_their_parts(mechanism: Mechanism, is_causal: bool) -> None:
    torch.manual_seed(0)
    layer = MultiheadAttention(16, 4, batch_first=True, mechanism=mechanism)
    parts = [torch.randn(length, 16) for length in (3, 5)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    found = layer(nested, nested, nested, is_causal=is_causal)[0]
    for part, got in zip(parts, found.unbind(), strict=True):
        torch.testing.assert_close(got, layer(part, part, part, is_causal=is_causal)[0])
    other = torch.nested.as_nested_tensor(parts[::-1], layout=torch.jagged)
    if isinstance(mechanism, Window) and not is_causal:
        with pytest.raises(ValueError, match="expected as many queries as keys in each, or is_causal=True"):
            layer(nested, other, other)


def test_an_encoder_of_several_layers() -> None:
    """``torch.nn.TransformerEncoder`` copies the layer that it is given."""
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    block.self_attn = MultiheadAttention(16, 4, batch_first=True, mechanism="sparsemax")
    encoder = torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(encoder(x), block(block(x)))
