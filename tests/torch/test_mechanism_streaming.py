"""Mechanisms that fold: keys in chunks against all logits at once, what is skipped, and what is held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from sharpmax.mechanisms import find
from sharpmax.torch import Learnable, blocks
from sharpmax.torch import mechanisms as module
from tests.torch.mechanism_cases import CASES, CHOSEN, FOLDING, Toy, attend, inputs, leaves


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*FOLDING, "toy"])
def test_streaming_is_the_reference(name: str, case: str, small_blocks: blocks.Sizes) -> None:
    assert small_blocks.keys < 11
    found: list[list[Any]] = []
    for impl in ("reference", "streaming"):
        held = Learnable(Toy() if name == "toy" else find(CHOSEN.get(name, name))).double()
        given, tensors = dict(CASES[case]), inputs()
        if "attn_mask" in given:
            given["attn_mask"] = leaves(given["attn_mask"])[0]
        out = attend(*tensors, mechanism=held, enable_gqa=True, impl=impl, **given)
        (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        tracked = [*tensors, *held.parameters(), *(x for x in given.values() if isinstance(x, Tensor))]
        found.append([out.detach(), *(x.grad for x in tracked)])
    for expected, got in zip(*found, strict=True):
        assert (expected is None) == (got is None)
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("impl", ["reference", "streaming"])
def test_second_derivatives_are_served_or_refused(impl: str) -> None:
    q, k, v = leaves(*(torch.randn(1, 2, 3, 4, dtype=torch.float64) for _ in range(3)))

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mechanism="stick_breaking", impl=impl)

    if impl == "reference":
        assert gradgradcheck(attended, (q, k, v), fast_mode=True)
        return
    (slope,) = torch.autograd.grad(attended(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"a second derivative is served by .* impl='reference' only"):
        slope.sum().backward()


def test_dead_blocks_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "CPU", blocks.Sizes(rows=4, keys=4, logits=64))
    toy, q = Toy(heads=None), torch.randn(1, 1, 12, 8)
    attend(q, q, q, mechanism=toy, is_causal=True, impl="streaming")
    assert toy.noted == [(4, 4)] * (1 + 2 + 3)


class Sizes(TorchDispatchMode):
    """Notes how many numbers the largest tensor that any operation makes has memory for."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("name", FOLDING)
def test_streaming_never_holds_all_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "CPU", blocks.Sizes(rows=32, keys=50, logits=2000))
    largest = {}
    for impl in ("streaming", "reference"):
        q, k, v = leaves(*(torch.randn(1, 1, length, 2) for length in (200, 230, 230)))
        with Sizes() as sizes:
            out = attend(q, k, v, mechanism=name, impl=impl)
            out.sum().backward()
        largest[impl] = sizes.largest
    assert largest["reference"] >= 200 * 230
    assert largest["streaming"] <= 32 * 230  # a block of queries and all keys


def test_auto_streams_what_folds_where_there_are_many_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    q, toy = torch.randn(1, 4, 6, 8), Toy()
    attend(q, q, q, mechanism=toy)
    assert toy.noted == []
    monkeypatch.setattr(module, "AT_ONCE", 4 * 6 * 6 - 1)
    many = attend(q, q, q, mechanism=toy)
    assert toy.noted == [(6, 6)]
    torch.testing.assert_close(many, attend(q, q, q, mechanism=toy, impl="reference"))
    attend(q, q, q, mechanism=toy, dropout_p=0.5)
    torch.func.vmap(lambda x: attend(x, x, x, mechanism=toy))(q.unsqueeze(1).expand(1, 9, 4, 6, 8))
    assert toy.noted == [(6, 6)]  # dropout and torch.func are served by the reference
