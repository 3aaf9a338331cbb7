"""Attention with adaptive temperature in JAX against jax.nn's own attention and against a literal Figure 4.

    python -m benchmarks.attention_jax [--lengths 2048 4096] [--rounds 5] [--no-blocks] [--out FILE]

On a CPU in float32, one head; on a GPU in bfloat16, with cuDNN's attention as a further peer. Logits are scaled so
that the paper's polynomial acts; the share of rows with beta > 1.3 is recorded. The functions run in turn, round after
round, each compiled, and ratios are those of their median times. Memory is what the compiled program needs besides
arguments and results. Peers that hold all logits are left out above --peers-up-to. On a CPU, sizes of blocks are
compared too.
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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import sharpmax
from benchmarks.figure4 import jax_figure4
from sharpmax.core.files import write_text
from sharpmax.jax import blocks, dot_product_attention
from sharpmax.provenance import provenance

ENTROPY = 4.0  # about the peak of the paper's polynomial; logits of deviation d have entropy log(n) - d^2 / 2
DIRECTIONS = ("forward", "forward+backward")
HOLD_LOGITS = ("xla", "figure4")
Function = Callable[..., Any]


class Setup(NamedTuple):
    """What is measured on a kind of device."""

    dtype: Any
    batch_and_heads: tuple[int, int]
    columns: tuple[int, ...]
    lengths: tuple[int, ...]
    peers_up_to: int
    blocks: tuple[tuple[int, int], ...]


SETUPS = {
    "cpu": Setup(
        jnp.float32,
        (1, 1),
        (64,),
        (1024, 2048, 4096, 8192, 16384),
        8192,
        ((128, 512), (256, 512), (512, 512), (1024, 512), (256, 1024), (512, 1024), (512, 256)),
    ),
    "gpu": Setup(jnp.bfloat16, (1, 16), (128,), (1024, 4096, 16384, 32768), 16384, ()),
}


def arrays(shape: tuple[int, ...], dtype: Any) -> list[jax.Array]:
    """Query, key, value and cotangent ``[batch, length, heads, columns]``."""
    random = np.random.default_rng(0)
    q, k, v, do = (random.standard_normal(shape, np.float32) for _ in range(4))
    q *= math.sqrt(shape[-1]) / np.linalg.norm(q, axis=-1, keepdims=True)  # like deviations, so like entropies
    factor = (2 * (math.log(shape[1]) - ENTROPY)) ** 0.25
    return [jnp.asarray(x).astype(dtype) for x in (factor * q, factor * k, v, do)]


def figure4(q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool) -> jax.Array:
    logits = jnp.einsum("btnd,bsnd->bnts", q, k) * q.shape[-1] ** -0.5
    if is_causal:
        logits = jnp.where(jnp.tril(jnp.ones(logits.shape[-2:], bool)), logits, jnp.finfo(q.dtype).min)
    return jnp.einsum("bnts,bsnd->btnd", jax_figure4(logits).astype(q.dtype), v)


def functions(device: str, direction: str) -> dict[str, Function]:
    found: dict[str, Function] = {
        "xla": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
        "sharpmax": dot_product_attention,
        "detached": functools.partial(dot_product_attention, policy=sharpmax.detached(sharpmax.PAPER)),
        "figure4": figure4,
    }
    if device == "gpu":
        found["cudnn"] = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    if direction == "forward":
        found.pop("detached")  # the same as the other
    return found


def compiled(function: Function, direction: str, causal: bool, given: list[jax.Array]) -> Any:
    """The function, or that of its gradients, compiled for the arrays."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, _: jax.Array) -> Any:
        return function(q, k, v, is_causal=causal)

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
        out, pullback = jax.vjp(lambda *x: function(*x, is_causal=causal), q, k, v)
        return out, pullback(do)

    return jax.jit(forward if direction == "forward" else gradients).lower(*given).compile()


def seconds(call: Any, given: list[jax.Array]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call(*given))
    return time.perf_counter() - start


