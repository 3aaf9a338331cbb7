"""Decoding in plain torch against attention written out row by row in float64, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import sharpmax
import sharpmax.torch
from sharpmax.torch import choice, decode
from sharpmax.torch.decode import Attention, decode_attention, paged_decode_attention

from .decode_cases import (
    MASKED_POLICIES,
    POLICIES,
    K,
    Q,
    SpreadOverTen,
    V,
    check,
    exact_inputs,
    inputs,
    lengths_of,
    nan_beyond,
    oracle,
    padding,
    paged,
    paper,
    with_offset,
)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_policies(name: str, dtype: torch.dtype) -> None:
    policy, betas = POLICIES[name]
    query, key, value = inputs(dtype=dtype)
    result = decode_attention(query, key, value, lengths_of([70, 33]), policy=policy, impl="torch", return_stats=True)
    check(result, oracle(query, key, value, [70, 33], betas), 1e-5)


@pytest.mark.parametrize("options", [{"window": 5}, {"window": 1}, {"softcap": 3.0}, {"scale": 0.7}])
def test_options(options: dict[str, Any]) -> None:
    query, key, value = inputs(value_dim=24)
    result = decode_attention(query, key, value, lengths_of([70, 4]), return_stats=True, **options)
    check(result, oracle(query, key, value, [70, 4], paper, **options), 1e-5)


def test_a_window_may_be_given_by_its_sides() -> None:
    torch.testing.assert_close(decode_attention(Q, K, V, window=(4, 0)), decode_attention(Q, K, V, window=5))
    torch.testing.assert_close(decode_attention(Q, K, V, window=(-1, 0)), decode_attention(Q, K, V))


def test_autocast_changes_nothing() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = decode_attention(Q, K, V)
    torch.testing.assert_close(output, decode_attention(Q, K, V), rtol=0, atol=0)


def test_without_lengths_the_whole_cache_is_valid() -> None:
    query, key, value = inputs(queries=1)
    check(decode_attention(query, key, value, return_stats=True), oracle(query, key, value, [70, 70], paper), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_computed_in_float32(dtype: torch.dtype) -> None:
    query, key, value = inputs(dtype=dtype)
    output = decode_attention(query, key, value)
    assert isinstance(output, Tensor)
    assert output.dtype == dtype
    expected = oracle(query, key, value, [70, 70], paper).output
    np.testing.assert_allclose(output.double(), expected, atol=torch.finfo(dtype).eps * 4)


@pytest.mark.parametrize("queries", [1, 3])
def test_short_caches_and_what_lies_beyond_them(queries: int) -> None:
    query, key, value = inputs(batch=4, queries=queries)
    lengths = [0, 1, 2, 70]
    expected = oracle(query, key, value, lengths, paper)
    nan_beyond(lengths, key, value)
    result = decode_attention(query, key, value, lengths_of(lengths), return_stats=True)
    check(result, expected, 1e-5)
    assert isinstance(result, Attention)
    assert bool((result.output[0] == 0).all())


def test_lengths_beyond_the_cache_mean_all_of_it() -> None:
    query, key, value = inputs()
    result = decode_attention(query, key, value, lengths_of([1000, -3]), return_stats=True)
    check(result, oracle(query, key, value, [70, 0], paper), 1e-5)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("policy", MASKED_POLICIES)
def test_hidden_keys(policy: str, window: int | None) -> None:
    chosen, betas = POLICIES[policy]
    lengths, mask = [70, 70, 69, 70, 41], padding()
    tensors = inputs(batch=5)
    expected = oracle(*tensors, lengths, betas, window=window, key_mask=mask)
    for cache in tensors[1:]:
        cache.masked_fill_(~mask[:, None, :, None], math.nan)
    options: dict[str, Any] = {"policy": chosen, "window": window, "impl": "torch", "return_stats": True}
    check(decode_attention(*tensors, lengths_of(lengths), key_mask=mask, **options), expected, 1e-5)


@pytest.mark.parametrize("page_size", [1, 16, 24])
def test_pages_equal_a_contiguous_cache(page_size: int) -> None:
    query, key, value = inputs(batch=3, value_dim=24)
    lengths = [70, 0, 33]
    expected = decode_attention(query, key, value, lengths_of(lengths))
    (keys, table), (values, _) = (paged(cache, lengths, page_size) for cache in (key, value))
    result = paged_decode_attention(query, keys, values, table, lengths_of(lengths))
    torch.testing.assert_close(result, expected)


def test_strides_do_not_matter() -> None:
    query, key, value = inputs()
    expected = decode_attention(query, key, value)
    scattered = [torch.stack((x.mT, x.mT), dim=-1)[..., 0].mT for x in (query, key, value)]
    assert not any(x.is_contiguous() for x in scattered)
    torch.testing.assert_close(decode_attention(*scattered), expected)


def test_an_offset_of_the_logits_changes_nothing() -> None:
    query, key, value = exact_inputs()
    offset = with_offset(key, 1e4)
    check(
        decode_attention(query, offset, value, scale=0.25, return_stats=True),
        oracle(query, key, value, [70, 70], paper, scale=0.25),
        1e-5,
    )


@pytest.mark.parametrize("empty", [{"batch": 0}, {"capacity": 0}])
def test_empty(empty: dict[str, Any]) -> None:
    query, key, value = inputs(**empty)
    output = decode_attention(query, key, value)
    assert isinstance(output, Tensor)
    assert output.shape == query.shape
    assert bool((output == 0).all())


@pytest.mark.parametrize("policy", [sharpmax.PAPER, SpreadOverTen()])
def test_compiled_whole_and_for_growing_caches(policy: Any) -> None:
    compiled = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph

    torch._dynamo.reset()
    function: Any = torch.compile(
        lambda q, k, v, n: decode_attention(q, k, v, n, policy=policy), fullgraph=True, backend=backend
    )
    for capacity in (40, 41, 42, 43):
        tensors: tuple[Any, ...] = (*inputs(capacity=capacity), lengths_of([capacity, 17]))
        torch.testing.assert_close(function(*tensors), decode_attention(*tensors, policy=policy))
    assert len(compiled) <= 2


def test_auto_takes_torch_where_there_is_no_gpu() -> None:
    query, key, value = inputs(dtype=torch.float64)
    torch.testing.assert_close(
        decode_attention(query, key, value), decode_attention(query, key, value, impl="torch"), rtol=0, atol=0
    )
    with pytest.raises(ValueError, match="use impl='torch'"):
        decode_attention(query, key, value, impl="triton")


def learned(heads: int | None) -> sharpmax.torch.Learnable:
    return sharpmax.torch.Learnable(sharpmax.LearnableTemperature(heads=heads, init=2.0))


@pytest.mark.parametrize("kind", ["module", "of each head", "any callable"])
def test_a_policy_with_parameters(kind: str) -> None:
    """Which would get no gradient: that is said, not done."""
    query, key, value = inputs()
    module = learned(4)
    policies: dict[str, Any] = {
        "module": module,
        "of each head": sharpmax.PerHead(tuple(learned(None) for _ in range(4))),
        "any callable": lambda stats: 2 * module(stats) / 2,
    }
    policy = policies[kind]
    with pytest.raises(ValueError, match="no gradient: call it under"):
        decode_attention(query, key, value, policy=policy)
    with torch.no_grad():
        output = decode_attention(query, key, value, policy=policy)
    assert isinstance(output, Tensor)
    torch.testing.assert_close(output, decode_attention(query, key, value, policy=sharpmax.Constant(2.0)))


LENGTHS = lengths_of([1, 2])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8], ids=str)
def test_whole_numbers_of_any_type(dtype: torch.dtype) -> None:
    lengths = [70, 33]
    expected = decode_attention(Q, K, V, lengths_of(lengths))
    torch.testing.assert_close(decode_attention(Q, K, V, torch.tensor(lengths, dtype=dtype)), expected)
    (keys, table), (values, _) = (paged(cache, lengths, 16) for cache in (K, V))
    found = paged_decode_attention(Q, keys, values, table.to(dtype), torch.tensor(lengths, dtype=dtype))
    torch.testing.assert_close(found, expected)


def test_numbers_beyond_int32_mean_all_of_the_cache() -> None:
    found = decode_attention(Q, K, V, torch.tensor([(1 << 33) + 5, 1 << 40]))
    torch.testing.assert_close(found, decode_attention(Q, K, V))


@pytest.mark.parametrize("window", [5, 17, 40])
def test_pages_before_the_window_are_not_read(window: int) -> None:
    lengths = [70, 33]
    expected = decode_attention(Q, K, V, lengths_of(lengths), window=window)
    (keys, table), (values, _) = (paged(cache, lengths, 16) for cache in (K, V))
    for b, length in enumerate(lengths):
        first = max(length - 2 - (window - 1), 0) // 16
        for p in range(first):
            keys[table[b, p]], values[table[b, p]] = math.nan, math.nan
            table[b, p] = 1 << 30
    found = paged_decode_attention(Q, keys, values, table, lengths_of(lengths), window=window)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("most", [0, 3])
def test_without_pages_there_is_nothing(most: int) -> None:
    keys, values = torch.empty(0, 16, 2, 16), torch.empty(0, 16, 2, 24)
    table = torch.zeros(2, most, dtype=torch.int32)
    output = paged_decode_attention(Q, keys, values, table, lengths_of([0, 0]))
    assert isinstance(output, Tensor)
    assert output.shape == (2, 4, 2, 24)
    assert bool((output == 0).all())
    if most:
        with pytest.raises(ValueError, match="expected block_table to name no page, since there is none, got 0"):
            paged_decode_attention(Q, keys, values, table, lengths_of([0, 1]))
    with pytest.raises(ValueError, match="pages of at least one key"):
        paged_decode_attention(Q, torch.empty(3, 0, 2, 16), torch.empty(3, 0, 2, 24), table, lengths_of([0, 0]))


def test_the_head_size_that_is_too_large_is_named() -> None:
    pytest.importorskip("triton")
    wide = inputs(dim=300)
    with pytest.raises(ValueError, match="from 1 to 256, got 300"):
        decode_attention(*wide, impl="triton")
    with pytest.raises(ValueError, match="from 1 to 256, got 0"):
        decode_attention(Q, K, V[..., :0], impl="triton")


def test_forward_mode_is_refused() -> None:
    with forward_ad.dual_level(), pytest.raises(ValueError, match="no gradient"):
        decode_attention(forward_ad.make_dual(Q, torch.ones_like(Q)), K, V)


REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "queries, head size": ((Q[:, :, 0], K, V), {}),
    "1 to 16 queries": ((Q.expand(2, 4, 2, 16).repeat(1, 1, 9, 1), K, V), {}),
    "same heads and capacity, got value": ((Q, K, V[:, :, :5]), {}),
    "same heads and capacity, got key": ((Q, K[:1], V), {}),
    "head size 16, got 8": ((Q, K[..., :8], V), {}),
    r"a multiple of the heads of a cache \[B, Hkv, capacity, D\], got shapes \(2, 3,": ((Q[:, :3], K, V), {}),
    "of one type": ((Q, K.half(), V), {}),
    "bfloat16, float32 or float64, got float8": (tuple(x.to(torch.float8_e4m3fn) for x in (Q, K, V)), {}),
    "cache_lengths to be a tensor of whole numbers, got bool": ((Q, K, V, torch.tensor([True, True])), {}),
    "expected cache_lengths to be a torch tensor, got list; torch.as_tensor makes one": ((Q, K, V, [1, 2]), {}),
    "expected key to be a dense tensor, got one of torch.sparse_coo": ((Q, K.to_sparse(), V), {}),
    "expected key to be a torch tensor, got NoneType": ((Q, None, V), {}),
    "expected value to be a torch tensor, got list": ((Q, K, [1.0]), {}),
    r"shape \[2\], got shape \(3,\)": ((Q, K, V, lengths_of([1, 2, 3])), {}),
    r"key_mask to be boolean of shape \(2, 70\), got float32": ((Q, K, V), {"key_mask": torch.ones(2, 70)}),
    r"key_mask to be boolean of shape \(2, 70\), got bool of shape \(70,\)": (
        (Q, K, V),
        {"key_mask": torch.ones(70, dtype=torch.bool)},
    ),
    "expected key_mask to be a torch tensor, got list": ((Q, K, V), {"key_mask": [True]}),
    "no gradient": ((Q.clone().requires_grad_(), K, V), {}),
    "impl to be one of auto, triton, torch, got 'fast'": ((Q, K, V), {"impl": "fast"}),
    "window to be None, a whole number of at least 1, or a pair": ((Q, K, V), {"window": 0}),
    "softcap to be a positive number or None, got 0.0": ((Q, K, V), {"softcap": 0.0}),
    "softcap to be a positive number or None, got '2'": ((Q, K, V), {"softcap": "2"}),
    r"scale to be a finite number, got \[1\]": ((Q, K, V), {"scale": [1]}),
    "callable with RowStats, got 'paper'": ((Q, K, V), {"policy": "paper"}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    positional, named = REFUSED[message]
    with pytest.raises((ValueError, TypeError), match=message):
        decode_attention(*positional, **named)


def test_refused_pages() -> None:
    (keys, table), (values, _) = (paged(cache, [70, 70], 16) for cache in (K, V))
    refused: dict[str, Any] = {
        "alike but for the last": (Q, keys, values[:2], table, lengths_of([1, 2])),
        "block_table to be a tensor of whole numbers, got float32": (Q, keys, values, table * 1.0, LENGTHS),
        "block_table to be a tensor of whole numbers, got NoneType": (Q, keys, values, None, LENGTHS),
        r"block_table of shape \[2, pages of a sequence\]": (Q, keys, values, table[:1], LENGTHS),
        "key_cache to be a torch tensor": (Q, None, values, table, LENGTHS),
        "how many keys are valid, got None": (Q, keys, values, table, None),
    }
    for message, arguments in refused.items():
        with pytest.raises((ValueError, TypeError), match=message):
            paged_decode_attention(*arguments)
    for wrong in (-1, len(keys)):
        listed = table.clone()
        listed[1, 2] = wrong
        with pytest.raises(ValueError, match=f"name pages from 0 to {len(keys) - 1}, got {wrong}"):
            paged_decode_attention(Q, keys, values, listed, lengths_of([70, 70]))
        paged_decode_attention(Q, keys, values, listed, lengths_of([70, 32]))  # that entry is beyond the valid ones


def test_old_gpus_are_not_for_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    query, key, value = (x.to("cuda" if torch.cuda.is_available() else "cpu") for x in (Q, K, V))
    for capability, obstacle in ((7, "Ampere"), (8, ""), (9, ""), (0, "")):
        monkeypatch.setattr(choice, "compute_capability", lambda _, found=capability: found)
        assert obstacle in (decode._obstacle(query, decode._Cache(key, value, None, None)) or "")
        assert choice.before_ampere(Q.device) == (capability == 7)


def test_gradients_are_refused_only_where_they_are_recorded() -> None:
    with torch.no_grad():
        decode_attention(Q.clone().requires_grad_(), K, V)
