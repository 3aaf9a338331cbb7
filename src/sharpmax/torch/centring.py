"""Keys without what they have in common, for gradients on a CPU.

For every ``c``, ``softmax(beta * <q, k>) = softmax(beta * <q, k - c>)``. The gradients of the logits of a row add up to
0, so that ``c`` gives that of the query nothing either, unless logits are rounded otherwise forward than backward, as
torch's own kernel does: then what they add up to is multiplied by ``c``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import accumulation
from .geometry import Geometry

LEAST = 2.0
"""Nats that logits of some row must have in common: what is rounded of less is nothing beside what they deviate."""


class Centred(NamedTuple):
    """Keys less what they have in common, and what a row of logits has of that, ``[B, Hq, Lq]``."""

    keys: Tensor
    shift: Tensor


def centred(q: Tensor, k: Tensor, beta: Tensor, geometry: Geometry, key_lengths: Tensor | None) -> Centred | None:
    """Keys less their mean, in columns where that is larger than what they deviate from it; ``None`` if it is little.

    Logits that are bent, and the maxima of hard rows, are left as they are.
    """
    if q.device.type != "cpu" or geometry.softcap > 0 or q.numel() == 0 or k.numel() == 0:
        return None
    wide = k.to(accumulation(q.dtype))
    valid, count = wide, torch.tensor(k.shape[2])
    if key_lengths is not None:
        seen = torch.arange(k.shape[2]) < key_lengths[:, None]
        valid, count = (
            torch.where(seen[:, None, :, None], wide, 0.0),
            key_lengths.clamp(1, k.shape[2]).view(-1, 1, 1, 1),
        )
    mean, square = (x.sum(2, keepdim=True) / count for x in (valid, valid.square()))
    common = torch.where(mean.square() > square / 2, mean, 0.0)  # not so of what is no number
    if not common.any() or not beta.isfinite().all():
        return None
    shift = (q.to(wide.dtype).unflatten(1, (k.shape[1], -1)) @ common.unsqueeze(2).mT).squeeze(-1).flatten(1, 2)
    shift *= geometry.scale
    return None if shift.abs().amax() < LEAST else Centred(wide - common, shift)
