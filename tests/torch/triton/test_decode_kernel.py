"""The decoding kernels against float64: compiled where there is a GPU, else in Triton's interpreter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sharpmax
from sharpmax.torch.checks import geometry_of
from sharpmax.torch.decode import (
    Attention,
    _Cache,
    _triton_attention,
    decode_attention,
    paged_decode_attention,
)
from tests.torch.decode_cases import (
    MASKED_POLICIES,
    POLICIES,
    SpreadOverTen,
    captured,
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

pytest.importorskip("triton")

from sharpmax.torch.triton.decode_portable import layout_of

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")]
NARROW = [torch.float16, pytest.param(torch.bfloat16, marks=gpu)]
"""The interpreter's product in bfloat16 is wrong."""
TYPES = [torch.float32, *(pytest.param(dtype, marks=gpu) for dtype in (torch.float16, torch.bfloat16))]


def some(names: Any) -> list[Any]:
    """Policies by name; the interpreter, which is slow, is asked for some of them unless all are wanted."""
    quick = ("paper", "callable", "hard")
    return [n if GPU or n in quick else pytest.param(n, marks=pytest.mark.thorough) for n in names]


def run(
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: list[int] | None = None,
    *,
    splits: int = 0,
    policy: Any = sharpmax.PAPER,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    key_mask: Tensor | None = None,
) -> Attention:
    query, key, value = tensors
    cache = _Cache(key, value, None, None if lengths is None else lengths_of(lengths, DEVICE), key_mask)
    result = _triton_attention(
        query, cache, geometry_of(query, "lower_right", scale, window, softcap), policy, True, splits
    )
    assert isinstance(result, Attention)
    return result


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", some(POLICIES))
def test_policies(name: str, dtype: torch.dtype) -> None:
    policy, betas = POLICIES[name]
    tensors = inputs(dtype=dtype, device=DEVICE)
    result = run(tensors, [70, 33], policy=policy, splits=2)
    check(result, oracle(*tensors, [70, 33], betas), TOLERANCES[dtype])


@pytest.mark.parametrize("policy", ["paper", "callable"])
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_splits(splits: int, policy: str) -> None:
    chosen, betas = POLICIES[policy]
    tensors = inputs(capacity=300, queries=1, dim=32, value_dim=16, device=DEVICE)
    result = run(tensors, [300, 130], policy=chosen, splits=splits)
    check(result, oracle(*tensors, [300, 130], betas), 1e-5)


@pytest.mark.parametrize("options", [{"window": 5}, {"window": 1}, {"window": 90}, {"softcap": 3.0}, {"scale": 0.7}])
@pytest.mark.parametrize("policy", some(["paper", "yarn", "callable"]))
def test_options(options: dict[str, Any], policy: str) -> None:
    chosen, betas = POLICIES[policy]
    tensors = inputs(capacity=200, dim=16, value_dim=64, device=DEVICE)  # blocks of keys and of values differ
    result = run(tensors, [197, 4], policy=chosen, splits=2, **options)
    check(result, oracle(*tensors, [197, 4], betas, **options), 1e-5)


@pytest.mark.parametrize("window", [2**31, 2**40])
def test_a_window_longer_than_any_cache(window: int) -> None:
    tensors = inputs(device=DEVICE)
    check(run(tensors, [70, 1], window=window, splits=2), oracle(*tensors, [70, 1], paper), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 1, "kv_heads": 1, "queries": 1},
        {"heads": 6, "kv_heads": 2, "queries": 5, "dim": 80, "value_dim": 40},
        {"heads": 3, "kv_heads": 1, "queries": 16, "dim": 24, "value_dim": 96},
        {"heads": 20, "kv_heads": 1, "queries": 4},
        {"heads": 8, "kv_heads": 1, "queries": 1, "dim": 256, "value_dim": 256},
        {"heads": 8, "kv_heads": 1, "queries": 9, "dim": 128, "value_dim": 256},
    ],
)
def test_sizes(sizes: dict[str, Any], dtype: torch.dtype) -> None:
    tensors = inputs(batch=1, dtype=dtype, device=DEVICE, **sizes)
    check(run(tensors), oracle(*tensors, [70], paper), TOLERANCES[dtype])


