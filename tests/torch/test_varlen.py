"""varlen_attention against attention on each document."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax
from sharpmax.torch import Attention, ops, scaled_dot_product_attention, varlen_attention
from tests.torch.attention_cases import place

STARTS_Q, STARTS_K = torch.tensor([0, 4, 4, 9]), torch.tensor([0, 6, 8, 13])


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((9, 4, 8), (13, 2, 8), (13, 2, 6))
    return [(2 * torch.randn(s, generator=g, dtype=torch.float64)).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3, (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_documents_do_not_meet_streaming(causal: bool, window: Any, dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype)
    result = varlen_attention(q, k, v, STARTS_Q, STARTS_K, 5, 6, causal=causal, window=window, return_stats=True)
    assert isinstance(result, Attention)
    parts, entropies = [], []
    for i in range(3):
        one = [
            x[starts[i] : starts[i + 1]].transpose(0, 1) for x, starts in ((q, STARTS_Q), (k, STARTS_K), (v, STARTS_K))
        ]
        lengths = (one[0].shape[1], one[1].shape[1])
        rows, keys = torch.arange(lengths[0])[:, None] + lengths[1] - lengths[0], torch.arange(lengths[1])
        left, right = (window - 1, window - 1) if isinstance(window, int) else window or (99, 99)
        mask = (keys >= rows - left) & (keys <= rows + (0 if causal else right))
        alone = scaled_dot_product_attention(
            one[0], one[1], one[2], mask, enable_gqa=True, impl="reference", return_stats=True
        )
        parts.append(alone.output.transpose(0, 1))
        entropies.append(alone.stats.entropy)
    expected = torch.cat(parts)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    assert torch.allclose(result.output, expected, atol=tolerance)
    assert torch.allclose(result.stats.entropy, torch.cat(entropies, 1), atol=max(tolerance, 1e-5) / 10)
    g = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), g) for x in (result.output, expected)), strict=True):
        assert torch.allclose(a, b, atol=10 * tolerance)


def test_gradcheck_with_dropout_streaming() -> None:
    def seeded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(0)
        out = varlen_attention(q, k, v, STARTS_Q, STARTS_K, dropout_p=0.2, causal=True)
        assert isinstance(out, Tensor)
        return out

    assert torch.autograd.gradcheck(seeded, inputs(), atol=1e-5, fast_mode=True)


def test_compiles_whole_streaming() -> None:
    q, k, v = inputs(torch.float32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = varlen_attention(q, k, v, STARTS_Q, STARTS_K, causal=True, policy=sharpmax.PAPER)
        assert isinstance(out, Tensor)
        return out

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(q, k, v), attend(q, k, v), atol=1e-6)


OUTSIDE_Q, OUTSIDE_K = torch.tensor([2, 4, 4, 7]), torch.tensor([3, 6, 8, 11])


def outside(impl: str) -> None:
    """Tokens of no document get nothing, and the others what they get without them."""
    q, k, v = place(impl, *inputs(torch.float32))
    starts_q, starts_k = OUTSIDE_Q.to(q.device), OUTSIDE_K.to(q.device)
    garbage = torch.full((1 << 20,), float("nan"), device=q.device)  # memory that is given back, and taken again
    del garbage
    found = varlen_attention(q, k, v, starts_q, starts_k, causal=True, impl=impl, return_stats=True)
    assert isinstance(found, Attention)
    alone = varlen_attention(q[2:7], k[3:11], v[3:11], starts_q - 2, starts_k - 3, causal=True, impl="streaming")
    assert isinstance(alone, Tensor)
    assert torch.allclose(found.output[2:7], alone, atol=1e-5)
    no_document = torch.tensor([True, True, *[False] * 5, True, True], device=q.device)
    assert (found.output[no_document] == 0).all()
    assert (found.stats.entropy[:, no_document] == 0).all()
    assert (found.stats.count[:, no_document] == 0).all()
    assert found.beta.isfinite().all()
    quick = varlen_attention(q, k, v, starts_q, starts_k, causal=True, impl=impl)
    assert isinstance(quick, Tensor)
    g = torch.randn_like(quick)
    expected = torch.autograd.grad(alone, (q, k, v), g[2:7])
    for output in (found.output, quick):
        assert torch.allclose(output, found.output, atol=1e-6)
        for a, b in zip(torch.autograd.grad(output, (q, k, v), g), expected, strict=True):
            assert torch.allclose(a, b, atol=1e-4)


def test_tokens_outside_of_all_documents_streaming() -> None:
    outside("streaming")


def test_tokens_outside_of_all_documents_triton(triton_everywhere: list[str]) -> None:
    outside("triton")
    assert triton_everywhere == ["adaptive_attention"]


@pytest.mark.parametrize(
    ("policy", "inside"),
    [
        (sharpmax.PAPER, True),
        pytest.param(sharpmax.detached(sharpmax.PAPER_HELD), True, marks=pytest.mark.thorough),
        (sharpmax.LogLength.relative(2), True),
        pytest.param(sharpmax.Constant(1.7), False, marks=pytest.mark.thorough),
        (lambda stats: 1.0 + 0.1 * stats.entropy, False),
    ],
    ids=["paper", "detached", "length", "number", "callable"],
)
@pytest.mark.parametrize("options", [{"causal": True, "window": 3, "softcap": 2.0}], ids=str)
def test_documents_with_the_policy_inside(
    policy: Any, inside: bool, options: dict[str, Any], triton_everywhere: list[str]
) -> None:
    q, k, v = leaves = place("triton", *inputs(torch.float32))
    starts = STARTS_Q.to(q.device), STARTS_K.to(q.device)
    found = varlen_attention(q, k, v, *starts, policy=policy, impl="triton", **options)
    assert triton_everywhere == ["adaptive_attention"] * inside
    expected = varlen_attention(q, k, v, *starts, policy=policy, impl="streaming", return_stats=True, **options)
    assert isinstance(found, Tensor)
    assert isinstance(expected, Attention)
    assert torch.allclose(found, expected.output, atol=1e-5)
    g = torch.randn_like(found)
    for a, b in zip(*(torch.autograd.grad(x, leaves, g) for x in (found, expected.output)), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_a_number_as_policy_needs_no_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    expected = varlen_attention(q, k, v, STARTS_Q, STARTS_K, policy=sharpmax.Constant(1.3), return_stats=True)
    monkeypatch.setattr(ops, "row_stats", lambda *_: pytest.fail("no statistics are needed"))
    found = varlen_attention(q, k, v, STARTS_Q, STARTS_K, policy=sharpmax.Constant(1.3))
    assert isinstance(expected, Attention)
    assert isinstance(found, Tensor)
    assert torch.allclose(found, expected.output, atol=1e-12)


def test_no_implementation_serves_torch_func_grad() -> None:
    q, k, v = (x.detach() for x in inputs())

    def loss(q: Tensor) -> Tensor:
        out = varlen_attention(q, k, v, STARTS_Q, STARTS_K)
        assert isinstance(out, Tensor)
        return out.sum()

    with pytest.raises(ValueError, match="and their like; scaled_dot_product_attention with impl='reference' can"):
        torch.func.grad(loss)(q)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 1, 1, 1], dtype=torch.bool)}, "whole numbers, got bool"),
        ({"cu_seqlens_q": torch.tensor([0, 5, 4, 9])}, "9 tokens on axis 0, from 0 to 9 and never falling"),
        ({"cu_seqlens_q": torch.tensor([-1, 4, 4, 9])}, "from 0 to 9"),
        ({"cu_seqlens_k": torch.tensor([0, 6, 8, 14])}, "from 0 to 13"),
        ({"impl": "triton"}, "; streaming can$"),
        ({"impl": "fast"}, "one of auto, streaming, triton, got 'fast'"),
        ({"cu_seqlens_k": torch.tensor([0, 13])}, "as many documents"),
        ({"cu_seqlens_q": [0, 9]}, "cu_seqlens_q to be a torch tensor, got list"),
        ({"query": torch.randn(2, 9, 4, 8)}, "tokens, heads, columns"),
        ({"value": torch.randn(12, 2, 8)}, "fit together"),
        ({"query": torch.randn(9, 3, 8)}, "multiple"),
        ({"causal": "none"}, "expected causal to be True or False, got 'none'"),
        ({"impl": "reference"}, "streaming, triton"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change: dict[str, Any], words: str) -> None:
    q, k, v = (x.detach().float() for x in inputs())
    call: Any = {"query": q, "key": k, "value": v, "cu_seqlens_q": STARTS_Q, "cu_seqlens_k": STARTS_K} | change
    with pytest.raises((ValueError, TypeError), match=words):
        varlen_attention(**call)


def test_no_columns_are_refused() -> None:
    empty, starts = torch.ones(5, 2, 0), torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="query, key and value that fit together"):
        varlen_attention(empty, empty, empty, starts, starts)
