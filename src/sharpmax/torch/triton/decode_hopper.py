"""Which decoding calls the kernel for Hopper takes, and its launch; all others are for the portable kernels.

All programs of the launch run at once, one on each processor of the device. In a context that has fewer of them, CUDA
refuses the launch with an error that says so.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from . import hopper
from .launch import OPTIONS, form_of

KEYS = 128
"""Keys of a tile."""
STAGES = {64: 6, 128: 3}
"""Tiles in the ring, by the head size; other sizes are not served."""
TILES = {8: 15, 16: 7}
"""The most tiles of a split, whose logits are kept in shared memory, by the columns that hold its rows."""
WARPS = 4
OVERHEAD = 1.5
"""What a split costs beside its tiles, in tiles."""
LEAST_TILES: float = 2
"""Tiles of keys for each processor, below which the portable kernels are taken."""
MOST_TURNS: float = 5
"""The most splits of a program where lengths are given: one without any key takes its time, too."""
PARTS = 64
"""Rows of partial outputs that a program adds up at a time."""


def refusal(query: Tensor, key: Tensor, value: Tensor, table: Tensor | None, mask: Tensor | None) -> str:
    """What the kernel does not serve of a call, or nothing where it serves all of it."""
    if not hopper.is_hopper(query.device) or hopper.version() not in hopper.RUN_WITH:
        return "other than Hopper GPUs and the versions of Triton that it was run with"
    if table is not None or mask is not None:
        return "pages or a mask"
    if query.dtype not in (torch.float16, torch.bfloat16) or query.shape[-1] not in STAGES:
        return "heads other than of 64 or 128 columns in a two-byte type"
    if value.shape[-1] != query.shape[-1]:
        return "values that are not as wide as keys"
    if min(query.numel(), key.numel()) == 0:
        return "empty tensors"
    if _rows(query, key) > max(TILES):
        return f"more than {max(TILES)} queries for a head of the cache"
    if query.stride(-1) != 1 or hopper.strides(form_of(key)) is None or hopper.strides(form_of(value)) is None:
        return "rows that are not contiguous or do not begin at multiples of 16 bytes"
    if _least_splits(query, key) > hopper.processors(query.device):
        return "caches whose logits do not fit into shared memory"
    return ""


def pays(query: Tensor, key: Tensor, left: int, *, lengths_given: bool) -> bool:
    """Whether to take the kernel where it serves: with keys for all processors, and not too many splits without any."""
    groups, blocks = key.shape[0] * key.shape[1], -(-key.shape[2] // KEYS)
    programs = hopper.processors(query.device)
    seen = blocks if left < 0 else min(blocks, (left + query.shape[2]) // KEYS + 2)
    turns = -(-groups * suitable_splits(groups, blocks, _least_splits(query, key), programs) // programs)
    return groups * seen >= LEAST_TILES * programs and (turns <= MOST_TURNS or not (lengths_given or left >= 0))


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    entropy: bool,
    numbers: list[float],
    splits: int,
    outputs: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fill output, statistics and beta; 0 splits for a suitable number of them."""
    from .decode_hopper_kernel import hopper_decode_kernel

    output, stats, beta = outputs
    batch, _, queries, dim = query.shape
    heads, capacity = key.shape[1:3]
    rows, columns = _rows(query, key), _columns(query, key)
    groups, programs = batch * heads, hopper.processors(query.device)
    least = _least_splits(query, key)
    if splits == 0:
        splits = suitable_splits(groups, -(-capacity // KEYS), least, programs)
    splits = min(max(splits, least), programs)
    items = groups * splits
    programs = min(programs, items)
    parts, sums = stats.new_empty((3, items, rows)), stats.new_empty((items, rows))
    shares = sums.new_empty((items, rows, dim) if splits > 1 else 0)
    lines = 1 if groups * columns <= programs else columns
    launch: Any = hopper_decode_kernel[(programs,)]
    launch(
        query, hopper.descriptor(key, KEYS), hopper.descriptor(value, KEYS), lengths,
        parts, stats, beta, shares, sums, output, torch.zeros(2 * groups, dtype=torch.int32, device=query.device),
        *query.stride()[:3], parts.stride(0), beta.numel(), heads, capacity, splits, left, items, scale, softcap,
        *numbers,
        ROWS=rows, COLUMNS=columns, QUERIES=queries, CAPPED=softcap > 0, ENTROPY=entropy, KEYS=KEYS,
        STAGES=STAGES[dim], TILES=TILES[columns], SPLITS=1 << (splits - 1).bit_length(), LINES=lines,
        CHUNK=PARTS // lines, num_warps=WARPS, launch_cooperative_grid=True, **OPTIONS,
    )  # fmt: skip


@functools.lru_cache(4096)
def suitable_splits(groups: int, blocks: int, least: int, programs: int) -> int:
    """How many splits of ``blocks`` tiles keep all programs at work: they take one after the other, in equal turns."""
    most = max(least, min(programs, blocks))
    return min(range(least, most + 1), key=lambda n: -(-groups * n // programs) * (2 * blocks / n + OVERHEAD))


def _rows(query: Tensor, key: Tensor) -> int:
    """Queries that share a head of the cache."""
    return query.shape[1] // key.shape[1] * query.shape[2]


def _columns(query: Tensor, key: Tensor) -> int:
    return min(TILES) if _rows(query, key) <= min(TILES) else max(TILES)


def _least_splits(query: Tensor, key: Tensor) -> int:
    """So many that the logits of one fit into shared memory."""
    return -(-key.shape[2] // (KEYS * TILES[_columns(query, key)]))
