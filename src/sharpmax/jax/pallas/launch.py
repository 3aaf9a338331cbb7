"""The kernels as functions of arrays: which block of what array a program gets.

Arrays keep the layout of attention, ``[B, T, N, D]`` and ``[B, S, K, D]``, and what belongs to rows is ``[B, N, T]``.
Programs are numbered by block, head and batch element, the blocks of a head next to each other: they share its keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas.triton import CompilerParams

from ..geometry import Geometry, Masks
from .blocks import Call, divided
from .kernels import key_kernel, query_kernel, stats_kernel
from .tiles import Plan, Tiles

SMALLEST_WIDTH = 16
"""Columns that a product of tiles has at least; narrower heads are filled up with zeros as they are read."""


def statistics(
    q: jax.Array, k: jax.Array, masks: Masks, geometry: Geometry, with_min: bool, plan: Plan
) -> list[jax.Array]:
    """Maximum, sum, moment and perhaps minimum of every row, ``[B, N, T]``; of rows that see no key they are anything.

    Maximum and minimum are those of raw logits, and the moment is in units of log 2: see :mod:`.kernels`.
    """
    call, width = call_of(q, k, masks, geometry, plan.stats), _width(q)
    rows = jax.eval_shape(lambda q: q[..., 0].swapaxes(1, 2).astype(jnp.float32), q)
    query, key, by_row = _specs_by_rows(call, width)
    return _run(
        functools.partial(stats_kernel, call=call, with_min=with_min),
        (call.row_blocks, q.shape[2], q.shape[0]),
        [(q, query), (k, key), *_lengths(masks)],
        [(rows, by_row)] * (3 + with_min),
        plan.stats,
        plan.interpret,
    )


def query_gradient(
    q: jax.Array, k: jax.Array, masks: Masks, by_row: tuple[jax.Array, ...], geometry: Geometry, plan: Plan
) -> jax.Array:
    """dq, from the raw maximum of every row and the cotangents ``gL + gA`` and ``gA log 2``."""
    call, width = call_of(q, k, masks, geometry, plan.query), _width(q)
    query, key, row = _specs_by_rows(call, width)
    return _run(
        functools.partial(query_kernel, call=call),
        (call.row_blocks, q.shape[2], q.shape[0]),
        [(q, query), (k, key), *_lengths(masks), *((x, row) for x in by_row)],
        [(jax.eval_shape(jnp.asarray, q), query)],
        plan.query,
        plan.interpret,
    )[0]


def key_gradient(
    q: jax.Array, k: jax.Array, masks: Masks, by_row: tuple[jax.Array, ...], geometry: Geometry, plan: Plan
) -> jax.Array:
    """dk, from the same."""
    call, width = call_of(q, k, masks, geometry, plan.key), _width(q)
    query = pl.BlockSpec((None, call.queries, call.group, width), lambda i, h, b: (b, 0, h, 0))
    key = pl.BlockSpec((None, plan.key.keys, None, width), lambda i, h, b: (b, i, h, 0))
    row = pl.BlockSpec((None, call.group, call.queries), lambda i, h, b: (b, h, 0))
    return _run(
        functools.partial(key_kernel, call=call),
        (call.key_blocks, k.shape[2], k.shape[0]),
        [(q, query), (k, key), *_lengths(masks), *((x, row) for x in by_row)],
        [(jax.eval_shape(jnp.asarray, k), key)],
        plan.key,
        plan.interpret,
    )[0]


def call_of(q: jax.Array, k: jax.Array, masks: Masks, geometry: Geometry, tiles: Tiles) -> Call:
    """What a kernel is compiled for."""
    group = q.shape[2] // k.shape[2]
    lengths = masks.query_lengths is not None, masks.key_lengths is not None
    return Call(q.shape[1], k.shape[1], group, q.shape[3], geometry, tiles, *lengths)


def _width(q: jax.Array) -> int:
    return max(SMALLEST_WIDTH, pl.next_power_of_2(q.shape[3]))


def _lengths(masks: Masks) -> list[tuple[jax.Array, Any]]:
    given = [x for x in (masks.query_lengths, masks.key_lengths) if x is not None]
    return [(x, pl.BlockSpec(x.shape, lambda i, h, b: (0,))) for x in given]


def _specs_by_rows(call: Call, width: int) -> tuple[Any, Any, Any]:
    """A block of queries, all keys of its head, and what belongs to its rows."""
    rows, group = call.tiles.rows, call.group
    return (
        pl.BlockSpec((None, rows, None, width), lambda i, h, b: (b, call.row_block(i), h, 0)),
        pl.BlockSpec((None, call.keys, None, width), lambda i, h, b: (b, 0, divided(h, group), 0)),
        pl.BlockSpec((None, None, rows), lambda i, h, b: (b, h, call.row_block(i))),
    )


def _run(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    given: list[tuple[Any, Any]],
    found: list[tuple[Any, Any]],
    tiles: Tiles,
    interpret: bool,
) -> list[jax.Array]:
    """The results of a kernel for arrays and the blocks of them that its programs get."""
    arrays, in_specs = zip(*given, strict=True)
    shapes, out_specs = zip(*found, strict=True)
    return pl.pallas_call(
        kernel,
        out_shape=list(shapes),
        grid=grid,
        in_specs=in_specs,
        out_specs=list(out_specs),
        compiler_params=CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name=kernel.func.__name__,  # pyright: ignore[reportFunctionMemberAccess]
    )(*arrays)
