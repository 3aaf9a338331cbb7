"""Logits in blocks: the walk over queries and keys that the streaming implementation does, forward and backward.

A *span* is a few batch elements and key heads at a time. The query heads that share a key head are folded into the rows
of its blocks, so keys and values are never repeated. A block is small enough to stay in cache, and blocks without any
visible logit are never computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.stats import ZERO_EXPONENT
from .geometry import ALL, Geometry


class Sizes(NamedTuple):
    """How many rows and keys one block has at most, and how many logits all blocks of a span have together."""

    rows: int
    keys: int
    logits: int


ROUNDED_AWAY = 1e30
"""Logits up to this change nothing when they are added to :func:`hidden_logit`."""
CPU, ACCELERATOR = Sizes(512, 512, 1 << 18), Sizes(1024, 4096, 1 << 25)


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """The type that everything is computed in: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def hidden_logit(dtype: torch.dtype) -> float:
    """What stands for a logit that is not seen: finite, so that 0 times it is 0."""
    return torch.finfo(dtype).min / 2


def shown(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Where a mask of numbers, added to logits of type ``dtype``, hides nothing; what is no number does not hide."""
    return ~(mask <= hiding(mask.dtype, dtype))


def hiding(of_mask: torch.dtype, of_logits: torch.dtype) -> float:
    """Up to which number a mask hides."""
    return max(hidden_logit(of_mask), hidden_logit(of_logits))


def index_of(mask: Tensor, *parts: slice) -> tuple[slice, ...]:
    """Where the part of a mask stands in it whose axes may have size 1."""
    return tuple(slice(0, 1) if size == 1 else part for size, part in zip(mask.shape, parts, strict=True))


def merged(highest: Tensor, total: Tensor, moment: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum and moment of rows, from those of their parts along ``dim``: :meth:`sharpmax.RowStats.merge`.

    All are finite: a part without keys has a maximum below all others. The maximum of a row without keys means
    nothing.
    """
    top = highest.amax(dim, keepdim=True)
    shift = (highest - top).clamp_(min=ZERO_EXPONENT)
    scale = shift.exp()
    return top.squeeze(dim), (scale * total).sum(dim), (scale * (moment + shift * total)).sum(dim)


class Buffers:
    """Memory that is used again for every block."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.held: dict[str, Tensor] = {}
        self.views: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        view = self.views.get((name, shape))
        if view is None:
            view = self.views[name, shape] = self._view(name, shape)
        return view

    def _view(self, name: str, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        held = self.held.get(name)
        if held is None or held.numel() < size:
            held = self.held[name] = self.like.new_empty(size, dtype=accumulation(self.like.dtype))
            self.views = {key: view for key, view in self.views.items() if key[0] != name}  # of what was too small
        return held[:size].view(shape)


class Rows(NamedTuple):
    """A block of query positions ``[first, last)`` of a span and the key blocks that it sees some of."""

    first: int
    last: int
    keys: list[tuple[int, int]]


class Hidden(NamedTuple):
    """Which logits of a block do not count: those before column ``first`` do, ``kept`` tells of the others.

    It has all bits of those that count, and none of the others, in numbers of the width of logits: on a CPU, these are
    filled by bits in a tenth of the time that ``masked_fill_`` takes.
    """

    first: int
    kept: Tensor

    @classmethod
    def of(cls, first: int, seen: Tensor, dtype: torch.dtype) -> Hidden:
        return cls(first, seen.to(TYPE_OF_BITS[dtype]).neg_())

    def fill(self, block: Tensor, value: float) -> None:
        """Put ``value`` where logits of a block do not count, whatever was there."""
        part = block[..., self.first :].view(self.kept.dtype)
        part.bitwise_and_(self.kept)
        if value != 0:
            part.bitwise_or_(self.kept.add(1).mul_(bits(value, block.dtype)))


TYPE_OF_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
"""The type of whole numbers as wide as a type that is accumulated in."""


@functools.cache
def bits(value: float, dtype: torch.dtype) -> int:
    """A number as the whole number that has its bits."""
    return int(torch.tensor(value, dtype=dtype).view(TYPE_OF_BITS[dtype]))


class Span:
    """Some batch elements and key heads of a call: tensors ``[n, length, columns]``, with ``n`` pairs of the two."""

    def __init__(self, call: Call, batches: slice, heads: slice) -> None:
        self.call, self.batches, self.heads = call, batches, heads
        self.shape = (batches.stop - batches.start, heads.stop - heads.start, call.group)
        self.n = self.shape[0] * self.shape[1]
        self.key = self._whole(call.k)
        self.value = None if call.v is None else self._whole(call.v)
        self.lengths = None
        shortest = longest = call.k.shape[2]
        if call.key_lengths is not None:
            self.lengths = call.key_lengths[batches].to(torch.int32).view(-1, 1, 1, 1, 1)
            shortest = 0
            if call.q.device.type == "cpu":
                shortest, longest = (int(x) for x in torch.aminmax(self.lengths.clamp(0, longest)))
        offset = call.q.shape[2] if call.geometry.lower_right else 0
        self.shifts = (shortest - offset, longest - offset) if call.geometry.lower_right else (0, 0)
        self.shortest, self.longest = shortest, longest

    def _whole(self, x: Tensor) -> Tensor:
        """Keys or values of the span; what lies beyond a key length may be anything, and becomes 0."""
        part = x[self.batches, self.heads].to(self.call.dtype)
        if self.call.key_lengths is not None:
            beyond = self.call.positions >= self.call.key_lengths[self.batches].view(-1, 1, 1)
            part = part.masked_fill(beyond[..., None], 0.0)
        return part.reshape(self.n, x.shape[2], x.shape[3])

    def rows(self) -> Iterator[Rows]:
        """The blocks of rows, from the first to the last."""
        left, right = self.call.geometry.left, self.call.geometry.right
        length, step = self.call.q.shape[2], max(1, self.call.sizes.rows // self.call.group)
        for first in range(0, length, step):
            last = min(first + step, length)
            low = 0 if left == ALL else max(0, first + self.shifts[0] - left)
            high = self.longest if right == ALL else min(self.longest, last + self.shifts[1] + right)
            keys = self.call.sizes.keys
            yield Rows(first, last, [(j, min(j + keys, high)) for j in range(low, high, keys)])

    def of_rows(self, x: Tensor, rows: Rows) -> Tensor:
        """The part of ``x`` (``[B, Hq, Lq, ...]``) that belongs to a block of rows: ``[n, rows, ...]``."""
        part = self._grouped(x)[self.batches, self.heads, :, rows.first : rows.last]
        return part.reshape(self.n, self.call.group * (rows.last - rows.first), *x.shape[3:])

    def put_rows(self, x: Tensor, rows: Rows, part: Tensor) -> None:
        """Write ``part`` (``[n, rows, ...]``) where :meth:`of_rows` would read it."""
        target = self._grouped(x)[self.batches, self.heads, :, rows.first : rows.last]
        target.copy_(part.view(target.shape))

    def put_keys(self, x: Tensor, part: Tensor) -> None:
        """Write ``part`` (``[n, Lk, columns]``) into ``x`` (``[B, Hkv, Lk, columns]``)."""
        x[self.batches, self.heads] = part.view(*self.shape[:2], *x.shape[2:]).to(x.dtype)

    def _grouped(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.call.group))

    def query(self, rows: Rows) -> Tensor:
        """The queries of a block of rows, times the scale."""
        return self.of_rows(self.call.q, rows).to(self.call.dtype) * self.call.geometry.scale

    def hidden(self, rows: Rows, keys: tuple[int, int], mask: bool = True) -> Hidden | None:
        """Which logits of a block do not count, broadcastable to ``[b, h, group, rows, keys]``; ``None`` if all do.

        Without ``mask``, keys that it hides count.
        """
        call, (start, stop) = self.call, keys
        mask = mask and call.mask is not None
        if mask or self.lengths is not None:
            return self._hidden(rows, keys, mask)
        place = (rows.first - start, rows.last - rows.first, stop - start)  # what a band hides follows from that
        if place not in call.bands:
            call.bands[place] = self._hidden(rows, keys, mask)
        return call.bands[place]

    def _hidden(self, rows: Rows, keys: tuple[int, int], mask: bool) -> Hidden | None:
        call, (start, stop) = self.call, keys
        left, right = call.geometry.left, call.geometry.right
        clear = stop <= self.shortest
        clear &= left == ALL or start >= rows.last - 1 + self.shifts[1] - left
        first = 0
        if clear:  # up to there, every row sees every key
            first = stop - start if right == ALL else max(0, rows.first + self.shifts[0] + right + 1 - start)
        seen = None
        if first < stop - start:
            first = 0 if mask else first
            lengths = call.k.shape[2] if self.lengths is None else self.lengths
            at = torch.arange(rows.first, rows.last, device=call.q.device, dtype=torch.int32)
            seen = call.geometry.visible(at, call.positions[start + first : stop], call.q.shape[2], lengths)
        elif mask:
            first = 0
        if mask:
            tile = self.mask_tile(rows, keys)
            there = tile if tile.dtype == torch.bool else shown(tile, call.dtype)
            seen = there if seen is None else seen & there
        return None if seen is None else Hidden.of(first, seen, call.dtype)

    def mask_index(self, rows: Rows, keys: tuple[int, int]) -> tuple[slice, ...]:
        """Where the mask of a block stands in the mask, whose axes may have size 1."""
        mask, group = self.call.mask, self.call.group
        assert mask is not None
        heads = slice(self.heads.start * group, self.heads.stop * group)
        return index_of(mask, self.batches, heads, slice(rows.first, rows.last), slice(*keys))

    def mask_tile(self, rows: Rows, keys: tuple[int, int]) -> Tensor:
        """The mask of a block, broadcastable to ``[b, h, group, rows, keys]``."""
        assert self.call.mask is not None
        tile = self.call.mask[self.mask_index(rows, keys)]
        return tile.unsqueeze(2) if tile.shape[1] == 1 else tile.unflatten(1, self.shape[1:])

    def logits(
        self, query: Tensor, rows: Rows, keys: tuple[int, int], *, slope: bool = False, hiding_adds: bool = False
    ) -> Block:
        """The logits of a block; ``slope`` keeps the derivative of the softcap.

        With ``hiding_adds``, numbers of a mask that hide are added as :func:`hidden_logit`, beside which logits are
        nothing, in half the time; the block does not tell then which those are.
        """
        call, (start, stop) = self.call, keys
        z = call.buffers("logits", self.n, query.shape[1], stop - start)
        product(query, self.key[:, start:stop].mT, z)
        bent = None
        if call.geometry.softcap > 0:
            z.div_(call.geometry.softcap).tanh_()
            if slope:
                bent = torch.mul(z, z, out=call.buffers("slope", *z.shape)).neg_().add_(1.0)
            z.mul_(call.geometry.softcap)
        if call.biased:
            tile = self.mask_tile(rows, keys)
            if hiding_adds:
                assert call.mask is not None
                least, into = hiding(call.mask.dtype, call.dtype), call.buffers("mask", *tile.shape)
                tile = torch.ops.aten.threshold.out(tile.to(call.dtype), least, hidden_logit(call.dtype), out=into)
            self.wide(z).add_(tile)
        hidden = self.hidden(rows, keys, not (call.biased and hiding_adds))
        self.fill(z, hidden, hidden_logit(call.dtype))
        return Block(z, hidden, bent)

    def wide(self, block: Tensor) -> Tensor:
        """A block ``[n, rows, keys]`` as ``[b, h, group, positions, keys]``."""
        return block.view(*self.shape, -1, block.shape[-1])

    def fill(self, block: Tensor, hidden: Hidden | None, value: float) -> None:
        """Put ``value`` where logits do not count."""
        if hidden is not None:
            hidden.fill(self.wide(block), value)


class Block(NamedTuple):
    """Logits ``[n, rows, keys]``, which of them do not count, and the derivative of the softcap."""

    logits: Tensor
    hidden: Hidden | None
    slope: Tensor | None


class Call:
    """What one pass works on: ``q [B, Hq, Lq, D]``, ``k [B, Hkv, Lk, D]``, ``v``, and which keys are seen."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        geometry: Geometry,
        mask: Tensor | None,
        key_lengths: Tensor | None,
    ) -> None:
        self.q, self.k, self.v, self.geometry, self.mask, self.key_lengths = q, k, v, geometry, mask, key_lengths
        self.group = q.shape[1] // max(1, k.shape[1])
        self.dtype = accumulation(q.dtype)
        self.biased = mask is not None and mask.dtype != torch.bool
        self.buffers = Buffers(q)
        self.positions = torch.arange(k.shape[2], device=q.device, dtype=torch.int32)
        self.bands: dict[tuple[int, int, int], Hidden | None] = {}
        self.sizes = CPU if q.device.type == "cpu" else ACCELERATOR

    def hiding_adds(self) -> bool:
        """Whether adding :func:`hidden_logit` hides a key: all logits are finite, and too small to change it."""
        if self.mask is None or not self.biased or self.q.device.type != "cpu" or self.q.numel() * self.k.numel() == 0:
            return False
        if accumulation(self.mask.dtype) != self.dtype:  # rounded, what it adds would not be what is compared
            return False
        return self.small

    def far(self) -> bool:
        """Whether logits may be so far below the maximum of a row that the difference is infinite."""
        return self.biased or self.q.device.type != "cpu" or not self.small

    @functools.cached_property
    def small(self) -> bool:
        """Whether products of queries and keys are nothing beside :func:`hidden_logit`; they may overflow otherwise."""
        if self.q.numel() * self.k.numel() == 0:
            return True
        most = self.q.shape[-1] * abs(self.geometry.scale)
        for x in (self.q, self.k):
            most *= max(abs(float(bound)) for bound in torch.aminmax(x))
        return most < ROUNDED_AWAY  # False for NaN

    def spans(self) -> Iterator[Span]:
        """All batch elements and key heads, a span at a time."""
        batch, heads = self.k.shape[:2]
        if self.q.numel() == 0:
            return
        rows = min(self.q.shape[2] * self.group, max(self.sizes.rows, self.group))
        pairs = max(1, self.sizes.logits // (rows * max(1, min(self.k.shape[2], self.sizes.keys))))
        by_batch, by_head = max(1, pairs // heads), min(pairs, heads)
        for b in range(0, batch, by_batch):
            for h in range(0, heads, by_head):
                yield Span(self, slice(b, min(b + by_batch, batch)), slice(h, min(h + by_head, heads)))


class Dropout:
    """Factors of the weights, 0 or ``1 / (1 - p)``: the same for every walk over the same blocks with one seed."""

    def __init__(self, call: Call, p: float, seed: int) -> None:
        self.p, self.buffers = p, call.buffers
        self.generator = torch.Generator(device=call.q.device).manual_seed(seed) if p > 0 else None

    def draw(self, like: Tensor) -> Tensor | None:
        """Factors for a block, or ``None`` without dropout."""
        if self.generator is None:
            return None
        kept = self.buffers("dropout", *like.shape)
        if self.p >= 1:
            return kept.zero_()
        return kept.bernoulli_(1 - self.p, generator=self.generator).div_(1 - self.p)

    def apply(self, weights: Tensor) -> None:
        kept = self.draw(weights)
        if kept is not None:
            weights.mul_(kept)


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """``a @ b`` for every pair of a span, into ``out``."""
    if a.shape[0] == 1:
        torch.mm(a[0], b[0], out=out[0])
        return out
    return torch.bmm(a, b, out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b`` for every pair of a span."""
    if a.shape[0] == 1:
        total[0].addmm_(a[0], b[0])
    else:
        total.baddbmm_(a, b)
