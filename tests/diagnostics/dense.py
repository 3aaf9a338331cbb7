"""Everything that a diagnosis says of a call, from all logits at once in float64."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sharpmax.huggingface.interface import Call
from tests.torch.oracle import seen_keys


class Row(NamedTuple):
    entropy: float
    largest: float
    spread: float
    keys: int
    sink: float
    sinkless: float


def rows(call: Call, first: list[int] | None = None) -> list[list[list[Row | None]]]:
    """``[B][H][Lq]`` of rows, ``None`` for a row that sees nothing; ``first`` is each sequence's first key."""
    q, k, options = call.query.double(), call.key.double(), call.options
    batch, heads, queries, columns = q.shape
    group = heads // k.shape[1]
    first = [0] * batch if first is None else first
    return [
        [
            [row(logits(q, k, b, h, i, group, options, columns), first[b]) for i in range(queries)]
            for h in range(heads)
        ]
        for b in range(batch)
    ]  # fmt: skip


def logits(q: Tensor, k: Tensor, b: int, h: int, i: int, group: int, options: dict[str, Any], columns: int) -> Tensor:
    """The logits of one row, ``-inf`` where a key is not seen."""
    keys, mask, lengths = k.shape[2], options.get("attn_mask"), options.get("key_lengths")
    shown = bias = None
    if mask is not None:
        full = mask.expand(q.shape[0], q.shape[1], q.shape[2], keys)[b, h, i]
        shown = full if full.dtype == torch.bool else full > torch.finfo(full.dtype).min / 2
        bias = None if full.dtype == torch.bool else full.double()
    seen = seen_keys(
        i, q.shape[2], keys, causal=options.get("is_causal", False), window=options.get("window"),
        length=None if lengths is None else int(lengths[b]), shown=shown,
    )  # fmt: skip
    scale = 1 / math.sqrt(columns) if options.get("scale") is None else options["scale"]
    z = scale * (k[b, h // group] @ q[b, h, i])
    if (cap := options.get("softcap")) is not None:
        z = cap * torch.tanh(z / cap)
    if bias is not None:
        z = z + bias
    hidden = torch.ones(keys, dtype=torch.bool)
    hidden[seen] = False
    return z.masked_fill(hidden, -math.inf)


def row(z: Tensor, first: int) -> Row | None:
    seen = z[z > -math.inf]
    if len(seen) == 0:
        return None
    p = torch.softmax(z, -1)
    rest = z.clone()
    rest[first] = -math.inf
    others = rest[rest > -math.inf]
    return Row(
        entropy(seen), float(p.max()), float(seen.max() - seen.min()), len(seen), float(p[first]),
        entropy(others) if len(others) else 0.0,
    )  # fmt: skip


def entropy(z: Tensor) -> float:
    p = torch.softmax(z, -1).numpy()
    return float(-np.sum(p[p > 0] * np.log(p[p > 0])))
