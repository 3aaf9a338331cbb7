"""Attention with adaptive temperature on a CPU against torch's own attention and against a literal Figure 4.

    python -m benchmarks.attention_cpu [--lengths 1024 4096 16384] [--hidden-up-to 4096] [--rounds 5] [--threads N]

One head, float32. Logits are scaled so that the paper's polynomial acts; the share of rows with beta > 1.3 is recorded.
Up to --hidden-up-to keys, there are calls with masks and windows too; torch's own attention gets those as masks.
The functions run in turn, round after round, and ratios are those of their median times. Figure 4 holds all logits and
is left out above --figure4-up-to.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
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
from sharpmax.torch import scaled_dot_product_attention

LEAST_SECONDS = 0.05
"""How long a function runs in a round; short calls are repeated."""
ENTROPY = 4.0  # about the peak of the paper's polynomial; logits of deviation d have entropy log(n) - d^2 / 2
Call = Callable[[], Any]


def tensors(length: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries all have the same norm, so that rows are about as sharp as each other."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, columns, generator=g) for _ in range(3))
    q *= math.sqrt(columns) / q.norm(dim=-1, keepdim=True)
    factor = (2 * max(0.0, math.log(length) - ENTROPY)) ** 0.25
    return q * factor, k * factor, v


KINDS = ("full", "causal", "key lengths", "boolean mask", "mask of numbers", "window")
WINDOW = 256


def options(kind: str, length: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a kind of call gives sharpmax, and torch's own attention."""
    if kind == "key lengths":
        valid = length - length // 8
        return {"key_lengths": torch.tensor([valid])}, {"attn_mask": (torch.arange(length) < valid).view(1, 1, 1, -1)}
    if kind == "window":
        seen = torch.ones(length, length, dtype=torch.bool).tril_().triu_(1 - WINDOW)
        return {"is_causal": True, "window": WINDOW}, {"attn_mask": seen}
    if kind in ("full", "causal"):
        causal = {"is_causal": kind == "causal"}
        return causal, causal
    mask = torch.rand(length, length, generator=torch.Generator().manual_seed(1)) > 0.3
    if kind == "mask of numbers":
        mask = torch.where(mask, 0.0, -math.inf)
    given = {"attn_mask": mask}
    return given, given


def figure4(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    logits = (q @ k.mT).mul_(q.shape[-1] ** -0.5)
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril_()
    if attn_mask is not None:
        hidden = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == -math.inf
        logits.masked_fill_(hidden, -1e9)
    return torch_figure4(logits) @ v


def calls(q: Tensor, k: Tensor, v: Tensor, kind: str, direction: str, with_figure4: bool) -> dict[str, Call]:
    ours, theirs = options(kind, k.shape[2])
    functions: dict[str, Callable[..., Tensor]] = {
        "torch": functools.partial(torch.nn.functional.scaled_dot_product_attention, **theirs),
        "sharpmax": functools.partial(scaled_dot_product_attention, **ours),
        "detached": functools.partial(scaled_dot_product_attention, **ours, policy=sharpmax.detached(sharpmax.PAPER)),
        "figure4": functools.partial(figure4, **theirs),
    }
    if direction == "forward":
        functions.pop("detached")
    if not with_figure4:
        functions.pop("figure4")
    if direction == "forward":
        return {name: functools.partial(f, q, k, v) for name, f in functions.items()}
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    cotangent = torch.randn_like(v)
    return {name: (lambda f=f: torch.autograd.grad(f(*leaves), leaves, cotangent)) for name, f in functions.items()}


def seconds(call: Call, repeats: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def measured(length: int, columns: int, kind: str, direction: str, rounds: int, figure4_up_to: int) -> dict[str, Any]:
    q, k, v = tensors(length, columns)
    result = scaled_dot_product_attention(q, k, v, **options(kind, length)[0], return_stats=True)
    made = calls(q, k, v, kind, direction, length <= figure4_up_to)
    for call in made.values():  # a first time, which takes longer
        call()
    repeats = {name: max(1, round(LEAST_SECONDS / seconds(call))) for name, call in made.items()}
    samples = [{name: seconds(call, repeats[name]) for name, call in made.items()} for _ in range(rounds)]
    times = {name: statistics.median(sample[name] for sample in samples) for name in made}
    return {
        "length": length,
        "columns": columns,
        "kind": kind,
        "direction": direction,
        "share_beta_above_1_3": round(float((result.beta > 1.3).float().mean()), 4),
        "milliseconds": {name: round(1000 * t, 3) for name, t in times.items()},
        "ratio_to_torch": {name: round(t / times["torch"], 3) for name, t in times.items() if name != "torch"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--columns", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--directions", nargs="+", default=["forward", "forward+backward"])
    parser.add_argument("--hidden-up-to", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--figure4-up-to", type=int, default=16384)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "attention_cpu.json")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    results = []
    for length in arguments.lengths:
        for columns in arguments.columns:
            for direction in arguments.directions:
                for kind in KINDS if length <= arguments.hidden_up_to else KINDS[:2]:
                    results.append(
                        measured(length, columns, kind, direction, arguments.rounds, arguments.figure4_up_to)
                    )
                    print(json.dumps(results[-1]), flush=True)
    content = {
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "rounds": arguments.rounds,
        "results": results,
        "provenance": provenance(["python", "-m", "benchmarks.attention_cpu", *sys.argv[1:]]),
    }
    write_text(arguments.out, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
