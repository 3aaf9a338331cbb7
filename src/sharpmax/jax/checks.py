"""Checks of what attention is called with, and one layout for all of it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..core.arrays import broadcasts, floating_dtype
from ..core.policies.base import check_callable
from ..mechanisms.base import check_no_mechanism
from .geometry import ALL, Geometry, Masks
from .varying import alike

Window = int | tuple[int, int] | None


class Inputs(NamedTuple):
    """Checked arguments: ``q [B, T, N, D]``, ``k [B, S, K, D]``, ``v``, a bias ``[B|1, N|1, T|1, S|1]`` and masks."""

    q: jax.Array
    k: jax.Array
    v: jax.Array | None
    bias: jax.Array | None
    masks: Masks
    geometry: Geometry
    batched: bool

    def restore(self, x: Any) -> Any:
        """``x`` (every array of it ``[B, ...]``) without the batch axis, if the query had none."""
        return x if self.batched else jax.tree.map(lambda array: array[0], x)


def checked(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    *,
    scale: float | None,
    is_causal: bool,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    local_window_size: Window,
    softcap: float | None,
) -> Inputs:
    """The arguments of attention in one layout; bad ones are refused."""
    arrays = {"query": query, "key": key} | ({} if value is None else {"value": value})
    arrays = {name: _array(x, name) for name, x in arrays.items()}
    for name, x in arrays.items():
        floating_dtype(x, name)
    types = sorted({str(x.dtype) for x in arrays.values()})
    if len(types) > 1:
        raise TypeError(f"expected {', '.join(arrays)} of one type, got {', '.join(types)}")
    _check_shapes(arrays)
    q, k, *v = (x if x.ndim == 4 else x[None] for x in arrays.values())
    batch, queries, heads, _ = q.shape
    keys, logits = k.shape[1], (batch, heads, queries, k.shape[1])
    masks = Masks(
        _broadcastable(mask, logits, "mask"),
        _lengths(query_seq_lengths, batch, queries, "query_seq_lengths"),
        _lengths(key_value_seq_lengths, batch, keys, "key_value_seq_lengths"),
    )
    geometry = geometry_of(q.shape[-1], is_causal, scale, local_window_size, softcap)
    bias = _broadcastable(bias, logits, "bias")
    q, k, value, bias, masks = alike((q, k, v[0] if v else None, bias, masks))
    return Inputs(q, k, value, bias, masks, geometry, arrays["query"].ndim == 4)


def _array(x: Any, name: str) -> jax.Array:
    if not isinstance(x, jax.Array | np.ndarray) and not hasattr(x, "__jax_array__"):
        raise TypeError(f"expected {name} to be a JAX or NumPy array, got {type(x).__name__}")
    return jnp.asarray(x)


def _check_shapes(arrays: dict[str, jax.Array]) -> None:
    query, key = arrays["query"], arrays["key"]
    if query.ndim not in (3, 4) or any(x.ndim != query.ndim for x in arrays.values()):
        raise misfit("arrays [batch, length, heads, columns] or [length, heads, columns]", arrays)
    if query.shape[-1] != key.shape[-1] or query.shape[-1] == 0:
        raise misfit("query and key with the same number of columns, at least 1", arrays)
    if "value" in arrays and arrays["value"].shape[:-1] != key.shape[:-1]:
        raise misfit("key and value alike but for their columns", arrays)
    if query.shape[:-3] != key.shape[:-3]:
        raise misfit("the same batch size", arrays)
    heads, key_heads = query.shape[-2], key.shape[-2]
    if heads != key_heads and (key_heads == 0 or heads % key_heads):
        raise misfit("the query's heads to be a multiple of the key's", arrays)


def misfit(expected: str, arrays: dict[str, jax.Array]) -> ValueError:
    """The error that says what shapes were expected, and which came."""
    return ValueError(f"expected {expected}, got shapes {' and '.join(str(x.shape) for x in arrays.values())}")


def _broadcastable(x: Any, logits: tuple[int, ...], name: str) -> jax.Array | None:
    if x is None:
        return None
    x = _array(x, name)
    if name == "mask" and x.dtype != jnp.bool_:
        raise TypeError(f"expected mask to be boolean, got {x.dtype}; numbers that are added to logits are a bias")
    if name == "bias":
        floating_dtype(x, name)
    if not broadcasts(x.shape, logits):
        raise ValueError(f"expected {name} to broadcast against logits {logits}, got shape {x.shape}")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _lengths(lengths: Any, batch: int, longest: int, name: str) -> jax.Array | None:
    if lengths is None:
        return None
    lengths = _array(lengths, name)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"expected {name} to be an array of whole numbers, got {lengths.dtype}")
    if lengths.shape != (batch,):
        raise ValueError(f"expected {name} of shape ({batch},), one for each batch element, got {lengths.shape}")
    if jnp.iinfo(lengths.dtype).bits < 32:  # the number of keys may be none of theirs
        lengths = lengths.astype(jnp.int32)
    return jnp.clip(lengths, 0, longest).astype(jnp.int32)


def geometry_of(
    columns: int, is_causal: bool, scale: float | None, local_window_size: Window, softcap: float | None
) -> Geometry:
    """The geometry that the arguments of attention describe."""
    if not isinstance(is_causal, bool | np.bool_):
        raise ValueError(f"expected is_causal to be True or False, got {is_causal!r}")
    if softcap is not None and not (_finite(softcap, "softcap") and softcap > 0):
        raise ValueError(f"expected softcap to be a positive number or None, got {softcap!r}")
    if scale is not None and not _finite(scale, "scale"):
        raise ValueError(f"expected scale to be a finite number, got {scale!r}")
    left, right = band(local_window_size)
    if is_causal:
        right = 0
    factor = 1.0 / math.sqrt(columns) if scale is None else float(scale)
    return Geometry(factor, 0.0 if softcap is None else float(softcap), left, right)


def _finite(x: Any, name: str) -> bool:
    if isinstance(x, Tracer):
        raise ValueError(
            f"expected {name} to be a plain number, got a traced array; multiply query or key by it instead"
        )
    return math.isfinite(x)


def band(window: Any) -> tuple[int, int]:
    """How many keys before and after its own a query sees, :data:`.geometry.ALL` without a window."""
    if window is None:
        return ALL, ALL
    sides = window if isinstance(window, tuple | list) else (window, window)
    if len(sides) != 2 or not all(
        isinstance(w, int | np.integer) and not isinstance(w, bool) and w >= 0 for w in sides
    ):
        raise ValueError(
            f"expected local_window_size to be a whole number of at least 0, or two (left, right), got {window!r}"
        )
    return int(sides[0]), int(sides[1])


def check_policy(policy: Any) -> None:
    """Refuse a policy that cannot be called, and a mechanism in the place of one."""
    check_no_mechanism(policy)
    check_callable(policy)
