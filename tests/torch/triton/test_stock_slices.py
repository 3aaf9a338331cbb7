"""Stock attention on ``beta * query`` by slices of the heads: where it is, it gives the same and holds less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sharpmax.torch import choice, fused, scaled_dot_product_attention, stock

WHOLE = (3, 4, 40, 16)


def tensors(gradient: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(WHOLE[0], heads, WHOLE[2], WHOLE[3]).half() for heads in (4, 2, 2))
    return q.requires_grad_(gradient), k, v


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Of the queries that the kernel was given."""
    if torch.cuda.is_available():
        pytest.skip("kernels cannot be interpreted here")
    found: list[tuple[int, ...]] = []
    real = fused.sharpened_query
    monkeypatch.setattr(choice, "triton_refusal", lambda *_: "")
    monkeypatch.setattr(stock, "LONG", WHOLE[2])
    monkeypatch.setattr(fused, "sharpened_query", lambda *a: (found.append(tuple(a[0].shape)), real(*a))[1])
    return found


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    given: Any = {"is_causal": True} | options
    return scaled_dot_product_attention(q, k, v, impl="stock", enable_gqa=True, **given)


@pytest.mark.parametrize(
    ("of_a_slice", "expected"),
    [
        ("half a key head", [(1, 2, 40, 16)] * 6),
        ("three key heads", [(1, 4, 40, 16)] * 3),
        ("two elements", [WHOLE]),
        ("everything", [WHOLE]),
    ],
)
@pytest.mark.parametrize("with_lengths", [False, True])
def test_slices_together_give_what_the_whole_gives(
    of_a_slice: str,
    expected: list[tuple[int, ...]],
    with_lengths: bool,
    shapes: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = tensors()
    options: Any = {"key_lengths": torch.tensor([40, 7, 23]), "is_causal": False} if with_lengths else {}
    whole = attend(q, k, v, **options)
    shapes.clear()
    head = 2 * 40 * 16 * 2  # bytes of the queries of a key head
    sizes = {"half a key head": head // 2, "three key heads": 3 * head, "two elements": 4 * head, "everything": 1 << 30}
    monkeypatch.setattr(stock, "SLICE", sizes[of_a_slice])
    found = attend(q, k, v, **options)
    assert shapes == expected
    assert found.is_contiguous()
    torch.testing.assert_close(found, whole, rtol=2e-3, atol=1e-3)


def test_few_keys_are_not_worth_it(shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "SLICE", 1)
    monkeypatch.setattr(stock, "LONG", WHOLE[2] + 1)
    attend(*tensors())
    assert shapes == [WHOLE]


def mapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.func.vmap(attend)(q, k, v)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, attn_mask=torch.ones(40, 40, dtype=torch.bool).tril(), is_causal=False)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own attention on a CPU, mapped
@pytest.mark.parametrize(
    ("function", "gradient"), [(attend, True), (masked, False), (mapped, False)], ids=["gradient", "mask", "vmap"]
)
def test_what_needs_all_of_it_is_not_cut(
    function: Callable[..., Tensor], gradient: bool, shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = tensors(gradient)
    if function is mapped:
        q, k, v = (x[:, None] for x in (q, k, v))
    expected = function(q, k, v)
    shapes.clear()
    monkeypatch.setattr(stock, "SLICE", 1)
    found = function(q, k, v)
    assert len(shapes) == 1
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 4])
def test_a_long_call_holds_a_slice_of_it(heads: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 131072, 128, device="cuda", dtype=torch.bfloat16) for n in (16, heads, heads))
    size = q.numel() * q.element_size()
    attend(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = attend(q, k, v)
    held = torch.cuda.max_memory_allocated() - before - size
    statistics = q[..., 0].numel() * 5 * 4
    assert held <= 2 * max(stock.SLICE, size // heads) + statistics + (8 << 20) < size
    with torch.no_grad():
        head = slice(0, 16 // heads)
        alone = attend(q[:, head, :8192], k[:, :1, :8192], v[:, :1, :8192])
    torch.testing.assert_close(found[:, head, :8192], alone, rtol=2e-2, atol=2e-2)
