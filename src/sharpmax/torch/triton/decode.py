"""Decoding on the GPU, as custom operators.

``decode`` evaluates a lowered policy within the portable kernels, or within the one for Hopper. Any other policy is
called between ``decode_stats``, which returns logits and statistics, and ``decode_values``. Nothing waits
here for the device or reads from it, and shapes follow from shapes, so that all of it may be captured in a CUDA graph.

A contiguous cache is ``[B, heads, capacity, D]``; a paged one ``[pages, page size, heads, D]`` with a block table.
``mask``, ``[B, capacity]``, is False where a key is hidden.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..blocks import merged
from ..geometry import capacity_of
from ..operator import operator
from . import decode_hopper, decode_kernel
from .decode_portable import fill_output, layout_of, logits_and_parts, padded

TYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED = not isinstance(decode_kernel.logits_kernel, triton.JITFunction)
"""Whether kernels run in Triton's interpreter, which serves tensors on the CPU."""


@operator("sharpmax::decode")
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    lengths: Tensor | None,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    policy: list[float],
    splits: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, (maximum, sum, moment) of each row, and beta, for a policy given by its numbers (:mod:`..fused`)."""
    stats = query.new_empty((3, *query.shape[:3]), dtype=torch.float32)
    beta = query.new_empty(query.shape[:3], dtype=torch.float32)
    output = value.new_empty((*query.shape[:3], value.shape[-1]))
    if stats.numel() == 0:
        return output, stats, beta
    pays = decode_hopper.pays(query, key, table, left)
    if pays and not decode_hopper.refusal(query, key, value, table, lengths, mask, left):
        decode_hopper.decode(
            query, key, value, table, lengths, scale, softcap, left, policy, splits, (output, stats, beta)
        )
    else:
        layout = layout_of(query.shape, key, table, max(query.shape[-1], value.shape[-1]), splits)
        logits, parts = logits_and_parts(layout, query, key, table, lengths, mask, scale, softcap, left, with_min=False)
        fill_output(layout, logits, value, table, lengths, mask, parts, stats, beta, output, left, policy)
    return output, stats, beta


@decode.register_fake
def _(query, key, value, table, lengths, mask, scale, softcap, left, policy, splits):
    stats = query.new_empty((3, *query.shape[:3]), dtype=torch.float32)
    return value.new_empty((*query.shape[:3], value.shape[-1])), stats, torch.empty_like(stats[0])


@operator("sharpmax::decode_stats")
def decode_stats(
    query: Tensor,
    key: Tensor,
    table: Tensor | None,
    lengths: Tensor | None,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    with_min: bool,
    splits: int,
) -> tuple[Tensor, Tensor]:
    """Logits, padded, and (maximum, sum, moment, minimum if asked for) of each row."""
    layout = layout_of(query.shape, key, table, query.shape[-1], splits)
    logits, parts = logits_and_parts(layout, query, key, table, lengths, mask, scale, softcap, left, with_min)
    return logits, _of_rows(parts).reshape(parts.shape[0], *query.shape[:3])


@decode_stats.register_fake
def _(query, key, table, lengths, mask, scale, softcap, left, with_min, splits):
    logits = query.new_empty((*query.shape[:3], padded(capacity_of(key, table))), dtype=torch.float32)
    return logits, logits.new_empty((4 if with_min else 3, *query.shape[:3]))


@operator("sharpmax::decode_values")
def decode_values(
    logits: Tensor,
    highest: Tensor,
    beta: Tensor,
    value: Tensor,
    table: Tensor | None,
    lengths: Tensor | None,
    mask: Tensor | None,
    left: int,
    splits: int,
) -> Tensor:
    """Output, given the logits of ``decode_stats``, the maximum of each row and its beta."""
    layout = layout_of(logits.shape, value, table, value.shape[-1], splits)
    output = value.new_empty((*logits.shape[:3], value.shape[-1]))
    if highest.numel() > 0:
        stats, betas = highest.contiguous(), beta.contiguous()
        fill_output(layout, logits, value, table, lengths, mask, None, stats, betas, output, left, None)
    return output


@decode_values.register_fake
def _(logits, highest, beta, value, table, lengths, mask, left, splits):
    return value.new_empty((*logits.shape[:3], value.shape[-1]))


def _of_rows(parts: Tensor) -> Tensor:
    """Statistics of rows from those of their splits, along axis 3 of ``parts``."""
    highest, total, moment, *lowest = parts.unbind(0)
    highest, total, moment = merged(highest, total, moment, 2)
    highest = highest.masked_fill_(total == 0, -torch.inf)
    return torch.stack([highest, total, moment, *(part.amin(dim=2) for part in lowest)])
