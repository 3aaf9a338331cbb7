"""Attention with adaptive temperature in JAX against jax.nn's own attention and against a literal Figure 4.

    python -m benchmarks.attention_jax [--lengths 2048 4096] [--rounds 5] [--no-blocks] [--tiles] [--out FILE]

On a CPU in float32, one head; on a GPU in bfloat16, with cuDNN's attention as a further peer, and so many heads that
all lengths have as many rows. Logits are scaled so that the paper's polynomial acts; the share of rows with beta > 1.3
is recorded. The functions run in turn, round after round, each compiled, and ratios are those of their median times.
Memory is what the compiled program needs besides arguments and results. Peers that hold all logits are left out above
--peers-up-to; what runs out of memory or fails is recorded as such. Results are written as they come.

On a CPU, sizes of blocks are compared too. On a GPU, errors of output and gradients are given as multiples of those
that cuDNN's attention makes on a query that is as sharp, and --tiles compares tiles of the kernels.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import sharpmax
from benchmarks.attention_jax_kernels import Function, compiled, errors, medians, swept
from benchmarks.figure4 import jax_figure4
from sharpmax.core.files import write_text
from sharpmax.jax import blocks, dot_product_attention, row_stats
from sharpmax.provenance import provenance

ENTROPY = 4.0  # about the peak of the paper's polynomial; logits of deviation d have entropy log(n) - d^2 / 2
DIRECTIONS = ("forward", "forward+backward")
HOLD_LOGITS = ("xla", "figure4")


class Setup(NamedTuple):
    """What is measured on a kind of device.

    Attributes:
      rows: batch size times heads times length; ``None`` for one head.
      sample: seconds that calls are repeated for, to time them together.
    """

    dtype: Any
    rows: int | None
    columns: tuple[int, ...]
    lengths: tuple[int, ...]
    peers_up_to: int
    rounds: int
    sample: float
    blocks: tuple[tuple[int, int], ...]

    def shape(self, length: int, columns: int) -> tuple[int, int, int, int]:
        """``[batch, length, heads, columns]``: 16 heads, or as many as there are rows for."""
        sequences = 1 if self.rows is None else max(1, self.rows // length)
        batch = max(1, sequences // 16)
        return batch, length, sequences // batch, columns


SETUPS = {
    "cpu": Setup(
        jnp.float32,
        None,
        (64,),
        (1024, 2048, 4096, 8192, 16384),
        8192,
        5,
        0.0,
        ((128, 512), (256, 512), (512, 512), (1024, 512), (256, 1024), (512, 1024), (512, 256)),
    ),
    "gpu": Setup(jnp.bfloat16, 4 * 16 * 4096, (128,), (4096, 32768, 131072, 16384, 1024, 8192), 16384, 10, 0.02, ()),
}


@functools.lru_cache(maxsize=1)
def arrays(shape: tuple[int, ...], dtype: Any) -> list[jax.Array]:
    """Query, key, value and cotangent ``[batch, length, heads, columns]``."""
    q, k, v, do = (jax.random.normal(key, shape, jnp.float32) for key in jax.random.split(jax.random.key(0), 4))
    q *= math.sqrt(shape[-1]) / jnp.linalg.norm(q, axis=-1, keepdims=True)  # like deviations, so like entropies
    factor = (2 * (math.log(shape[1]) - ENTROPY)) ** 0.25
    return [x.astype(dtype) for x in (factor * q, factor * k, v, do)]


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


@functools.cache
def share_of_sharp_rows(shape: tuple[int, ...], dtype: Any, causal: bool) -> float:
    """The share of rows that get a beta of more than 1.3."""

    def share(q: jax.Array, k: jax.Array) -> jax.Array:
        return (sharpmax.PAPER(row_stats(q, k, is_causal=causal)) > 1.3).mean()

    return round(float(jax.jit(share)(*arrays(shape, dtype)[:2])), 4)


def runnable(
    chosen: dict[str, Function], direction: str, causal: bool, given: list[jax.Array]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Each function compiled and run once, and why others do not: what is left is measured all the same."""
    calls: dict[str, Any] = {}
    dead: dict[str, str] = {}
    for name, function in chosen.items():
        try:
            call = compiled(function, direction, causal, given)
            jax.block_until_ready(call(*given))
            calls[name] = call
        except jax.errors.JaxRuntimeError as error:
            dead[name] = "out of memory" if "RESOURCE_EXHAUSTED" in str(error) else str(error)[:200]
    return calls, dead


