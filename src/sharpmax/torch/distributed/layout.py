"""Which tokens of a sequence each rank holds, and which of its queries see which keys of another rank.

``"contiguous"`` gives rank ``r`` of ``P`` the ``r``-th of ``P`` pieces. Under causality the last rank then has about
twice the average work, and all others wait for it. ``"zigzag"`` cuts the sequence in ``2 P`` pieces and gives rank
``r`` those numbered ``r`` and ``2 P - 1 - r``: an early and a late one, so that all ranks have the same work, at every
stop of the ring.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..geometry import ALL, Geometry
from .group import Group, member_of

LAYOUTS = ("zigzag", "contiguous")


class Part(NamedTuple):
    """Consecutive tokens of a shard: their positions ``[start, stop)``, and where in the shard they begin."""

    start: int
    stop: int
    local: int


class Pair(NamedTuple):
    """Queries and keys of two shards that see each other: where in their shards, and the geometry between them."""

    rows: slice
    keys: slice
    geometry: Geometry


class Stop(NamedTuple):
    """A stop of the ring: whose keys are met there (as many ranks back), and which pairs live."""

    offset: int
    pairs: tuple[Pair, ...]


def check_layout(layout: str) -> None:
    """Refuse the name of a layout that there is not."""
    if layout not in LAYOUTS:
        raise ValueError(f"expected layout to be one of {', '.join(LAYOUTS)}, got {layout!r}")


def parts(rank: int, size: int, tokens: int, layout: str) -> tuple[Part, ...]:
    """The parts of the sequence that ``rank`` holds, where every rank holds ``tokens``."""
    if layout == "contiguous":
        return (Part(rank * tokens, (rank + 1) * tokens, 0),)
    if tokens % 2:
        raise ValueError(
            f"expected an even number of tokens on every rank for layout='zigzag', got {tokens}; "
            "layout='contiguous' takes any"
        )
    piece, late = tokens // 2, 2 * size - 1 - rank
    if late == rank + 1:
        return (Part(rank * piece, (late + 1) * piece, 0),)
    return (Part(rank * piece, (rank + 1) * piece, 0), Part(late * piece, (late + 1) * piece, piece))


def pair_of(queries: Part, keys: Part, geometry: Geometry) -> Pair | None:
    """What of ``queries`` and ``keys`` see each other, cut to where they do; ``None`` if nothing does.

    The band ``-left <= j - i <= right`` of positions becomes one of places in the cut parts.
    """
    left, right = geometry.left, geometry.right
    first, last, low, high = queries.start, queries.stop, keys.start, keys.stop
    if left != ALL:
        low, last = max(low, queries.start - left), min(last, keys.stop + left)
    if right != ALL:
        high, first = min(high, queries.stop + right), max(first, keys.start - right)
    if first >= last or low >= high:
        return None
    ahead = low - first
    left = ALL if left == ALL or left + ahead >= last - first - 1 else left + ahead
    right = ALL if right == ALL or right - ahead >= high - low - 1 else right - ahead
    at, of = queries.local - queries.start, keys.local - keys.start
    return Pair(
        slice(first + at, last + at), slice(low + of, high + of), geometry._replace(left=left, right=right)
    )  # fmt: skip


def pairs(queries: tuple[Part, ...], keys: tuple[Part, ...], geometry: Geometry) -> tuple[Pair, ...]:
    """All pairs of parts of two shards that see each other."""
    found = (pair_of(a, b, geometry) for a in queries for b in keys)
    return tuple(pair for pair in found if pair is not None)


@functools.lru_cache(maxsize=256)
def route(rank: int, size: int, tokens: int, layout: str, geometry: Geometry) -> tuple[Stop, ...]:
    """The stops of ``rank``, from its own keys on; where no rank would meet a key that it sees, nobody stops."""
    held = [parts(r, size, tokens, layout) for r in range(size)]

    def met(r: int, offset: int) -> tuple[Pair, ...]:
        return pairs(held[r], held[(r - offset) % size], geometry)

    offsets = [0, *(offset for offset in range(1, size) if any(met(r, offset) for r in range(size)))]
    return tuple(Stop(offset, met(rank, offset)) for offset in offsets)


def shard(x: Tensor, dim: int, *, group: Group = None, layout: str = "zigzag") -> Tensor:
    """The tokens of ``x`` that this rank holds; ``x`` is the whole sequence along ``dim``, the same on every rank.

    A slice (``contiguous``) or a copy (``zigzag``); gradients flow back to the rank's own tokens of ``x``.
    """
    check_layout(layout)
    member = member_of(group)
    pieces = member.size * (2 if layout == "zigzag" else 1)
    if x.shape[dim] % pieces:
        raise ValueError(
            f"expected a length that {member.size} ranks share evenly in layout={layout!r}, a multiple of {pieces}, "
            f"got {x.shape[dim]}; pad the sequence at its end"
        )
    found = parts(member.rank, member.size, x.shape[dim] // member.size, layout)
    slices = [x.narrow(dim, part.start, part.stop - part.start) for part in found]
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim)


def unshard(x: Tensor, dim: int, *, group: Group = None, layout: str = "zigzag") -> Tensor:
    """The whole sequence along ``dim`` on every rank, from the shards ``x``; no gradient flows through it."""
    check_layout(layout)
    member = member_of(group)
    tokens = x.shape[dim]
    found = [parts(rank, member.size, tokens, layout) for rank in range(member.size)]
    mine = x.detach().contiguous()
    shards = [torch.empty_like(mine) for _ in range(member.size)]
    dist.all_gather(shards, mine, group=member.group)
    pieces = [
        (part.start, piece.narrow(dim, part.local, part.stop - part.start))
        for piece, of_rank in zip(shards, found, strict=True)
        for part in of_rank
    ]
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda item: item[0])], dim)


def positions(
    tokens: int, *, group: Group = None, layout: str = "zigzag", device: torch.device | str | None = None
) -> Tensor:
    """The positions in the sequence of the ``tokens`` that this rank holds, for rotary embeddings and the like."""
    check_layout(layout)
    member = member_of(group)
    found = parts(member.rank, member.size, tokens, layout)
    return torch.cat([torch.arange(part.start, part.stop, device=device) for part in found])
