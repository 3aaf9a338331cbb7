"""The decoding kernel for Hopper, against float64 and the portable kernels; interpreted where there is no such GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import sharpmax
from sharpmax.torch.decode import Attention, decode_attention
from tests.torch.decode_cases import (
    POLICIES,
    captured,
    check,
    exact_inputs,
    lengths_of,
    nan_beyond,
    oracle,
    paper,
    with_offset,
)

pytest.importorskip("triton")

from sharpmax.torch.triton import decode_hopper
from tests.torch.triton.decode_hopper_cases import NARROW, WIDE, made, run, seen_launches
from tests.torch.triton.hopper_cases import DEVICE, ON_HOPPER

HARD = "hard by overflow"
LOWERED: dict[str, tuple[Any, Any]] = {
    name: POLICIES[name] for name in ("paper", "held", "detached", "log length", "yarn", "constant", "flat")
} | {HARD: (sharpmax.EntropyPolynomial((3e38, 3e38), threshold=0.0), lambda z, h: math.inf)}
"""Policies that the kernel evaluates itself."""
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture
def launches(hopper_kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return seen_launches(monkeypatch)


def portable(monkeypatch: pytest.MonkeyPatch, *arguments: Any, **options: Any) -> Attention:
    with monkeypatch.context() as patched:
        patched.setattr(decode_hopper, "refusal", lambda *_: "anything")
        return run(*arguments, **options)


def agree(result: Attention, other: Attention, tolerance: float) -> None:
    torch.testing.assert_close(result.output, other.output, atol=tolerance, rtol=0)
    torch.testing.assert_close(result.beta, other.beta, atol=0, rtol=1e-4)
    torch.testing.assert_close(result.stats.max, other.stats.max, atol=0, rtol=1e-5)
    torch.testing.assert_close(result.stats.entropy, other.stats.entropy, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", LOWERED)
def test_policies(name: str, launches: list[int], hopper_kernels: list[str]) -> None:
    policy, betas = LOWERED[name]
    tensors = made()
    check(run(tensors, [700, 333], policy=policy, splits=3), oracle(*tensors, [700, 333], betas), 3e-2)
    assert launches == [3]
    assert hopper_kernels == ([] if ON_HOPPER else ["hopper_decode_kernel"])


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.bfloat16, {"heads": 1, "kv_heads": 1, "queries": 1, **WIDE}),
        (torch.float16, {"heads": 16, "kv_heads": 2, "queries": 1, **WIDE}),
        (torch.float16, {"heads": 6, "kv_heads": 2, "queries": 2, **NARROW}),
        (torch.bfloat16, {"heads": 3, "kv_heads": 1, "queries": 5, **NARROW}),
        (torch.bfloat16, {"heads": 32, "kv_heads": 2, "queries": 1, **WIDE}),
        (torch.float16, {"heads": 1, "kv_heads": 1, "queries": 16, **WIDE}),
    ],
    ids=str,
)
def test_sizes(sizes: dict[str, Any], dtype: torch.dtype, launches: list[int]) -> None:
    tensors = made(dtype, capacity=777, **sizes)
    expected = oracle(*tensors, [777, 400], paper)
    check(run(tensors, [777, 400]), expected, TOLERANCES[dtype])
    check(run(tensors, [777, 400], splits=1), expected, TOLERANCES[dtype])
    assert launches == [0, 1]


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("policy", ["paper", "yarn"])
def test_short_caches_and_what_lies_beyond_them(policy: str, splits: int, launches: list[int]) -> None:
    chosen, betas = LOWERED[policy]
    lengths = [0, 1, 2, 127, 128, 129, 700]
    tensors = made(batch=7)
    expected = oracle(*tensors, lengths, betas)
    nan_beyond(lengths, *tensors[1:])
    result = run(tensors, lengths, policy=chosen, splits=splits)
    check(result, expected, 3e-2)
    assert bool((result.output[0] == 0).all())
    assert launches == [splits]


@pytest.mark.parametrize("options", [{"window": 5}, {"window": 300}, {"softcap": 3.0}, {"scale": 0.2}], ids=str)
@pytest.mark.parametrize("policy", ["paper", "yarn"])
def test_options(policy: str, options: dict[str, Any], launches: list[int]) -> None:
    chosen, betas = LOWERED[policy]
    tensors = made()
    result = run(tensors, [697, 4], policy=chosen, splits=2, **options)
    check(result, oracle(*tensors, [697, 4], betas, **options), 3e-2)
    assert launches == [2]


@pytest.mark.parametrize("splits", [0, 1, 5, 17, 132])
@pytest.mark.parametrize("spread", ["equal", "ragged"])
def test_many_turns_and_groups_that_straddle_them(
    splits: int, spread: str, launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, heads, capacity = (40, 8, 1900) if ON_HOPPER else (3, 2, 1100)
    tensors = made(torch.float16, batch=batch, heads=2 * heads, kv_heads=heads, queries=1, capacity=capacity)
    lengths = torch.randint(0, capacity + 1, (batch,), generator=torch.Generator().manual_seed(0)).int().to(DEVICE)
    valid = lengths if spread == "ragged" else None
    results = [run(tensors, valid, splits=splits) for _ in range(3)]
    agree(results[0], portable(monkeypatch, tensors, valid), 3e-2)
    for again in results[1:]:
        torch.testing.assert_close(again.output, results[0].output, atol=0, rtol=0)
        torch.testing.assert_close(again.beta, results[0].beta, atol=0, rtol=0)
    assert len(launches) == 3


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize(
    ("batch", "capacity", "lengths"),
    [
        (3, 2000, [2000, 0, 1]),
        (6, 700, [37 * i % 701 for i in range(6)]),
        (40, 130, [0] * 39 + [130]),
        *(
            pytest.param(*call, marks=pytest.mark.gpu)
            for call in (
                (3, 40000, [40000, 0, 1]),
                (64, 20000, [20000] + [130] * 63),
                (64, 20000, [0] * 63 + [20000]),
                (200, 3000, [37 * i % 3001 for i in range(200)]),
                (256, 1000, [0] * 256),
                (1, 131072, [1000]),
                (1, 131072, [100000]),
            )
        ),
    ],
    ids=lambda x: str(x)[:12],
)
def test_caches_of_which_little_is_valid(
    batch: int,
    capacity: int,
    lengths: list[int],
    window: int | None,
    launches: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = made(torch.float16, batch=batch, heads=8, kv_heads=2, queries=1, capacity=capacity)
    result = run(tensors, lengths, window=window)
    agree(result, portable(monkeypatch, tensors, lengths, window=window), 3e-2)
    assert launches == [0]


@pytest.mark.gpu
def test_long_caches(launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = made(batch=1, heads=16, kv_heads=2, queries=1, capacity=131072, deviation=4.0, **WIDE)
    result = run(tensors)
    agree(result, portable(monkeypatch, tensors), 3e-2)
    assert float((result.beta > 1.3).float().mean()) > 0.8
    assert launches == [0]


@pytest.mark.parametrize("offset", [1024.0, -1024.0])
def test_an_offset_of_the_logits_changes_nothing(offset: float, launches: list[int]) -> None:
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE, "capacity": 300, **NARROW}
    query, key, value = exact_inputs(**sizes)
    result = run((query, with_offset(key, offset), value), splits=2, scale=0.25)
    check(result, oracle(query, key, value, [300, 300], paper, scale=0.25), 3e-2)
    assert launches == [2]


def test_one_huge_logit_and_equal_logits(launches: list[int]) -> None:
    query, key, value = made()
    key[0] = 1.0
    key[1, :, 7] *= 100
    check(run((query, key, value), splits=2), oracle(query, key, value, [700, 700], paper), 3e-2)
    assert launches == [2]


def test_strides_do_not_matter(launches: list[int]) -> None:
    tensors = made()
    query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)
    wider = torch.cat([key, key], -1)[..., : key.shape[-1]]
    torch.testing.assert_close(run((query, wider, value)).output, run(tensors).output, atol=0, rtol=0)
    assert launches == [0, 0]


@pytest.mark.gpu
def test_a_captured_graph_follows_the_lengths(launches: list[int]) -> None:
    tensors = made(queries=1, batch=4, capacity=3000)
    lengths = lengths_of([3000, 300, 5, 0], "cuda")
    graph, result = captured(lambda: run(tensors, lengths))
    assert launches == [0, 0]
    for now in ([3000, 300, 5, 0], [0, 0, 0, 0], [1, 77, 2999, 1500], [3000, 3000, 3000, 3000], [0, 0, 0, 3000]):
        lengths.copy_(lengths_of(now))
        for _ in range(3):
            graph.replay()
        check(result, oracle(*tensors, now, paper), 3e-2)


@pytest.mark.gpu
def test_two_at_once_do_not_wait_for_each_other(launches: list[int]) -> None:
    tensors = made(batch=16, heads=16, kv_heads=8, queries=1, capacity=1900)
    expected = run(tensors)
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(run(tensors))
    torch.cuda.synchronize()
    for result in results:
        torch.testing.assert_close(result.output, expected.output, atol=0, rtol=0)
    assert len(launches) == 41


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
def test_large_calls_take_it_and_small_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    launch = decode_hopper.decode
    monkeypatch.setattr(decode_hopper, "decode", lambda *arguments: (taken.append(True), launch(*arguments)))
    decode_attention(*made(heads=8, kv_heads=8, capacity=4096))
    assert taken == [True]
    decode_attention(*made())
    assert taken == [True]
