"""What the kernels share: the blocks that a program walks over, and the tiles that it reads and writes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ..geometry import ALL, Geometry, both
from .tiles import Tiles

LOG2E, LN2 = math.log2(math.e), math.log(2)

Number = jax.Array | int
Step = Callable[[Number, Any, bool], Any]


class Call(NamedTuple):
    """What a kernel is compiled for: sizes, geometry, tiles, and which lengths there are."""

    queries: int
    keys: int
    group: int
    columns: int
    geometry: Geometry
    tiles: Tiles
    query_lengths: bool
    key_lengths: bool

    @property
    def row_blocks(self) -> int:
        return -(-self.queries // self.tiles.rows)

    @property
    def key_blocks(self) -> int:
        return -(-self.keys // self.tiles.keys)

    @property
    def edges(self) -> bool:
        """Whether any block may have logits that do not count."""
        whole = self.keys % self.tiles.keys == 0 and self.queries % self.tiles.rows == 0
        return not whole or self.geometry.banded or self.query_lengths or self.key_lengths

    @property
    def bent(self) -> bool:
        return self.geometry.softcap > 0 or self.geometry.scale <= 0

    @property
    def factor(self) -> float:
        """What ``raw`` is multiplied by to give the logit."""
        return 1.0 if self.bent else self.geometry.scale

    @property
    def unit(self) -> float:
        return self.factor * LOG2E

    def row_block(self, i: Number) -> Number:
        """The block of rows that program ``i`` has: under causality the last first, since they see most."""
        return i if self.geometry.right == ALL else self.row_blocks - 1 - i

    def lengths(self, refs: list[Any], batch: Number) -> tuple[Number, Number]:
        """How many queries and keys this batch element has; takes the lengths off the front of ``refs``."""
        queries = refs.pop(0)[batch] if self.query_lengths else self.queries
        keys = refs.pop(0)[batch] if self.key_lengths else self.keys
        return queries, keys


def visible(at: jax.Array, to: jax.Array, queries: Number, keys: Number, geometry: Geometry) -> jax.Array:
    """Whether the query ``at`` a position sees the key at ``to``, by length and band."""
    distance = to - at
    seen = both(
        to < keys,
        at < queries,
        distance >= -geometry.left if geometry.left != ALL else None,
        distance <= geometry.right if geometry.right != ALL else None,
    )
    assert seen is not None
    return seen


Range = tuple[Number, Number, Number, Number]
"""Numbers of blocks ``low, a, b, high``: those in ``[a, b)`` are seen whole, the others of ``[low, high)`` in part."""


def key_range(first: Number, queries: Number, keys: Number, call: Call) -> Range:
    """The blocks of keys that the rows from ``first`` on see."""
    left, right = call.geometry.left, call.geometry.right
    last, size = _least(first + call.tiles.rows, queries) - 1, call.tiles.keys
    low = whole_low = 0
    high = whole_high = keys
    if left != ALL:
        low, whole_low = _most(first - left, 0), _most(last - left, 0)
    if right != ALL:
        high, whole_high = _least(keys, last + right + 1), _least(keys, first + right + 1)
    if call.query_lengths:
        high = _if(first < queries, high, 0)
    return _blocks(low, whole_low, whole_high, high, size)


def row_range(first: Number, queries: Number, keys: Number, call: Call) -> Range:
    """The blocks of rows that see the keys from ``first`` on."""
    left, right = call.geometry.left, call.geometry.right
    last, size = _least(first + call.tiles.keys, keys) - 1, call.tiles.rows
    low = whole_low = 0
    high = whole_high = queries
    if right != ALL:
        low, whole_low = _most(first - right, 0), _most(last - right, 0)
    if left != ALL:
        high, whole_high = _least(queries, last + left + 1), _least(queries, first + left + 1)
    if call.key_lengths:
        high = _if(first < keys, high, 0)
    if call.key_lengths or call.keys % call.tiles.keys:  # a block of keys that is not full is seen whole by none
        whole_high = _if(first + call.tiles.keys <= keys, whole_high, 0)
    return _blocks(low, whole_low, whole_high, high, size)


def _blocks(low: Number, whole_low: Number, whole_high: Number, high: Number, size: int) -> Range:
    begin = divided(low, size)
    end = _if(high > low, divided(_most(high, 0) + size - 1, size), begin)
    a = _least(_most(divided(whole_low + size - 1, size), begin), end)
    return begin, a, _most(_least(divided(whole_high, size), end), a), end


def over_blocks(ranges: Range, size: int, length: int, edges: bool, step: Step, carry: Any) -> Any:
    """``carry`` after ``step(start, carry, edge)`` of every block of ``length`` rows or keys, those at an edge last."""
    low, a, b, high = ranges
    if size <= length:
        carry = lax.fori_loop(a, b, lambda i, carry: step(i * size, carry, False), carry)
    if not edges:
        return carry

    def at_edge(i: Number, carry: Any) -> Any:
        block = low + i
        return step(jnp.where(block < a, block, block + b - a) * size, carry, True)

    return lax.fori_loop(0, (a - low) + (high - b), at_edge, carry)


def _least(*numbers: Number) -> Number:
    return min(numbers) if all(isinstance(x, int) for x in numbers) else functools.reduce(jnp.minimum, numbers)


def _most(*numbers: Number) -> Number:
    return max(numbers) if all(isinstance(x, int) for x in numbers) else functools.reduce(jnp.maximum, numbers)


def _if(condition: Any, x: Number, otherwise: Number) -> Number:
    """``x`` where the condition holds; by arithmetic, since the lowering takes no choice between two plain numbers."""
    if isinstance(condition, bool):
        return x if condition else otherwise
    return otherwise + condition.astype(jnp.int32) * (x - otherwise)


def divided(x: Number, size: int) -> Number:
    """``x // size`` of a number that is not negative."""
    return x // size if isinstance(x, int) else lax.div(x, np.int32(size))


# ----------------------------------------------------------------------------------------------------------------
# Tiles
# ----------------------------------------------------------------------------------------------------------------


def span(size: int) -> jax.Array:
    """``0 .. size - 1``."""
    return lax.broadcasted_iota(jnp.int32, (size,), 0)


def column(start: Number, size: int) -> jax.Array:
    """The numbers from ``start`` on, ``[size, 1]``."""
    return (start + span(size))[:, None]


def row(start: Number, size: int) -> jax.Array:
    """The numbers from ``start`` on, ``[1, size]``."""
    return (start + span(size))[None, :]


def tile(ref: Any, start: Number, size: int, length: Number | None, columns: int, head: Number | None = None) -> Any:
    """Rows from ``start`` on of a matrix (of one of its heads), with 0 from ``length`` on and beyond the columns."""
    width = ref.shape[-1]
    inside = both(
        None if length is None else column(start, size) < length,
        None if width == columns else row(0, width) < columns,
    )
    index = (pl.ds(start, size), slice(None)) if head is None else (pl.ds(start, size), head, slice(None))
    return some(ref, index, inside)


def some(ref: Any, index: tuple[Any, ...], inside: jax.Array | None) -> jax.Array:
    """A part of an array, with 0 for what is not ``inside``."""
    return ref[index] if inside is None else triton.load(ref.at[index], mask=inside, other=0.0)


def put_tile(ref: Any, values: jax.Array, length: Number, columns: int) -> None:
    """Write the rows up to ``length`` of a block of a matrix."""
    size, width = values.shape
    inside = (column(0, size) < length) & (row(0, width) < columns)
    triton.store(ref, values.astype(ref.dtype), mask=inside)
