"""The decoding kernel for Hopper on pages, against float64 and contiguous caches; interpreted where no such GPU is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.torch.decode_cases import captured, check, lengths_of, oracle, paged, paper
from tests.torch.triton.decode_hopper_cases import NARROW, WIDE, made, run, seen_launches
from tests.torch.triton.hopper_cases import DEVICE, ON_HOPPER


@pytest.fixture
def launches(hopper_kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return seen_launches(monkeypatch)


def in_pages(
    tensors: tuple[Tensor, Tensor, Tensor], lengths: list[int], size: int
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """The caches as scattered pages, which hold NaN where nothing is valid, and their table."""
    (key, table), (value, _) = (paged(cache, lengths, size) for cache in tensors[1:])
    return (tensors[0], key, value), table


@pytest.mark.parametrize("page", [16, 32, 64, 128, 256, 384])
@pytest.mark.parametrize("sizes", [NARROW, WIDE, {"heads": 16, "kv_heads": 1, "queries": 1, **WIDE}], ids=str)
def test_pages(page: int, sizes: dict[str, Any], launches: list[int]) -> None:
    lengths = [0, 1, 2, 15, 16, 17, 127, 128, 129, 700]
    tensors = made(batch=10, **sizes)
    pages, table = in_pages(tensors, lengths, page)
    expected = oracle(*tensors, lengths, paper)
    for splits in (0, 1, 4):
        check(run(pages, lengths, table=table, splits=splits), expected, 3e-2)
    assert launches == [0, 1, 4]


@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("window", [5, 300])
def test_pages_before_the_window_are_not_read(page: int, window: int, launches: list[int]) -> None:
    lengths = [700, 333, 130]
    tensors = made(batch=3)
    expected = oracle(*tensors, lengths, paper, window=window)
    nan_before = [max(n - tensors[0].shape[2] - window + 1, 0) // page for n in lengths]
    pages, table = in_pages(tensors, lengths, page)
    for b, first in enumerate(nan_before):
        for cache in pages[1:]:
            cache[table[b, :first].long()] = math.nan
        table[b, :first] = 2**31 - 1 if b else -5
    check(run(pages, lengths, table=table, window=window, splits=2), expected, 3e-2)
    assert launches == [2]


def test_pages_and_tables_of_any_strides(launches: list[int]) -> None:
    lengths = [700, 333, 0, 128]
    tensors = made(batch=4)
    (query, key, value), table = in_pages(tensors, lengths, 32)
    expected = run((query, key, value), lengths, table=table)
    by_head = key.transpose(1, 2).contiguous().transpose(1, 2)
    together = torch.stack([key, value], 1)
    wider = torch.full((4, table.shape[1] + 3), -7, dtype=torch.int32, device=DEVICE)
    wider[:, 1:-2] = table
    for keys, values, listed in (
        (by_head, value, table),
        (together[:, 0], together[:, 1], wider[:, 1:-2]),
        (key, by_head.new_empty(by_head.shape).copy_(value), torch.cat([table, table], 1)[:, : table.shape[1]]),
    ):
        found = run((query, keys, values), lengths, table=listed)
        torch.testing.assert_close(found.output, expected.output, atol=0, rtol=0)
    assert launches == [0] * 4


def test_numbers_that_no_page_has_are_read_as_zeros(launches: list[int]) -> None:
    query, key, value = made(batch=2)
    pages, table = in_pages((query, key, value), [700, 700], 64)
    for b, p, number in ((0, 3, -1), (0, 5, -(2**31)), (1, 0, 2**31 - 1), (1, 10, len(pages[1]))):
        table[b, p] = number
        key[b, :, 64 * p : 64 * (p + 1)] = value[b, :, 64 * p : 64 * (p + 1)] = 0
    check(run(pages, [700, 700], table=table), oracle(query, key, value, [700, 700], paper), 3e-2)
    assert launches == [0]


@pytest.mark.parametrize("splits", [0, 5, 132])
def test_pages_give_the_bits_of_a_contiguous_cache(splits: int, launches: list[int]) -> None:
    batch, heads, capacity = (40, 8, 1900) if ON_HOPPER else (4, 2, 900)
    tensors = made(batch=batch, heads=2 * heads, kv_heads=heads, queries=1, capacity=capacity, **WIDE)
    lengths = [47 * i % (capacity + 1) for i in range(1, batch + 1)]
    pages, table = in_pages(tensors, lengths, 16)
    expected = run(tensors, lengths, splits=splits)
    for _ in range(3):
        result = run(pages, lengths, table=table, splits=splits)
        torch.testing.assert_close(result.output, expected.output, atol=0, rtol=0)
        torch.testing.assert_close(result.beta, expected.beta, atol=0, rtol=0)
    assert len(launches) == 4


@pytest.mark.gpu
def test_a_captured_graph_follows_the_table(launches: list[int]) -> None:
    tensors = made(queries=1, batch=4, capacity=3000)
    lengths = lengths_of([3000] * 4, "cuda")
    pages, table = in_pages(tensors, [3000] * 4, 16)
    listed = table.clone()
    graph, result = captured(lambda: run(pages, lengths, table=listed))
    assert launches == [0, 0]
    for now, order in (([3000, 300, 5, 0], [0, 1, 2, 3]), ([1, 77, 2999, 1500], [3, 0, 2, 1])):
        lengths.copy_(lengths_of(now))
        listed.copy_(table[order])
        graph.replay()
        query, key, value = tensors
        check(result, oracle(query, key[order], value[order], now, paper), 3e-2)
