"""Stock attention on ``beta * query`` by slices of the heads: where it is, it gives the same and holds less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import sharpmax
from sharpmax.torch import choice, scaled_dot_product_attention, stock

WHOLE = (5, 6, 40, 16)
OF_HEAD = 2 * 40 * 16 * 2
"""Bytes of the queries of a key head."""


class Learned(torch.nn.Module):
    """A policy whose parameter alone asks for a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(0.1))

    def forward(self, stats: sharpmax.RowStats) -> Any:
        return 1 + self.factor * stats.entropy


def tensors(gradient: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(WHOLE[0], heads, WHOLE[2], WHOLE[3]).half() for heads in (6, 3, 3))
    return q.requires_grad_(gradient), k, v


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Of the ``beta * query`` that stock attention was given."""
    if torch.cuda.is_available():
        pytest.skip("kernels cannot be interpreted here")
    found: list[tuple[int, ...]] = []
    real = stock._attend
    monkeypatch.setattr(choice, "triton_refusal", lambda *_: "")
    monkeypatch.setattr(stock, "LONG", WHOLE[2])
    monkeypatch.setattr(stock, "_attend", lambda *a: (found.append(tuple(a[1].shape)), real(*a))[1])
    return found


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    given: Any = {"is_causal": True} | options
    return scaled_dot_product_attention(q, k, v, impl="stock", enable_gqa=True, **given)


@pytest.mark.parametrize(
    ("bytes_of_a_slice", "expected"),
    [
        pytest.param(OF_HEAD // 2, [(1, 2, 40, 16)] * 15, id="half a key head"),
        pytest.param(2 * OF_HEAD, [(1, 4, 40, 16), (1, 2, 40, 16)] * 5, id="two key heads"),
        pytest.param(4 * OF_HEAD, [(1, 6, 40, 16)] * 5, id="an element and more"),
        pytest.param(6 * OF_HEAD, [(2, 6, 40, 16), (2, 6, 40, 16), (1, 6, 40, 16)], id="two elements"),
        pytest.param(9 * OF_HEAD, [WHOLE], id="three elements, which would be two slices"),
        pytest.param(1 << 30, [WHOLE], id="everything"),
    ],
)
@pytest.mark.parametrize("with_lengths", [False, True])
def test_slices_together_give_what_the_whole_gives(
    bytes_of_a_slice: int,
    expected: list[tuple[int, ...]],
    with_lengths: bool,
    shapes: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = tensors()
    options: Any = {"key_lengths": torch.tensor([40, 7, 23, 0, 39]), "is_causal": False} if with_lengths else {}
    whole = attend(q, k, v, **options)
    shapes.clear()
    monkeypatch.setattr(stock, "SLICE", bytes_of_a_slice)
    found = attend(q, k, v, **options)
    assert shapes == expected
    assert found.is_contiguous()
    torch.testing.assert_close(found, whole, rtol=2e-3, atol=1e-3)


HEADS = (sharpmax.PAPER, sharpmax.Constant(2.0), sharpmax.LogLength(0.3)) * 2


@pytest.mark.parametrize(
    "policy",
    [sharpmax.Constant(1.5), sharpmax.LogLength(0.3), sharpmax.PerHead(HEADS), lambda stats: 1 + 0.1 * stats.entropy],
    ids=["number", "length", "by head", "callable"],
)
@pytest.mark.parametrize("bytes_of_a_slice", [2 * OF_HEAD, 6 * OF_HEAD])
def test_policies_that_no_kernel_has_inside_are_cut_too(
    policy: Any, bytes_of_a_slice: int, shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = attend(*tensors(), policy=policy)
    monkeypatch.setattr(stock, "SLICE", bytes_of_a_slice)
    shapes.clear()
    found = attend(*tensors(), policy=policy)
    assert len(shapes) > 2
    torch.testing.assert_close(found, whole, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(40, 40), (5, 1, 1, 40), (6, 40, 40), (5, 6, 40, 1)], ids=str)
def test_a_mask_is_cut_with_what_it_belongs_to(
    shape: tuple[int, ...], shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = tensors()
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.3
    whole = attend(q, k, v, attn_mask=mask, is_causal=False)
    monkeypatch.setattr(stock, "SLICE", 2 * OF_HEAD)
    shapes.clear()
    found = attend(q, k, v, attn_mask=mask, is_causal=False)
    assert len(shapes) == 10
    torch.testing.assert_close(found, whole, rtol=2e-3, atol=1e-3)


def with_a_device(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.device("cpu"):
        return attend(q, k, v)


def with_a_profiler(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autograd.profiler.profile():
        return attend(q, k, v)


def with_statistics(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, return_stats=True).output


@pytest.mark.parametrize("function", [with_a_device, with_a_profiler, with_statistics])
def test_what_looks_on_does_not_keep_a_call_whole(
    function: Callable[..., Tensor], shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = tensors()
    whole = attend(q, k, v)
    monkeypatch.setattr(stock, "SLICE", 1)
    shapes.clear()
    found = function(q, k, v)
    assert len(shapes) == 15
    torch.testing.assert_close(found, whole, rtol=2e-3, atol=1e-3)


def test_few_keys_are_not_worth_it(shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "SLICE", 1)
    monkeypatch.setattr(stock, "LONG", WHOLE[2] + 1)
    attend(*tensors())
    assert shapes == [WHOLE]


def mapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.func.vmap(attend)(q[:, None], k[:, None], v[:, None])


def learned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, policy=Learned())


def dropping(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch.manual_seed(2)
    return attend(q, k, v, dropout_p=0.5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own attention on a CPU, mapped
@pytest.mark.parametrize(
    ("function", "gradient"), [(attend, True), (learned, False), (dropping, False), (mapped, False)]
)
def test_what_needs_all_of_it_is_not_cut(
    function: Callable[..., Tensor], gradient: bool, shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = tensors(gradient)
    expected = function(q, k, v)
    shapes.clear()
    monkeypatch.setattr(stock, "SLICE", 1)
    found = function(q, k, v)
    assert len(shapes) == 1
    assert found.requires_grad == (function in (attend, learned))
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-3)


def test_a_compiled_call_is_one_of_stock_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "LONG", WHOLE[2])
    monkeypatch.setattr(stock, "SLICE", 1)
    names: list[str] = []

    def seen(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    q, k, v = tensors()
    found = torch.compile(attend, fullgraph=True, backend=seen)(q, k, v)
    assert sum("scaled_dot_product_attention" in name for name in names) == 1
    torch.testing.assert_close(found, attend(q, k, v), rtol=2e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [sharpmax.PAPER, sharpmax.LogLength(0.3)], ids=["inside", "outside"])
@pytest.mark.parametrize("heads", [16, 4])
def test_a_long_call_holds_a_slice_of_it(heads: int, policy: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 131072, 128, device="cuda", dtype=torch.bfloat16) for n in (16, heads, heads))
    size = q.numel() * q.element_size()
    attend(q, k, v, policy=policy)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = attend(q, k, v, policy=policy)
    held = torch.cuda.max_memory_allocated() - before - size
    numbers = q[..., 0].numel() * 10 * 4
    copies = 2 if policy is sharpmax.PAPER else 3  # beta * q is made in float32, beside the output's slice
    assert held <= copies * max(stock.SLICE, size // heads) + numbers + (8 << 20) < size
    for first in (0, heads // 2, heads - 1):
        head = slice(first * 16 // heads, (first + 1) * 16 // heads)
        alone = attend(q[:, head, :8192], k[:, [first], :8192], v[:, [first], :8192], policy=policy)
        torch.testing.assert_close(found[:, head, :8192], alone, rtol=2e-2, atol=2e-2)
