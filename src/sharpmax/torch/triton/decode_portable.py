"""The portable decoding kernels: how the cache is split, and their launches.

A contiguous cache is ``[B, heads, capacity, D]``; a paged one ``[pages, page size, heads, D]`` with a block table.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fused import policy_of
from ..geometry import capacity_of, heads_of
from . import decode_kernel
from .hopper import processors
from .launch import FORMS, LEAST_SIDE, OPTIONS, Form, Launch, form_of, power_of_2, strides
from .policy import policy_values

MOST_SPLITS = 128
"""The most parts that a cache is split into by itself."""
TILE_BYTES = 16384
"""Bytes of keys, or of values, that a program takes at a time."""
PADDING = 128
"""Rows of logits are padded to a multiple of this, which every block of keys divides."""
UNBOUNDED = 1e30
"""What stands for an infinite bound of a policy."""


class Layout(NamedTuple):
    """The sizes of a call, and how it is cut into programs."""

    batch: int
    heads: int  # of the cache
    queries: int
    rows: int  # queries that share a head of the cache
    capacity: int
    page_size: int
    block_m: int
    block_n: int
    splits: int

    @property
    def padded(self) -> int:
        """The length of a row of logits."""
        return padded(self.capacity)

    @property
    def warps(self) -> int:
        """Of a program."""
        return 8 if self.block_m == 64 else 4

    @property
    def grid(self) -> tuple[int, int]:
        """Programs by batch element and split, and by head and block of rows."""
        return self.splits * self.batch, self.heads * -(-self.rows // self.block_m)


def padded(capacity: Any) -> Any:
    """The length of a row of logits."""
    return (capacity + PADDING - 1) // PADDING * PADDING


def layout_of(
    query_shape: torch.Size | tuple[int, ...], cache: Tensor, table: Tensor | None, head_dim: int, splits: int
) -> Layout:
    """The layout of a call whose largest head size is ``head_dim``; 0 splits for a suitable number of them."""
    batch, query_heads, queries = query_shape[:3]
    heads, capacity = heads_of(cache, table), capacity_of(cache, table)
    rows = query_heads // heads * queries
    block_m = min(64, power_of_2(rows, LEAST_SIDE))
    row_bytes = power_of_2(head_dim, LEAST_SIDE) * cache.element_size()
    block_n = min(128 if block_m == 16 else 64, max(LEAST_SIDE, TILE_BYTES // row_bytes))
    programs = batch * heads * -(-rows // block_m)
    return Layout(
        batch,
        heads,
        queries,
        rows,
        capacity,
        1 if table is None else cache.shape[1],
        block_m,
        block_n,
        splits or suitable_splits(programs, capacity, processors(cache.device)),
    )


def suitable_splits(programs: int, capacity: int, count: int) -> int:
    """Into how many parts to split the cache of each of ``programs``, on a card of ``count`` processors.

    Few programs: about two for each processor, in one wave, of 128 keys or more. Many: several waves, so that the last
    one costs little, of 2,048 keys or more, beside which the parts of the output are small.
    """
    slots = 2 * count
    if 4 * programs <= slots:
        wanted, least = slots // max(programs, 1), 128
    else:
        wanted, least = -(-4 * slots // programs), 2048
    return max(1, min(wanted, capacity // least, MOST_SPLITS))


def logits_and_parts(
    layout: Layout,
    query: Tensor,
    key: Tensor,
    table: Tensor | None,
    lengths: Tensor | None,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    with_min: bool,
) -> tuple[Tensor, Tensor]:
    """Logits ``[B, Hq, Lq, padded]`` and the statistics ``[3 or 4, B, heads, splits, rows]`` of every split."""
    logits = query.new_empty((*query.shape[:3], layout.padded), dtype=torch.float32)
    parts = logits.new_empty((4 if with_min else 3, layout.batch, layout.heads, layout.splits, layout.rows))
    if parts.numel() > 0:
        forms = (form_of(query), form_of(key), *(None if x is None else form_of(x) for x in (table, mask)))
        run = _logits_launch(layout, *forms, lengths is not None, scale, softcap, left, with_min)
        given = {"query": query, "key": key, "table": table, "lengths": lengths, "mask": _bytes(mask)}
        run(given | {"logits": logits, "parts": parts}, query)
    return logits, parts


@functools.lru_cache(FORMS)
def _logits_launch(
    layout: Layout, query: Form, key: Form, table: Form | None, mask: Form | None, with_lengths: bool, scale: float,
    softcap: float, left: int, with_min: bool,
) -> Launch:  # fmt: skip
    """The launch for a call; with lengths and without are two, since Triton compiles a kernel for each."""
    del with_lengths
    dim = query.shape[-1]
    numbers = {
        **strides("q", query, "bhld"),
        **_numbers_of_cache("k", layout, key, table, mask, left),
        "scale": scale,
        "softcap": softcap,
        "DIM": dim,
        "CAPPED": softcap > 0,
        "WITH_MIN": with_min,
        "BLOCK_D": power_of_2(dim, LEAST_SIDE),
    }
    return _launch(decode_kernel.logits_kernel, layout, numbers, query.device, table is not None)


def _numbers_of_cache(
    letter: str, layout: Layout, cache: Form, table: Form | None, mask: Form | None, left: int
) -> dict[str, Any]:
    """The numbers that both kernels take which go through keys or values."""
    outer, second, third, inner = cache.strides
    of_cache = (outer, second, third, inner) if table is None else (outer, third, second, inner)
    return {
        **{f"stride_{letter}{axis}": stride for axis, stride in zip("bhnd", of_cache, strict=True)},
        "stride_table": 0 if table is None else table.strides[0],
        "stride_mask": 0 if mask is None else mask.strides[0],
        "stride_part": layout.batch * layout.heads * layout.splits * layout.rows,
        "padded": layout.padded,
        "heads": layout.heads,
        "capacity": layout.capacity,
        "splits": layout.splits,
        "left": left,
        "ROWS": layout.rows,
        "QUERIES": layout.queries,
        "PAGE_SIZE": layout.page_size,
        "BLOCK_M": layout.block_m,
        "BLOCK_N": layout.block_n,
    }


def _launch(kernel: Any, layout: Layout, numbers: dict[str, Any], device: torch.device, paged: bool) -> Launch:
    pipeline = {"num_warps": layout.warps, "num_stages": _stages(layout, paged)}
    dependent, options = _options(device)
    return Launch(kernel, layout.grid, numbers | {"DEPENDENT": dependent}, pipeline | options)


def fill_output(
    layout: Layout,
    logits: Tensor,
    value: Tensor,
    table: Tensor | None,
    lengths: Tensor | None,
    mask: Tensor | None,
    parts: Tensor | None,
    stats: Tensor,
    beta: Tensor,
    output: Tensor,
    left: int,
    policy: list[float] | None,
) -> None:
    """Fill ``output``; with ``parts`` and a policy's numbers also ``stats`` and ``beta``, which else are given."""
    whole = layout.splits == 1
    shares = output
    if not whole:
        shares = logits.new_empty((layout.batch, layout.heads, layout.splits, layout.rows, value.shape[-1]))
    sums = None if whole else logits.new_empty(shares.shape[:-1])
    forms = (form_of(value), *(None if x is None else form_of(x) for x in (table, mask)))
    numbers = None if policy is None else tuple(policy)
    run = _values_launch(layout, *forms, lengths is not None, beta.numel(), left, numbers)
    given = {"logits": logits, "value": value, "table": table, "lengths": lengths, "mask": _bytes(mask)}
    run(given | {"parts": parts, "stats": stats, "betas": beta, "output": shares, "sums": sums}, value)
    if not whole:
        run = _combine_launch(layout, form_of(output))
        run({"parts": shares, "sums": sums, "output": output}, value)


