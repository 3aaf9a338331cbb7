"""Calls of the kernels for GPUs, and the comparison of their results with the oracle."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharpmax
from sharpmax.jax import dot_product_attention, row_stats
from sharpmax.jax.checks import checked
from tests.conformance.registry import gpu_is_there
from tests.jax import oracle
from tests.jax.attention_cases import close

MARKS = [pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")]
on_gpu = pytest.mark.skipif(not gpu_is_there("jax"), reason="JAX sees no GPU")

CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "full, whole tiles": ((2, 32, 64, 2, 2, 16), {}),
    "causal": ((1, 41, 37, 4, 2, 24), {"is_causal": True}),
    "window, softcap": ((1, 50, 37, 2, 1, 8), {"local_window_size": (5, 3), "softcap": 2.0}),
    "lengths": (
        (3, 37, 70, 2, 2, 16),
        {"query_seq_lengths": np.array([20, 37, 5]), "key_value_seq_lengths": np.array([70, 0, 33]), "scale": -0.3},
    ),
    "causal window, lengths": (
        (2, 60, 37, 2, 1, 16),
        {"is_causal": True, "local_window_size": (20, 0), "key_value_seq_lengths": np.array([17, 30])},
    ),
}
"""Batch, queries, keys, heads, key heads and columns; and what else the call is made with."""


def arrays(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> list[jax.Array]:
    batch, queries, keys, heads, key_heads, columns = shape
    random = np.random.default_rng(seed)
    shapes = ((queries, heads, columns), (keys, key_heads, columns), (keys, key_heads, columns))
    q, k, v = (random.normal(size=(batch, *shape)) for shape in shapes)
    return [jnp.asarray(x).astype(dtype) for x in (2 * q, 2 * k, v)]


def truth(q: Any, k: Any, held: Any = None, **kw: Any) -> Any:
    return oracle.attention(q, k, k, policy=lambda stats: stats.sum, held=held, **kw)


def statistics_and_gradients(q: Any, k: Any, kw: dict[str, Any], compile: Any) -> Any:
    """Row statistics, and the gradients of a sum of them with random weights."""
    plain = {name: x for name, x in kw.items() if not isinstance(x, np.ndarray)}
    lengths = {name: jnp.asarray(x) for name, x in kw.items() if isinstance(x, np.ndarray)}
    weights = np.random.default_rng(5).normal(size=(2, q.shape[0], q.shape[2], q.shape[1]))

    def total(q: Any, k: Any, lengths: Any) -> Any:
        stats = row_stats(q, k, with_min=True, impl="pallas", **plain, **lengths)
        found = (jnp.stack([stats.sum, stats.moment]) * weights.astype(np.float32)).sum()
        return found, stats

    gradients, stats = compile(jax.grad(total, (0, 1), has_aux=True))(q, k, lengths)
    return stats, gradients, weights


def check_statistics(shape: tuple[int, ...], kw: dict[str, Any], dtype: Any, tolerance: float, compile: Any) -> None:
    """Values against the oracle, gradients against its differences."""
    q, k, _ = arrays(shape, dtype)
    stats, gradients, weights = statistics_and_gradients(q, k, kw, compile)
    expected = truth(q, k, **kw)
    np.testing.assert_array_equal(stats.count, expected.stats.count)
    for name in ("max", "min", "sum", "moment"):
        got, want = (np.asarray(getattr(x, name), np.float64) for x in (stats, expected.stats))
        close_enough = max(2e-5, tolerance / 50)
        np.testing.assert_allclose(got, want, rtol=close_enough, atol=close_enough, err_msg=name)
    for name, x, gradient in (("query", q, gradients[0]), ("key", k, gradients[1])):
        assert gradient.dtype == dtype
        assert np.isfinite(gradient.astype(np.float32)).all()
        direction = np.random.default_rng(3).normal(size=x.shape)
        moved = []
        for step in (1e-5, -1e-5):
            given = {"q": q, "k": k, name[0]: np.asarray(x, np.float64) + step * direction}
            there = truth(given["q"], given["k"], expected, **kw).stats
            moved.append(float((np.stack([there.sum, there.moment]) * weights).sum()))
        slope = (moved[0] - moved[1]) / 2e-5
        size = np.linalg.norm(np.asarray(gradient, np.float64))
        got = float((np.asarray(gradient, np.float64) * direction).sum())
        assert abs(got - slope) <= tolerance * size, f"{name}: {got} and {slope}"


ATTENDED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal window": {"is_causal": True, "local_window_size": 9},
    "lengths": {
        "is_causal": True,
        "query_seq_lengths": np.array([11, 24]),
        "key_value_seq_lengths": np.array([24, 0]),
    },
}


def attention_and_gradients(given: list[jax.Array], kw: dict[str, Any], impl: str, compile: Any) -> Any:
    plain = {name: x for name, x in kw.items() if not isinstance(x, np.ndarray)}
    lengths = {name: jnp.asarray(x) for name, x in kw.items() if isinstance(x, np.ndarray)}
    cotangent = np.random.default_rng(9).normal(size=given[0].shape)

    def run(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        call = functools.partial(dot_product_attention, impl=impl, **plain, **lengths)
        out, pullback = jax.vjp(call, q, k, v)
        return out, pullback(jnp.asarray(cotangent).astype(out.dtype))

    return compile(run)(*given, lengths)


def attended(case: str, dtype: Any) -> list[jax.Array]:
    """Query, key and value, with NaN beyond the lengths."""
    q, k, v = arrays((2, 24, 24, 2, 1, 16), dtype)
    if case != "lengths":
        return [q, k, v]
    return [q.at[0, 11:].set(jnp.nan), k.at[1].set(jnp.nan), v.at[1].set(jnp.nan)]


def check_attention(given: list[jax.Array], kw: dict[str, Any], tolerance: float, compile: Any) -> None:
    """The output against the oracle, gradients against those of the reference in float64."""
    with jax.default_matmul_precision("highest"):  # of float32 on a GPU, where streaming attends
        out, gradients = attention_and_gradients(given, kw, "pallas", compile)
    assert out.dtype == given[0].dtype
    finite = [np.nan_to_num(np.asarray(x, np.float64)) for x in given]
    close(out, oracle.attention(*finite, policy=sharpmax.PAPER, **kw).output, tolerance, "output")
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        _, expected = attention_and_gradients([jnp.asarray(x) for x in finite], kw, "reference", compile)
    for name, got, want in zip(("dq", "dk", "dv"), gradients, expected, strict=True):
        close(got, want, 2 * tolerance, name)


def prepared(q: Any, k: Any, v: Any, *, bias: Any = None, mask: Any = None, **kw: Any) -> Any:
    names = ("scale", "query_seq_lengths", "key_value_seq_lengths", "local_window_size", "softcap")
    return checked(q, k, v, bias, mask, **{**dict.fromkeys(names), "is_causal": False, **kw})
