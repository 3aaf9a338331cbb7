"""Calls with masks, windows, caps and grouped heads on a GPU, against FlexAttention and torch's own attention.

    python -m benchmarks.attention_kinds [--kinds NAME ...] [--quick] [--out FILE]

FlexAttention is compiled for each kind, with its mask as a block mask and what is done to scores as a function; torch's
own attention gets a mask as a tensor, and chooses its kernel itself. Neither has a temperature. "compiled" is a call of
sharpmax under ``torch.compile(fullgraph=True)``; "detached" has no gradient through beta.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

import sharpmax
from sharpmax.core.files import write_text
from sharpmax.provenance import provenance
from sharpmax.torch import scaled_dot_product_attention

BATCH, HEADS, LENGTH, COLUMNS = 4, 16, 4096, 128
GROUPED, WINDOW, SOFTCAP, SHOWN = (32, 8), 1024, 30.0, 0.7
ENTROPY = 3.0  # where the paper's polynomial acts; logits of deviation d have entropy log(n) - d^2 / 2
Call = Callable[[], Any]


class Kind(NamedTuple):
    """What a kind of call gives sharpmax, torch's own attention (``None``: it has no such thing) and FlexAttention."""

    ours: dict[str, Any]
    torch: dict[str, Any] | None
    mask_mod: Callable[..., Tensor] | None = None
    score_mod: Callable[..., Tensor] | None = None
    heads: tuple[int, int] = (HEADS, HEADS)


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def kinds() -> dict[str, Callable[[], Kind]]:
    def grouped() -> Kind:
        given = {"is_causal": True, "enable_gqa": True}
        return Kind(given, given, causal, heads=GROUPED)

    def key_lengths() -> Kind:
        lengths = torch.tensor([LENGTH - LENGTH * b // 8 for b in range(BATCH)], device="cuda")
        seen = torch.arange(LENGTH, device="cuda") < lengths[:, None]
        return Kind({"key_lengths": lengths}, {"attn_mask": seen[:, None, None]}, lambda b, h, i, j: j < lengths[b])

    def window() -> Kind:
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda").tril_().triu_(1 - WINDOW)
        ours = {"is_causal": True, "window": WINDOW}
        return Kind(ours, {"attn_mask": seen}, lambda b, h, i, j: (i >= j) & (i - j < WINDOW))

    def boolean_mask() -> Kind:
        seen = torch.rand(LENGTH, LENGTH, generator=torch.Generator("cuda").manual_seed(1), device="cuda") < SHOWN
        return Kind({"attn_mask": seen}, {"attn_mask": seen}, lambda b, h, i, j: seen[i, j])

    def mask_of_numbers() -> Kind:
        generator = torch.Generator("cuda").manual_seed(1)
        added = torch.randn(LENGTH, LENGTH, generator=generator, device="cuda").to(torch.bfloat16)
        given = {"attn_mask": added}
        return Kind(given, given, score_mod=lambda score, b, h, i, j: score + added[i, j])

    def softcap() -> Kind:
        ours = {"is_causal": True, "softcap": SOFTCAP}
        capped = lambda score, b, h, i, j: SOFTCAP * torch.tanh(score / SOFTCAP)  # noqa: E731
        return Kind(ours, None, causal, capped)

    return {
        "causal": lambda: Kind({"is_causal": True}, {"is_causal": True}, causal),
        "causal, 32 on 8 heads": grouped,
        "key lengths": key_lengths,
        f"causal, window of {WINDOW:,}": window,
        "boolean mask": boolean_mask,
        "mask of numbers": mask_of_numbers,
        "causal, softcap": softcap,
    }


def inputs(heads: int, key_heads: int) -> list[Tensor]:
    """Query, key and value, leaves of autograd, and the cotangent of the output."""
    factor = (2 * (math.log(LENGTH) - ENTROPY)) ** 0.25
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((heads, factor), (key_heads, factor), (key_heads, 1.0), (heads, 1.0))
    tensors = [
        torch.randn((BATCH, n, LENGTH, COLUMNS), generator=generator, device="cuda") * scale for n, scale in shapes
    ]
    return [x.to(torch.bfloat16).requires_grad_() for x in tensors]


def functions(kind: Kind) -> dict[str, Callable[..., Tensor]]:
    """What is compared, as functions of query, key and value."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block_mask = None
    if kind.mask_mod is not None:
        block_mask = create_block_mask(kind.mask_mod, BATCH, None, LENGTH, LENGTH, device="cuda")
    ours = functools.partial(scaled_dot_product_attention, **kind.ours)
    found: dict[str, Callable[..., Any]] = {
        "flex": functools.partial(
            torch.compile(flex_attention, dynamic=False),
            score_mod=kind.score_mod,
            block_mask=block_mask,
            enable_gqa=kind.heads[0] != kind.heads[1],
        ),
        "sharpmax": ours,
        "detached": functools.partial(ours, policy=sharpmax.detached(sharpmax.PAPER)),
        "compiled": torch.compile(ours, fullgraph=True, dynamic=False),
    }
    if kind.torch is not None:
        found["torch"] = functools.partial(torch.nn.functional.scaled_dot_product_attention, **kind.torch)
    return found


def milliseconds(function: Call, quick: bool) -> float | str:
    repeat = 1 if quick else 100
    try:
        return float(triton.testing.do_bench(function, warmup=1 if quick else 25, rep=repeat, return_mode="median"))  # pyright: ignore
    except Exception as error:  # what a peer cannot do is a result
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


def measured(name: str, kind: Kind, quick: bool) -> dict[str, Any]:
    torch.compiler.reset()
    q, k, v, cotangent = inputs(*kind.heads)
    plain = [x.detach() for x in (q, k, v)]
    beta = scaled_dot_product_attention(plain[0], plain[1], plain[2], **kind.ours, return_stats=True).beta
    times: dict[str, float | str] = {}
    for path, function in functions(kind).items():
        if path != "detached":
            times[f"{path} forward"] = milliseconds(lambda f=function: f(*plain), quick)
        whole = lambda f=function: torch.autograd.grad(f(q, k, v), (q, k, v), cotangent)  # noqa: E731
        times[f"{path} forward+backward"] = milliseconds(whole, quick)
    ratios: dict[str, float] = {}
    for path, time in times.items():
        peer = times["flex forward" + "+backward" * ("+backward" in path)]
        if isinstance(time, float) and isinstance(peer, float):
            ratios[path] = round(time / peer, 3)
    return {
        "kind": name,
        "shape": [BATCH, kind.heads[0], LENGTH, COLUMNS],
        "key_heads": kind.heads[1],
        "share_beta_above_1_3": round(float((beta > 1.3).float().mean()), 4),
        "milliseconds": {path: round(time, 4) if isinstance(time, float) else time for path, time in times.items()},
        "ratio_to_flex": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(kinds()), default=list(kinds()))
    parser.add_argument("--quick", action="store_true", help="time each call once, to compile what is run")
    parser.add_argument("--out", type=Path, help="attention_kinds_cuda.json of benchmarks/results, for a whole run")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.attention_kinds needs a GPU")
    out: Path | None = arguments.out
    if out is None and not arguments.quick and set(arguments.kinds) == set(kinds()):
        out = Path(__file__).parent / "results" / "attention_kinds_cuda.json"
    results: list[dict[str, Any]] = []
    for name in arguments.kinds:
        results.append(measured(name, kinds()[name](), arguments.quick))
        print(json.dumps(results[-1]), flush=True)
        if out is not None:
            made = provenance(["python", "-m", "benchmarks.attention_kinds", *sys.argv[1:]])
            content = {"dtype": "bfloat16", "results": results, "provenance": made}
            write_text(out, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
