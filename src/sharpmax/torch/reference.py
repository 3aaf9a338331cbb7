"""Attention with adaptive temperature as it is written down: all logits at once, differentiated by autograd.

The oracle of the other implementations, in any floating-point type; memory is queries times keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.softmax import softmax
from ..core.stats import RowStats
from ..core.stats import row_stats as statistics
from .blocks import accumulation, shown
from .geometry import Geometry


def logits(
    q: Tensor, k: Tensor, geometry: Geometry, *, mask: Tensor | None = None, key_lengths: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The logits ``[B, Hq, Lq, Lk]``, in float32 or float64, and which of them are seen (``None`` for all)."""
    dtype = accumulation(q.dtype)
    query = _grouped(q.to(dtype), k) * geometry.scale
    z = (query @ k.to(dtype).unsqueeze(2).mT).flatten(1, 2)
    if geometry.softcap > 0:
        z = geometry.softcap * torch.tanh(z / geometry.softcap)
    rows, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    lengths = k.shape[2] if key_lengths is None else key_lengths.view(-1, 1, 1, 1)
    seen = geometry.visible(rows, keys, q.shape[2], lengths)
    if mask is not None:
        there = mask
        if mask.dtype != torch.bool:
            there = shown(mask, dtype)
            z = (z + torch.where(there, mask, 0.0)).to(dtype)
        seen = there if seen is None else seen & there
    return z, seen


def row_stats(
    q: Tensor,
    k: Tensor,
    geometry: Geometry,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    with_min: bool = False,
) -> RowStats:
    """The statistics of every row of logits, ``[B, Hq, Lq]``."""
    z, seen = logits(q, without_padding(k, key_lengths), geometry, mask=mask, key_lengths=key_lengths)
    return statistics(z, where=seen, with_min=with_min)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    geometry: Geometry,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """``softmax(beta * z) v`` in the type of ``q``."""
    given = (geometry, mask, key_lengths, dropout_p)
    return weighted(q, k, v, lambda z, seen: softmax(z, where=seen, beta=beta), *given).to(q.dtype)


def weighted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights_of: Callable[[Tensor, Tensor | None], Tensor],
    geometry: Geometry,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """``weights v`` in float32 or float64; ``weights_of`` takes what :func:`logits` gives."""
    k, v = without_padding(k, key_lengths), without_padding(v, key_lengths)
    weights = weights_of(*logits(q, k, geometry, mask=mask, key_lengths=key_lengths))
    if dropout_p > 0:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    return (_grouped(weights, v) @ v.to(weights.dtype).unsqueeze(2)).flatten(1, 2)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """The query heads of ``x`` as ``[key heads, group]``."""
    return x.unflatten(1, (k.shape[1], x.shape[1] // max(1, k.shape[1])))


def without_padding(x: Tensor, key_lengths: Tensor | None) -> Tensor:
    """``x`` with 0 for what lies beyond the key lengths, which may be anything."""
    if key_lengths is None:
        return x
    beyond = torch.arange(x.shape[2], device=x.device) >= key_lengths.view(-1, 1, 1)
    return x.masked_fill(beyond[..., None], 0.0)
