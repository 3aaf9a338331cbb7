"""Attention with adaptive temperature, row by row in float64: the slow truth that implementations are held to.

Every row is treated by itself with plain sums; gradients come from autograd. Of sharpmax it uses nothing but the
policy, called on statistics that are computed here from their definitions.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sharpmax import RowStats


class Truth(NamedTuple):
    output: Tensor
    entropy: Tensor
    beta: Tensor  # what the policy gives for the statistics that are computed here
    keys: Tensor  # how many each query sees


class Held(NamedTuple):
    """What an implementation found of rows ``[B, H, L]``, whose output is to be judged by itself."""

    stats: RowStats
    beta: Tensor

    def of(self, row: tuple[int, int, int]) -> Held:
        fields = (None if x is None else x.detach()[row].cpu() for x in self.stats)
        return Held(RowStats(*fields), self.beta.detach()[row].cpu().double())


def seen_keys(
    i: int, queries: int, keys: int, *, causal: Any, window: Any, length: int | None, shown: Tensor | None
) -> list[int]:
    """The keys that query ``i`` sees, by the words of the documentation."""
    end = keys if length is None else min(length, keys)
    position = i + (end - queries if causal == "lower_right" else 0)
    seen = []
    for j in range(end):
        if causal and j > position:
            continue
        if isinstance(window, int) and abs(j - position) >= window:
            continue
        if isinstance(window, tuple):
            left, right = window
            if (left >= 0 and j < position - left) or (right >= 0 and j > position + right):
                continue
        if shown is not None and not shown[j]:
            continue
        seen.append(j)
    return seen


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    policy: Any,
    is_causal: Any = False,
    scale: float | None = None,
    window: Any = None,
    softcap: float | None = None,
    key_lengths: Tensor | None = None,
    held: Held | None = None,
) -> Truth:
    """``[B, H, L, D]`` tensors; what is held, where given, has the values of statistics and betas, not their gradient.

    The output is then that of those betas, and its gradient that of the policy at those statistics: on the side of a
    point where its slope jumps on which the implementation was.
    """
    batch, heads, queries, columns = query.shape
    keys, group = key.shape[2], heads // key.shape[1]
    q, k, v = query.double(), key.double(), value.double()
    scale = 1 / math.sqrt(columns) if scale is None else scale
    shown = bias = None
    if attn_mask is not None:
        full = attn_mask.expand(batch, heads, queries, keys)
        shown = full if full.dtype == torch.bool else full > torch.finfo(full.dtype).min / 2
        bias = None if full.dtype == torch.bool else full.double()
    outputs, entropies, betas, counts = [], [], [], []
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                row = seen_keys(
                    i, queries, keys, causal=is_causal, window=window,
                    length=None if key_lengths is None else int(key_lengths[b]),
                    shown=None if shown is None else shown[b, h, i],
                )  # fmt: skip
                z = scale * (k[b, h // group][row] @ q[b, h, i])
                if softcap is not None:
                    z = softcap * torch.tanh(z / softcap)
                if bias is not None:
                    z = z + bias[b, h, i][row]
                found = None if held is None else held.of((b, h, i))
                out, entropy, chosen = _row(z, v[b, h // group][row], policy, found)
                outputs.append(out)
                entropies.append(entropy)
                betas.append(chosen)
                counts.append(len(row))
    shape = (batch, heads, queries)
    if not outputs:
        empty = q.new_zeros(shape) + 0 * (q.sum() + k.sum() + v.sum())
        return Truth(empty[..., None].expand(*shape, v.shape[-1]), empty, empty, empty.int())
    return Truth(
        torch.stack(outputs).view(*shape, -1),
        torch.stack(entropies).view(shape),
        torch.stack(betas).view(shape),
        torch.tensor(counts).view(shape),
    )


def _row(z: Tensor, v: Tensor, policy: Any, held: Held | None) -> tuple[Tensor, Tensor, Tensor]:
    if len(z) == 0:
        zero = z.sum()  # 0, and connected to the query
        return v.sum(0), zero, zero
    top = z.max().detach()
    e = torch.exp(z - top)
    stats = RowStats(top, e.sum(), (e * (z - top)).sum(), z.min().detach(), torch.tensor(len(z), dtype=torch.int32))
    p = torch.softmax(z, 0)
    entropy = -torch.special.xlogy(p, p).sum()
    own = beta = torch.as_tensor(policy(stats), dtype=torch.float64)
    if held is not None and torch.isfinite(held.beta):
        beta = torch.as_tensor(policy(_with_values(stats, held.stats))).double()
        beta = beta + (held.beta - beta).detach()
    if torch.isinf(beta):
        ties = (z == top).double()
        return (ties / ties.sum()) @ v, entropy, own
    return torch.softmax(beta * z, 0) @ v, entropy, own


def _with_values(stats: RowStats, values: RowStats) -> RowStats:
    """Other values, in their own type, with the gradient of what they stand for."""
    total, moment = (
        (x + (value.double() - x).detach()).to(value.dtype)
        for x, value in ((stats.sum, values.sum), (stats.moment, values.moment))
    )
    return values._replace(sum=total, moment=moment)
