"""The streaming implementation: memory, work, and JAX's transforms."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

import sharpmax
import sharpmax.flax
import sharpmax.jax
from sharpmax.jax import blocks, dot_product_attention, reference, streaming
from tests.jax import oracle
from tests.jax.attention_cases import close, inputs, quick, set_sizes

stream = functools.partial(dot_product_attention, impl="streaming")


def loss(q: jax.Array, k: jax.Array, v: jax.Array, **kw: Any) -> jax.Array:
    return jnp.square(stream(q, k, v, **kw)).sum()


def largest_intermediate(jaxpr: Any) -> int:
    """How many numbers the largest array has that anything in a jaxpr, or in the loops in it, computes."""
    sizes = [var.aval.size for eqn in jaxpr.eqns for var in eqn.outvars if hasattr(var.aval, "size")]
    inner = [largest_intermediate(sub) for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params)]
    return max([*sizes, *inner], default=0)


@pytest.mark.parametrize("kw", [{}, {"softcap": 5.0, "local_window_size": (64, 0)}], ids=["full", "window"])
@pytest.mark.parametrize(("sizes", "share"), [(blocks.CPU, 64), (blocks.ACCELERATOR, 16)], ids=["cpu", "accelerator"])
def test_memory_of_a_training_step_grows_with_length(
    kw: dict[str, Any], sizes: blocks.Sizes, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_sizes(monkeypatch, sizes)
    largest = {}
    for length in (4096, 8192):
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        step = jax.make_jaxpr(jax.grad(functools.partial(loss, **kw), (0, 1, 2)))(x, x, x)
        largest[length] = largest_intermediate(step.jaxpr)
    assert largest[8192] <= 2 * largest[4096]
    assert largest[8192] < 8192 * 8192 / share


def test_compiled_memory_is_far_below_that_of_the_logits() -> None:
    x = jax.ShapeDtypeStruct((1, 8192, 1, 16), jnp.float32)
    compiled = jax.jit(jax.grad(functools.partial(loss, is_causal=True), (0, 1, 2))).lower(x, x, x).compile()
    analysis: Any = compiled.memory_analysis()
    assert analysis.temp_size_in_bytes < 4 * 8192**2 / 8


@pytest.fixture
def block_counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Which blocks of keys are computed, noted as they are."""
    set_sizes(monkeypatch, blocks.Sizes(rows=8, keys=8, together=False))
    seen: list[int] = []
    real = blocks.Pair._block

    def noted(self: blocks.Pair, rows: blocks.Rows, j: Any, slope: bool) -> blocks.Block:
        jax.debug.callback(lambda _: seen.append(1), j)
        return real(self, rows, j, slope)

    monkeypatch.setattr(blocks.Pair, "_block", noted)
    jax.clear_caches()
    yield seen
    jax.clear_caches()


def test_blocks_out_of_sight_are_never_computed(block_counter: list[int]) -> None:
    x = jnp.ones((1, 64, 1, 4))
    work = {}
    calls: dict[str, dict[str, Any]] = {
        "full": {},
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "local_window_size": (7, 0)},
        "lengths": {"key_value_seq_lengths": jnp.array([17]), "query_seq_lengths": jnp.array([8])},
    }
    for name, kw in calls.items():
        block_counter.clear()
        jax.block_until_ready(sharpmax.jax.row_stats(x, x, impl="streaming", **kw))
        jax.effects_barrier()
        work[name] = len(block_counter)
    assert work == {"full": 64, "causal": 36, "window": 15, "lengths": 3}


@pytest.mark.usefixtures("small_blocks")
def test_transforms() -> None:
    """vmap with keys that are shared, and scan with remat, give what the reference gives for each query."""
    q, k, v = inputs("float32")
    queries = jnp.stack([q, 2 * q])

    def total(q: jax.Array, k: jax.Array, impl: str) -> jax.Array:
        return jnp.square(dot_product_attention(q, k, v, is_causal=True, impl=impl)).sum()

    def mapped(k: jax.Array, impl: str) -> jax.Array:
        return jax.vmap(functools.partial(total, impl=impl), in_axes=(0, None))(queries, k).sum()

    def scanned(k: jax.Array, impl: str) -> jax.Array:
        kept = jax.checkpoint(functools.partial(total, impl=impl))
        return jax.lax.scan(lambda sum, one: (sum + kept(one, k), None), jnp.zeros(()), queries)[0]

    value, dk = quick(jax.value_and_grad(mapped), static_argnums=1)(k, "reference")
    for transformed in (mapped, scanned):
        found = quick(jax.value_and_grad(transformed), static_argnums=1)(k, "streaming")
        close(found[0], value, 1e-5, transformed.__name__)
        close(found[1], dk, 1e-5, f"{transformed.__name__}: dk")