def measured(
    device: str, shape: tuple[int, ...], causal: bool, direction: str, rounds: int, peers: bool
) -> dict[str, Any]:
    setup = SETUPS[device]
    given = arrays(shape, setup.dtype)
    chosen = {n: f for n, f in functions(device, direction).items() if peers or n not in HOLD_LOGITS}
    calls, dead = runnable(chosen, direction, causal, given)
    times = medians(calls, given, rounds, setup.sample)
    memory = {name: call.memory_analysis().temp_size_in_bytes for name, call in calls.items()}
    result: dict[str, Any] = {
        "shape": dict(zip(("batch", "length", "heads", "columns"), shape, strict=True)),
        "causal": causal,
        "direction": direction,
        "share_beta_above_1_3": share_of_sharp_rows(shape, setup.dtype, causal),
        "milliseconds": {name: round(t, 3) for name, t in times.items()} | dead,
        "temporary_megabytes": {name: round(size / 1e6, 1) for name, size in memory.items()},
    }
    for peer in ("xla", "cudnn", "figure4"):
        if peer in times:
            others = {name: round(t / times[peer], 3) for name, t in times.items() if name != peer}
            result[f"ratio_to_{peer}"] = others
    return result


def block_sizes(length: int, columns: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Times of ``streaming`` with blocks of other sizes."""
    given, usual = arrays((1, length, 1, columns), jnp.float32), blocks.CPU
    for rows, keys in SETUPS["cpu"].blocks:
        blocks.CPU = blocks.Sizes(rows, keys, together=False)
        streaming = functools.partial(dot_product_attention, impl="streaming")
        calls = {
            f"{direction}, {'causal' if causal else 'full'}": compiled(streaming, direction, causal, given)
            for direction in DIRECTIONS
            for causal in (False, True)
        }
        times = {name: round(t, 2) for name, t in medians(calls, given, rounds, 0.0).items()}
        yield {"rows": rows, "keys": keys, "length": length, "columns": columns, "milliseconds": times}
    blocks.CPU = usual


def main() -> None:
    device = "cpu" if jax.default_backend() == "cpu" else "gpu"
    setup = SETUPS[device]
    suffix = "cpu" if device == "cpu" else "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=setup.lengths)
    parser.add_argument("--columns", type=int, nargs="+", default=setup.columns)
    parser.add_argument("--directions", nargs="+", default=DIRECTIONS, choices=DIRECTIONS)
    parser.add_argument("--rounds", type=int, default=setup.rounds)
    parser.add_argument("--peers-up-to", type=int, default=setup.peers_up_to)
    parser.add_argument("--no-blocks", action="store_true", help="do not compare sizes of blocks")
    parser.add_argument("--tiles", action="store_true", help="compare tiles of the kernels")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"attention_jax_{suffix}.json")
    arguments = parser.parse_args()
    content: dict[str, Any] = {"dtype": jnp.dtype(setup.dtype).name, "rounds": arguments.rounds}
    content["provenance"] = provenance(["python", "-m", "benchmarks.attention_jax", *sys.argv[1:]])

    def keep(part: str, found: Iterable[dict[str, Any]]) -> None:
        content[part] = []
        for result in found:
            content[part].append(result)
            print(json.dumps(result), flush=True)
            write_text(arguments.out, json.dumps(content, indent=2) + "\n")

    def cases() -> Iterator[dict[str, Any]]:
        for length in arguments.lengths:
            for columns in arguments.columns:
                shape, peers = setup.shape(length, columns), length <= arguments.peers_up_to
                for direction in arguments.directions:
                    for causal in (False, True):
                        yield measured(device, shape, causal, direction, arguments.rounds, peers)

    keep("results", cases())
    if device == "gpu":
        small = arrays((1, 2048, 2, arguments.columns[0]), setup.dtype)
        keep("errors", (errors(causal, small) for causal in (False, True)))
    if setup.blocks and not arguments.no_blocks:
        keep("blocks", block_sizes(4096, arguments.columns[0], arguments.rounds))
    if arguments.tiles:
        keep("tiles", swept(arrays(setup.shape(4096, arguments.columns[0]), setup.dtype)))


if __name__ == "__main__":
    main()
