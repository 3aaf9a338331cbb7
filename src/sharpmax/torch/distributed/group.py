"""A process group as seen from one of its ranks, and the check that all ranks ask for the same."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


class Member(NamedTuple):
    """A process group, this process's rank in it, and how many ranks there are."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def global_rank(self, distance: int) -> int:
        """The rank among all processes of the one ``distance`` on in the group."""
        return dist.get_global_rank(self.group, (self.rank + distance) % self.size)


def member_of(group: Group) -> Member:
    """This process in ``group``, the default one for ``None``."""
    if not dist.is_initialized():
        raise RuntimeError(
            "expected a process group, got none: call torch.distributed.init_process_group first, under torchrun"
        )
    chosen = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    rank = -1 if group is not None and chosen is not group else dist.get_rank(chosen)
    if rank < 0 or chosen is None:
        raise ValueError(f"expected a process group that this process (rank {dist.get_rank()}) is in, got {group!r}")
    return Member(chosen, rank, dist.get_world_size(chosen))


def check_device(member: Member, x: Tensor) -> None:
    """Refuse tensors that the group's backend does not carry."""
    serves = {"gloo": "cpu", "nccl": "cuda"}
    backend = dist.get_backend(member.group)
    expected = serves.get(backend, x.device.type)
    if member.size > 1 and x.device.type != expected:
        raise ValueError(f"expected tensors on {expected} for a process group of {backend}, got {x.device.type}")


def check_agreement(member: Member, described: dict[str, tuple[Any, ...]], device: torch.device) -> None:
    """Refuse what is not the same on every rank: numbers and short words, as many under each name on every rank.

    One small message; a GPU is waited for.
    """
    if member.size == 1:
        return
    mine = torch.tensor([n for values in described.values() for n in _encoded(values)], device=device)
    everyone = [torch.empty_like(mine) for _ in range(member.size)]
    dist.all_gather(everyone, mine, group=member.group)
    rows = torch.stack(everyone).tolist()
    at = 0
    for name, values in described.items():
        width = len(_encoded(values))
        found = [row[at : at + width] for row in rows]
        at += width
        for rank, other in enumerate(found):
            if other != found[0]:
                raise ValueError(
                    f"expected {name} alike on every rank, got {_decoded(found[0], values)} on rank 0 and "
                    f"{_decoded(other, values)} on rank {rank}"
                )


def _encoded(values: tuple[Any, ...]) -> list[int]:
    """Numbers, truth values and words of up to 16 letters as whole numbers of 64 bits."""
    found: list[int] = []
    for x in values:
        if isinstance(x, str):
            found += struct.unpack("qq", x.encode().ljust(16))
        else:
            found += struct.unpack("q", struct.pack("d", x)) if isinstance(x, float) else (int(x),)
    return found


def _decoded(numbers: list[int], like: tuple[Any, ...]) -> Any:
    """What :func:`_encoded` was given, of the types of ``like``; one value stands alone."""
    rest, found = iter(numbers), []
    for x in like:
        if isinstance(x, str):
            found.append(struct.pack("qq", next(rest), next(rest)).decode().rstrip())
        else:
            bits = next(rest)
            found.append(struct.unpack("d", struct.pack("q", bits))[0] if isinstance(x, float) else type(x)(bits))
    return found[0] if len(found) == 1 else tuple(found)
