"""Attention with beta and its statistics in float64, with the whole matrix of logits: what the kernels are held to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sharpmax.core.policies.base import Lowered
from sharpmax.core.stats import RowStats
from sharpmax.torch.geometry import Geometry

POLICY = Lowered("entropy", (-0.037, 0.481, -2.3, 4.917, -1.791), threshold=0.5, floor=1.0)

PLAIN = Geometry(0.25)


@dataclass(frozen=True)
class Case:
    """One call: sizes, geometry and what else decides which keys are seen."""

    name: str
    batch: int = 1
    heads: int = 1
    key_heads: int = 1
    queries: int = 40
    keys: int = 40
    width: int = 16
    value_width: int = 16
    geometry: Geometry = PLAIN
    mask: str | None = None
    lengths: tuple[int, ...] | None = None
    q_offsets: tuple[int, ...] | None = None
    k_offsets: tuple[int, ...] | None = None
    strided: bool = False

    def grown(self, factor: int) -> Case:
        """The same case with sequences ``factor`` times as long."""

        def times(numbers: tuple[int, ...] | None) -> tuple[int, ...] | None:
            return None if numbers is None else tuple(factor * n for n in numbers)

        return replace(
            self,
            queries=factor * self.queries,
            keys=factor * self.keys,
            lengths=times(self.lengths),
            q_offsets=times(self.q_offsets),
            k_offsets=times(self.k_offsets),
        )


@dataclass
class Inputs:
    """Tensors of a case, as the kernels take them."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    d_sum: Tensor
    d_moment: Tensor
    options: dict[str, Any]
    case: Case


def inputs(case: Case, dtype: torch.dtype, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(len(case.name) + case.queries)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    b, h, g, n, m = case.batch, case.heads, case.key_heads, case.queries, case.keys
    q, k = 1.7 * normal(b, h, n, case.width), 1.7 * normal(b, g, m, case.width)
    v, do = normal(b, g, m, case.value_width), normal(b, h, n, case.value_width)
    options: dict[str, Any] = {}
    if case.mask == "boolean":
        options["mask"] = torch.rand(b, 1, n, m, generator=generator) > 0.4
        options["mask"][:, :, 3] = False
    elif case.mask == "bias":
        bias = torch.randn(1, h, n, m, generator=generator)
        bias[..., 5, :] = -torch.inf
        bias[..., 7, : m // 2] = torch.finfo(torch.float32).min
        options["mask"] = bias
    if case.lengths is not None:
        options["key_lengths"] = torch.tensor(case.lengths, dtype=torch.int32)
        for x in (k, v):
            for i, length in enumerate(case.lengths):
                x[i, :, length:] = torch.nan
    for name, offsets in (("cu_q", case.q_offsets), ("cu_k", case.k_offsets)):
        if offsets is not None:
            options[name] = torch.tensor(offsets, dtype=torch.int32)
    options = {name: value.to(device) for name, value in options.items()}
    q, k, v, do = (_placed(x.to(dtype).to(device), case.strided) for x in (q, k, v, do))
    d_sum, d_moment = (0.05 * torch.randn(b, h, n, generator=generator).to(device) for _ in range(2))
    return Inputs(q, k, v, do, d_sum, d_moment, options, case)


def _placed(x: Tensor, strided: bool) -> Tensor:
    """``x``, or the same numbers in the midst of larger rows of NaN, with heads beside each other."""
    if not strided:
        return x
    b, h, n, d = x.shape
    within = x.new_full((b, n, h, d + 16), torch.nan)[..., 8 : 8 + d].transpose(1, 2)
    within.copy_(x)
    return within


def visible(given: Inputs) -> Tensor:
    """Which key every query sees, ``[B, H, Lq, Lk]``."""
    case, device = given.case, given.q.device
    shape = (case.batch, case.heads, case.queries, case.keys)
    row, key = (torch.arange(n, device=device) for n in (case.queries, case.keys))
    if case.q_offsets is not None:
        assert case.k_offsets is not None
        seen = torch.zeros(shape, dtype=torch.bool, device=device)
        ends = zip(case.q_offsets, case.q_offsets[1:], case.k_offsets, case.k_offsets[1:], strict=False)
        for q0, q1, k0, k1 in ends:
            inside = case.geometry.visible(row[: q1 - q0], key[: k1 - k0], q1 - q0, k1 - k0)
            seen[:, :, q0:q1, k0:k1] = True if inside is None else inside
        return seen
    length: Tensor | int = case.keys
    if "key_lengths" in given.options:
        length = given.options["key_lengths"].long()[:, None, None, None]
    seen = case.geometry.visible(row, key, case.queries, length)
    seen = torch.ones(shape, dtype=torch.bool, device=device) if seen is None else seen.expand(shape)
    mask = given.options.get("mask")
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)
    return seen


def logits(given: Inputs, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The logits, with 0 where a key is not seen, and which are seen."""
    geometry, seen = given.case.geometry, visible(given)
    k = k.nan_to_num().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    z = geometry.scale * q @ k.mT
    if geometry.softcap > 0:
        z = geometry.softcap * torch.tanh(z / geometry.softcap)
    mask = given.options.get("mask")
    if mask is not None and mask.dtype != torch.bool:
        z = z + mask.double()
    return torch.where(seen, z, 0.0), seen


def stats(z: Tensor, seen: Tensor) -> RowStats:
    highest = torch.where(seen, z, -torch.inf).amax(-1).detach()
    t = torch.where(seen, z - torch.where(highest.isinf(), 0.0, highest)[..., None], 0.0)
    e = torch.where(seen, t.exp(), 0.0)
    lowest = torch.where(seen, z, torch.inf).amin(-1).detach()
    return RowStats(highest, e.sum(-1), (e * t).sum(-1), lowest, seen.sum(-1, dtype=torch.int32))


def attention(z: Tensor, seen: Tensor, v: Tensor, beta: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and logsumexp; ``factor`` is what dropout multiplies the weights by."""
    v = v.nan_to_num().repeat_interleave(z.shape[1] // v.shape[1], dim=1)
    scaled = torch.where(seen, beta[..., None] * z, -torch.inf)
    lse = scaled.logsumexp(-1)
    weights = torch.where(seen, (scaled - torch.where(lse.isinf(), 0.0, lse)[..., None]).exp(), 0.0)
    return (weights if factor is None else weights * factor) @ v, lse
