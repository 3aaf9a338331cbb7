"""What benchmarks/attention_jax.py asks of the kernels for GPUs besides their time: errors, and other tiles."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sharpmax
from sharpmax.jax import dot_product_attention
from sharpmax.jax.geometry import ALL, Geometry, Masks
from sharpmax.jax.pallas.tiles import Plan, Tiles

Function = Callable[..., Any]

SWEPT = {
    "stats": [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3), (64, 128, 4, 3), (64, 64, 4, 4)],
    "query": [(128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 3), (64, 64, 4, 3), (64, 128, 4, 2), (128, 128, 8, 2)],
    "key": [(128, 64, 8, 2), (128, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2), (128, 128, 8, 2)],
}
"""Rows, keys, warps and stages that are compared, by kernel."""


def compiled(function: Function, direction: str, causal: bool, given: list[jax.Array]) -> Any:
    """The function, or that of its gradients, compiled for query, key, value and cotangent."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, _: jax.Array) -> Any:
        return function(q, k, v, is_causal=causal)

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
        out, pullback = jax.vjp(lambda *x: function(*x, is_causal=causal), q, k, v)
        return out, pullback(do)

    return jax.jit(forward if direction == "forward" else gradients).lower(*given).compile()


def seconds(call: Any, given: list[jax.Array], repeat: int = 1) -> float:
    start, found = time.perf_counter(), None
    for _ in range(repeat):
        found = call(*given)
    jax.block_until_ready(found)
    return (time.perf_counter() - start) / repeat


def medians(calls: dict[str, Any], given: list[jax.Array], rounds: int, sample: float) -> dict[str, float]:
    """The median time of each call in milliseconds; a first round, not counted, says how many fill a sample."""
    for call in calls.values():
        jax.block_until_ready(call(*given))
    repeat = {name: max(1, min(50, int(sample / seconds(call, given)))) for name, call in calls.items()}
    samples = [{name: seconds(call, given, repeat[name]) for name, call in calls.items()} for _ in range(rounds)]
    return {name: 1000 * statistics.median(sample[name] for sample in samples) for name in calls}


def errors(causal: bool, given: list[jax.Array]) -> dict[str, Any]:
    """Errors of output and gradients relative to float64, as multiples of cuDNN's on ``beta * query``, rounded.

    cuDNN's are relative to float64 attention on that same query.
    """
    q, k, v, do = given
    stock = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    with jax.enable_x64(True):
        exact: Function = functools.partial(dot_product_attention, impl="reference")
        wide = [x.astype(jnp.float64) for x in given]
        beta = exact(*wide[:3], is_causal=causal, return_stats=True).beta
        sharp = (wide[0] * beta.swapaxes(1, 2)[..., None]).astype(q.dtype)
        truth = _gradients(exact, causal, wide)
        plain = functools.partial(exact, policy=sharpmax.Constant(1.0))
        own = _gradients(plain, causal, [sharp.astype(jnp.float64), *wide[1:]])
    peer = _off(_gradients(stock, causal, [sharp, k, v, do]), own)
    result: dict[str, Any] = {"shape": q.shape, "causal": causal, "cudnn": peer}
    for impl in ("pallas", "streaming"):
        found = _off(_gradients(functools.partial(dot_product_attention, impl=impl), causal, given), truth)
        result[impl] = {name: round(x / peer[name], 2) for name, x in found.items()}
    return result


def _gradients(function: Function, causal: bool, given: list[jax.Array]) -> list[np.ndarray]:
    call = compiled(function, "forward+backward", causal, given)
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(call(*given))]


def _off(found: list[np.ndarray], truth: list[np.ndarray]) -> dict[str, float]:
    pairs = zip(("output", "dq", "dk", "dv"), found, truth, strict=True)
    return {name: float(np.linalg.norm(a - b) / np.linalg.norm(b)) for name, a, b in pairs}


def tile_call(kernel: str, tiles: Tiles, causal: bool, given: list[jax.Array]) -> tuple[Any, list[jax.Array]]:
    """One kernel of the statistics with these tiles, compiled, and its arguments."""
    from sharpmax.jax.pallas import launch

    q, k = given[:2]
    geometry = Geometry(q.shape[-1] ** -0.5, right=0 if causal else ALL)
    plan = Plan(tiles, tiles, tiles)
    calls: dict[str, Function] = {
        "stats": lambda q, k, *_: launch.statistics(q, k, Masks(), geometry, False, plan),
        "query": lambda q, k, *by_row: launch.query_gradient(q, k, Masks(), by_row, geometry, plan),
        "key": lambda q, k, *by_row: launch.key_gradient(q, k, Masks(), by_row, geometry, plan),
    }
    row = jnp.ones((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    arguments = [q, k, 500 * row, row, row]
    return jax.jit(calls[kernel]).lower(*arguments).compile(), arguments


def swept(given: list[jax.Array]) -> Iterator[dict[str, Any]]:
    """Times of the kernels with every tile of :data:`SWEPT`; what does not compile is recorded with the reason."""
    for kernel, candidates in SWEPT.items():
        for tiles in candidates:
            result: dict[str, Any] = {"kernel": kernel, "tiles": tiles}
            for causal in (False, True):
                try:
                    call, arguments = tile_call(kernel, Tiles(*tiles), causal, given)
                    found: Any = round(medians({kernel: call}, arguments, 5, 0.02)[kernel], 3)
                except Exception as error:  # the compiler's errors are of many kinds, and the next tiles may do
                    found = f"{type(error).__name__}: {error}"[:200]
                result["causal" if causal else "full"] = found
            yield result
