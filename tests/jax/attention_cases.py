"""Calls of attention, policies for them, and the comparison of their results with the oracle."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharpmax
from sharpmax.jax import blocks, dot_product_attention
from tests.jax import oracle

BATCH, QUERIES, KEYS, HEADS, KEY_HEADS, COLUMNS, VALUE_COLUMNS = 2, 9, 11, 4, 2, 8, 6
TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
"""Relative to the largest value; a rounding of the output's type, and for float32 what sums and exp lose."""

OPTIONS = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def _known_options() -> dict[str, Any]:
    """Those of OPTIONS that the compiler of this version of JAX knows."""
    known = {}
    for name, value in OPTIONS.items():
        try:
            jax.jit(lambda: jnp.zeros(()), compiler_options={name: value})()
        except jax.errors.JaxRuntimeError:
            continue
        known[name] = value
    return known


quick: Any = functools.partial(jax.jit, compiler_options=_known_options())
"""``jax.jit`` for tests, which compile far more than they run: a third of the time. Some run what users run."""

RANDOM = np.random.default_rng(1)
HIDING = RANDOM.normal(size=(1, HEADS, QUERIES, KEYS))
HIDING[..., 3], HIDING[..., 5], HIDING[:, 1, 4] = -math.inf, np.finfo(np.float64).min, -math.inf

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"local_window_size": (2, 1)},
    "causal_window": {"is_causal": True, "local_window_size": 3},
    "softcap": {"softcap": 2.0, "is_causal": True},
    "lengths": {"query_seq_lengths": np.array([5, 9]), "key_value_seq_lengths": np.array([11, 4])},
    "mask": {"mask": RANDOM.random((BATCH, 1, QUERIES, KEYS)) > 0.4, "scale": 0.7},
    "bias": {"bias": HIDING, "is_causal": True},
}

POLICIES: dict[str, Any] = {
    "hard": sharpmax.PerHead((sharpmax.PAPER, sharpmax.Hard(), sharpmax.Constant(2.0), sharpmax.LogLength())),
    "spread": sharpmax.PerHead(
        (
            sharpmax.PAPER_HELD,
            sharpmax.Constant(0.0),
            sharpmax.EntropyCurve((0.5, 1.5), (1.0, 2.0)),
            lambda stats: 1 + 0.1 * stats.spread,
        )
    ),
}
"""One policy for each head, so that a compilation serves several."""


def set_sizes(monkeypatch: pytest.MonkeyPatch, sizes: blocks.Sizes) -> None:
    """Those of blocks, whatever device JAX runs on."""
    for device in ("CPU", "ACCELERATOR"):
        monkeypatch.setattr(blocks, device, sizes)


def inputs(dtype: str = "float64", *, seed: int = 0) -> list[jax.Array]:
    random = np.random.default_rng(seed)
    shapes = ((QUERIES, HEADS, COLUMNS), (KEYS, KEY_HEADS, COLUMNS), (KEYS, KEY_HEADS, VALUE_COLUMNS))
    q, k, v = (random.normal(size=(BATCH, *shape)) for shape in shapes)
    return [jnp.asarray(x).astype(dtype) for x in (2.5 * q, 2 * k, v)]


def close(got: Any, expected: Any, tolerance: float, what: str) -> None:
    got, expected = (np.asarray(x, np.float64) for x in (got, expected))
    assert got.shape == expected.shape, what
    assert np.isfinite(got).all(), what
    error = np.abs(got - expected).max(initial=0.0)
    assert error <= tolerance * max(1.0, np.abs(expected).max(initial=0.0)), f"{what}: {error:.2e}"


def with_gradients(impl: str, policy: Any, **kw: Any) -> Any:
    """A function of query, key, value, bias, cotangent and other arrays, compiled once: result and gradients."""
    return _with_gradients(impl, policy, blocks.sizes(), **kw)


@functools.cache
def _with_gradients(impl: str, policy: Any, sizes: blocks.Sizes, **kw: Any) -> Any:

    def run(q: Any, k: Any, v: Any, bias: Any, cotangent: Any, arrays: dict[str, Any]) -> Any:
        def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
            found = dot_product_attention(q, k, v, bias, policy=policy, impl=impl, return_stats=True, **arrays, **kw)
            return found.output, found

        if bias is None:
            _, pullback, found = jax.vjp(lambda q, k, v: attend(q, k, v, None), q, k, v, has_aux=True)
        else:
            _, pullback, found = jax.vjp(attend, q, k, v, bias, has_aux=True)
        return found, pullback(cotangent)

    return quick(run)


def cotangent_of(v: jax.Array) -> jax.Array:
    shape = (BATCH, QUERIES, HEADS, v.shape[-1])
    return jnp.asarray(np.random.default_rng(9).normal(size=shape)).astype(v.dtype)


def compare(impl: str, policy: Any = sharpmax.PAPER, **kw: Any) -> None:
    """Output, statistics, beta and gradients of a call in float64 against the oracle."""
    q, k, v = inputs()
    plain = {name: x for name, x in kw.items() if not isinstance(x, np.ndarray)}
    arrays = {name: jnp.asarray(x) for name, x in kw.items() if isinstance(x, np.ndarray)}
    bias, cotangent = arrays.pop("bias", None), cotangent_of(v)
    found, gradients = with_gradients(impl, policy, **plain)(q, k, v, bias, cotangent, arrays)
    truth = oracle.attention(q, k, v, policy=policy, **kw)
    close(found.output, truth.output, 1e-11, "output")
    close(found.stats.entropy, truth.entropy, 1e-11, "entropy")
    np.testing.assert_array_equal(found.stats.count, truth.stats.count)
    np.testing.assert_allclose(found.stats.max, truth.stats.max, rtol=1e-12)
    np.testing.assert_allclose(found.beta, truth.beta, rtol=1e-9)
    if found.stats.min is not None and truth.stats.min is not None:
        np.testing.assert_allclose(found.stats.min, truth.stats.min, rtol=1e-11)
    given = {"query": q, "key": k, "value": v} | ({} if bias is None else {"bias": bias})
    for (name, x), gradient in zip(given.items(), gradients, strict=True):
        direction = np.random.default_rng(3).normal(size=x.shape)
        moved = []
        for step in (1e-6, -1e-6):
            call = {**kw, **given, name: np.asarray(x) + step * direction}
            there = oracle.attention(**call, policy=policy, held=truth).output
            moved.append(float((there * np.asarray(cotangent)).sum()))
        expected = (moved[0] - moved[1]) / 2e-6
        assert float((gradient * direction).sum()) == pytest.approx(expected, rel=1e-6, abs=1e-6), name
