"""Logits in blocks: the walk over queries and keys that the streaming implementation does, forward and backward.

A :class:`Pair` is one batch element and one key head, with the group of query heads that share it, so keys and values
are never repeated. Blocks without any visible logit are never computed. Lengths need not be multiples of a block: the
last block then starts earlier, and what it has in common with the one before it counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .geometry import ALL, Geometry, Masks, accumulation, both, hidden_logit, shown, without_padding
from .varying import alike

Numbers = jax.Array | int


class Sizes(NamedTuple):
    """How many rows (positions times heads of a group) and keys a block has at most, and whether pairs run at once."""

    rows: int
    keys: int
    together: bool


CPU, ACCELERATOR = Sizes(512, 512, together=False), Sizes(1024, 1024, together=True)
"""On a CPU one block at a time, small enough for the cache; measured by benchmarks/attention_jax.py."""


def sizes() -> Sizes:
    """The sizes for the backend that JAX runs on."""
    return CPU if jax.default_backend() == "cpu" else ACCELERATOR


class Rows(NamedTuple):
    """A block of queries: its number, where it starts, and its queries ``[G, rows, columns]``."""

    number: Numbers
    start: Numbers
    query: jax.Array


class Block(NamedTuple):
    """Logits ``[G, rows, keys]`` and what they were made of: ``slope`` is the derivative of the softcap."""

    start: Numbers
    key: jax.Array
    logits: jax.Array
    slope: jax.Array | None
    seen: jax.Array | None


class Pair:
    """One batch element and one key head: ``q [G, T, D]``, ``k [S, D]``, ``bias`` and mask ``[G|1, T|1, S|1]``."""

    def __init__(
        self, q: jax.Array, k: jax.Array, bias: jax.Array | None, masks: Masks, geometry: Geometry, limits: Sizes
    ) -> None:
        self.dtype = accumulation(q.dtype)
        self.q, self.k, self.bias, self.masks, self.geometry = q, k.astype(self.dtype), bias, masks, geometry
        self.group, self.queries = q.shape[:2]
        self.keys = k.shape[0]
        self.row_step = min(self.queries, max(1, limits.rows // self.group))
        self.key_step = min(self.keys, limits.keys)
        self.tight = not limits.together

    def each_rows(self, f: Callable[[Rows], Any]) -> Any:
        """``f`` of every block of rows; what it gives, ``[G, rows, ...]``, is put together to ``[G, T, ...]``."""
        found = lax.map(lambda i: f(self.rows(i)), jnp.arange(-(-self.queries // self.row_step)))
        return jax.tree.map(self._joined, found)

    def carry_rows(self, f: Callable[[Rows, Any], tuple[Any, Any]], carry: Any) -> tuple[Any, Any]:
        """The same with a carry that goes from block to block."""
        numbers = jnp.arange(-(-self.queries // self.row_step))
        carry, found = lax.scan(lambda carry, i: f(self.rows(i), carry), alike(carry, self.q), numbers)
        return carry, jax.tree.map(self._joined, found)

    def _joined(self, parts: jax.Array) -> jax.Array:
        """Blocks ``[n, G, rows, ...]`` as ``[G, T, ...]``; the last may start within the one before it."""
        blocks, group, step, *rest = parts.shape
        joined = jnp.moveaxis(parts, 0, 1).reshape(group, blocks * step, *rest)
        twice = blocks * step - self.queries
        if twice == 0:
            return joined
        last = (blocks - 1) * step
        return jnp.concatenate([joined[:, :last], joined[:, last + twice :]], axis=1)

    def rows(self, i: Numbers) -> Rows:
        """Block ``i`` of the queries."""
        start = jnp.minimum(i * self.row_step, self.queries - self.row_step)
        return Rows(i, start, self.of_rows(self.q, start).astype(self.dtype))

    def of_rows(self, x: jax.Array, start: Numbers) -> jax.Array:
        """The part of ``x`` (``[G, T, ...]``) that belongs to a block of rows."""
        return lax.dynamic_slice_in_dim(x, start, self.row_step, axis=1)

    def of_keys(self, x: jax.Array, start: Numbers) -> jax.Array:
        """The part of ``x`` (``[S, columns]``) that belongs to a block of keys."""
        return lax.dynamic_slice_in_dim(x, start, self.key_step, axis=0)

    def add_to_keys(self, x: jax.Array, start: Numbers, part: jax.Array) -> jax.Array:
        """``x`` with ``part`` added where :meth:`of_keys` would read it."""
        return lax.dynamic_update_slice_in_dim(x, self.of_keys(x, start) + part, start, axis=0)

    def over_keys(self, rows: Rows, step: Callable[[Block, Any], Any], carry: Any, *, slope: bool = False) -> Any:
        """``carry`` after ``step`` of every block of keys that the rows see some of."""
        low, high = self._range(rows)
        start = alike(carry, self.q)
        return lax.fori_loop(low, high, lambda j, carry: step(self._block(rows, j, slope), carry), start)

    def _range(self, rows: Rows) -> tuple[Numbers, Numbers]:
        """The first block of keys and the one after the last that the rows see some of."""
        left, right = self.geometry.left, self.geometry.right
        first, last = rows.number * self.row_step, (rows.number + 1) * self.row_step - 1
        low, high, shift = 0, self.keys, 0 if self.masks.shift is None else self.masks.shift
        if left != ALL:
            low = jnp.maximum(first + shift - left, 0)
        if right != ALL:
            high = jnp.clip(jnp.minimum(last, self.queries - 1) + shift + right + 1, 0, high)
        if self.tight and self.masks.key_lengths is not None:
            high = jnp.minimum(high, self.masks.key_lengths)
        if self.tight and self.masks.query_lengths is not None:
            high = jnp.where(first < self.masks.query_lengths, high, 0)
        return low // self.key_step, (high + self.key_step - 1) // self.key_step

    def _block(self, rows: Rows, j: Numbers, slope: bool) -> Block:
        start = jnp.minimum(j * self.key_step, self.keys - self.key_step)
        key, cap = self.of_keys(self.k, start), self.geometry.softcap
        z = jnp.einsum("gtd,sd->gts", rows.query, key) * self.geometry.scale
        bent = None
        if cap > 0:
            z = jnp.tanh(z / cap)
            bent = 1.0 - z * z if slope else None
            z = cap * z
        seen = self._seen(rows, j, start)
        if self.bias is not None:
            tile = self.tile(self.bias, rows.start, start)
            there = shown(tile, self.dtype)
            z, seen = (z + jnp.where(there, tile, 0)).astype(self.dtype), both(seen, there)
        if seen is not None:
            z = jnp.where(seen, z, hidden_logit(self.dtype))
        return Block(start, key, z, bent, seen)

    def _seen(self, rows: Rows, j: Numbers, start: Numbers) -> jax.Array | None:
        """Which logits of a block count, broadcastable to ``[G, rows, keys]``; ``None`` if all do."""
        at, keys = rows.start + jnp.arange(self.row_step), start + jnp.arange(self.key_step)
        _, query_length, key_length, shift = self.masks
        return both(
            self.geometry.visible(at if shift is None else at + shift, keys),
            None if self.keys % self.key_step == 0 else keys >= j * self.key_step,
            None if self.queries % self.row_step == 0 else (at >= rows.number * self.row_step)[:, None],
            None if query_length is None else (at < query_length)[:, None],
            None if key_length is None else keys < key_length,
            None if self.masks.mask is None else self.tile(self.masks.mask, rows.start, start),
        )

    def tile(self, x: jax.Array, row: Numbers, key: Numbers) -> jax.Array:
        """The part of a bias or mask that belongs to a block, broadcastable to ``[G, rows, keys]``."""
        return lax.dynamic_slice(x, *self._tile(x, row, key))

    def add_to_tile(self, x: jax.Array, row: Numbers, key: Numbers, part: jax.Array) -> jax.Array:
        """``x`` with a block ``part`` added to its tile, summed over the axes that ``x`` has once."""
        start, shape = self._tile(x, row, key)
        axes = tuple(axis for axis in range(3) if x.shape[axis] == 1)
        here = lax.dynamic_slice(x, start, shape) + jnp.sum(part, axes, keepdims=True)
        return lax.dynamic_update_slice(x, here, start)

    def _tile(self, x: jax.Array, row: Numbers, key: Numbers) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        starts, steps = (0, row, key), (self.group, self.row_step, self.key_step)
        alone = [size == 1 for size in x.shape]
        start = tuple(0 if one else at for one, at in zip(alone, starts, strict=True))
        return start, tuple(1 if one else step for one, step in zip(alone, steps, strict=True))


class Grouped(NamedTuple):
    """Arguments with a batch axis and an axis of key heads in front (or 1 for what is shared)."""

    q: jax.Array
    k: jax.Array
    v: jax.Array | None
    bias: jax.Array | None
    masks: Masks

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array, v: jax.Array | None, bias: jax.Array | None, masks: Masks) -> Grouped:
        """The arguments of attention by batch element and key head; padding becomes 0."""
        key_heads = k.shape[2]
        k = jnp.moveaxis(without_padding(k, masks.key_lengths), 1, 2)
        v = None if v is None else jnp.moveaxis(without_padding(v, masks.key_lengths), 1, 2)
        lengths = (None if x is None else x[:, None] for x in masks[1:])
        return cls(
            by_pair(without_padding(q, masks.query_lengths), key_heads),
            k,
            v,
            _by_group(bias, key_heads),
            Masks(_by_group(masks.mask, key_heads), *lengths),
        )


def by_pair(x: jax.Array, key_heads: int) -> jax.Array:
    """``x`` (``[B, T, N, ...]``) as ``[B, K, G, T, ...]``."""
    batch, length, heads, *rest = x.shape
    return jnp.moveaxis(x.reshape(batch, length, key_heads, heads // key_heads, *rest), 1, 3)


def from_pair(x: jax.Array) -> jax.Array:
    """``x`` (``[B, K, G, T, ...]``) as ``[B, T, N, ...]``."""
    batch, key_heads, group, length, *rest = x.shape
    return jnp.moveaxis(x, 3, 1).reshape(batch, length, key_heads * group, *rest)


def _by_group(x: jax.Array | None, key_heads: int) -> jax.Array | None:
    """A bias or mask ``[B|1, N|1, T|1, S|1]`` as ``[B|1, K|1, G|1, T|1, S|1]``."""
    if x is None:
        return None
    batch, heads, *rest = x.shape
    return x.reshape(batch, *((1, 1) if heads == 1 else (key_heads, heads // key_heads)), *rest)


def over_pairs(f: Callable[..., tuple[Any, Any]], arguments: Any, shape: tuple[int, int], together: bool) -> Any:
    """``f`` of every batch element and key head, and what is shared between them.

    The leaves of ``arguments`` have the axes ``shape`` in front, 1 for what is shared. ``f`` gives two results: one
    that is stacked to ``[B, K, ...]``, and the gradient of the bias (or ``None``), summed where the bias is shared.
    """
    batch, heads = shape

    def by_head(*given: Any) -> tuple[Any, Any]:
        return _over(f, given, heads, together)

    return _over(by_head, arguments, batch, together)


def _over(f: Callable[..., tuple[Any, Any]], arguments: Any, size: int, together: bool) -> tuple[Any, Any]:
    leaves, tree = jax.tree.flatten(arguments)
    mapped = [leaf.shape[0] == size and size > 1 for leaf in leaves]
    bias = arguments[0].bias
    summed = bias is not None and bias.shape[0] == 1

    def one(*parts: jax.Array) -> tuple[Any, Any]:
        rest = iter(parts)
        given = [next(rest) if own else leaf[0] for own, leaf in zip(mapped, leaves, strict=True)]
        return f(*jax.tree.unflatten(tree, given))

    def stacked(x: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[None], x)

    own = [leaf for leaf, its in zip(leaves, mapped, strict=True) if its]
    if size == 1:
        return stacked(one())
    if together:
        found, gradient = jax.vmap(one)(*own)
        return found, gradient if not summed or gradient is None else gradient.sum(0, keepdims=True)
    if not summed:
        return lax.map(lambda parts: one(*parts), own)

    def add(total: Any, parts: list[jax.Array]) -> tuple[Any, Any]:
        found, gradient = one(*parts)
        return jax.tree.map(jnp.add, total, gradient), found

    shapes = jax.eval_shape(lambda: one(*(x[0] for x in own))[1])
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, found = lax.scan(add, alike(zeros, own), own)
    return found, stacked(total)
