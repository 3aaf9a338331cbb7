"""Which decoding calls the kernel for Hopper takes, and its launch; all others are for the portable kernels.

All programs of the launch run at once, one on each processor of the device. In a context that has fewer of them, CUDA
refuses the launch with an error that says so.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..geometry import capacity_of, heads_of
from . import hopper
from .decode_portable import decoding_policy_arguments
from .launch import FORMS, OPTIONS, Form, Launch, form_of, power_of_2

KEYS = 128
"""Keys of a tile."""
STAGES = {64: 6, 128: 3}
"""Tiles in the ring, by the head size; other sizes are not served."""
TILES = {8: 15, 16: 7}
"""The most tiles of a split, whose logits are kept in shared memory, by the columns that hold its rows."""
WARPS = 4
OVERHEAD = 16
"""What a split costs beside its tiles, where half of a tile of keys, or of values, costs 1."""
LEAST_TILES: float = 2
"""Tiles of keys for each processor, below which the portable kernels are taken."""
MOST_BATCH = 256
"""The most batch elements with lengths of their own: the plan of all of them is in shared memory."""
SPARE = 8
"""Splits for each program, for which there is room beside those of full caches."""
SPLITS = 128
"""Splits of a head whose statistics are merged at once."""
PARTS = 64
"""Rows of partial outputs that a program adds up at a time."""
LEAST_PAGE = 16
"""Keys of the smallest pages: with smaller ones, a tile would come in too many pieces."""
PIECE = 64
"""Columns of a piece of a tile: as far as the copy engine goes without a gap."""


def refusal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    lengths: Tensor | None,
    mask: Tensor | None,
    left: int,
) -> str:
    """What the kernel does not serve of a call, or nothing where it serves all of it."""
    if not hopper.known_processors(query.device):
        return "other than Hopper GPUs and the versions of Triton that it was run with"
    if mask is not None:
        return "a mask"
    if table is not None and (key.shape[1] < LEAST_PAGE or (KEYS % key.shape[1] and key.shape[1] % KEYS)):
        return f"pages that neither divide {KEYS} keys, {LEAST_PAGE} or more of them, nor are a multiple of that"
    if query.dtype not in (torch.float16, torch.bfloat16) or query.shape[-1] not in STAGES:
        return "heads other than of 64 or 128 columns in a two-byte type"
    if value.shape[-1] != query.shape[-1]:
        return "values that are not as wide as keys"
    if min(query.numel(), key.numel()) == 0:
        return "empty tensors"
    rows = _rows(query.shape, heads_of(key, table))
    if rows > max(TILES):
        return f"more than {max(TILES)} queries for a head of the cache"
    if lengths is not None and query.shape[0] > MOST_BATCH:
        return f"more than {MOST_BATCH} batch elements with lengths of their own"
    if query.stride(-1) != 1 or hopper.strides(form_of(key)) is None or hopper.strides(form_of(value)) is None:
        return "rows that are not contiguous or do not begin at multiples of 16 bytes"
    tiles = most_tiles(capacity_of(key, table), query.shape[2], left)
    if tiles > TILES[_columns(rows)] * hopper.processors(query.device):
        return "caches whose logits do not fit into shared memory"
    return ""


def pays(query: Tensor, key: Tensor, table: Tensor | None, left: int) -> bool:
    """Whether to take the kernel where it serves: with keys for all processors, as far as the host can tell."""
    tiles = query.shape[0] * heads_of(key, table) * most_tiles(capacity_of(key, table), query.shape[2], left)
    return tiles >= LEAST_TILES * hopper.processors(query.device)


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    policy: list[float],
    splits: int,
    outputs: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fill output, statistics and beta; 0 splits for numbers of them that suit the lengths, else those of most keys."""
    output, stats, beta = outputs
    if table is not None:
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    heads = key.shape[1]
    rows = _rows(query.shape, heads)
    forms = (form_of(query), form_of(key), form_of(value), None if table is None else form_of(table))
    run, limit, parted = _decode_launch(
        *forms, lengths is not None, scale, softcap, left, tuple(policy), splits, beta.numel()
    )
    sums = stats.new_empty((limit, rows))
    given = {
        "query": query,
        "key": key,
        "value": value,
        "lengths": lengths,
        "table": table,
        "parts": stats.new_empty((3, limit, rows)),
        "stats": stats,
        "betas": beta,
        "shares": stats.new_empty((limit, rows, query.shape[-1])) if parted else sums,
        "sums": sums,
        "output": output,
        "counters": torch.zeros(2 * query.shape[0] * heads, dtype=torch.int32, device=query.device),
    }
    run(given, query)