@pytest.mark.parametrize("policy", ["paper", "hard", "callable"])
@pytest.mark.parametrize("splits", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_short_caches_and_what_lies_beyond_them(policy: str, splits: int) -> None:
    chosen, betas = POLICIES[policy]
    lengths = [0, 1, 2, 70]
    tensors = inputs(batch=4, queries=2, device=DEVICE)
    expected = oracle(*tensors, lengths, betas)
    nan_beyond(lengths, *tensors[1:])
    result = run(tensors, lengths, policy=chosen, splits=splits)
    check(result, expected, 1e-5)
    assert bool((result.output[0] == 0).all())


@pytest.mark.parametrize(("splits", "window"), [(1, None), (3, 9)])
@pytest.mark.parametrize("policy", some(MASKED_POLICIES))
def test_hidden_keys(policy: str, window: int | None, splits: int) -> None:
    chosen, betas = POLICIES[policy]
    lengths, mask = [70, 70, 69, 70, 41], padding(device=DEVICE)
    tensors = inputs(batch=5, device=DEVICE)
    expected = oracle(*tensors, lengths, betas, window=window, key_mask=mask)
    for cache in tensors[1:]:
        cache.masked_fill_(~mask[:, None, :, None], math.nan)
    check(run(tensors, lengths, policy=chosen, splits=splits, window=window, key_mask=mask), expected, 1e-5)
    strided = torch.stack([mask, ~mask], -1)[..., 0]
    public = decode_attention(
        *tensors, lengths_of(lengths, DEVICE), key_mask=strided, policy=chosen, window=window, impl="triton"
    )
    assert isinstance(public, Tensor)
    np.testing.assert_allclose(public.cpu(), expected.output, atol=1e-5)


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_an_offset_of_the_logits_changes_nothing(offset: float) -> None:
    query, key, value = exact_inputs(device=DEVICE)
    result = run((query, with_offset(key, offset), value), splits=2, scale=0.25)
    check(result, oracle(query, key, value, [70, 70], paper, scale=0.25), 1e-5)


def test_one_huge_logit_and_equal_logits() -> None:
    query, key, value = inputs(device=DEVICE)
    key[0] = 1.0
    key[1, :, 7] *= 1e4
    check(run((query, key, value), splits=2), oracle(query, key, value, [70, 70], paper), 1e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("page_size", [1, 16, 24])
@pytest.mark.parametrize("policy", ["held", "callable"])
def test_pages_equal_a_contiguous_cache(page_size: int, dtype: torch.dtype, policy: str) -> None:
    query, key, value = inputs(batch=3, value_dim=24, dtype=dtype, device=DEVICE)
    lengths = [70, 0, 33]
    chosen, _ = POLICIES[policy]
    expected = run((query, key, value), lengths, policy=chosen)
    (keys, table), (values, _) = (paged(cache, lengths, page_size) for cache in (key, value))
    result = paged_decode_attention(
        query, keys, values, table, lengths_of(lengths, DEVICE), policy=chosen, impl="triton", return_stats=True
    )
    assert isinstance(result, Attention)
    torch.testing.assert_close(result.output, expected.output, atol=TOLERANCES[dtype], rtol=0)
    torch.testing.assert_close(result.beta, expected.beta)


def test_strides_do_not_matter() -> None:
    tensors = inputs(device=DEVICE)
    query, key, value = (torch.stack((x.mT, x.mT), dim=-1)[..., 0].mT for x in tensors)
    torch.testing.assert_close(run((query, key, value)).output, run(tensors).output)
    (keys, table), (values, _) = (paged(cache, [70, 33], 16) for cache in tensors[1:])
    lengths = lengths_of([70, 33], DEVICE)
    expected = paged_decode_attention(tensors[0], keys, values, table, lengths, impl="triton")
    table, lengths = (torch.stack((x, x), dim=-1)[..., 0] for x in (table, lengths))
    torch.testing.assert_close(paged_decode_attention(query, keys, values, table, lengths, impl="triton"), expected)


@pytest.mark.parametrize("empty", [{"batch": 0}, {"capacity": 0}])
@pytest.mark.parametrize("policy", ["paper", "callable"])
def test_empty(empty: dict[str, Any], policy: str) -> None:
    tensors = inputs(device=DEVICE, **empty)
    output = run(tensors, policy=POLICIES[policy][0]).output
    assert output.shape == tensors[0].shape
    assert bool((output == 0).all())


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
def test_auto_takes_the_kernels() -> None:
    tensors = inputs(device="cuda")
    torch.testing.assert_close(decode_attention(*tensors), run(tensors).output, atol=0, rtol=0)


def test_refused() -> None:
    with pytest.raises(ValueError, match="serves head sizes from 1 to 256, got 272; use impl='torch'"):
        decode_attention(*inputs(value_dim=272, device=DEVICE), impl="triton")


def test_operators() -> None:
    from sharpmax.torch.fused import policy_numbers
    from sharpmax.torch.triton import decode as operators

    query, key, value = inputs(queries=1, device=DEVICE)
    (keys, table), (values, _) = (paged(cache, [70, 33], 16) for cache in (key, value))
    lengths = lengths_of([70, 33], DEVICE)
    form = sharpmax.PAPER.lower()
    assert form is not None
    numbers = policy_numbers(form)
    tests = ("test_schema", "test_faketensor")
    mask = padding(device=DEVICE)[:2]
    for k, v, pages, valid, seen in (
        (key, value, None, None, None),
        (key, value, None, None, mask),
        (keys, values, table, lengths, None),
    ):
        arguments: tuple[Any, ...] = (query, k, v, pages, valid, seen, 0.25, 0.0, -1, numbers, 2)
        torch.library.opcheck(operators.decode.opaque, arguments, test_utils=tests)
        arguments = (query, k, pages, valid, seen, 0.25, 0.0, 5, True, 2)
        torch.library.opcheck(operators.decode_stats.opaque, arguments, test_utils=tests)
        logits, stats = operators.decode_stats(*arguments)
        arguments = (logits, stats[0], torch.ones_like(stats[0]), v, pages, valid, seen, 5, 2)
        torch.library.opcheck(operators.decode_values.opaque, arguments, test_utils=tests)


@pytest.mark.parametrize("policy", [sharpmax.PAPER, pytest.param(SpreadOverTen(), marks=pytest.mark.thorough)])
def test_compiled_whole_and_for_growing_caches(policy: Any) -> None:
    compiled = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph

    torch._dynamo.reset()
    function = torch.compile(
        lambda q, k, v, n: decode_attention(q, k, v, n, policy=policy, impl="triton"), fullgraph=True, backend=backend
    )
    for capacity in (40, 41, 42, 43):
        tensors: tuple[Any, ...] = (*inputs(capacity=capacity, device=DEVICE), lengths_of([capacity, 17], DEVICE))
        torch.testing.assert_close(function(*tensors), decode_attention(*tensors, policy=policy, impl="triton"))
    assert len(compiled) <= 2


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("policy", ["paper", "callable"])
def test_a_captured_graph_follows_the_lengths(policy: str) -> None:
    chosen, betas = POLICIES[policy]
    query, key, value = inputs(capacity=600, queries=1, dim=64, value_dim=64, dtype=torch.bfloat16, device="cuda")
    lengths = lengths_of([600, 300], "cuda")
    graph, result = captured(
        lambda: decode_attention(query, key, value, lengths, policy=chosen, impl="triton", return_stats=True)
    )
    for now in ([600, 300], [0, 599], [1, 77]):
        lengths.copy_(lengths_of(now))
        graph.replay()
        check(result, oracle(query, key, value, now, betas), TOLERANCES[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", TYPES)
def test_long_caches(dtype: torch.dtype) -> None:
    query, key, value = inputs(
        batch=2, heads=16, queries=1, capacity=5000, dim=128, value_dim=128, deviation=3.0, dtype=dtype, device="cuda"
    )
    result = run((query, key, value), [5000, 4999])
    expected = oracle(query, key, value, [5000, 4999], paper)
    check(result, expected, 2 * TOLERANCES[dtype])  # logits of products of 128 terms
    assert np.mean(expected.beta > 1.3) > 0.9


def test_a_suitable_number_of_splits() -> None:
    from sharpmax.torch.triton.decode_portable import MOST_SPLITS, suitable_splits

    assert suitable_splits(8, 8192, 132) == 33  # two programs for each of 132 processors
    assert suitable_splits(8, 256, 132) == 2  # but 128 keys for each
    assert suitable_splits(1, 131072, 132) == MOST_SPLITS
    assert suitable_splits(512, 131072, 132) == 3  # several waves
    assert suitable_splits(512, 1024, 132) == 1


@pytest.mark.parametrize("policy", ["paper", "callable"])
@pytest.mark.parametrize("window", [5, 17, 40])
def test_pages_before_the_window_are_not_read(window: int, policy: str) -> None:
    tensors, lengths = inputs(device=DEVICE), [70, 33]
    query, key, value = tensors
    (keys, table), (values, _) = (paged(cache, lengths, 16) for cache in (key, value))
    for b, length in enumerate(lengths):
        for p in range(max(length - 2 - (window - 1), 0) // 16):
            keys[table[b, p]], values[table[b, p]] = math.nan, math.nan
            table[b, p] = 1 << 30
    chosen, betas = POLICIES[policy]
    cache = _Cache(keys, values, table, lengths_of(lengths, DEVICE))
    geometry = geometry_of(query, "lower_right", None, window, None)
    result = _triton_attention(query, cache, geometry, chosen, True, 2)
    check(result, oracle(*tensors, lengths, betas, window=window), 1e-5)


def test_no_axis_of_the_grid_but_the_first_grows_with_the_batch() -> None:
    query, key, _ = inputs(batch=1, device="cpu")
    layout = layout_of((70_000, *query.shape[1:]), key.expand(70_000, *key.shape[1:]), None, 16, 3)
    assert layout.grid[0] == 3 * 70_000
    assert max(layout.grid[1:]) < 65_536


def test_many_batch_elements() -> None:
    tensors = inputs(batch=5, device=DEVICE)
    lengths = [70, 3, 41, 0, 16]
    check(run(tensors, lengths, splits=3), oracle(*tensors, lengths, paper), 1e-5)