@functools.lru_cache(FORMS)
def _values_launch(
    layout: Layout, value: Form, table: Form | None, mask: Form | None, with_lengths: bool, rows: int, left: int,
    policy: tuple[float, ...] | None,
) -> Launch:  # fmt: skip
    """The launch for a call; with lengths and without are two, since Triton compiles a kernel for each."""
    del with_lengths
    dim, lowered = value.shape[-1], policy is not None
    numbers = {
        **_numbers_of_cache("v", layout, value, table, mask, left),
        **decoding_policy_arguments(policy),
        "stride_stats": rows,
        "DIM": dim,
        "LOWERED": lowered,
        "BLOCK_D": power_of_2(dim, LEAST_SIDE),
        "SPLITS": power_of_2(layout.splits) if lowered else 1,
        "WHOLE": layout.splits == 1,
    }
    return _launch(decode_kernel.values_kernel, layout, numbers, value.device, table is not None)


def decoding_policy_arguments(numbers: tuple[float, ...] | None) -> dict[str, Any]:
    """A policy, by the numbers that operators take, as arguments of kernels for decoding; all 0 without one."""
    if numbers is None:
        return dict.fromkeys(decode_kernel.POLICY_NUMBERS, 0.0) | {"ENTROPY": False}
    lowered = policy_of(numbers)
    values = dict(zip(decode_kernel.POLICY_NUMBERS, policy_values(lowered, UNBOUNDED), strict=True))
    return values | {"ENTROPY": lowered.variable == "entropy"}


@functools.lru_cache(FORMS)
def _combine_launch(layout: Layout, output: Form) -> Launch:
    *rows, dim = output.shape
    splits, block_d = power_of_2(layout.splits), power_of_2(dim, LEAST_SIDE)
    dependent, options = _options(output.device)
    numbers = {
        "splits": layout.splits,
        "ROWS": layout.rows,
        "DIM": dim,
        "BLOCK_D": block_d,
        "SPLITS": splits,
        "CHUNK": min(splits, 8192 // block_d),
        "DEPENDENT": dependent,
    }
    return Launch(decode_kernel.combine_kernel, math.prod(rows), numbers, {"num_warps": 4, **options})


@functools.cache
def _options(device: torch.device) -> tuple[bool, dict[str, bool]]:
    """Whether a kernel may begin before the one ahead of it has ended, and options of a launch, which allow it."""
    can = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
    if can and importlib.util.find_spec("triton.language.extra.cuda.gdc") is not None:
        return True, OPTIONS | {"launch_pdl": True}
    return False, OPTIONS


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


def _stages(layout: Layout, paged: bool) -> int:
    """How far loads run ahead: as many blocks as fit beside those of other programs.

    Pages are looked up ahead of what they hold, which takes as many stages again.
    """
    ahead = {16: 4, 32: 3, 64: 2}[layout.block_m]
    return 2 * ahead - 1 if paged else ahead
