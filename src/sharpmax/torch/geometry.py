"""What decides the logits of attention apart from query and key: scale, softcap, and which keys a query may see.

    s = scale * <q_i, k_j>        z = softcap * tanh(s / softcap) + bias        weights = softmax(beta * z)

Query ``i`` sees key ``j`` if ``-left <= j - (i + shift) <= right``: a band around its own position. Causality is
``right = 0``, a sliding window bounds ``left`` (and ``right``, without causality). The shift is 0 where positions are
counted from the start (as ``torch``'s ``is_causal`` has it), and ``keys - queries`` where they are counted from the end
(``lower_right``, as a cache needs it).

A cache of keys or values is ``[B, heads, capacity, D]``, or, with a block table ``[B, most pages]``, paged: ``[pages,
page size, heads, D]``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ALL = -1
"""A side of the band that has no bound."""
LARGEST_HEAD = 256
"""Columns of a head that the Triton kernels take."""
LEAST_SCALE = 1e-30
"""Below it, negative scales included, kernels multiply logits by the scale first: in float32 it is about to be 0."""
LARGEST_POLYNOMIAL = 8
"""Coefficients of a policy that the Triton kernels evaluate themselves."""


class Geometry(NamedTuple):
    """Plain numbers, which every implementation takes.

    Attributes:
      scale: what the product of query and key is multiplied by.
      softcap: logits are kept within plus and minus this by ``tanh``; 0 for no cap.
      left, right: how many keys before and after its own position a query sees, :data:`ALL` for all.
      lower_right: whether positions are counted from the end of queries and keys.
    """

    scale: float
    softcap: float = 0.0
    left: int = ALL
    right: int = ALL
    lower_right: bool = False

    @property
    def numbers(self) -> list[float]:
        """What a custom operator takes: one list, since each argument of an operator costs its calls time."""
        return [float(x) for x in self]

    @classmethod
    def of(cls, numbers: list[float]) -> Geometry:
        """The geometry that has these :attr:`numbers`."""
        scale, softcap, left, right, lower_right = numbers
        return cls(scale, softcap, int(left), int(right), bool(lower_right))

    @property
    def banded(self) -> bool:
        """Whether some keys are out of sight of some queries."""
        return self.left != ALL or self.right != ALL

    def visible(
        self, rows: Tensor, keys: Tensor, query_length: Tensor | int, key_length: Tensor | int
    ) -> Tensor | None:
        """Whether the query at each of ``rows`` sees the key at each of ``keys``; ``None`` where all see all.

        Lengths are numbers, or tensors ``[..., 1, 1]`` of one for each batch element; keys from ``key_length`` on are
        seen by none. The result broadcasts against ``[..., rows, keys]``.
        """
        seen = None
        if isinstance(key_length, Tensor):
            seen = keys < key_length
        if self.banded:
            shift = key_length - query_length if self.lower_right else 0
            distance = keys - (rows[:, None] + shift)
            for bound, inside in ((self.left, distance >= -self.left), (self.right, distance <= self.right)):
                if bound != ALL:
                    seen = inside if seen is None else seen & inside
        return seen


def visible_counts(geometry: Geometry, rows: Tensor, query_length: Tensor | int, key_length: Tensor | int) -> Tensor:
    """How many keys the query at each of ``rows`` sees, int32; lengths as in :meth:`Geometry.visible`, ``[..., 1]``."""
    first = torch.zeros_like(rows)
    last = torch.zeros_like(rows) + key_length - 1
    if geometry.banded:
        position = rows + (key_length - query_length if geometry.lower_right else 0)
        if geometry.left != ALL:
            first = torch.clamp(position - geometry.left, min=0)
        if geometry.right != ALL:
            last = torch.minimum(last, position + geometry.right)
    return torch.clamp(last - first + 1, min=0).to(torch.int32)


def capacity_of(cache: Tensor, table: Tensor | None) -> int:
    """How many keys a cache has room for, of each sequence."""
    return cache.shape[2] if table is None else table.shape[1] * cache.shape[1]


def heads_of(cache: Tensor, table: Tensor | None) -> int:
    """How many heads a cache has."""
    return cache.shape[1 if table is None else 2]
