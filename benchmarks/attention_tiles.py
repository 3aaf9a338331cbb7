"""Which size of tile each attention kernel likes best, on one GPU: what ``sharpmax.torch.triton.tiles`` was chosen by.

    python -m benchmarks.attention_tiles [--widths 128 64 256] [--kinds full causal ...] [--kernels stats attend ...]
                                         [--out FILE]

bfloat16, 4 x 16 heads x 4,096. Kernels are compiled side by side and timed one by one. Masks are ``[4096, 4096]`` and
hide three keys in ten, or are added in bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.attention import POLICY, Inputs, deviation_for, made, milliseconds, statistics
from sharpmax.core.files import write_text
from sharpmax.provenance import provenance
from sharpmax.torch.triton import Tiles, gradient, prefill


def candidates(kernel: str, width: int, masked: bool) -> list[Tiles]:
    """Sizes of tiles worth trying: for the backward pass of keys, ``rows`` is what is walked over."""
    if kernel in ("stats", "attend", "beta"):
        sizes = [(128, 64, 8), (128, 64, 4), (64, 64, 4)]
        large = [(128, 128, 8), (64, 128, 4)]
    elif kernel in ("query", "stats query"):
        sizes = [(128, 64, 8), (64, 64, 4), (128, 32, 8)]
        large = [(128, 64, 4), (128, 128, 8), (64, 128, 4)]
        if width > 128:
            sizes += [(64, 64, 8), (64, 32, 8)]
    else:
        sizes = [(64, 128, 8), (64, 64, 4), (32, 64, 4), (32, 128, 8)]
        large = [(128, 128, 8), (64, 128, 4), (128, 64, 4)]
        if width > 128:
            sizes += [(32, 64, 8), (64, 64, 8), (64, 32, 8)]
    if not masked:  # with a mask, large ones have too few registers
        sizes += large
    stages = (2, 3, 4) if not masked and (kernel == "stats" or width < 128) else (2, 3)
    wide = [size for size in sizes if width <= 128 or size[0] * size[1] <= 64 * 128]
    return [Tiles(*size, n, True) for size in wide for n in ((1, 2) if width > 128 else stages)]


SWEPT = ("stats", "attend", "beta", "query", "key", "stats query", "stats key")
KINDS = ("full", "causal", "boolean mask", "mask of numbers")
SHOWN = 0.7
Candidate = tuple[str, int, str, Tiles]


def mask_of(kind: str, length: int) -> torch.Tensor | None:
    generator = torch.Generator("cuda").manual_seed(1)
    if kind == "boolean mask":
        return torch.rand(length, length, generator=generator, device="cuda") < SHOWN
    if kind == "mask of numbers":
        return torch.randn(length, length, generator=generator, device="cuda").to(torch.bfloat16)
    return None


def sweep_runs(width: int, kind: str, shape: tuple[int, int, int]) -> dict[str, Callable[[Tiles], Any]]:
    """Every kernel as a function of its tiles, the backward ones beside their fellow with its usual tiles."""
    x = made((*shape, width), kind == "causal", deviation_for(4096), torch.bfloat16)
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    stats, beta, _ = statistics(x, scaled_query=True)
    if (mask := mask_of(kind, shape[-1])) is not None:
        return masked_runs(x, mask, beta)
    out, lse = prefill.attend(q, k, v, beta, x.geometry)
    grads: dict[str, Any] = {"row_max": stats[0], "grad_sum": beta, "grad_moment": beta}
    given: dict[str, Any] = {"out": out, "lse": lse, "grad_out": x.do, "row_max": stats[0]}
    both = given | grads | {"delta": beta}
    scaled: dict[str, Any] = {
        "row_max": stats[0], "row_sum": stats[1], "row_moment": stats[2], "lowered": POLICY, "grad_scaled": x.do,
    }  # fmt: skip
    return {
        "stats": lambda t: statistics(x, scaled_query=True, config=t),
        "attend": lambda t: prefill.attend(q, k, v, beta, x.geometry, config=t),
        "beta": lambda t: gradient.beta_gradient(q, k, v, beta, x.geometry, **given, config=t),
        "query": lambda t: gradient.backward(q, k, v, beta, x.geometry, **both, config=(t, None)),
        "key": lambda t: gradient.backward(q, k, v, beta, x.geometry, **both, config=(None, t)),
        "stats query": lambda t: gradient.backward(q, k, None, beta, x.geometry, **scaled, config=(t, None)),
        "stats key": lambda t: gradient.backward(q, k, None, beta, x.geometry, **scaled, config=(None, t)),
    }


def masked_runs(x: Inputs, mask: torch.Tensor, beta: torch.Tensor) -> dict[str, Callable[[Tiles], Any]]:
    """The same with a mask, under which nothing is left to stock attention."""
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    row_max = prefill.row_stats(q, k, x.geometry, mask=mask)[0]
    out, lse = prefill.attend(q, k, v, beta, x.geometry, mask=mask)
    given: dict[str, Any] = {"out": out, "lse": lse, "grad_out": x.do, "row_max": row_max, "mask": mask}
    both: dict[str, Any] = given | {"grad_sum": beta, "grad_moment": beta, "delta": beta}
    return {
        "stats": lambda t: prefill.row_stats_and_scaled_query(
            q, k, x.geometry, POLICY, mask=mask, scaled_query=False, config=t
        ),
        "attend": lambda t: prefill.attend(q, k, v, beta, x.geometry, mask=mask, config=t),
        "beta": lambda t: gradient.beta_gradient(q, k, v, beta, x.geometry, **given, config=t),
        "query": lambda t: gradient.backward(q, k, v, beta, x.geometry, **both, config=(t, None)),
        "key": lambda t: gradient.backward(q, k, v, beta, x.geometry, **both, config=(None, t)),
    }


def compiled(candidate: Candidate) -> None:
    """Fill Triton's cache on disk; what does not fit the card is found out when it is timed."""
    kernel, width, kind, tiles = candidate
    with contextlib.suppress(triton.runtime.errors.OutOfResources, RuntimeError):
        sweep_runs(width, kind, (1, 16, 512))[kernel](tiles)