def medians(calls: dict[str, Any], given: list[jax.Array], rounds: int) -> dict[str, float]:
    """The median time of each call in milliseconds; a first round is not counted."""
    samples = [{name: seconds(call, given) for name, call in calls.items()} for _ in range(rounds + 1)][1:]
    return {name: 1000 * statistics.median(sample[name] for sample in samples) for name in calls}


def measured(device: str, shape: tuple[int, ...], causal: bool, direction: str, rounds: int, peers: bool) -> Any:
    given = arrays(shape, SETUPS[device].dtype)
    chosen = {n: f for n, f in functions(device, direction).items() if peers or n not in HOLD_LOGITS}
    calls = {name: compiled(f, direction, causal, given) for name, f in chosen.items()}
    times = medians(calls, given, rounds)
    beta = dot_product_attention(*given[:3], is_causal=causal, return_stats=True).beta
    memory = {name: call.memory_analysis().temp_size_in_bytes for name, call in calls.items()}
    result = {
        "shape": dict(zip(("batch", "length", "heads", "columns"), shape, strict=True)),
        "causal": causal,
        "direction": direction,
        "share_beta_above_1_3": round(float((beta > 1.3).mean()), 4),
        "milliseconds": {name: round(t, 2) for name, t in times.items()},
        "temporary_megabytes": {name: round(size / 1e6, 1) for name, size in memory.items()},
    }
    for peer in ("xla", "cudnn", "figure4"):
        if peer in times:
            others = {name: round(t / times[peer], 3) for name, t in times.items() if name != peer}
            result[f"ratio_to_{peer}"] = others
    return result


def block_sizes(length: int, columns: int, rounds: int) -> list[dict[str, Any]]:
    """Times of ``streaming`` with blocks of other sizes."""
    given, usual, results = arrays((1, length, 1, columns), jnp.float32), blocks.CPU, []
    for rows, keys in SETUPS["cpu"].blocks:
        blocks.CPU = blocks.Sizes(rows, keys, together=False)
        streaming = functools.partial(dot_product_attention, impl="streaming")
        calls = {
            f"{direction}, {'causal' if causal else 'full'}": compiled(streaming, direction, causal, given)
            for direction in DIRECTIONS
            for causal in (False, True)
        }
        times = {name: round(t, 2) for name, t in medians(calls, given, rounds).items()}
        results.append({"rows": rows, "keys": keys, "length": length, "columns": columns, "milliseconds": times})
        print(json.dumps(results[-1]), flush=True)
    blocks.CPU = usual
    return results


def main() -> None:
    device = "cpu" if jax.default_backend() == "cpu" else "gpu"
    setup = SETUPS[device]
    suffix = "cpu" if device == "cpu" else "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=setup.lengths)
    parser.add_argument("--columns", type=int, nargs="+", default=setup.columns)
    parser.add_argument("--directions", nargs="+", default=DIRECTIONS, choices=DIRECTIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers-up-to", type=int, default=setup.peers_up_to)
    parser.add_argument("--no-blocks", action="store_true", help="do not compare sizes of blocks")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"attention_jax_{suffix}.json")
    arguments = parser.parse_args()
    batch, heads = setup.batch_and_heads
    results = []
    for length in arguments.lengths:
        for columns in arguments.columns:
            for direction in arguments.directions:
                for causal in (False, True):
                    shape = (batch, length, heads, columns)
                    peers = length <= arguments.peers_up_to
                    results.append(measured(device, shape, causal, direction, arguments.rounds, peers))
                    print(json.dumps(results[-1]), flush=True)
    content: dict[str, Any] = {"dtype": jnp.dtype(setup.dtype).name, "rounds": arguments.rounds, "results": results}
    if setup.blocks and not arguments.no_blocks:
        content["blocks"] = block_sizes(4096, arguments.columns[0], arguments.rounds)
    content["provenance"] = provenance(["python", "-m", "benchmarks.attention_jax", *sys.argv[1:]])
    write_text(arguments.out, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
