"""How large the tiles of each kernel are: fixed numbers by head size, type and the memory of the device."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch

Kernel = Literal["stats", "attend", "beta", "query", "key", "stats query", "stats key"]
"""Forward kernels, and the two of the backward pass: of dbeta alone, of everything, of the statistics alone."""


class Tiles(NamedTuple):
    """Query rows and keys of a tile, warps of a program, stages of its pipeline, and whether descriptors are used.

    Descriptors serve Hopper's copy engine (TMA) where the tensors are aligned for it; others are read by address.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    descriptors: bool = False


# Kernels without tiles of their own take those of another.
LIKE: dict[Kernel, Kernel] = {"beta": "query", "stats query": "query", "stats key": "key"}
# By kernel, then by the largest head size served; for two-byte types with 200 KB of shared memory or more (Hopper).
LARGE: dict[Kernel, dict[int, Tiles]] = {
    "stats": {64: Tiles(128, 128, 8, 3, True), 128: Tiles(128, 128, 8, 2, True), 256: Tiles(128, 64, 8, 1, True)},
    "attend": {64: Tiles(64, 128, 4, 2, True), 128: Tiles(128, 64, 4, 2, True), 256: Tiles(64, 128, 4, 1, True)},
    "beta": {64: Tiles(64, 64, 4, 3, True), 128: Tiles(64, 64, 4, 2, True), 256: Tiles(64, 64, 4, 1, True)},
    "query": {64: Tiles(64, 64, 4, 3, True), 128: Tiles(64, 64, 4, 2, True), 256: Tiles(64, 64, 4, 2, True)},
    "key": {64: Tiles(64, 64, 4, 2, True), 128: Tiles(32, 64, 4, 3, True), 256: Tiles(64, 64, 8, 2, True)},
    "stats query": {64: Tiles(64, 64, 4, 3, True), 128: Tiles(128, 64, 4, 3, True), 256: Tiles(64, 64, 4, 2, True)},
    "stats key": {64: Tiles(128, 64, 4, 2, True), 128: Tiles(128, 64, 4, 2, True), 256: Tiles(64, 64, 4, 2, True)},
}
# In place of LARGE where the band is bounded: smaller tiles waste less at its edge.
LARGE_BANDED: dict[tuple[Kernel, int], Tiles] = {
    ("stats", 64): Tiles(64, 128, 4, 3, True),
    ("stats", 128): Tiles(64, 128, 4, 3, True),
    ("stats", 256): Tiles(64, 64, 4, 1, True),
    ("attend", 64): Tiles(64, 64, 4, 3, True),
    ("attend", 128): Tiles(64, 64, 4, 3, True),
}
# In place of LARGE under a mask, whose entries take registers, and shared memory as the kernels wait for them.
LARGE_MASKED: dict[tuple[Kernel, int], Tiles] = {
    ("stats", 64): Tiles(64, 64, 4, 3, True),
    ("stats", 128): Tiles(64, 64, 4, 3, True),
    ("stats", 256): Tiles(64, 64, 4, 1, True),
    ("attend", 64): Tiles(64, 64, 4, 2, True),
    ("attend", 128): Tiles(64, 64, 4, 2, True),
    ("attend", 256): Tiles(128, 64, 8, 2, True),
    ("key", 128): Tiles(32, 64, 4, 2, True),
}
# In place of that where the mask has four bytes for each key.
LARGE_MASKED_WIDE: dict[tuple[Kernel, int], Tiles] = {("attend", 256): Tiles(64, 64, 4, 2, True)}
# The same for less shared memory (Ampere, Ada, AMD).
SMALL: dict[Kernel, dict[int, Tiles]] = {
    "stats": {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 32, 4, 2), 256: Tiles(64, 32, 4, 2)},
    "attend": {64: Tiles(128, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(64, 16, 4, 1)},
    "query": {64: Tiles(64, 32, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(32, 16, 4, 1)},
    "key": {64: Tiles(32, 64, 4, 2), 128: Tiles(32, 64, 4, 1), 256: Tiles(16, 32, 4, 1)},
}
# float32 without tensor cores: what matters is that a tile fits.
FLOAT32: dict[Kernel, dict[int, Tiles]] = {
    "stats": {64: Tiles(64, 32, 8, 2), 128: Tiles(16, 32, 8, 1), 256: Tiles(16, 16, 8, 1)},
    "attend": {64: Tiles(64, 32, 8, 2), 128: Tiles(16, 32, 8, 1), 256: Tiles(16, 16, 8, 1)},
    "query": {64: Tiles(32, 32, 4, 2), 128: Tiles(32, 32, 8, 2), 256: Tiles(16, 16, 8, 1)},
    "key": {64: Tiles(32, 32, 4, 2), 128: Tiles(16, 32, 8, 1), 256: Tiles(16, 16, 8, 1)},
}


@functools.cache
def _large_memory(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= 200_000


def tiles_for(
    kernel: Kernel, width: int, dtype: torch.dtype, device: torch.device, *, banded: bool = False, mask_bytes: int = 0
) -> Tiles:
    """The tiles of a kernel for heads of ``width`` columns (the wider of query and value).

    ``banded`` says whether queries see a bounded band of keys: causality, or a window. An entry of the mask has
    ``mask_bytes``, 0 without one.
    """
    table = FLOAT32 if dtype == torch.float32 else LARGE if _large_memory(device) else SMALL
    own = table[kernel if kernel in table else LIKE[kernel]]
    limit = next(limit for limit in own if width <= limit)
    tiles = own[limit]
    if table is LARGE and mask_bytes:
        tiles = LARGE_MASKED.get((kernel, limit), tiles)
        return LARGE_MASKED_WIDE.get((kernel, limit), tiles) if mask_bytes > 2 else tiles
    return LARGE_BANDED.get((kernel, limit), tiles) if banded and table is LARGE else tiles