def sweep(modes: list[tuple[int, str]], kernels: list[str]) -> list[dict[str, Any]]:
    """The time of every kernel at every size of tile; compiled side by side, timed one by one."""
    every = [
        (kernel, width, kind, tiles)
        for (width, kind), kernel in itertools.product(modes, kernels)
        if "mask" not in kind or kernel not in ("stats query", "stats key")
        for tiles in candidates(kernel, width, "mask" in kind)
    ]
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compiled, every))
    found, runs = [], {mode: sweep_runs(*mode, (4, 16, 4096)) for mode in modes}
    for kernel, width, kind, tiles in every:
        try:
            time: Any = round(milliseconds(lambda: runs[width, kind][kernel](tiles), True), 4)  # noqa: B023
        except (triton.runtime.errors.OutOfResources, RuntimeError) as error:
            time = str(error).splitlines()[0][:120]
        found.append(
            {
                "kernel": kernel,
                "width": width,
                "causal": kind == "causal",
                "kind": kind,
                "tiles": list(tiles),
                "ms": time,
            }
        )
        print(f"  {kernel:11} {width} {kind} {tuple(tiles)} {time}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="*", default=[128, 64, 256], help="head sizes")
    parser.add_argument("--kinds", nargs="*", default=["full", "causal"], choices=KINDS)
    parser.add_argument("--kernels", nargs="*", default=list(SWEPT), choices=SWEPT)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "attention_tiles_cuda.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.attention_tiles needs a GPU")
    content = {
        "sweep": sweep(list(itertools.product(arguments.widths, arguments.kinds)), arguments.kernels),
        "provenance": provenance(["python", "-m", "benchmarks.attention_tiles", *sys.argv[1:]]),
    }
    write_text(arguments.out, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