@functools.lru_cache(FORMS)
def _decode_launch(
    query: Form, key: Form, value: Form, table: Form | None, with_lengths: bool, scale: float, softcap: float,
    left: int, policy: tuple[float, ...], splits: int, rows_in_all: int,
) -> tuple[Launch, int, bool]:  # fmt: skip
    """The launch, for how many splits it wants room, and whether a head may have several.

    Keys and values are ``[batch, heads, keys, columns]``, or, with a table, ``[pages, heads, keys, columns]``.
    """
    from .decode_hopper_kernel import hopper_decode_kernel

    batch, _, queries, dim = query.shape
    heads, length = key.shape[1:3]
    page, capacity = (0, length) if table is None else (length, table.shape[1] * length)
    rows = _rows(query.shape, heads)
    columns = _columns(rows)
    groups, most = batch * heads, TILES[columns]
    programs, share, limit, splits = bounds(
        groups, most_tiles(capacity, queries, left), most, splits, hopper.processors(query.device)
    )
    lines = 1 if groups * columns <= programs else columns
    numbers = {
        **dict(zip(("stride_qb", "stride_qh", "stride_ql"), query.strides, strict=False)),
        **decoding_policy_arguments(policy),
        "stride_table": 0 if table is None else table.strides[0],
        "stride_part": limit * rows,
        "stride_stats": rows_in_all,
        "groups": groups,
        "heads": heads,
        "capacity": capacity,
        "left": left,
        "share": share,
        "limit": limit,
        "overhead": OVERHEAD,
        "scale": scale,
        "softcap": softcap,
        "ROWS": rows,
        "COLUMNS": columns,
        "QUERIES": queries,
        "CAPPED": softcap > 0,
        "KEYS": KEYS,
        "STAGES": STAGES[dim],
        "BATCH": planned_batch(batch) if with_lengths else 1,
        "TILES": most,
        "SPLITS": min(power_of_2(splits), SPLITS),
        "LINES": lines,
        "CHUNK": PARTS // lines,
        "D": dim,
        "PAGE": page,
    }
    tiles = functools.partial(hopper.descriptor, rows=min(page or KEYS, KEYS), columns=PIECE if page else dim)
    made = {"k_desc": ("key", tiles), "v_desc": ("value", tiles)}
    options = {"num_warps": WARPS, "launch_cooperative_grid": True, **OPTIONS}
    return Launch(hopper_decode_kernel, programs, numbers, options, made=made), limit, splits > 1


def bounds(groups: int, tiles: int, most: int, splits: int, processors: int) -> tuple[int, int, int, int]:
    """What the host fixes of the plan, which the kernel makes from the lengths, for up to ``tiles`` tiles of a head.

    How many programs there are, the most tiles of a split (0: the kernel chooses, up to ``most``, so that there is
    room for all), for how many splits there is room, and the most splits of a head.
    """
    programs = min(processors, groups * tiles)
    share = min(-(-tiles // min(splits, programs)), most) if splits else 0
    limit = groups * -(-tiles // (share or most)) + (0 if share else SPARE * programs)
    return programs, share, limit, min(-(-tiles // (share or 1)), programs)


def planned_batch(batch: int) -> int:
    """For how many batch elements the kernel plans: one, or as many for each of the 32 lanes of a warp."""
    return 1 if batch == 1 else power_of_2(batch, 32)


def most_tiles(capacity: int, queries: int, left: int) -> int:
    """The most tiles of keys that a head may have in sight."""
    blocks = -(-capacity // KEYS)
    return blocks if left < 0 else min(blocks, (left + queries) // KEYS + 2)


def _rows(query: tuple[int, ...], heads: int) -> int:
    """Queries that share one of the heads of a cache."""
    return query[1] // heads * query[2]


def _columns(rows: int) -> int:
    return min(TILES) if rows <= min(TILES) else max(TILES)
