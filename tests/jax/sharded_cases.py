"""Attention over eight devices that XLA makes of one CPU, against one device; prints the largest differences as JSON.

A program of its own: the number of devices is fixed when JAX starts.
"""

import functools
import json
import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import sharpmax
from sharpmax.jax import dot_product_attention, sharded

LENGTH, BATCH = 32, 2
BANDED = {"batch_axis": "batch", "softcap": 3.0, "local_window_size": (9, 3)}
SHARED = ("is_causal", "softcap", "local_window_size")
MESHES = {
    "line": jax.make_mesh((8,), ("sequence",), axis_types=(AxisType.Auto,)),
    "grid": jax.make_mesh((2, 4), ("batch", "sequence"), axis_types=(AxisType.Explicit,) * 2),
}


def by_spread(stats):
    return 1.0 + 0.05 * stats.spread + 0.1 * stats.entropy


CASES = {
    "zigzag": ("line", {"is_causal": True, "layout": "zigzag"}, sharpmax.PAPER, jnp.float64),
    "window and spread": ("grid", BANDED, by_spread, jnp.float64),
}


def inputs(dtype):
    rng = np.random.default_rng(0)
    shapes = ((4, 8, 2.0), (2, 8, 1.0), (2, 6, 1.0), (4, 6, 1.0))
    return [jnp.asarray(scale * rng.normal(size=(BATCH, LENGTH, n, d)), dtype) for n, d, scale in shapes]


def differences(mesh, options, policy, dtype):
    q, k, v, cotangent = inputs(dtype)
    devices = mesh.shape["sequence"]
    order = sharded.zigzag(LENGTH, devices) if options.get("layout") == "zigzag" else np.arange(LENGTH)
    back = np.argsort(order)

    def many(q, k, v):
        found: Any = sharded.dot_product_attention(q, k, v, mesh=mesh, policy=policy, return_stats=True, **options)
        return found.output, found

    def one(q, k, v):
        chosen = {
            name: value for name, value in options.items() if name in ("is_causal", "softcap", "local_window_size")
        }
        wide = (x.astype(jnp.float64) for x in (q, k, v))
        found: Any = dot_product_attention(*wide, policy=policy, impl="reference", return_stats=True, **chosen)
        return found.output, found

    def both(function, q, k, v, cotangent):
        out, pull, found = jax.vjp(function, q, k, v, has_aux=True)
        return found, pull(cotangent.astype(out.dtype))

    placed = [x[:, order] for x in (q, k, v, cotangent)]
    program: Any = jax.jit(functools.partial(both, many)).lower(*placed).compile()
    whole, gradients = jax.tree.map(np.asarray, program(*placed))
    truth, expected = both(one, q, k, v, cotangent)
    text: Any = program.as_text()
    pairs = {
        "output": (whole.output[:, back], truth.output),
        "entropy": (whole.stats.entropy[..., back], truth.stats.entropy),
        "count": (whole.stats.count[..., back], truth.stats.count),
        "beta": (whole.beta[..., back], truth.beta),
    }
    if whole.stats.min is not None:
        pairs["spread"] = (whole.stats.spread[..., back], truth.stats.spread)
    pairs |= {name: (a[:, back], b) for name, a, b in zip(("dq", "dk", "dv"), gradients, expected, strict=True)}
    errors = {name: float(np.abs(np.asarray(a, float) - np.asarray(b, float)).max()) for name, (a, b) in pairs.items()}
    return errors | {"gathers": text.count("all-gather("), "permutes": text.count("collective-permute")}


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    print(json.dumps({name: differences(MESHES[mesh], *rest) for name, (mesh, *rest) in CASES.items()}))