def test_learnable_policies_get_gradients() -> None:
    q, k, v = inputs("float32")
    policy = sharpmax.flax.LearnableNNX(sharpmax.LearnableTemperature(heads=4, init=1.5))

    def with_policy(policy: nnx.Module, impl: str) -> jax.Array:
        return jnp.square(dot_product_attention(q, k, v, policy=policy, impl=impl)).sum()

    found, expected = (
        nnx.jit(nnx.grad(with_policy), static_argnums=1)(policy, impl)["log_beta"].get_value()
        for impl in ("streaming", "reference")
    )
    assert np.all(np.asarray(found) != 0)
    close(found, expected, 1e-5, "log_beta")


def test_a_detached_policy_has_no_backward_of_statistics() -> None:
    def products(policy: Any) -> int:
        x = jax.ShapeDtypeStruct((1, 64, 1, 4), jnp.float32)
        return str(jax.make_jaxpr(jax.grad(functools.partial(loss, policy=policy), (0, 1, 2)))(x, x, x)).count(
            "dot_general"
        )

    statistics, attention, backward, of_statistics = 1, 2, 5, 3
    assert products(sharpmax.PAPER) == statistics + attention + backward + of_statistics
    assert products(sharpmax.detached(sharpmax.PAPER)) == statistics + attention + backward
    assert products(sharpmax.Constant(1.0)) == attention + backward


def test_forward_mode_is_refused_in_one_sentence_and_served_by_the_reference() -> None:
    q, k, v = inputs("float32")
    with pytest.raises(ValueError, match="does not serve differentiation in forward mode; reference can"):
        jax.jvp(lambda q: stream(q, k, v), (q,), (q,))
    _, tangent = jax.jit(lambda q: jax.jvp(lambda q: dot_product_attention(q, k, v), (q,), (q,)))(q)
    assert np.isfinite(tangent).all()


@pytest.mark.usefixtures("wide", "small_blocks")
def test_forward_over_reverse() -> None:
    """Products with the second derivative, which need forward mode of the backward alone."""
    q, k, v = inputs()

    def product(q: jax.Array, impl: str) -> jax.Array:
        def total(q: jax.Array) -> jax.Array:
            return jnp.square(dot_product_attention(q, k, v, is_causal=True, impl=impl)).sum()

        return jax.jvp(jax.grad(total), (q,), (jnp.cos(q),))[1]

    found, expected = (quick(product, static_argnums=1)(q, impl) for impl in ("streaming", "reference"))
    close(found, expected, 1e-9, "second derivative")


def test_blocks_are_small_in_the_tests_that_say_so(small_blocks: blocks.Sizes) -> None:
    q, k, _ = inputs("float32")
    grouped = blocks.Grouped.of(q, k, None, None, blocks.Masks())
    pair = blocks.Pair(grouped.q[0, 0], grouped.k[0, 0], None, blocks.Masks(), blocks.Geometry(1.0), blocks.sizes())
    assert blocks.sizes() == small_blocks
    assert (pair.row_step, pair.key_step) == (4, 5)
    assert pair.queries % pair.row_step
    assert pair.keys % pair.key_step


@pytest.mark.parametrize(("module", "shift"), [(reference, [3, 3]), (reference, [3]), (streaming, [3])])
@pytest.mark.usefixtures("wide", "small_blocks")
def test_queries_that_stand_behind_the_first_key(module: Any, shift: list[int]) -> None:
    """The last rows of a longer sequence, given without those before them."""
    q, k, v = inputs()
    truth = oracle.attention(q, k, v, policy=sharpmax.PAPER, scale=0.5, is_causal=True, local_window_size=(4, 0))
    masks, geometry = blocks.Masks(shift=jnp.asarray(shift)), blocks.Geometry(0.5, left=4, right=0)
    stats = quick(lambda q, k: module.row_stats(q[:, 3:], k, None, masks, geometry))(q, k)
    close(stats.entropy, truth.entropy[..., 3:], 1e-11, "entropy")
    np.testing.assert_array_equal(stats.count, truth.stats.count[..., 3:])
    beta = jnp.asarray(truth.beta[..., 3:])
    out = quick(lambda q, k, v: module.attend(q[:, 3:], k, v, beta, None, masks, geometry))(q, k, v)
    close(out, truth.output[:, 3:], 1e-11, "output")


def test_a_gradient_of_a_gradient_is_a_number_in_blocks_that_overlap() -> None:
    q, k, v = (jax.random.normal(key, (1, 600, 1, 8)) for key in jax.random.split(jax.random.key(0), 3))

    def twice(impl: str) -> jax.Array:
        def once(q: jax.Array) -> jax.Array:
            return jax.grad(lambda q: jnp.square(dot_product_attention(q, k, v, impl=impl)).sum())(q)

        return jax.grad(lambda q: jnp.square(once(q)).sum())(q)

    np.testing.assert_allclose(twice("streaming"), twice("reference"), rtol=1e-3, atol=0.05)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32])
@pytest.mark.parametrize("impl", ["reference", "streaming"])
def test_lengths_of_few_bits_beside_many_keys(impl: str, dtype: Any) -> None:
    x = jnp.ones((1, 300, 1, 4))
    stats = sharpmax.jax.row_stats(x, x, key_value_seq_lengths=np.array([100], dtype), impl=impl)
    assert (stats.count == 100).all()
