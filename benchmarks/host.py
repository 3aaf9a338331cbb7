"""What a call costs the host: attention on inputs so small that the GPU waits for the calls, against torch's own.

    python -m benchmarks.host [--out FILE] [--profile FOLDER]

Microseconds of one call in a loop of many without a pause, the median of several loops taken in turn. Models that run
without torch.compile or CUDA graphs pay this for every layer. With --profile, what Python's profiler saw of each case
is kept as text.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sharpmax
from benchmarks.figure4 import torch_figure4
from sharpmax.core.files import write_text
from sharpmax.provenance import provenance
from sharpmax.torch import decode_attention, row_stats, scaled_dot_product_attention, varlen_attention

BATCH, HEADS, LENGTH, DIM, CACHE = 1, 4, 64, 64, 256
CALLS, LOOPS = 200, 15
PEER = {"forward": "torch forward", "forward+backward": "torch forward+backward"}
torch_attention = torch.nn.functional.scaled_dot_product_attention


def figure4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch_figure4(q @ k.mT * DIM**-0.5) @ v


def cases() -> dict[str, Callable[[], Any]]:
    on_gpu: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v, grad = (torch.randn((BATCH, HEADS, LENGTH, DIM), **on_gpu) for _ in range(4))
    leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))
    packed_q, packed_k, packed_v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    starts = torch.tensor([0, LENGTH // 4, LENGTH], device="cuda", dtype=torch.int32)
    keys, values = (torch.randn((BATCH, HEADS, CACHE, DIM), **on_gpu) for _ in range(2))
    newest, lengths = q[:, :, :1].contiguous(), torch.full((BATCH,), CACHE - 5, device="cuda", dtype=torch.int32)

    def whole(attention: Callable[..., Tensor], **given: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(attention(*leaves, **given), leaves, grad)

    detached: Any = sharpmax.detached(sharpmax.PAPER)
    ours: dict[str, dict[str, Any]] = {
        "stock": {"impl": "stock"}, "stock, detached": {"impl": "stock", "policy": detached},
        "triton": {"impl": "triton"}, "triton, detached": {"impl": "triton", "policy": detached},
    }  # fmt: skip
    found: dict[str, Callable[[], Any]] = {
        "torch forward": lambda: torch_attention(q, k, v, is_causal=True),
        "torch forward+backward": whole(torch_attention, is_causal=True),
        "figure 4 forward": lambda: figure4(q, k, v),
        "figure 4 forward+backward": whole(figure4),
    }
    for name, options in ours.items():
        given: dict[str, Any] = options | {"is_causal": True}
        if "detached" not in name:
            found[f"{name} forward"] = lambda given=given: scaled_dot_product_attention(q, k, v, **given)
        found[f"{name} forward+backward"] = whole(scaled_dot_product_attention, **given)
    return found | {
        "row_stats forward": lambda: row_stats(q, k, is_causal=True),
        "varlen forward": lambda: varlen_attention(packed_q, packed_k, packed_v, starts, starts, causal=True),
        "decode forward": lambda: decode_attention(newest, keys, values, lengths),
    }


def microseconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / CALLS * 1e6


def profiled(call: Callable[[], Any]) -> str:
    profile, text = cProfile.Profile(), io.StringIO()
    profile.enable()
    for _ in range(CALLS):
        call()
    profile.disable()
    torch.cuda.synchronize()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(60)
    return text.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "host_cuda.json")
    parser.add_argument("--profile", type=Path, help="a folder for what Python's profiler saw")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.host needs a GPU")
    calls = cases()
    for call in calls.values():
        for _ in range(10):
            call()
    samples = [{name: microseconds(call) for name, call in calls.items()} for _ in range(LOOPS)]
    times = {name: statistics.median(sample[name] for sample in samples) for name in calls}
    results = {
        name: {"microseconds": round(t, 1), "ratio_to_torch": round(t / times[PEER[name.rsplit(" ", 1)[1]]], 2)}
        for name, t in times.items()
    }
    for name, result in results.items():
        print(f"{name:36} {result['microseconds']:8.1f} us  {result['ratio_to_torch']:6.2f}x of torch's", flush=True)
    if arguments.profile is not None:
        arguments.profile.mkdir(parents=True, exist_ok=True)
        for name, call in calls.items():
            (arguments.profile / f"{name.replace(' ', '_').replace(',', '')}.txt").write_text(profiled(call))
    content = {
        "shape": [BATCH, HEADS, LENGTH, DIM],
        "cache": CACHE,
        "dtype": "bfloat16",
        "results": results,
        "provenance": provenance(["python", "-m", "benchmarks.host"]),
    }
    write_text(arguments.out, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
