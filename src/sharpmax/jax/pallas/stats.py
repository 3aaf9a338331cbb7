"""Row statistics by the kernels, with a backward of their own."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ..cotangents import instantiated, values
from ..geometry import Geometry, Masks, row_counts
from ..streaming import Fields
from .blocks import LN2
from .launch import call_of, key_gradient, query_gradient, statistics
from .tiles import Plan

UNREACHED = 1e20
"""A maximum under which every power is exactly 0: that of rows without keys."""


def fields(q: jax.Array, k: jax.Array, masks: Masks, geometry: Geometry, with_min: bool, plan: Plan) -> Fields:
    """Maximum, sum, moment, minimum (``None`` unless asked for) and count of every row, ``[B, N, T]``."""
    return _fields_and_raw_maximum(q, k, masks, geometry, with_min, plan)[0]


def _fields_and_raw_maximum(
    q: jax.Array, k: jax.Array, masks: Masks, geometry: Geometry, with_min: bool, plan: Plan
) -> tuple[Fields, jax.Array]:
    top, total, moment, *lowest = statistics(q, k, masks, geometry, with_min, plan)
    factor = call_of(q, k, masks, geometry, plan.stats).factor
    count = row_counts(q, k, masks, geometry)
    seen = count > 0
    found = (
        jnp.where(seen, top * factor, -math.inf),
        jnp.where(seen, total, 0.0),
        jnp.where(seen, moment * LN2, 0.0),
        jnp.where(seen, lowest[0] * factor, math.inf) if lowest else None,
        count,
    )
    return found, jnp.where(seen, top, UNREACHED)


def _forward(q: Any, k: Any, masks: Any, geometry: Geometry, with_min: bool, plan: Plan) -> tuple[Fields, Any]:
    q, k, masks = values((q, k, masks))
    found, top = _fields_and_raw_maximum(q, k, masks, geometry, with_min, plan)
    return found, (q, k, masks, top)


def _backward(geometry: Geometry, with_min: bool, plan: Plan, saved: Any, cotangents: Any) -> Any:
    q, k, masks, top = saved
    _, d_total, d_moment, *_ = cotangents
    if isinstance(d_total, SymbolicZero) and isinstance(d_moment, SymbolicZero):
        return None, None, None
    seen = top < UNREACHED
    d_total, d_moment = (jnp.where(seen, instantiated(x), 0.0) for x in (d_total, d_moment))
    by_row = top, d_total + d_moment, d_moment * LN2
    dq = query_gradient(q, k, masks, by_row, geometry, plan)
    return dq, key_gradient(q, k, masks, by_row, geometry, plan), None


_stats = jax.custom_vjp(fields, nondiff_argnums=(3, 4, 5))
_stats.defvjp(_forward, _backward, symbolic_zeros=True)
compiled = jax.jit(_stats, static_argnums=(3, 4, 5))
"""The same, compiled and with gradients."""
