"""Decoding with adaptive temperature against the best stock decoding of torch, on one GPU.

    python -m benchmarks.decode [--quick] [--out FILE] [--splits N ...]

bfloat16, 8 key heads with 8 query heads each, head size 128, one query. Stock is torch's
scaled_dot_product_attention by cuDNN and by flash attention, each as torch takes grouped heads (``enable_gqa``) and
with the heads of a group packed as rows of one query, which reads the cache once; the fastest counts. All run as CUDA
graphs, round after round in random order, each graph several calls on several caches whose valid keys together exceed
the cache of the card. Ours are given lengths, as in serving, be the caches full or not. Stock takes none: where all
lengths are equal, it gets the valid part of the cache, and else there is no stock decode to compare with. Bandwidth
counts valid keys and values once.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sharpmax
from sharpmax.core.files import write_text
from sharpmax.provenance import provenance
from sharpmax.torch.checks import geometry_of
from sharpmax.torch.decode import _Cache, _triton_attention, decode_attention, paged_decode_attention
from sharpmax.torch.triton import decode_hopper

HEADS, GROUP, DIM, PAGE = 8, 8, 128, 16
BATCHES, LENGTHS = (1, 8, 64), (8192, 32768, 131072)
QUICK = ((1, 8192), (1, 131072), (8, 32768), (64, 8192))
PARTS = tuple((b, n) for b in (1, 8, 64) for n in LENGTHS[1:])
VALID = ("1,024", "a tenth", "ragged")
"""How much of a cache is valid: so many keys, a part of the capacity, or any number of keys, all equally likely."""
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
COLD_BYTES = 256 * 2**20
CALLS = 32
ENTROPY = 3.0  # where the paper's polynomial acts; the deviation of the logits is chosen for it

Call = Callable[["Inputs"], Tensor]


class Inputs(NamedTuple):
    """One decoding step."""

    query: Tensor
    key: Tensor
    value: Tensor
    lengths: Tensor


def lengths_of(batch: int, capacity: int, valid: str) -> list[int]:
    if valid == "ragged":
        return torch.randint(1, capacity + 1, (batch,), generator=torch.Generator().manual_seed(0)).tolist()
    return [{"all": capacity, "a tenth": capacity // 10, "1,024": 1024}[valid]] * batch


class SpreadOverTen:
    """A policy without numbers for the kernel: it runs as torch operations between the kernels."""

    def __call__(self, stats: Any) -> Any:
        return 1 + stats.spread / 10


def deviation(length: int) -> float:
    """That of Gaussian logits whose softmax has the wanted entropy, log n - deviation**2 / 2."""
    return math.sqrt(2 * max(math.log(length) - ENTROPY, 0))


def made(capacity: int, lengths: list[int]) -> Inputs:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    batch = len(lengths)
    query = torch.randn((batch, HEADS * GROUP, 1, DIM), **options)
    wanted = torch.tensor([deviation(n) * math.sqrt(DIM) for n in lengths], **options)
    query *= wanted.view(batch, 1, 1, 1) / query.norm(dim=-1, keepdim=True)
    key, value = (torch.empty((batch, HEADS, capacity, DIM), **options).normal_() for _ in range(2))
    return Inputs(query, key, value, torch.tensor(lengths, dtype=torch.int32, device="cuda"))


def stock(backend: SDPBackend, packed: bool, length: int) -> Call:
    """On the first ``length`` keys."""

    def call(given: Inputs) -> Tensor:
        query, key, value = given.query, given.key[:, :, :length], given.value[:, :, :length]
        with sdpa_kernel(backend):
            if packed:
                rows = query.view(query.shape[0], HEADS, GROUP, DIM)
                output = torch.nn.functional.scaled_dot_product_attention(rows, key, value)
                return output.reshape(query.shape)
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return call


def adaptive(policy: Any = sharpmax.PAPER, splits: int = 0) -> Call:
    if splits == 0:
        return lambda given: plain(decode_attention(*given, policy=policy, impl="triton"))

    def call(given: Inputs) -> Tensor:
        cache = _Cache(given.key, given.value, None, given.lengths)
        geometry = geometry_of(given.query, "lower_right", None, None, None)
        return plain(_triton_attention(given.query, cache, geometry, policy, False, splits))

    return call


@contextlib.contextmanager
def portable_kernels() -> Iterator[None]:
    """Without the kernel for Hopper."""
    least, decode_hopper.LEAST_TILES = decode_hopper.LEAST_TILES, math.inf
    try:
        yield
    finally:
        decode_hopper.LEAST_TILES = least


def portable(given: Inputs) -> Tensor:
    with portable_kernels():
        return plain(decode_attention(*given, impl="triton"))


def paged(batch: int, length: int, within: Callable[[], Any] = contextlib.nullcontext) -> Call:
    """On a paged cache, whose pages lie in random order; they are those of the contiguous one, relabelled."""
    pages = batch * length // PAGE
    table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, length // PAGE)

    def call(given: Inputs) -> Tensor:
        key, value = (cache.view(pages, PAGE, HEADS, DIM) for cache in (given.key, given.value))
        with within():
            return plain(paged_decode_attention(given.query, key, value, table, given.lengths, impl="triton"))

    return call


def plain(result: Any) -> Tensor:
    assert isinstance(result, Tensor)
    return result


def captured(call: Call, given: list[Inputs], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of ``calls`` calls, on one input after the other."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call(given[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(given[i % len(given)])
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def measured(batch: int, capacity: int, valid: str, rounds: int, splits: list[int]) -> dict[str, Any]:
    lengths = lengths_of(batch, capacity, valid)
    size = 2 * sum(lengths) * HEADS * DIM * 2
    result: dict[str, Any] = {"batch": batch, "length": capacity}
    if valid != "all":
        result |= {"valid": valid, "mean_length": round(sum(lengths) / batch)}
    result["logit_deviation"] = round(statistics.mean(deviation(n) for n in lengths), 3)
    logits = 4 * batch * HEADS * GROUP * capacity
    copies = -(-COLD_BYTES // size)
    needed = copies * 2 * batch * HEADS * capacity * DIM * 2 + 4 * logits
    free = torch.cuda.mem_get_info()[0]
    if needed + 2**30 > free:
        return result | {"skipped": f"needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free"}
    given = [made(capacity, lengths) for _ in range(copies)]
    first = given[0]
    statistic: Any = decode_attention(*first, impl="triton", return_stats=True)
    result["share_beta_above_1_3"] = round((statistic.beta > 1.3).float().mean().item(), 4)
    del statistic

    calls = stock_calls(lengths[0]) if min(lengths) == max(lengths) else {}
    stocks = list(calls)
    calls |= {"sharpmax": adaptive(), "sharpmax, portable": portable, "sharpmax paged": paged(batch, capacity)}
    if valid == "all":
        calls |= {"sharpmax paged, portable": paged(batch, capacity, portable_kernels)}
        calls |= {"sharpmax, policy between kernels": adaptive(SpreadOverTen())}
    calls |= {f"sharpmax, {n} splits": adaptive(splits=n) for n in splits}
    count = copies * -(-(CALLS if size < COLD_BYTES else 4) // copies)
    graphs, outputs = {}, {}
    for name, call in calls.items():
        try:
            outputs[name] = call(first) if name in stocks else None
            graphs[name] = captured(call, given, count)
        except RuntimeError as error:
            if name not in stocks:
                raise
            result.setdefault("not served", {})[name] = str(error).splitlines()[0]
    plainly = adaptive(sharpmax.Constant(1.0))(first)
    result["difference_from_stock_at_beta_1"] = {
        name: (plainly.float() - output.float()).abs().max().item()
        for name, output in outputs.items()
        if name in stocks
    }
    for graph in graphs.values():
        milliseconds(graph, count)
    order = random.Random(0)  # what runs first leaves the card warm for what runs next
    samples = [
        {name: milliseconds(graphs[name], count) for name in order.sample(list(graphs), len(graphs))}
        for _ in range(rounds)
    ]
    times = {name: statistics.median(sample[name] for sample in samples) for name in graphs}
    served = [name for name in stocks if name in times]
    best = min(served, key=lambda name: times[name]) if served else None
    return result | {
        "milliseconds": {name: round(t, 5) for name, t in times.items()},
        "gigabytes_per_second": {name: round(size / t / 1e6) for name, t in times.items()},
        "best_stock": best,
        "ratio_to_best_stock": round(times["sharpmax"] / times[best], 3) if best else None,
        "ratio_to_portable": round(times["sharpmax"] / times["sharpmax, portable"], 3),
    }


def stock_calls(length: int) -> dict[str, Call]:
    return {
        f"{name}{' packed' * packed}": stock(backend, packed, length)
        for name, backend in BACKENDS.items()
        for packed in (False, True)
    }


def line(result: dict[str, Any]) -> str:
    head = f"{result['batch']:5} {result['length']:7} {result.get('valid', ''):7} "
    if "skipped" in result:
        return head + result["skipped"]
    times, rates = result["milliseconds"], result["gigabytes_per_second"]
    timings = "  ".join(f"{name} {t:.4f} ms {rates[name]} GB/s" for name, t in times.items())
    ratios = f"x{result['ratio_to_best_stock']} of {result['best_stock']}, x{result['ratio_to_portable']} of portable"
    return f"{head} {ratios}: {timings}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cases, each measured briefly")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "decode_cuda.json")
    parser.add_argument("--splits", type=int, nargs="*", default=[], help="other numbers of splits to measure as well")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.decode needs a GPU")
    full = QUICK if arguments.quick else tuple((b, n) for b in BATCHES for n in LENGTHS)
    cases = [(b, n, "all") for b, n in full]
    cases += [
        (b, n, valid) for b, n in (() if arguments.quick else PARTS) for valid in VALID if b > 1 or valid != "ragged"
    ]
    results = []
    with torch.no_grad():
        for case in cases:
            results.append(measured(*case, 7 if arguments.quick else 25, arguments.splits))
            print(line(results[-1]), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    options = ["--quick"] * arguments.quick + (["--splits", *map(str, arguments.splits)] if arguments.splits else [])
    content = {
        "dtype": "bfloat16",
        "key_heads": HEADS,
        "query_heads": HEADS * GROUP,
        "head_size": DIM,
        "page_size": PAGE,
        "results": [result for result in results if "valid" not in result],
        "partly_valid": [result for result in results if "valid" in result],
        "provenance": provenance(["python", "-m", "benchmarks.decode", *options]),
    }
    write_text(arguments.out, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
