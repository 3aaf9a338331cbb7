"""The decoding kernel for Hopper: against float64 and the portable kernels on such a GPU, compiled elsewhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax
from sharpmax.torch.checks import geometry_of
from sharpmax.torch.decode import Attention, _Cache, _triton_attention, decode_attention
from tests.torch.decode_cases import (
    POLICIES,
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

from sharpmax.torch.triton import decode_hopper, hopper
from tests.torch.triton.compiled import printed

ON_HOPPER = (
    torch.cuda.is_available()
    and torch.cuda.get_device_capability() == (9, 0)
    and hopper.version() in hopper.RUN_WITH
)  # fmt: skip
HARD = "hard by overflow"
LOWERED: dict[str, tuple[Any, Any]] = {
    name: POLICIES[name] for name in ("paper", "held", "detached", "log length", "yarn", "constant", "flat")
} | {HARD: (sharpmax.EntropyPolynomial((3e38, 3e38), threshold=0.0), lambda z, h: math.inf)}
"""Policies that the kernel evaluates itself."""
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
WIDE: dict[str, Any] = {"dim": 128, "value_dim": 128}
NARROW: dict[str, Any] = {"dim": 64, "value_dim": 64}


@pytest.fixture(autouse=True)
def device_there(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not ON_HOPPER:
        pytest.skip("needs a Hopper GPU and a Triton that the kernel was run with")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many splits each launch of the kernel was asked for; calls of any size take it."""
    asked = []
    launch = decode_hopper.decode

    def counted(*arguments: Any) -> None:
        asked.append(arguments[10])
        launch(*arguments)

    monkeypatch.setattr(decode_hopper, "decode", counted)
    monkeypatch.setattr(decode_hopper, "LEAST_TILES", 0)
    return asked


