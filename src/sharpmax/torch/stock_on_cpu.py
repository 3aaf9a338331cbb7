"""torch's own attention for the CPU, on ``beta * q``: the second pass of streaming attention where that is exact.

It computes in float32 or float64, so nothing of ``beta * q`` is rounded to a narrower type. What torch's kernel knows
nothing of (key lengths, bands other than its causality) is dealt with in pieces: batch elements of one length, and
blocks of rows with the keys that any of them sees. What is left to hide there, and numbers that are added to logits,
it takes as a mask of numbers, of one piece at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import TYPE_OF_BITS, Buffers, Hidden, accumulation, bits, hiding, index_of, shown
from .geometry import ALL, Geometry

LARGEST = 1024.0
"""The largest logsumexp to subtract from logits: in float32, their powers are right to four digits then."""
ROWS = 512
"""Rows of a block with a mask of its own."""
MASK = 1 << 21
"""Numbers of the mask of a block, at most, if that has more than one row for each head."""


def serves(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, geometry: Geometry, mask: Tensor | None,
    key_lengths: Tensor | None, dropout_p: float, *, of_numbers: bool = False,
) -> bool:  # fmt: skip
    """Whether torch's own kernel on the CPU does the same on ``beta * q``, in float32 or float64.

    A mask ``of_numbers`` is one whose gradient is asked for, or that which beta has through it: the kernel gives
    neither. Of logits that are no numbers it makes 0, so none may be possible. What it gives may turn out not to be
    :func:`exact`.
    """
    if q.device.type != "cpu" or dropout_p > 0 or geometry.softcap > 0 or geometry.scale <= 0:
        return False
    if q.numel() == 0 or k.numel() == 0 or q.shape[-1] != v.shape[-1]:
        return False
    if of_numbers and mask is not None and mask.dtype != torch.bool:
        return False
    dtype = accumulation(q.dtype)
    of_queries, of_keys = (torch.linalg.vector_norm(x, dim=-1, dtype=dtype) for x in (q, k))
    if key_lengths is not None:
        of_keys = of_keys.masked_fill(torch.arange(k.shape[2]) >= key_lengths[:, None, None], 0.0)
    most = (of_queries * beta.abs()).amax() * of_keys.amax() * geometry.scale
    return bool(most < torch.finfo(dtype).max)  # not so of what is no number


def of_numbers(x: Tensor) -> bool:
    """Whether the sum is a number: all elements are, then. It takes a tenth of the time of asking each."""
    return bool(x.sum(dtype=accumulation(x.dtype)).isfinite())


def exact(lse: Tensor) -> bool:
    """Whether logits times beta were numbers, and small enough that powers of them are right though they are rounded.

    They are not where all logits of a row are far from 0, or too large for their type.
    """
    return bool(torch.where(lse == -math.inf, 0.0, lse).abs().amax() <= LARGEST)


class _Piece(NamedTuple):
    """Batch elements, heads of keys and of queries, rows and keys that are attended at once."""

    batches: slice
    key_heads: slice
    heads: slice
    rows: slice
    keys: slice
    causal: bool
    added: Tensor | None
    """To logits times beta: ``-inf`` where a key is not seen."""

    @property
    def of_rows(self) -> tuple[slice, ...]:
        return self.batches, self.heads, self.rows

    @property
    def of_keys(self) -> tuple[slice, ...]:
        return self.batches, self.key_heads, self.keys

    def empty(self) -> Tensor | None:
        """Which of its rows see nothing."""
        return None if self.added is None else self.added.amax(-1) == -math.inf


class _Pieces:
    """The pieces of a call."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, geometry: Geometry, mask: Tensor | None,
        key_lengths: Tensor | None,
    ) -> None:  # fmt: skip
        dtype = accumulation(q.dtype)
        wide = (q.to(dtype) * beta[..., None], k.to(dtype), v.to(dtype))
        self.q, self.k, self.v = (x if x.stride(-1) == 1 else x.contiguous() for x in wide)  # as the kernel takes them
        self.beta, self.geometry, self.mask, self.key_lengths = beta, geometry, mask, key_lengths
        self.buffers = Buffers(self.q)
        self.scales = mask is not None and mask.dtype != torch.bool and bool((beta > 0).all())

    def __iter__(self) -> Iterator[_Piece]:
        left, right, lower_right = self.geometry[2:]
        queries, heads = self.q.shape[2], (slice(0, self.k.shape[1]), slice(0, self.q.shape[1]))
        for batches, length in self._lengths():
            causal = left == ALL and right == 0 and (not lower_right or queries == length)
            if length == 0:
                continue
            if self.mask is None and (causal or not self.geometry.banded):
                yield _Piece(batches, *heads, slice(0, queries), slice(0, length), causal, None)
            else:
                yield from self._blocks(batches, length)

    def _lengths(self) -> Iterator[tuple[slice, int]]:
        """Batch elements that have the same number of keys, and that number."""
        batch, most = self.q.shape[0], self.k.shape[2]
        lengths = [most] * batch if self.key_lengths is None else self.key_lengths.clamp(0, most).tolist()
        first = 0
        for length, same in itertools.groupby(lengths):
            count = len(list(same))
            yield slice(first, first + count), int(length)
            first += count

    def _blocks(self, batches: slice, length: int) -> Iterator[_Piece]:
        """Blocks of rows with a mask; where that is large, few rows, or few batch elements and heads at a time."""
        geometry, mask, queries, key_heads = self.geometry, self.mask, self.q.shape[2], self.k.shape[1]
        group = self.q.shape[1] // key_heads
        biased = mask is not None and mask.dtype != torch.bool
        if mask is not None and mask.shape[2] == 1 and not biased and not geometry.banded:
            rows, elements, step = queries, [batches], key_heads  # one row of the mask is that of all
        else:
            apart = [mask is not None and (biased or mask.shape[axis] > 1) for axis in (0, 1)]
            elements = [slice(b, b + 1) for b in range(batches.start, batches.stop)] if apart[0] else [batches]
            band = length if ALL in geometry[2:4] else min(length, ROWS + geometry.left + geometry.right)
            of_head = band * (group if apart[1] else 1)
            rows = max(1, min(ROWS, MASK // of_head))
            step = max(1, MASK // (rows * of_head)) if apart[1] else key_heads
        shift = length - queries if geometry.lower_right else 0
        for first in range(0, queries, rows):
            last = min(first + rows, queries)
            low = 0 if geometry.left == ALL else max(0, first + shift - geometry.left)
            high = length if geometry.right == ALL else min(length, last + shift + geometry.right)
            if low >= high:
                continue
            at = (slice(first, last), slice(low, high))
            for part, head in itertools.product(elements, range(0, key_heads, step)):
                of_keys = slice(head, min(head + step, key_heads))
                heads = slice(of_keys.start * group, of_keys.stop * group)
                yield _Piece(part, of_keys, heads, *at, False, self._added(part, heads, *at, length))

    def _added(self, batches: slice, heads: slice, rows: slice, keys: slice, length: int) -> Tensor:
        """What is added to logits times beta, ``[batches, heads, rows, keys]``: of any but the last, 1 stands for all.

        Keys from ``length`` on are not among ``keys``.
        """
        dtype = self.q.dtype
        of_rows, of_keys = (torch.arange(x.start, x.stop, dtype=torch.int32) for x in (rows, keys))
        seen = self.geometry.visible(of_rows, of_keys, self.q.shape[2], length)
        if self.mask is None:
            assert seen is not None
            return self._of(seen, len(of_keys))
        tile = self.mask[index_of(self.mask, batches, heads, rows, keys)]
        if tile.dtype == torch.bool:
            return self._of(tile if seen is None else seen & tile, len(of_keys))
        beta = self.beta[batches, heads, rows, None]
        if self.scales:  # -inf times beta is -inf
            kept, cut = self.buffers("mask", *tile.shape), hiding(tile.dtype, dtype)
            tile = torch.ops.aten.threshold.out(tile.to(dtype), cut, -math.inf, out=kept)
        else:
            there = shown(tile, dtype)
            seen = there if seen is None else seen & there
        wide = tile.to(dtype).expand(*tile.shape[:-1], len(of_keys))
        added = self._room(torch.broadcast_shapes(beta.shape, wide.shape), len(of_keys))
        torch.mul(wide, beta, out=added)
        if seen is not None:
            Hidden.of(0, seen, dtype).fill(added, -math.inf)
        return added

    def _of(self, seen: Tensor, keys: int) -> Tensor:
        """0 where a key is seen and ``-inf`` elsewhere, by its bits."""
        added = self._room(seen.shape, keys)
        added.view(TYPE_OF_BITS[added.dtype]).copy_(seen).sub_(1).bitwise_and_(bits(-math.inf, added.dtype))
        return added

    def _room(self, shape: torch.Size | tuple[int, ...], keys: int) -> Tensor:
        """Memory for what is added in a piece, the same for every one."""
        return self.buffers("added", *(1,) * (4 - len(shape)), *shape[:-1], keys)


def attend(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, geometry: Geometry, mask: Tensor | None, key_lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output, not rounded, and the logsumexp of ``beta`` times the logits."""
    x = _Pieces(q, k, v, beta, geometry, mask, key_lengths)
    out = x.q.new_zeros(x.q.shape)
    lse = x.q.new_full(x.q.shape[:-1], -math.inf)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for piece in x:
        here, there = piece.of_rows, piece.of_keys
        found, sums = kernel(
            x.q[here], x.k[there], x.v[there], 0.0, piece.causal, attn_mask=piece.added, scale=geometry.scale
        )
        empty = piece.empty()
        out[here] = found if empty is None else found.masked_fill_(empty[..., None], 0.0)
        lse[here] = sums if empty is None else sums.masked_fill_(empty, -math.inf)
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, geometry: Geometry, mask: Tensor | None, key_lengths: Tensor | None,
    out: Tensor, lse: Tensor, grad_out: Tensor, need_beta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """With ``dx`` the gradient of ``x = beta * q``: that of q is ``beta * dx``, that of beta ``<dx, q>``."""
    x = _Pieces(q, k, v, beta, geometry, mask, key_lengths)
    out, grad_out = out.to(x.q.dtype), grad_out.to(x.q.dtype).contiguous()
    lse = torch.where(lse == -math.inf, 0.0, lse)  # powers of what is not seen are 0 then
    dx, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (x.q, x.k, x.v))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for piece in x:
        here, there = piece.of_rows, piece.of_keys
        dx[here], d_key, d_value = kernel(
            grad_out[here], x.q[here], x.k[there], x.v[there], out[here], lse[here], 0.0, piece.causal,
            attn_mask=piece.added, scale=geometry.scale,
        )  # fmt: skip
        dk[there] += d_key
        dv[there] += d_value
    d_beta = (dx * q).sum(-1) if need_beta else None
    return (dx * beta[..., None]).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_beta
