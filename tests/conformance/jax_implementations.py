"""JAX against the golden cases: the core functions, eager and compiled, and attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import jax
import numpy as np

from sharpmax import RowStats, adaptive_temperature_softmax, row_stats
from sharpmax.jax import blocks, dot_product_attention
from sharpmax.jax import row_stats as jax_row_stats
from sharpmax.torch.geometry import LARGEST_HEAD

from .cases import Case, load
from .recipes import DTYPES
from .registry import (
    attends,
    collected,
    compile_key,
    kernels_attend,
    length,
    looks_at_values,
    policy_name,
    policy_of,
    register,
    shape_key,
)
from .results import Result


def _jax_row(x: Any, where: Any, cotangent: Any, policy: Any) -> tuple[RowStats, Any, Any, Any]:
    stats = row_stats(x, where=where)
    weights, pullback = jax.vjp(lambda x: adaptive_temperature_softmax(x, where=where, policy=policy), x)
    return stats, policy(stats), weights, pullback(cotangent)[0]


@cache
def _jax_jitted() -> Callable[..., Any]:
    return jax.jit(_jax_row, static_argnames=("policy",))


def _jax(case: Case, row: Callable[..., Any], device: Any = None) -> Result:
    wide: Any = jax.enable_x64(True) if case.dtype == "float64" else nullcontext()
    with wide, jax.default_device(device) if device is not None else nullcontext():
        x = jax.numpy.asarray(case.logits.astype(DTYPES[case.dtype]))
        cotangent = jax.numpy.asarray(case.cotangent.astype(DTYPES[case.dtype]))
        where = None if case.where is None else jax.numpy.asarray(case.where)
        return collected(*row(x, where, cotangent, policy=policy_of(case)))


@register("jax", takes=lambda row: not looks_at_values(row), group=shape_key)
def jax_eager(case: Case) -> Result:
    return _jax(case, _jax_row)


def _jax_compiles(row: dict[str, Any]) -> bool:
    """Everything in float32; of the other types the paper's policy and its held form, at a few lengths."""
    few = policy_name(row) in ("paper", "held") and length(row) in (1, 8, 16, 33, 64, 4096)
    return not looks_at_values(row) and (few or row["dtype"] == "float32")


@register("jax-jit", takes=_jax_compiles, group=compile_key)
def jax_jit(case: Case) -> Result:
    return _jax(case, _jax_jitted())


@register("jax-gpu", gpu="jax", takes=lambda row: not looks_at_values(row), group=compile_key)
def jax_gpu(case: Case) -> Result:
    return _jax(case, _jax_jitted(), jax.devices("gpu")[0])


_SPLIT = blocks.Sizes(rows=64, keys=100, together=False)
"""Blocks of which a row of keys has three, the last one partly in the one before it."""


def _jax_attention(case: Case, impl: str) -> Result:
    """All rows are filled up to one length with keys that the mask hides, so that they share a compilation."""
    dtype, length = DTYPES[case.dtype], LARGEST_HEAD
    kept, key, value = np.zeros(length, bool), np.zeros((1, length, 1, 16)), np.zeros((1, length, 1, 1))
    kept[: case.n] = case.kept
    key[0, : case.n, 0, 0] = np.where(case.kept, case.logits, 0)
    value[0, : case.n, 0, 0] = case.cotangent
    query = np.zeros((1, 1, 1, 16))
    query[..., 0] = 1
    wide: Any = jax.enable_x64(True) if case.dtype == "float64" else nullcontext()
    with wide, patch.object(blocks, "CPU", _SPLIT):
        identity = np.eye(length)[None, :, None]
        q, k, v, one = (jax.numpy.asarray(x.astype(dtype)) for x in (query, key, value, identity))
        return _with_gradient(case, q, k, v, one, {"mask": jax.numpy.asarray(kept), "scale": 1.0, "impl": impl})


def _with_gradient(case: Case, q: Any, k: Any, v: Any, identity: Any, given: dict[str, Any]) -> Result:
    """What attention to a row of keys gives: its weights with the identity for values, and the gradient of ``k``."""
    stats = jax_row_stats(q, k, with_min=True, **given)
    given["policy"] = policy_of(case)
    found = dot_product_attention(q, k, identity, return_stats=True, **given)
    output, pullback = jax.vjp(lambda k: dot_product_attention(q, k, v, **given), k)
    (gradient,) = pullback(jax.numpy.ones_like(output))
    row = RowStats(*(field[0, 0, 0] for field in stats if field is not None))
    return collected(row, found.beta[0, 0, 0], found.output[0, 0, 0, : case.n], gradient[0, : case.n, 0, 0])


def _jax_attends(row: dict[str, Any]) -> bool:
    return attends(row) and not looks_at_values(row)


@register("jax-attention-reference", dtypes=("float32",), takes=_jax_attends, group=lambda row: row["dtype"])
def jax_attention_reference(case: Case) -> Result:
    return _jax_attention(case, "reference")


@register(
    "jax-attention-streaming",
    dtypes=("float64",),
    takes=_jax_attends,
    group=lambda row: row["dtype"],
)
def jax_attention_streaming(case: Case) -> Result:
    return _jax_attention(case, "streaming")


def _kernels_attend_in_jax(row: dict[str, Any]) -> bool:
    """The kernels know no mask: rows of which every logit counts."""
    return kernels_attend(row) and _jax_attends(row) and bool(load(row["id"]).kept.all())


@register("jax-attention-pallas", gpu="jax", dtypes=("float32",), takes=_kernels_attend_in_jax, group=shape_key)
def jax_attention_pallas(case: Case) -> Result:
    """The keys that fill rows up lie beyond the sequence length, and hold NaN."""
    length = LARGEST_HEAD
    key, value, query = np.full((1, length, 1, 16), np.nan), np.full((1, length, 1, 1), np.nan), np.zeros((1, 1, 1, 16))
    key[0, : case.n] = 0
    key[0, : case.n, 0, 0] = case.logits
    value[0, : case.n, 0, 0] = case.cotangent
    query[..., 0] = 1
    identity = np.eye(length)[None, :, None]
    q, k, v, one = (jax.numpy.asarray(x.astype(DTYPES[case.dtype])) for x in (query, key, value, identity))
    given = {"key_value_seq_lengths": jax.numpy.asarray([case.n], "int32"), "scale": 1.0, "impl": "pallas"}
    with jax.default_matmul_precision("highest"):
        return _with_gradient(case, q, k, v, one, given)
