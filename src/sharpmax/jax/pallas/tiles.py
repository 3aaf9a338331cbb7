"""How large the tiles of each kernel are: fixed numbers by head size, type and the generation of the GPU."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Tiles(NamedTuple):
    """Query rows and keys of a tile, warps of a program, and stages of its pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


class Plan(NamedTuple):
    """The tiles of the forward kernel and of the two backward ones, and whether they run in Pallas' interpreter."""

    stats: Tiles
    query: Tiles
    key: Tiles
    interpret: bool = False


INTERPRETED: Plan | None = None
"""What tests on a CPU set: the plan of every call, in the interpreter, which is far too slow for anything else."""

# By the largest head size served. Two-byte types on Hopper and its successors for servers: of 128 columns, those that
# took the least time on an H200; of 64 and 256, near the best of the same kernels in sharpmax.torch.
LARGE = {
    64: Plan(Tiles(128, 128, 8, 3), Tiles(64, 64, 4, 3), Tiles(128, 64, 4, 2)),
    128: Plan(Tiles(128, 128, 4, 2), Tiles(64, 64, 4, 2), Tiles(32, 128, 4, 3)),
    256: Plan(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)),
}
# In place of the forward tiles of LARGE where the band is bounded: smaller ones waste less at its edge.
BANDED = {64: Tiles(64, 128, 4, 3), 128: Tiles(64, 128, 4, 3), 256: Tiles(64, 64, 4, 1)}
# The same for less shared memory.
SMALL = {
    64: Plan(Tiles(128, 64, 4, 3), Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 2)),
    128: Plan(Tiles(128, 32, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 1)),
    256: Plan(Tiles(64, 32, 4, 2), Tiles(32, 16, 4, 1), Tiles(16, 32, 4, 1)),
}
# float32 without tensor cores: what matters is that a tile fits.
FLOAT32 = {
    64: Plan(Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2)),
    128: Plan(Tiles(16, 32, 8, 1), Tiles(32, 32, 8, 2), Tiles(16, 32, 8, 1)),
    256: Plan(Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
}
LARGEST_HEAD = max(LARGE)
"""Columns of a head that the kernels take."""


def plan(columns: int, dtype: Any, banded: bool) -> Plan:
    """The tiles for heads of so many columns; ``banded``: queries see a bounded band of keys."""
    if INTERPRETED is not None:
        return INTERPRETED
    large = generation() in (9, 10)
    table = FLOAT32 if dtype == jnp.float32 else LARGE if large else SMALL
    limit = next(limit for limit in table if columns <= limit)
    return table[limit]._replace(stats=BANDED[limit]) if banded and table is LARGE else table[limit]


@functools.cache
def generation() -> int:
    """The generation of the GPU (9 is Hopper); where there is none, that of the one to compile for."""
    try:
        device: Any = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return 9
    return int(str(device.compute_capability).partition(".")[0])
