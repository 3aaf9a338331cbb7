"""Attention with the kernels for GPUs: by stock attention on beta * query, and which calls take it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import sharpmax
from sharpmax.jax import attention, dot_product_attention, pallas, row_stats, streaming
from sharpmax.jax.geometry import ALL, Geometry
from sharpmax.jax.pallas import stock
from tests.jax.attention_cases import close, quick
from tests.jax.pallas_cases import (
    ATTENDED,
    MARKS,
    arrays,
    attended,
    attention_and_gradients,
    check_attention,
    on_gpu,
    prepared,
)

pytestmark = MARKS


@pytest.mark.parametrize("case", ATTENDED)
@pytest.mark.usefixtures("interpreted")
def test_attention_is_stock_attention_on_a_sharpened_query(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another stock implementation in the place of cuDNN's; padding may hold anything."""
    monkeypatch.setattr(pallas, "STOCK", "xla")
    monkeypatch.setattr(pallas, "cudnn_serves", lambda *call: True)
    monkeypatch.setattr(streaming, "attend", None)
    check_attention(attended(case, jnp.float32), ATTENDED[case], 2e-5, quick)


def test_what_cudnn_does_not_serve_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "attend", lambda *given: given)
    inputs = prepared(*arrays((1, 4, 4, 1, 1, 8), jnp.float32))
    beta = jnp.ones((1, 1, 4))
    given = (inputs.q, inputs.k, inputs.v, beta, None, inputs.masks, inputs.geometry)
    assert pallas.attend(*given) == given


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "axes"), [(7, 7, True, (1, None, 2, 1)), (6, 5, False, (None, None, None, 1))]
)
def test_stock_attention_gets_even_lengths(
    queries: int, keys: int, causal: bool, axes: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gradients by cuDNN in jax.nn need them; what is added to a length is not seen. Under vmap."""
    real = jax.nn.dot_product_attention

    def even(q: Any, k: Any, v: Any, **kw: Any) -> Any:
        assert q.shape[1] % 2 == k.shape[1] % 2 == v.shape[1] % 2 == 0
        return real(q, k, v, **kw)

    def run(attend: Any, q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, pullback = jax.vjp(attend, q, k, v)
        return out, *pullback(d_out)

    def ours(q: Any, k: Any, v: Any) -> Any:
        return stock.attention(q, k, v, None, Geometry(0.3, right=0 if causal else ALL), "xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", even)
    q, k, v = arrays((2, queries, keys, 2, 1, 8), jnp.float32)
    one = [q, k, v, q + 1]
    given = [x if axis is None else jnp.stack([x, x / 2], axis) for x, axis in zip(one, axes, strict=True)]
    found = quick(jax.vmap(functools.partial(run, ours), in_axes=axes))(*given)
    halved = [x if axis is None else x / 2 for x, axis in zip(one, axes, strict=True)]
    expected = quick(functools.partial(run, functools.partial(real, scale=0.3, is_causal=causal)))(*halved)
    for name, got, want in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
        close(got[1], want, 2e-5, name)


def test_arrays_are_mapped_alike_under_vmap() -> None:
    """All of them or none, over the first axis, as cuDNN's batching in jax.nn needs them; of vmaps in vmaps too."""
    x, y = jnp.ones((4, 2)), jnp.ones((3, 5))
    assert [a.shape for a in stock.level(x, y)] == [(4, 2), (3, 5)]
    inner = jax.vmap(stock.level, in_axes=(1, None))
    assert [a.shape for a in jax.eval_shape(inner, x, y)] == [(2, 4), (2, 3, 5)]

    @jax.custom_batching.custom_vmap
    def watched(x: Any, y: Any) -> Any:
        return x, y

    @watched.def_vmap
    def _(size: int, mapped: Any, x: Any, y: Any) -> Any:
        assert mapped == [True, True]
        return (x, y), (True, True)

    twice = jax.vmap(jax.vmap(lambda x, y: watched(*stock.level(x, y)), in_axes=(1, None)), in_axes=(None, 0))
    assert [a.shape for a in jax.eval_shape(twice, x, y)] == [(3, 2, 4), (3, 2, 5)]


def test_statistics_vary_over_the_mesh_as_query_and_key_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of jax.shard_map; traced only, since the interpreter does not serve it."""
    monkeypatch.setattr(pallas, "_on_nvidia", lambda x: True)
    q, k, _ = arrays((1, 32, 32, 2, 1, 16), jnp.bfloat16)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def gradients(q: Any, k: Any) -> Any:
        return jax.grad(lambda q, k: row_stats(q, k, impl="pallas").entropy.sum(), (0, 1))(q, k)

    specs = (PartitionSpec("x"), PartitionSpec())
    found = jax.eval_shape(jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs), q, k)
    assert [x.shape for x in found] == [q.shape, k.shape]


def served(shape: tuple[int, ...] = (1, 64, 64, 2, 2, 64), dtype: Any = jnp.bfloat16, wide: int = 0, **kw: Any) -> bool:
    q, k, v = arrays(shape, dtype)
    inputs = prepared(q, k, jnp.concatenate([v, v[..., :wide]], -1), **kw)
    assert inputs.v is not None
    return pallas.cudnn_serves(inputs.q, inputs.k, inputs.v, inputs.masks, inputs.geometry)


def test_what_cudnn_serves() -> None:
    lengths: Any = {"key_value_seq_lengths": jnp.array([5])}
    assert served()
    assert served(dtype=jnp.float16, is_causal=True, **lengths)
    assert served(is_causal=True, local_window_size=7)
    assert served((1, 32, 64, 2, 2, 64), query_seq_lengths=jnp.array([5]))
    assert not served(dtype=jnp.float32)
    assert not served(wide=8)
    assert not served(softcap=2.0)
    assert not served((1, 64, 64, 2, 2, 20))
    assert not served((1, 32, 64, 2, 2, 64), is_causal=True)
    assert not served(local_window_size=(7, 1))
    assert not served(is_causal=True, local_window_size=7, **lengths)


def test_infinite_beta_stays_within_float16() -> None:
    q = jnp.asarray([[[[100.0, -3.0]], [[1.0, 2.0]]]], jnp.float16)
    found = pallas.sharpened(q, jnp.asarray([[[jnp.inf, 2.0]]]))
    assert np.isfinite(found).all()
    assert float(found[0, 0, 0, 0]) > 6e4
    np.testing.assert_array_equal(found[0, 1, 0], [2.0, 4.0])


@pytest.mark.usefixtures("interpreted")
def test_a_detached_policy_runs_no_backward_kernel() -> None:
    def kernels(policy: Any) -> list[str]:
        def total(q: Any, k: Any, v: Any) -> Any:
            return dot_product_attention(q, k, v, policy=policy, impl="pallas").sum()

        text = str(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(*arrays((1, 32, 32, 1, 1, 16), jnp.float32)))
        return [name for name in ("stats_kernel", "query_kernel", "key_kernel") if name in text]

    assert kernels(sharpmax.PAPER) == ["stats_kernel", "query_kernel", "key_kernel"]
    assert kernels(sharpmax.detached(sharpmax.PAPER)) == ["stats_kernel"]
    assert kernels(sharpmax.Constant(2.0)) == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mask": jnp.ones((32, 32), bool)}, "a mask"),
    ({"bias": jnp.zeros((32, 32))}, "a bias"),
    ({"policy": sharpmax.PerHead((sharpmax.PAPER, sharpmax.detached(sharpmax.Hard())))}, "hard attention"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=[words for _, words in REFUSED])
@pytest.mark.usefixtures("interpreted")
def test_what_is_not_served_is_refused_in_one_sentence(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"impl='pallas' does not serve {words}; reference, streaming can"):
        dot_product_attention(*arrays((1, 32, 32, 2, 2, 16), jnp.float32), impl="pallas", **change)


@pytest.mark.usefixtures("interpreted")
def test_wide_heads_and_types_are_refused() -> None:
    with pytest.raises(ValueError, match="heads of more than 256 columns"):
        row_stats(*arrays((1, 2, 2, 1, 1, 257), jnp.float32)[:2], impl="pallas")
    with jax.enable_x64(True), pytest.raises(ValueError, match="does not serve float64"):
        row_stats(*arrays((1, 2, 2, 1, 1, 16), jnp.float64)[:2], impl="pallas")


def test_a_cpu_is_refused() -> None:
    with (
        jax.default_device(jax.devices("cpu")[0]),
        pytest.raises(ValueError, match="does not serve arrays on cpu; reference, streaming can"),
    ):
        row_stats(*arrays((1, 2, 2, 1, 1, 16), jnp.float32)[:2], impl="pallas")


@pytest.mark.usefixtures("interpreted")
def test_forward_mode_is_refused() -> None:
    q, k, v = arrays((1, 16, 16, 1, 1, 16), jnp.float32)
    with pytest.raises(ValueError, match="impl='pallas' does not serve differentiation in forward mode; reference can"):
        jax.jvp(lambda q: dot_product_attention(q, k, v, impl="pallas"), (q,), (q,))


@pytest.mark.usefixtures("interpreted")
def test_auto_takes_the_kernels_where_they_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is chosen on a GPU."""
    monkeypatch.setattr(attention, "AT_ONCE", 0)
    shape = (1, 64, 64, 2, 2, 64)

    def chosen(dtype: Any = jnp.bfloat16, policy: Any = sharpmax.PAPER, **kw: Any) -> Any:
        return attention.choose("auto", prepared(*arrays(shape, dtype), **kw), policy)

    assert chosen() is pallas
    assert chosen(jnp.float32) is streaming
    assert chosen(mask=jnp.ones((64, 64), bool)) is streaming
    assert chosen(softcap=3.0) is streaming
    assert chosen(policy=sharpmax.Hard()) is streaming
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert chosen() is streaming


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 4e-2), ("float16", 8e-3), ("float32", 1e-3)])
@pytest.mark.parametrize("case", ATTENDED)
def test_attention_on_a_gpu(case: str, dtype: str, tolerance: float) -> None:
    check_attention(attended(case, dtype), ATTENDED[case], tolerance, jax.jit)


@pytest.mark.gpu
@on_gpu
def test_a_training_step_on_a_gpu_is_that_of_streaming() -> None:
    given = arrays((2, 600, 600, 4, 2, 64), jnp.bfloat16)
    inputs = prepared(*given, is_causal=True)
    assert attention.choose("auto", inputs, sharpmax.PAPER) is pallas
    found, expected = (
        attention_and_gradients(given, {"is_causal": True}, impl, jax.jit) for impl in ("auto", "streaming")
    )
    for name, a, b in zip(("output", "dq", "dk", "dv"), *(jax.tree.leaves(x) for x in (found, expected)), strict=True):
        close(a, b, 4e-2, name)
