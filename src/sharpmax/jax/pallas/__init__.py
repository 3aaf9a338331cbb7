"""For NVIDIA GPUs: row statistics by kernels written in Pallas, and attention by cuDNN.

Attention with beta is stock attention on ``beta * query``, so statistics are all that needs a kernel. Rounding that
product to the type of the query costs digits exactly where beta is large; what ``"streaming"`` gives is closer. Where
cuDNN does not serve (see :func:`cudnn_serves`), attention is that of ``"streaming"``.

The kernels go through Pallas' Triton lowering, and its modules are imported when they are needed.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ...core.policies import Policy, is_hard
from ...core.stats import RowStats
from .. import streaming
from ..checks import Inputs
from ..geometry import ALL, Geometry, Masks, accumulation, row_counts, without_padding
from . import stock, tiles

STOCK: stock.Implementation = "cudnn"
"""The implementation of ``jax.nn`` that attention is left to."""
HARDEST = 1e4
"""What stands for infinite beta in cuDNN's attention."""


def refusal(inputs: Inputs, policy: Policy | None) -> str:
    """What of a call is not served, empty if all of it is."""
    reasons = {
        f"arrays on {_platform(inputs.q)}": tiles.INTERPRETED is None and not _on_nvidia(inputs.q),
        "a JAX without Pallas' Triton lowering": not _lowering_is_there(),
        str(inputs.q.dtype): inputs.q.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32),
        f"heads of more than {tiles.LARGEST_HEAD} columns": inputs.q.shape[-1] > tiles.LARGEST_HEAD,
        "a mask": inputs.masks.mask is not None,
        "a bias": inputs.bias is not None,
        "hard attention": is_hard(policy),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def row_stats(
    q: jax.Array,
    k: jax.Array,
    bias: jax.Array | None,
    masks: Masks,
    geometry: Geometry,
    *,
    with_min: bool = False,
) -> RowStats:
    """The statistics of every row of logits, ``[B, N, T]``."""
    from . import stats

    assert bias is None
    assert masks.mask is None
    assert masks.shift is None
    plan = tiles.plan(q.shape[-1], q.dtype, geometry.banded)
    return RowStats(*stats.compiled(q, k, masks, geometry, with_min, plan))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    bias: jax.Array | None,
    masks: Masks,
    geometry: Geometry,
) -> jax.Array:
    """``softmax(beta * z) v``, ``[B, T, N, columns]`` in the type of ``q``."""
    if not cudnn_serves(q, k, v, masks, geometry):
        return streaming.attend(q, k, v, beta, bias, masks, geometry)
    count = row_counts(q, k, masks, geometry)
    q = sharpened(without_padding(q, masks.query_lengths), beta)
    k, v = (without_padding(x, masks.key_lengths) for x in (k, v))
    # Rows without keys see one here, so that cuDNN divides by no 0, and are set to 0 afterwards.
    lengths = None if masks.key_lengths is None else jnp.maximum(masks.key_lengths, 1)
    out = stock.attention(q, k, v, lengths, geometry, STOCK)
    if masks.query_lengths is None and masks.key_lengths is None:
        return out
    return jnp.where((count > 0).swapaxes(1, 2)[..., None], out, jnp.zeros((), out.dtype))


def cudnn_serves(q: jax.Array, k: jax.Array, v: jax.Array, masks: Masks, geometry: Geometry) -> bool:
    """Whether cuDNN's attention serves a call.

    It does for float16 and bfloat16, values as wide as queries, heads of a multiple of 8 columns (up to 256 on Hopper,
    else 128), without a softcap, and with every key in sight or, where there are as many queries as keys, under
    causality. A window needs causality, and no lengths of keys.
    """
    narrow = q.dtype in (jnp.float16, jnp.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= _widest()
    causal = geometry.right == 0 and q.shape[1] == k.shape[1]
    window = causal and masks.key_lengths is None
    band = not geometry.banded or (causal if geometry.left == ALL else window)
    return narrow and band and geometry.softcap == 0 and v.shape[-1] == q.shape[-1]


def sharpened(q: jax.Array, beta: jax.Array) -> jax.Array:
    """``beta * q`` in the type of ``q``; infinite beta is :data:`HARDEST`, or as much as fits that type."""
    wide = q.astype(accumulation(q.dtype))
    beta = jnp.where(jnp.isposinf(beta), HARDEST, beta).swapaxes(1, 2)[..., None]
    if q.dtype == jnp.float16:
        largest = jnp.maximum(jnp.abs(jax.lax.stop_gradient(wide)).max(-1, keepdims=True), 1e-3)
        beta = jnp.where(beta == HARDEST, jnp.minimum(beta, float(jnp.finfo(q.dtype).max) / largest), beta)
    return (beta * wide).astype(q.dtype)


def alone() -> bool:
    """Whether what is traced runs on one device: the kernels are not partitioned, XLA would gather their arguments."""
    return jax.device_count() == 1 or jax.sharding.get_abstract_mesh().are_all_axes_manual


def _platform(x: Any) -> str:
    """Where an array is, or while it is traced, where JAX runs."""
    if isinstance(x, Tracer):
        device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        return jax.default_backend() if device is None else getattr(device, "platform", device)
    return next(iter(x.devices())).platform


def _on_nvidia(x: Any) -> bool:
    if _platform(x) not in ("gpu", "cuda"):
        return False
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def _widest() -> int:
    """Columns of a head that cuDNN takes, forward and backward."""
    return 256 if tiles.generation() == 9 else 128


def _lowering_is_there() -> bool:
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None
