"""Rows next to a jump of the policy: each is on one side of it, with beta, output and gradients; none is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sharpmax.torch import (
    Attention,
    decode_attention,
    paged_decode_attention,
    scaled_dot_product_attention,
    varlen_attention,
)
from tests.torch.attention_cases import TOLERANCE, place
from tests.torch.decode_cases import lengths_of, paged
from tests.torch.threshold_cases import AT, KEYS, NEAR, Rows, check, rows

ON_GPU = torch.cuda.is_available()
OF_KERNELS = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
"""Triton's interpreter gets products of bfloat16 wrong."""


def found(given: Rows, result: Tensor | Attention, leaves: list[Tensor]) -> dict[str, Tensor]:
    output = result.output if isinstance(result, Attention) else result
    gradients = torch.autograd.grad(output, leaves, given.cotangent.to(output.device).view(output.shape))
    beta = {"beta": result.beta} if isinstance(result, Attention) else {}
    return {"output": output, **beta, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def attended(impl: str, dtype: torch.dtype, return_stats: bool) -> None:
    given = rows(dtype)
    q, k, v = leaves = place(impl, *(x.clone().requires_grad_() for x in given[:3]))
    call: Any = {"scale": 1.0, "policy": given.policy, "impl": impl, "return_stats": return_stats}
    check(given, found(given, scaled_dot_product_attention(q, k, v, **call), leaves))


@pytest.mark.parametrize("impl", ["reference", "streaming", "stock"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("return_stats", [False, True])
def test_attention(impl: str, dtype: torch.dtype, return_stats: bool) -> None:
    attended(impl, dtype, return_stats)


def each_way(*quick: tuple[torch.dtype, bool]) -> list[Any]:
    """Types with and without statistics; the interpreter, which is slow, is asked for some unless all is wanted."""
    pairs = [(dtype, return_stats) for dtype in OF_KERNELS for return_stats in (False, True)]
    return [pair if ON_GPU or pair in quick else pytest.param(*pair, marks=pytest.mark.thorough) for pair in pairs]


@pytest.mark.parametrize(("dtype", "return_stats"), each_way((torch.float32, True), (torch.float16, False)), ids=str)
def test_attention_by_the_portable_kernels(
    dtype: torch.dtype, return_stats: bool, triton_everywhere: list[str]
) -> None:
    attended("triton", dtype, return_stats)
    assert triton_everywhere == ([] if return_stats else ["adaptive_attention"])


def packed(impl: str, dtype: torch.dtype, return_stats: bool) -> None:
    given = rows(dtype)
    q, k, v = leaves = place(impl, *(x.transpose(1, 2).flatten(0, 1).clone().requires_grad_() for x in given[:3]))
    starts_q, starts_k = (torch.arange(AT + 2 * NEAR + 1).to(q.device) * n for n in (1, KEYS))
    call: Any = {"scale": 1.0, "policy": given.policy, "impl": impl, "return_stats": return_stats}
    check(given, found(given, varlen_attention(q, k, v, starts_q, starts_k, **call), leaves))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("return_stats", [False, True])
def test_documents(dtype: torch.dtype, return_stats: bool) -> None:
    packed("streaming", dtype, return_stats)


@pytest.mark.parametrize(("dtype", "return_stats"), each_way((torch.float16, False)), ids=str)
@pytest.mark.usefixtures("triton_everywhere")
def test_documents_by_the_portable_kernels(dtype: torch.dtype, return_stats: bool) -> None:
    packed("triton", dtype, return_stats)


@pytest.mark.parametrize(
    ("impl", "dtype"), [*(("torch", x) for x in TOLERANCE), *(("triton", x) for x in OF_KERNELS)], ids=str
)
def test_caches(impl: str, dtype: torch.dtype) -> None:
    if impl == "triton":
        pytest.importorskip("triton")
    given, device = rows(dtype), "cuda" if ON_GPU and impl == "triton" else "cpu"
    query, key, value = (x.to(device) for x in given[:3])
    lengths = [KEYS] * len(query)
    (keys, table), (values, _) = (paged(x, lengths, 4) for x in (key, value))
    call: Any = {"scale": 1.0, "policy": given.policy, "impl": impl, "return_stats": True}
    for result in (
        decode_attention(query, key, value, **call),
        paged_decode_attention(query, keys, values, table, lengths_of(lengths, device), **call),
    ):
        assert isinstance(result, Attention)
        check(given, {"beta": result.beta, "output": result.output})
