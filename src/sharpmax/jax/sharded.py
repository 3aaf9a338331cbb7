"""Attention over sequences that are longer than one device holds: queries, keys and values sharded along the sequence.

Every device keeps its queries, while keys and values go round the devices of a mesh axis. Statistics of a row are
merged over all shards before beta is chosen, so keys go round twice forward: once for the statistics, and once more
with the values. Backward it is the same, with the gradients of keys and values on the way home beside them. No device
ever holds more than its own shard and the one that visits.

Under causality a device with early queries would have little to do. ``layout="zigzag"`` gives device ``i`` of ``n`` the
chunks ``i`` and ``2 n - 1 - i`` of ``2 n``, so that all have the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..core.policies import PAPER, Policy, needs_spread
from ..core.stats import RowStats
from . import streaming
from .attention import Attention, row_betas
from .blocks import Sizes, sizes
from .checks import Window, check_policy, checked
from .geometry import Geometry, Masks, accumulation, row_counts

LAYOUTS = ("contiguous", "zigzag")


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mesh: Mesh,
    axis: str = "sequence",
    batch_axis: str | None = None,
    head_axis: str | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    layout: str = "contiguous",
    policy: Policy = PAPER,
    softcap: float | None = None,
    return_stats: bool = False,
) -> jax.Array | Attention:
    """:func:`sharpmax.jax.dot_product_attention` of arrays whose sequence is sharded over an axis of a mesh.

    Args:
      query: ``[B, T, N, D]``.
      key, value: ``[B, T, K, D]`` and ``[B, T, K, Dv]``; ``T`` is a multiple of the devices along ``axis``, for
        ``"zigzag"`` of twice their number.
      mesh: the devices.
      axis: the axis of the mesh that the sequence is sharded over.
      batch_axis, head_axis: axes of the mesh that batch and heads are sharded over, if they are; heads of queries and
        of keys alike.
      scale, is_causal, local_window_size, softcap: as for one device.
      layout: ``"contiguous"``, or ``"zigzag"``: the sequence is in the order of :func:`zigzag`.
      policy: any callable on RowStats ``[B, N, T]``; on every device it sees the rows of that device.
      return_stats: return :class:`~sharpmax.jax.Attention` in place of the output.
    """
    spec = P(batch_axis, axis, head_axis, None)
    rows = P(batch_axis, head_axis, axis)
    local = functools.partial(
        ring_attention, axis=axis, scale=scale, is_causal=is_causal, local_window_size=local_window_size, layout=layout,
        policy=policy, softcap=softcap, return_stats=return_stats,
    )  # fmt: skip
    if axis not in mesh.shape:
        raise ValueError(f"expected axis to be one of the mesh's {', '.join(mesh.shape)}, got {axis!r}")
    chunks = mesh.shape[axis] * _chunks(layout)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if getattr(x, "ndim", 0) != 4 or x.shape[1] % chunks or x.shape[1] != query.shape[1]:
            raise ValueError(
                f"expected query, key and value [B, T, heads, columns] with one T, a multiple of {chunks}, got {name} "
                f"of shape {tuple(getattr(x, 'shape', ()))}"
            )
    lowest = rows if needs_spread(policy) else None
    stats = Attention(spec, RowStats(rows, rows, rows, lowest, rows), rows)  # pyright: ignore[reportArgumentType]
    call = jax.shard_map(
        local, mesh=mesh, in_specs=(spec,) * 3, out_specs=stats if return_stats else spec, check_vma=False
    )
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        query, key, value = (jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x in (query, key, value))
    return call(query, key, value)


def ring_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis: str,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    layout: str = "contiguous",
    policy: Policy = PAPER,
    softcap: float | None = None,
    return_stats: bool = False,
) -> jax.Array | Attention:
    """The same inside of ``jax.shard_map(..., check_vma=False)``: arguments are the shards of this device."""
    check_policy(policy)
    inputs = checked(
        query, key, value, None, None, scale=scale, is_causal=is_causal, query_seq_lengths=None,
        key_value_seq_lengths=None, local_window_size=local_window_size, softcap=softcap,
    )  # fmt: skip
    q, k, v, geometry = inputs.q, inputs.k, inputs.v, inputs.geometry
    assert v is not None
    ring = Ring(axis, _chunks(layout), needs_spread(policy), geometry, sizes())
    fields: Any = _ring_stats(q, k, ring)
    stats = RowStats(*fields)
    beta = row_betas(policy, stats)
    output: Any = _ring_attend(q, k, v, beta, ring)
    return inputs.restore(Attention(output, stats, beta) if return_stats else output)


def _chunks(layout: str) -> int:
    if layout not in LAYOUTS:
        raise ValueError(f"expected layout to be one of {', '.join(LAYOUTS)}, got {layout!r}")
    return 1 + (layout == "zigzag")


def zigzag(length: int, devices: int) -> np.ndarray:
    """The order of positions in which ``devices`` equal parts have equal work under causality.

    ``x[:, zigzag(T, n)]`` goes into attention, and with it positions (for rotary embeddings) and labels;
    ``out[:, np.argsort(zigzag(T, n))]`` is in the usual order again.
    """
    if devices < 1 or length % (2 * devices):
        raise ValueError(f"expected a length that is a multiple of twice the {devices} devices, got {length}")
    chunks = np.arange(length).reshape(2 * devices, -1)
    return np.concatenate([np.concatenate([chunks[i], chunks[-1 - i]]) for i in range(devices)])


class Ring(NamedTuple):
    """How shards go round, and what decides the logits."""

    axis: str
    chunks: int
    with_min: bool
    geometry: Geometry
    limits: Sizes

    @property
    def size(self) -> int:
        """How many devices there are."""
        return lax.axis_size(self.axis)

    def passed_on(self, shards: Any) -> Any:
        """What the device before this one held."""
        n = self.size
        return lax.ppermute(shards, self.axis, [(i, (i + 1) % n) for i in range(n)])

    def split(self, x: jax.Array, axis: int = 1) -> list[jax.Array]:
        """The chunks of a shard."""
        return jnp.split(x, self.chunks, axis)

    def ids(self, step: Any) -> list[Any]:
        """The places in the sequence of the chunks that visit after so many steps."""
        n = self.size
        owner = (lax.axis_index(self.axis) - step) % n
        return [owner] if self.chunks == 1 else [owner, 2 * n - 1 - owner]

    def masks(self, mine: Any, theirs: Any, query: jax.Array) -> Masks:
        """How far a chunk of queries stands behind one of keys; where that is too far, no block is computed."""
        return Masks(shift=jnp.full((1,), (mine - theirs) * query.shape[1], jnp.int32))

    def round(self, step: Callable[[Any, Any, Any], tuple[Any, Any]], shards: Any, carry: Any, home: bool) -> Any:
        """``step(i, shards, carry)`` with the shards of every device; ``home``: the shards are brought back."""

        def turn(i: Any, state: Any) -> Any:
            shards, carry = step(i, *state)
            return self.passed_on(shards), carry

        shards, carry = lax.fori_loop(0, self.size - (not home), turn, (shards, carry))
        if not home:
            shards, carry = step(self.size - 1, shards, carry)
        return shards, carry


def _joined(parts: list[jax.Array], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


# ----------------------------------------------------------------------------------------------------------------
# Statistics
# ----------------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _ring_stats(q: jax.Array, k: jax.Array, ring: Ring) -> tuple[Any, ...]:
    return _stats_forward(q, k, ring)[0]


def _stats_forward(q: jax.Array, k: jax.Array, ring: Ring) -> tuple[tuple[Any, ...], Any]:
    queries, mine = ring.split(q), ring.ids(0)

    def step(i: Any, key: jax.Array, found: Any) -> tuple[Any, Any]:
        for theirs, part in zip(ring.ids(i), ring.split(key), strict=True):
            for n, query in enumerate(queries):
                masks = ring.masks(mine[n], theirs, query)
                new = streaming.fields(query, part, None, masks, ring.geometry, ring.with_min, ring.limits)
                found[n] = found[n].merge(RowStats(*new))
        return key, found

    _, found = ring.round(step, k, [_no_stats(x, ring.with_min) for x in queries], home=False)
    fields = tuple(None if x[0] is None else _joined(list(x), 2) for x in zip(*found, strict=True))
    return fields, (q, k, fields[0])


def _no_stats(q: jax.Array, with_min: bool) -> RowStats:
    """The statistics of rows that have seen nothing yet."""
    zeros = jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), accumulation(q.dtype))
    lowest = jnp.full_like(zeros, jnp.inf) if with_min else None
    return RowStats(jnp.full_like(zeros, -jnp.inf), zeros, zeros, lowest, zeros.astype(jnp.int32))


def _stats_backward(ring: Ring, saved: Any, cotangents: Any) -> tuple[jax.Array, jax.Array]:
    q, k, top = saved
    queries, mine = ring.split(q), ring.ids(0)
    by_row = [list(parts) for parts in zip(*(ring.split(x, 2) for x in (top, *cotangents[1:3])), strict=True)]
    wide = accumulation(q.dtype)

    def step(i: Any, shards: Any, dq: Any) -> tuple[Any, Any]:
        key, dk = shards
        dk = list(dk)
        for m, (theirs, part) in enumerate(zip(ring.ids(i), ring.split(key), strict=True)):
            for n, query in enumerate(queries):
                shift, *cotangent = by_row[n]
                masks = ring.masks(mine[n], theirs, query)
                given = (query.astype(wide), part.astype(wide), None, masks, shift, None)
                new = streaming.stats_backward(ring.geometry, False, ring.limits, given, (None, *cotangent))
                dq[n], dk[m] = dq[n] + new[0], dk[m] + new[1]
        return (key, dk), dq

    zeros = [jnp.zeros(x.shape, wide) for x in ring.split(k)]
    (_, dk), dq = ring.round(step, (k, zeros), [jnp.zeros(x.shape, wide) for x in queries], home=True)
    return _joined(dq, 1).astype(q.dtype), _joined(dk, 1).astype(k.dtype)


_ring_stats.defvjp(_stats_forward, _stats_backward)


# ----------------------------------------------------------------------------------------------------------------
# Attention
# ----------------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring_attend(q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, ring: Ring) -> jax.Array:
    return _attend_forward(q, k, v, beta, ring)[0]


class _Part(NamedTuple):
    """Attention to the keys seen so far: the output, the largest logit, and ``log sum exp(beta * (z - max))``."""

    out: jax.Array
    top: jax.Array
    log_sum: jax.Array


def _attend_forward(q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, ring: Ring) -> tuple[jax.Array, Any]:
    queries, betas, mine = ring.split(q), ring.split(beta, 2), ring.ids(0)
    wide, heads = accumulation(q.dtype), k.shape[2]

    def step(i: Any, shards: Any, found: Any) -> tuple[Any, Any]:
        for theirs, part, values in zip(ring.ids(i), *(ring.split(x) for x in shards), strict=True):
            for n, query in enumerate(queries):
                masks = ring.masks(mine[n], theirs, query)
                given = (query.astype(wide), part, values, betas[n], None, masks, ring.geometry)
                out, top, log_sum = streaming.attend_with_sums(*given, ring.limits)
                seen = streaming.of_heads(row_counts(query, part, masks, ring.geometry), heads) > 0
                new = _Part(out, top, jnp.where(seen, log_sum, -jnp.inf))
                found[n] = _merged(found[n], new, streaming.of_heads(betas[n], heads))
        return shards, found

    _, found = ring.round(step, (k, v), [_no_part(x, v, heads) for x in queries], home=False)
    out = _joined([part.out for part in found], 1)
    return out.astype(q.dtype), (q, k, v, beta, out, [(part.top, part.log_sum) for part in found])


def _no_part(q: jax.Array, v: jax.Array, key_heads: int) -> _Part:
    batch, length, heads, _ = q.shape
    wide = accumulation(q.dtype)
    rows = jnp.zeros((batch, key_heads, heads // key_heads, length), wide)
    hidden = jnp.full_like(rows, -jnp.inf)
    return _Part(jnp.zeros((batch, length, heads, v.shape[3]), wide), rows, hidden)


def _merged(a: _Part, b: _Part, beta: jax.Array) -> _Part:
    """Attention to the keys of both parts; a part that saw nothing has the weight 0."""
    seen = [part.log_sum > -jnp.inf for part in (a, b)]
    tops = [jnp.where(there, part.top, -jnp.inf) for there, part in zip(seen, (a, b), strict=True)]
    top = jnp.maximum(*tops)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    logs = [
        jnp.where(there, streaming.exponent(beta, part.top, top) + part.log_sum, -jnp.inf)
        for there, part in zip(seen, (a, b), strict=True)
    ]
    log_sum = jnp.logaddexp(*logs)
    shift = jnp.where(jnp.isfinite(log_sum), log_sum, 0.0)
    out = sum(_rows(jnp.exp(log - shift)) * part.out for log, part in zip(logs, (a, b), strict=True))
    return _Part(jnp.asarray(out), top, log_sum)


def _rows(x: jax.Array) -> jax.Array:
    """``x`` (``[B, K, G, T]``) as ``[B, T, N, 1]``."""
    batch, key_heads, group, length = x.shape
    return jnp.moveaxis(x.reshape(batch, key_heads * group, length), 1, 2)[..., None]


def _attend_backward(ring: Ring, saved: Any, d_out: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v, beta, out, sums = saved
    wide = accumulation(q.dtype)
    by_chunk = [ring.split(x) for x in (q, out, d_out)]
    betas, mine = ring.split(beta, 2), ring.ids(0)

    def step(i: Any, shards: Any, found: Any) -> tuple[Any, Any]:
        key, value, dk, dv = shards
        dk, dv = list(dk), list(dv)
        for m, (theirs, part, values) in enumerate(zip(ring.ids(i), ring.split(key), ring.split(value), strict=True)):
            for n, (query, result, cotangent) in enumerate(zip(*by_chunk, strict=True)):
                masks = ring.masks(mine[n], theirs, query)
                wider = (x.astype(wide) for x in (query, part, values))
                given = (*wider, betas[n], None, masks, result, *sums[n], ((), None))
                new = streaming.attend_backward(ring.geometry, ring.limits, given, cotangent)
                found[n] = (found[n][0] + new[0], found[n][1] + new[3])
                dk[m], dv[m] = dk[m] + new[1], dv[m] + new[2]
        return (key, value, dk, dv), found

    zeros = [[jnp.zeros(x.shape, wide) for x in ring.split(part)] for part in (k, v)]
    start = [(jnp.zeros(x.shape, wide), jnp.zeros(b.shape, wide)) for x, b in zip(by_chunk[0], betas, strict=True)]
    (_, _, dk, dv), found = ring.round(step, (k, v, *zeros), start, home=True)
    dq, d_beta = (list(x) for x in zip(*found, strict=True))
    return (
        _joined(dq, 1).astype(q.dtype),
        _joined(dk, 1).astype(k.dtype),
        _joined(dv, 1).astype(v.dtype),
        _joined(d_beta, 2),
    )


_ring_attend.defvjp(_attend_forward, _attend_backward)
