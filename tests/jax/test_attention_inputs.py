"""What calls are taken, what is refused and how, and what implementations do at the edges."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

import sharpmax
from sharpmax.jax import attention as module
from sharpmax.jax import dot_product_attention, reference, row_stats, streaming
from sharpmax.jax.checks import checked
from tests.jax.attention_cases import close, inputs, quick

X = jnp.zeros((1, 5, 2, 4), jnp.float32)

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": X[0]}, ValueError, r"\[length, heads, columns\], got shapes"),
    ({"key": X[..., :3]}, ValueError, "same number of columns"),
    ({"value": X[:, :4]}, ValueError, "key and value alike"),
    ({"key": jnp.zeros((2, 5, 2, 4)), "value": jnp.zeros((2, 5, 2, 4))}, ValueError, "same batch size"),
    ({"query": jnp.zeros((1, 5, 3, 4))}, ValueError, "multiple of the key's"),
    ({"value": None}, TypeError, "expected value to be a JAX or NumPy array, got NoneType"),
    ({"query": [1.0]}, TypeError, "JAX or NumPy array, got list"),
    ({"query": torch.zeros(1, 5, 2, 4)}, TypeError, "JAX or NumPy array, got Tensor"),
    ({"query": X.astype(jnp.int32)}, TypeError, "query of type float16, bfloat16, float32 or float64, got int32"),
    ({"query": X.astype(jnp.float16)}, TypeError, "of one type, got float16, float32"),
    ({"mask": jnp.zeros((5, 5))}, TypeError, "mask to be boolean, got float32; numbers that are added"),
    ({"mask": jnp.ones((4, 5), bool)}, ValueError, r"mask to broadcast against logits \(1, 2, 5, 5\)"),
    ({"bias": jnp.ones((5, 5), bool)}, TypeError, "bias of type"),
    ({"bias": jnp.zeros((3, 5, 5))}, ValueError, "bias to broadcast"),
    ({"key_value_seq_lengths": jnp.array([1.0])}, TypeError, "whole numbers, got float32"),
    ({"query_seq_lengths": jnp.array([1, 2])}, ValueError, r"query_seq_lengths of shape \(1,\)"),
    ({"scale": float("nan")}, ValueError, "scale to be a finite number"),
    ({"softcap": 0.0}, ValueError, "softcap to be a positive number"),
    ({"is_causal": "lower_right"}, ValueError, "is_causal to be True or False"),
    ({"local_window_size": -1}, ValueError, "local_window_size"),
    ({"local_window_size": (1, 2, 3)}, ValueError, "local_window_size"),
    ({"policy": 1.5}, TypeError, "policy to be callable"),
    ({"policy": lambda stats: jnp.ones(3)}, ValueError, r"rows of shape \(1, 2, 5\), got \(3,\)"),
    ({"impl": "flash"}, ValueError, "one of auto, reference, streaming, pallas, got 'flash'"),
    ({"implementation": "cudnn"}, ValueError, "implementation to be None, got 'cudnn'.*impl ours"),
    ({"return_residual": True}, ValueError, "return_residual to be False; return_stats=True"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD, ids=[f"{'-'.join(c)}: {words}" for c, _, words in BAD])
def test_bad_input_is_refused_in_one_sentence(change: dict[str, Any], error: type[Exception], words: str) -> None:
    call: Any = {"query": X, "key": X, "value": X} | change
    with pytest.raises(error, match=words) as caught:
        dot_product_attention(**call)
    assert "\n" not in str(caught.value)


def test_a_traced_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="scale to be a plain number, got a traced array; multiply query"):
        jax.jit(lambda scale: dot_product_attention(X, X, X, scale=scale))(0.5)


def test_the_signature_starts_with_that_of_jax() -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (dot_product_attention, jax.nn.dot_product_attention))
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    assert list(ours)[len(theirs) :] == ["policy", "mechanism", "softcap", "impl", "return_stats"]


def prepared(queries: int, keys: int) -> Any:
    q, k = jnp.zeros((1, queries, 2, 4)), jnp.zeros((1, keys, 2, 4))
    none: Any = dict.fromkeys(
        ("scale", "query_seq_lengths", "key_value_seq_lengths", "local_window_size", "softcap"), None
    )
    return checked(q, k, k, None, None, is_causal=True, **none)


def test_auto_holds_all_logits_only_where_they_are_few() -> None:
    assert module.choose("auto", prepared(1, 4096), None) is reference
    assert module.choose("auto", prepared(256, 512), None) is reference
    assert module.choose("auto", prepared(257, 512), None) is streaming
    assert module.choose("streaming", prepared(1, 1), None) is streaming
    assert module.choose("reference", prepared(4096, 4096), None) is reference


@pytest.mark.parametrize("impl", ["reference", "streaming"])
def test_rows_without_keys_are_zero_whatever_padding_holds(impl: str) -> None:
    q, k, v = inputs("float32")
    q, k, v = q.at[0, 5:].set(jnp.nan), k.at[1, 4:].set(jnp.inf), v.at[1, 4:].set(jnp.nan)
    mask = jnp.ones((9, 11), bool).at[2].set(False)
    lengths: Any = {"query_seq_lengths": jnp.array([5, 20]), "key_value_seq_lengths": jnp.array([11, 4])}

    @quick
    def run(q: Any, k: Any, v: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return dot_product_attention(q, k, v, mask=mask, impl=impl, **lengths)

        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(jnp.ones_like(out))

    out, gradients = run(q, k, v)
    assert np.isfinite(out).all()
    assert (out[:, 2] == 0).all()
    assert (out[0, 5:] == 0).all()
    assert (gradients[0][:, 2] == 0).all()
    assert (gradients[0][0, 5:] == 0).all()
    for gradient in gradients:
        assert np.isfinite(gradient).all()
    for gradient in gradients[1:]:
        assert (gradient[1, 4:] == 0).all()


@pytest.mark.parametrize("impl", ["reference", "streaming"])
@pytest.mark.parametrize(("queries", "keys", "heads"), [(0, 5, 2), (3, 0, 2), (3, 5, 0)])
def test_empty_arrays(impl: str, queries: int, keys: int, heads: int) -> None:
    q, k, v = jnp.ones((2, queries, heads, 4)), jnp.ones((2, keys, heads, 4)), jnp.ones((2, keys, heads, 6))
    found = quick(lambda: dot_product_attention(q, k, v, impl=impl, return_stats=True))()
    np.testing.assert_array_equal(found.output, np.zeros((2, queries, heads, 6)))
    assert found.beta.shape == found.stats.entropy.shape == (2, heads, queries)


def test_numpy_arrays_are_taken() -> None:
    q, k, v = (np.asarray(x) for x in inputs("float32"))
    plain = dot_product_attention(*map(jnp.asarray, (q, k, v)))
    np.testing.assert_array_equal(dot_product_attention(q, k, v), plain)


@pytest.mark.parametrize("impl", ["reference", "streaming"])
def test_a_wider_bias_is_read_alike(impl: str) -> None:
    q, k, v = inputs("float32")
    with jax.enable_x64(True):
        bias = jnp.zeros((9, 11)).at[:, 3].set(-1e200).at[4].set(-jnp.inf)
        found = quick(lambda: dot_product_attention(q, k, v, bias, impl=impl, return_stats=True))()
    assert found.output.dtype == found.beta.dtype == found.stats.max.dtype == "float32"
    assert (found.stats.count[:, :, 4] == 0).all()
    assert (found.stats.count[:, :, 5] == 10).all()


def test_policies_that_need_no_statistics_compute_none(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs("float32")
    for policy in (sharpmax.Constant(1.5), sharpmax.LogLength()):
        expected = dot_product_attention(q, k, v, is_causal=True, policy=policy, return_stats=True)
        with monkeypatch.context() as patched:
            patched.setattr(reference, "row_stats", None)
            found = dot_product_attention(q, k, v, is_causal=True, policy=policy)
        close(found, expected.output, 1e-6, type(policy).__name__)


def test_row_stats_refuses_alike() -> None:
    with pytest.raises(ValueError, match="got 'flash'"):
        row_stats(X, X, impl="flash")
    with pytest.raises(ValueError, match="same number of columns"):
        row_stats(X, X[..., :3])


def test_streaming_inside_of_shard_map() -> None:
    """Which keeps account of what varies over the mesh; keys are the same on every device, and lengths are not."""
    q, k, v = inputs("float32")
    lengths = jnp.asarray([11, 4])
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def total(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        out = dot_product_attention(q, k, v, is_causal=True, key_value_seq_lengths=lengths, impl="streaming")
        return (out**2).sum(axis=(1, 2, 3))

    specs = (P("x"), P(), P(), P("x"))
    sharded = jax.shard_map(total, mesh=mesh, in_specs=specs, out_specs=P("x"))
    found, expected = (
        quick(jax.grad(lambda *x, f=f: f(*x).sum(), (0, 1, 2)))(q, k, v, lengths) for f in (sharded, total)
    )
    for name, got, want in zip(("query", "key", "value"), found, expected, strict=True):
        close(got, want, 1e-6, name)


@pytest.mark.parametrize("impl", ["reference", "streaming"])
def test_what_is_no_number_in_a_bias_hides_no_key(impl: str) -> None:
    """As in ``jax.nn``, such a row gives no numbers, and others are not touched."""
    x = jnp.ones((1, 5, 2, 4))
    bias = jnp.zeros((5, 5)).at[2, 3].set(jnp.nan).at[4, 1].set(-jnp.inf)
    found = dot_product_attention(x, x, x, bias=bias, impl=impl)
    expected = jax.nn.dot_product_attention(x, x, x, bias=bias[None, None])
    assert bool((jnp.isnan(found) == jnp.isnan(expected)).all())
    assert bool(jnp.isnan(expected[:, 2]).all())
