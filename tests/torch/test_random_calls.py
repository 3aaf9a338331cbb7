"""Random calls of every implementation, in every type that it serves, against attention row by row in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sharpmax.torch import Attention, decode_attention, paged_decode_attention, varlen_attention
from tests.torch import decode_cases, oracle
from tests.torch.attention_cases import TOLERANCE, close, compare, place
from tests.torch.random_cases import Caches, Documents, caches, calls, documents

ON_GPU = torch.cuda.is_available()
TYPES = list(TOLERANCE)
OF_KERNELS = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
"""Triton's interpreter gets products of bfloat16 wrong."""
NUMBERS = [25] * 4 if ON_GPU else [10, pytest.param(80, marks=pytest.mark.thorough)]
"""Of calls of kernels; the interpreter is slow, and so is the compiler, which several processes may run at once."""
ROUNDED = 4
"""How many times the error of others stock attention may have: it rounds beta * query."""


def examples(number: int, *, interpreted: bool = False) -> Callable[[Any], Any]:
    """So many of them, of which the interpreter, which is slow, makes none smaller."""
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    phases = [phase for phase in Phase if not interpreted or phase == Phase.generate]
    return settings(max_examples=number, deadline=None, suppress_health_check=quiet, phases=phases)


def of(strategy: Callable[..., st.SearchStrategy[Any]], types: list[torch.dtype], **options: Any) -> Any:
    """A type, and a call in it."""
    return st.sampled_from(types).flatmap(lambda dtype: strategy(dtype, **options))


@pytest.mark.parametrize("impl", ["reference", "streaming"])
@given(call=of(calls, TYPES))
@examples(150)
@pytest.mark.usefixtures("small_blocks")
def test_any_call(impl: str, call: dict[str, Any]) -> None:
    tensors = call.pop("tensors")
    compare(tensors, impl, tolerance=TOLERANCE[tensors[0].dtype], **call)


@given(call=of(calls, TYPES, plain=True))
@examples(100)
def test_any_call_that_stock_attention_serves(call: dict[str, Any]) -> None:
    tensors = call.pop("tensors")
    compare(tensors, "stock", tolerance=ROUNDED * TOLERANCE[tensors[0].dtype], **call)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.usefixtures("small_tiles")
def test_any_call_of_the_portable_kernels(number: int) -> None:
    @given(call=of(calls, OF_KERNELS, few=not ON_GPU))
    @examples(number, interpreted=not ON_GPU)
    def holds(call: dict[str, Any]) -> None:
        tensors = call.pop("tensors")
        compare(tensors, "triton", tolerance=TOLERANCE[tensors[0].dtype], **call)

    holds()


def alone(call: Documents) -> Tensor:
    """The output of every document by itself, 0 between them."""
    q, k, v = call.tensors
    window, causal = call.options["window"], call.options["causal"]
    left, right = (window - 1, window - 1) if isinstance(window, int) else window or (-1, -1)
    rest = {name: call.options[name] for name in ("scale", "softcap")}
    output = torch.zeros(len(q), q.shape[1], v.shape[2], dtype=torch.float64)
    starts_q, starts_k = (x.tolist() for x in call.starts)
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        rows, keys = torch.arange(q0 - q1, 0)[:, None], torch.arange(k0 - k1, 0)  # counted from the end
        hidden = (left >= 0) & (keys < rows - left) | (right >= 0) & (keys > rows + right) | causal & (keys > rows)
        one, of, values = (x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        truth = oracle.attention(one, of, values, ~hidden[None, None], policy=call.policy, **rest)
        output = output.index_copy(0, torch.arange(q0, q1), truth.output[0].transpose(0, 1))
    return output


def packed(impl: str, call: Documents) -> None:
    q, k, v = given = place(impl, *call.tensors)
    expected, tolerance = alone(call), TOLERANCE[q.dtype]
    starts_q, starts_k = (x.to(q.device) for x in call.starts)
    found = varlen_attention(q, k, v, starts_q, starts_k, policy=call.policy, impl=impl, **call.options)
    output = found.output if isinstance(found, Attention) else found
    close(output, expected, tolerance, "output")
    g = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(q.dtype)
    expected = expected + 0 * sum(x.double().sum() for x in call.tensors)  # where there is no document
    gradients = torch.autograd.grad(expected, call.tensors, g.double())
    ours = torch.autograd.grad(output, given, g.to(q.device), materialize_grads=True)
    for name, a, b in zip(("dq", "dk", "dv"), ours, gradients, strict=True):
        close(a, b, 4 * tolerance, name)


@given(call=of(documents, TYPES))
@examples(60)
@pytest.mark.usefixtures("small_blocks")
def test_any_documents(call: Documents) -> None:
    packed("streaming", call)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.usefixtures("small_tiles")
def test_any_documents_of_the_portable_kernels(number: int) -> None:
    @given(call=of(documents, OF_KERNELS, few=not ON_GPU))
    @examples(number, interpreted=not ON_GPU)
    def holds(call: Documents) -> None:
        packed("triton", call)

    holds()


def decoded(impl: str, call: Caches) -> None:
    """A cache, with and without hidden keys, and the same in pages; what is not valid is NaN."""
    query, key, value = (x.clone() for x in call.tensors)
    policy, betas = decode_cases.POLICIES[call.policy]
    options: Any = {"policy": policy, "impl": impl, "return_stats": True, **call.options}
    lengths = decode_cases.lengths_of(call.lengths, query.device.type)
    hidden = decode_cases.oracle(query, key, value, call.lengths, betas, key_mask=call.mask, **call.options)
    expected = decode_cases.oracle(query, key, value, call.lengths, betas, **call.options)
    tolerance = TOLERANCE[query.dtype] * max(
        1.0, float(np.abs(expected.output).max()), float(np.abs(hidden.output).max())
    )
    decode_cases.nan_beyond(call.lengths, key, value)
    decode_cases.check(decode_attention(query, key, value, lengths, **options), expected, tolerance)
    (keys, table), (values, _) = (decode_cases.paged(x, call.lengths, call.page_size) for x in (key, value))
    decode_cases.check(paged_decode_attention(query, keys, values, table, lengths, **options), expected, tolerance)
    for cache in (key, value):
        cache.masked_fill_(~call.mask[:, None, :, None], torch.nan)
    masked = decode_attention(query, key, value, lengths, key_mask=call.mask, **options)
    decode_cases.check(masked, hidden, tolerance)


@given(call=of(caches, TYPES))
@examples(80)
def test_any_cache(call: Caches) -> None:
    decoded("torch", call)


@pytest.mark.parametrize("number", NUMBERS)
def test_any_cache_of_the_portable_kernels(number: int) -> None:
    pytest.importorskip("triton")

    @given(call=of(caches, OF_KERNELS, device="cuda" if ON_GPU else "cpu"))
    @examples(number, interpreted=not ON_GPU)
    def holds(call: Caches) -> None:
        decoded("triton", call)

    holds()
