"""Shards on their way around the ranks of a group: point to point, while the rank computes with what it has.

At a stop ``offset`` ranks on, rank ``r`` has the shard of rank ``r - offset``. Shards travel in two sets of memory that
are used in turn, so a rank never holds more than two foreign shards of what travels; gradients follow the shards that
they belong to and go home from the last stop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .group import Member

COMMUNICATION = ("ring", "gather")

Shards = tuple[Tensor, ...]


def check_communication(name: str) -> None:
    """Refuse the name of a way of communication that there is not."""
    if name not in COMMUNICATION:
        raise ValueError(f"expected communication to be one of {', '.join(COMMUNICATION)}, got {name!r}")


class Swap:
    """Tensors on their way to the rank ``distance`` on, and those of the rank as far back on theirs to this one."""

    def __init__(self, member: Member, sent: Shards, room: Shards, distance: int) -> None:
        self.sent, self.received = sent, room
        ahead, behind = member.global_rank(distance), member.global_rank(-distance)
        operations = [dist.P2POp(dist.isend, x, ahead, member.group) for x in sent if x.numel()]
        operations += [dist.P2POp(dist.irecv, x, behind, member.group) for x in room if x.numel()]
        self.work: list[Any] = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Shards:
        """What came, once everything has arrived."""
        for work in self.work:
            work.wait()
        self.sent, self.work = (), []  # which hold what was sent
        return self.received


def tour(member: Member, tensors: Shards, offsets: tuple[int, ...], keep: int = 0) -> Iterator[Shards]:
    """The shards ``tensors`` of the ranks at ``offsets`` (0 first); the next ones travel while one is worked on.

    Shards that came are overwritten two stops later, but for the first ``keep`` tensors of each.
    """
    here = tuple(x.contiguous() for x in tensors)
    rooms: list[Shards] = []
    for i, offset in enumerate(offsets):
        coming = None
        if i + 1 < len(offsets):
            rooms.append(_room(here) if i < 2 else (*_room(here[:keep]), *rooms.pop(0)[keep:]))
            coming = Swap(member, here, rooms[-1], offsets[i + 1] - offset)
        yield here
        if coming is not None:
            here = coming.wait()


def _room(like: Shards) -> Shards:
    return tuple(torch.empty_like(x) for x in like)


class Homeward:
    """Gradients of the shards of a :func:`tour`: each rank adds its own at every stop, and all end at the owner."""

    def __init__(self, member: Member, offsets: tuple[int, ...]) -> None:
        self.member, self.offsets = member, offsets
        self.visited = 0
        self.own: Shards = ()
        self.coming: Swap | None = None

    def add(self, gradients: Shards) -> None:
        """Add this rank's gradients of the shard at the next stop; they are written to."""
        i, self.visited = self.visited, self.visited + 1
        if i == 0:
            self.own = gradients
            return
        if self.coming is not None:
            for total, earlier in zip(gradients, self.coming.wait(), strict=True):
                total.add_(earlier)
        onward = self.offsets[i + 1] if i + 1 < len(self.offsets) else self.member.size
        self.coming = Swap(self.member, gradients, _room(gradients), onward - self.offsets[i])

    def home(self) -> Shards:
        """The gradients of this rank's own shard, by all ranks."""
        if self.coming is not None:
            for total, others in zip(self.own, self.coming.wait(), strict=True):
                total.add_(others)
        return self.own