def made(dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    return inputs(**({"capacity": 700} | NARROW | sizes), dtype=dtype, device="cuda")


def run(
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: list[int] | Tensor | None = None,
    *,
    splits: int = 0,
    policy: Any = sharpmax.PAPER,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    table: Tensor | None = None,
) -> Attention:
    query, key, value = tensors
    valid = lengths_of(lengths, "cuda") if isinstance(lengths, list) else lengths
    geometry = geometry_of(query, "lower_right", scale, window, softcap)
    result = _triton_attention(query, _Cache(key, value, table, valid), geometry, policy, True, splits)
    assert isinstance(result, Attention)
    return result


def portable(monkeypatch: pytest.MonkeyPatch, *arguments: Any, **options: Any) -> Attention:
    with monkeypatch.context() as patched:
        patched.setattr(decode_hopper, "refusal", lambda *_: "anything")
        return run(*arguments, **options)


def agree(result: Attention, other: Attention, tolerance: float) -> None:
    torch.testing.assert_close(result.output, other.output, atol=tolerance, rtol=0)
    torch.testing.assert_close(result.beta, other.beta, atol=0, rtol=1e-4)
    torch.testing.assert_close(result.stats.max, other.stats.max, atol=0, rtol=1e-5)
    torch.testing.assert_close(result.stats.entropy, other.stats.entropy, atol=1e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOWERED)
def test_policies(name: str, launches: list[int]) -> None:
    policy, betas = LOWERED[name]
    tensors = made()
    check(run(tensors, [700, 333], policy=policy, splits=3), oracle(*tensors, [700, 333], betas), 3e-2)
    assert launches == [3]


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"window": 5}, {"window": 300}, {"softcap": 3.0}, {"scale": 0.2}], ids=str)
@pytest.mark.parametrize("policy", ["paper", "yarn"])
def test_options(policy: str, options: dict[str, Any], launches: list[int]) -> None:
    chosen, betas = LOWERED[policy]
    tensors = made()
    result = run(tensors, [697, 4], policy=chosen, splits=2, **options)
    check(result, oracle(*tensors, [697, 4], betas, **options), 3e-2)
    assert launches == [2]


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [0, 1, 5, 17, 132])
@pytest.mark.parametrize("spread", ["equal", "ragged"])
def test_many_turns_and_groups_that_straddle_them(
    splits: int, spread: str, launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = made(batch=40, heads=16, kv_heads=8, queries=1, capacity=1900)
    lengths = torch.randint(0, 1901, (40,), generator=torch.Generator().manual_seed(0)).to("cuda", torch.int32)
    valid = lengths if spread == "ragged" else None
    results = [run(tensors, valid, splits=splits) for _ in range(3)]
    agree(results[0], portable(monkeypatch, tensors, valid), 3e-2)
    for again in results[1:]:
        torch.testing.assert_close(again.output, results[0].output, atol=0, rtol=0)
        torch.testing.assert_close(again.beta, results[0].beta, atol=0, rtol=0)
    assert len(launches) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize(
    ("batch", "capacity", "lengths"),
    [
        (3, 40000, [40000, 0, 1]),
        (64, 20000, [20000] + [130] * 63),
        (64, 20000, [0] * 63 + [20000]),
        (200, 3000, [37 * i % 3001 for i in range(200)]),
        (256, 1000, [0] * 256),
        (1, 131072, [1000]),
        (1, 131072, [100000]),
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
    tensors = made(batch=batch, heads=8, kv_heads=2, queries=1, capacity=capacity)
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


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [1024.0, -1024.0])
def test_an_offset_of_the_logits_changes_nothing(offset: float, launches: list[int]) -> None:
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", "capacity": 300, **NARROW}
    query, key, value = exact_inputs(**sizes)
    result = run((query, with_offset(key, offset), value), splits=2, scale=0.25)
    check(result, oracle(query, key, value, [300, 300], paper, scale=0.25), 3e-2)
    assert launches == [2]


@pytest.mark.gpu
def test_one_huge_logit_and_equal_logits(launches: list[int]) -> None:
    query, key, value = made()
    key[0] = 1.0
    key[1, :, 7] *= 100
    check(run((query, key, value), splits=2), oracle(query, key, value, [700, 700], paper), 3e-2)
    assert launches == [2]


@pytest.mark.gpu
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


def in_pages(
    tensors: tuple[Tensor, Tensor, Tensor], lengths: list[int], size: int
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """The caches as scattered pages, which hold NaN where nothing is valid, and their table."""
    (key, table), (value, _) = (paged(cache, lengths, size) for cache in tensors[1:])
    return (tensors[0], key, value), table


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_pages_and_tables_of_any_strides(launches: list[int]) -> None:
    lengths = [700, 333, 0, 128]
    tensors = made(batch=4)
    (query, key, value), table = in_pages(tensors, lengths, 32)
    expected = run((query, key, value), lengths, table=table)
    by_head = key.transpose(1, 2).contiguous().transpose(1, 2)
    together = torch.stack([key, value], 1)
    wider = torch.full((4, table.shape[1] + 3), -7, dtype=torch.int32, device="cuda")
    wider[:, 1:-2] = table
    for keys, values, listed in (
        (by_head, value, table),
        (together[:, 0], together[:, 1], wider[:, 1:-2]),
        (key, by_head.new_empty(by_head.shape).copy_(value), torch.cat([table, table], 1)[:, : table.shape[1]]),
    ):
        found = run((query, keys, values), lengths, table=listed)
        torch.testing.assert_close(found.output, expected.output, atol=0, rtol=0)
    assert launches == [0] * 4


@pytest.mark.gpu
def test_numbers_that_no_page_has_are_read_as_zeros(launches: list[int]) -> None:
    query, key, value = made(batch=2)
    pages, table = in_pages((query, key, value), [700, 700], 64)
    for b, p, number in ((0, 3, -1), (0, 5, -(2**31)), (1, 0, 2**31 - 1), (1, 10, len(pages[1]))):
        table[b, p] = number
        key[b, :, 64 * p : 64 * (p + 1)] = value[b, :, 64 * p : 64 * (p + 1)] = 0
    check(run(pages, [700, 700], table=table), oracle(query, key, value, [700, 700], paper), 3e-2)
    assert launches == [0]


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [0, 5, 132])
def test_pages_give_the_bits_of_a_contiguous_cache(splits: int, launches: list[int]) -> None:
    tensors = made(batch=40, heads=16, kv_heads=8, queries=1, capacity=1900, **WIDE)
    lengths = [47 * i % 1901 for i in range(40)]
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
def test_large_calls_take_it_and_small_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    launch = decode_hopper.decode
    monkeypatch.setattr(decode_hopper, "decode", lambda *arguments: (taken.append(True), launch(*arguments)))
    decode_attention(*made(heads=8, kv_heads=8, capacity=4096))
    assert taken == [True]
    decode_attention(*made())
    assert taken == [True]


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "is_hopper", lambda _: True)
    monkeypatch.setattr(hopper, "processors", lambda _: 132)
    monkeypatch.setattr(hopper, "RUN_WITH", (hopper.version(),))


@pytest.mark.usefixtures("as_on_hopper")
def test_what_is_served() -> None:
    def refusal(sizes: dict[str, Any], dtype: torch.dtype = torch.float16, left: int = -1, **more: Tensor) -> str:
        tensors = inputs(**(NARROW | sizes), dtype=dtype)
        return decode_hopper.refusal(*tensors, more.get("table"), more.get("lengths"), more.get("mask"), left)

    assert not refusal({})
    assert not refusal({"heads": 16, "kv_heads": 1, "queries": 1, **WIDE})
    assert not refusal({"capacity": 132 * 15 * 128})
    long = {"batch": 1, "heads": 1, "kv_heads": 1, "capacity": 132 * 15 * 128 + 1}
    assert "do not fit" in refusal(long)
    assert not refusal(long, left=132 * 14 * 128)
    assert "more than 16 queries" in refusal({"heads": 16, "kv_heads": 1, "queries": 2})
    assert "64 or 128 columns" in refusal({"dim": 96, "value_dim": 96})
    assert "two-byte" in refusal({}, torch.float32)
    assert "as wide" in refusal({"value_dim": 128})
    assert "mask" in refusal({}, mask=padding())
    table = torch.zeros(2, 40, dtype=torch.int32)
    for page, served in ((8, False), (16, True), (48, False), (128, True), (192, False), (256, True)):
        query = inputs(**NARROW, dtype=torch.float16)[0]
        pages = torch.zeros(9, page, 2, 64, dtype=torch.float16)
        found = decode_hopper.refusal(query, pages, pages, table, torch.ones(2), None, -1)
        assert (found == "") == served
        assert served or "pages" in found
    assert "empty" in refusal({"capacity": 0})
    assert not refusal({"batch": 257, "capacity": 10})
    assert not refusal({"batch": 256, "capacity": 10}, lengths=torch.zeros(256, dtype=torch.int32))
    assert "batch elements" in refusal({"batch": 257, "capacity": 10}, lengths=torch.zeros(257, dtype=torch.int32))
    query, key, value = inputs(**NARROW, dtype=torch.float16)
    assert "contiguous" in decode_hopper.refusal(query, key.mT.contiguous().mT, value, None, None, None, -1)
    assert "contiguous" in decode_hopper.refusal(query.mT.contiguous().mT, key, value, None, None, None, -1)


def test_other_devices_and_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(**NARROW, dtype=torch.float16)
    assert "other than Hopper" in decode_hopper.refusal(*tensors, None, None, None, -1)
    monkeypatch.setattr(hopper, "is_hopper", lambda _: True)
    monkeypatch.setattr(hopper, "RUN_WITH", ())
    assert "versions of Triton" in decode_hopper.refusal(*tensors, None, None, None, -1)


@pytest.mark.usefixtures("as_on_hopper")
@pytest.mark.parametrize(
    ("shape", "left", "expected"),
    [
        ((1, 8, 1024), -1, False),
        ((1, 8, 8192), -1, True),
        ((1, 1, 4096), -1, False),
        ((64, 8, 1024), -1, True),
        ((64, 8, 131072), -1, True),
        ((1, 8, 32768), 100, False),  # a window of two tiles
        ((1, 8, 32768), 30000, True),
        ((64, 8, 32768), 100, True),
    ],
    ids=str,
)
def test_when_it_pays(shape: tuple[int, int, int], left: int, expected: bool) -> None:
    batch, heads, length = shape
    query, key = (torch.empty(size, device="meta") for size in ((batch, heads, 1, 64), (*shape, 64)))
    assert decode_hopper.pays(query, key, None, left) == expected
    pages, table = torch.empty((9, 16, heads, 64), device="meta"), torch.empty((batch, length // 16), device="meta")
    assert decode_hopper.pays(query, pages, table, left) == expected


COMPILE = """
import torch, triton
from triton._utils import canonicalize_dtype
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from sharpmax.torch.triton import decode_hopper, hopper, decode_hopper_kernel

FLOATS = ("parts", "stats", "betas", "shares", "sums")

def type_of(name, made, flags):
    dtype = canonicalize_dtype(made.base.dtype)
    if name.endswith("_desc"):
        return f"tensordesc<{dtype}{made.block_shape},{made.layout!r}>"
    if name in ("query", "output"):
        return f"*{dtype}"
    if name in flags:
        return "constexpr"
    if name in ("lengths", "table", "counters"):
        return "*i32"
    return "*fp32" if name in FLOATS else "i32" if name in decode_hopper_kernel.WHOLE_NUMBERS else "fp32"

for width, dtype, rows, columns, splits, batch, page, lines in (
    (128, torch.bfloat16, 8, 8, 128, 1, 0, 1),
    (128, torch.bfloat16, 8, 8, 128, 256, 0, 1),
    (128, torch.bfloat16, 8, 8, 128, 256, 0, 8),
    (64, torch.float16, 12, 16, 1, 64, 0, 16),
    (128, torch.bfloat16, 8, 8, 128, 256, 16, 8),
):
    sizes = (page, decode_hopper.PIECE) if page else (decode_hopper.KEYS, width)
    made = hopper.descriptor(torch.zeros(1, 1, 256, width, dtype=dtype), *sizes)
    kernel = decode_hopper_kernel.hopper_decode_kernel
    flags = {
        "ROWS": rows, "COLUMNS": columns, "QUERIES": 1, "CAPPED": False, "ENTROPY": True, "KEYS": decode_hopper.KEYS,
        "STAGES": decode_hopper.STAGES[width], "BATCH": batch, "TILES": decode_hopper.TILES[columns],
        "SPLITS": splits, "LINES": lines, "CHUNK": decode_hopper.PARTS // lines, "D": width, "PAGE": page,
    } | ({"lengths": None} if batch == 1 else {}) | ({} if page else {"table": None})
    source = GluonASTSource(kernel, {name: type_of(name, made, flags) for name in kernel.arg_names}, flags)
    options = {"num_warps": decode_hopper.WARPS, "launch_cooperative_grid": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    print("kernel", compiled.metadata.shared, ptx.count("wgmma.mma_async"), ptx.count("cp.async.bulk.tensor"))
"""


def test_it_compiles_for_hopper_without_a_gpu_and_keeps_both_products() -> None:
    pytest.importorskip("triton.experimental.gluon._runtime")
    found = [tuple(map(int, line.split()[1:])) for line in printed(COMPILE).splitlines() if line.startswith("kernel")]
    shared, products, copies = zip(*found, strict=True)
    assert products == (2 * 2 * 8, 2 * 2 * 8, 2 * 2 * 8, 2 * 2 * 4, 2 * 2 * 8)
    assert copies == (2 * 2, 2 * 2, 2 * 2, 2, 2 * 8 * 2)  # of keys and of values, each by 64 columns, and by pages
    assert max(shared) <= 227 * 1024  # what a program may have
