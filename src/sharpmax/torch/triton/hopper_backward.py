"""The gradient of attention with a policy of the entropy, on Hopper: which calls its kernels take, and their launch.

Attention is cuDNN's, on ``q~ = beta q``. Its gradient and that of the statistics share the logits: 8 products in all,
where one after the other takes 9, and nothing is added atomically. Three kernels: one for numbers of every row, one by
rows of queries (:mod:`.hopper_query_kernel`) and one by keys (:mod:`.hopper_key_kernel`).

The numbers lie by tiles of 64 rows, ``[tile, NUMBERS, 64]``, in the order of ``hopper_query_kernel.place_of``. With
``D = <do, out>``, ``H`` the entropy, maximum ``m`` and sum ``L`` of the statistics, and logarithms to base 2:

    -lse, -D, unit / beta, H - m - log L, g / 2^H, H, slope of the policy (as ``g`` takes it), nothing
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...core.policies.base import Lowered
from ..geometry import ALL, Geometry
from .hopper import FILLED, descriptor, processors
from .hopper import strides as engine_strides
from .hopper_numbers_kernel import numbers_kernel
from .launch import FORMS, LOG2E, OPTIONS, Form, Launch, Making, form_of, policy_arguments, row_numbers, strides

LINES = 64
"""Rows of a tile, of queries or of keys."""
ROWS = 128
"""Rows of queries, or keys, that a program owns at a time."""
NUMBERS = 8
"""Numbers of a row."""
STAGES = {64: 6, 128: 3}
"""Tiles in shared memory, by the head size; other sizes are not served."""
HALVES = {64: False, 128: True}
"""Whether the kernel of the queries takes tiles half by half, by the head size; as measured better on an H200."""
SECTION = 64 << 20
"""Bytes of what is streamed that programs work on at the same time; with causality alone."""
LEAST_BETA = 1e-3
"""Kernels divide by beta, of numbers that are rounded."""
SAMPLE = 256
"""Keys that stand for all of a head's where only their mean is asked for."""


def refusal(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, lowered: Lowered) -> str:
    """Why the kernels do not give these gradients, or nothing where they do; devices are for others to look at."""
    regular = all(_regular(x) for x in (q, k, v))
    return _unserved(q, k, v, geometry, lowered) or ("" if regular else "rows as the copy engine takes them")


def _unserved(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, lowered: Lowered) -> str:
    """The same, wherever tensors lie."""
    if geometry.softcap > 0 or geometry.scale <= 0:
        return "calls without a softcap and with a positive scale"
    aligned = not geometry.lower_right or q.shape[2] == k.shape[2]
    if geometry.left != ALL or geometry.right not in (ALL, 0) or not aligned:
        return "calls that see all keys, or those up to a row's own number"
    if q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] not in STAGES:
        return "heads of 64 or 128 columns in a two-byte type"
    if v.shape[-1] != q.shape[-1]:
        return "values as wide as queries"
    if 0 in (*q.shape, *k.shape):
        return "tensors that are not empty"
    if k.shape[2] == 1:
        return "more than one key, as cuDNN does"
    return "" if lowered.floor >= LEAST_BETA else f"policies whose beta is at least {LEAST_BETA}"


def _regular(x: Tensor) -> bool:
    """Whether the copy engine takes the strides of ``x``."""
    return x.stride(-1) == 1 and all(
        s > 0 and s % 8 == 0 for n, s in zip(x.shape[:-1], x.stride(), strict=False) if n > 1
    )


def pays(q: Tensor, k: Tensor, causal: bool, count: int) -> bool:
    """Whether ``count`` processors all have blocks of rows and of keys to do, as ``hopper.pays`` asks."""
    for x in (q, k):
        blocks = -(-x.shape[2] // ROWS) * x.shape[0] * x.shape[1]
        if blocks < (2 * count if causal else FILLED * count * -(-blocks // count)):
            return False
    return True


def sharpened_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    geometry: Geometry,
    lowered: Lowered,
    *,
    scaled: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    row_moment: Tensor,
    beta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; ``out`` and ``lse`` are those of attention on ``scaled``, which is ``beta * q``."""
    refused = _unserved(q, k, v, geometry, lowered)
    if refused:
        raise ValueError(f"the gradient kernels for Hopper serve {refused}")
    given = _tensors(q, k, v, scaled, out, grad_out, beta, lse, row_max, row_sum, row_moment)
    forms = (form_of(given[name]) for name in ("q", "k", "out", "d_out"))
    for run in _launches(*forms, geometry, lowered):
        run(given, q)
    return given["dq"], given["dk"], given["dv"]


def _tensors(
    q: Tensor, k: Tensor, v: Tensor, scaled: Tensor, out: Tensor, grad_out: Tensor, beta: Tensor, lse: Tensor,
    row_max: Tensor, row_sum: Tensor, row_moment: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    """What the kernels read and write, by name."""
    k, v, grad_out = (_placed(x) for x in (k, v, grad_out))
    rows = {"beta": beta, "lse": lse, "row_max": row_max, "row_sum": row_sum, "row_moment": row_moment}
    sequences, tiles = q.shape[0] * q.shape[1], -(-q.shape[2] // LINES)
    return {
        "q": q,
        "k": k,
        "v": v,
        "scaled": scaled.contiguous(),
        "out": out,
        "d_out": grad_out,
        "mean": k[:, :, :: max(1, k.shape[2] // SAMPLE)].mean(2, dtype=torch.float32),
        **{name: row_numbers(x, q) for name, x in rows.items()},
        "numbers": q.new_empty((sequences, tiles, NUMBERS, LINES), dtype=torch.float32),
        **{f"d{name}": x.new_empty(x.shape) for name, x in (("q", q), ("k", k), ("v", v))},
    }


def _placed(x: Tensor) -> Tensor:
    """``x``, where the copy engine can take it."""
    return x if engine_strides(form_of(x)) is not None else x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(FORMS)
def _launches(
    q: Form, k: Form, out: Form, grad_out: Form, geometry: Geometry, lowered: Lowered
) -> tuple[Launch, Launch, Launch]:
    """Of the numbers of every row, of dq, and of dk and dv."""
    from .hopper_key_kernel import hopper_key_kernel
    from .hopper_query_kernel import hopper_query_kernel

    causal = geometry.banded
    batch, heads, queries, width = q.shape
    shared = {
        "group": heads // k.shape[1],
        "queries": queries,
        "unit": geometry.scale * LOG2E,
        "scale": geometry.scale,
        "STAGES": STAGES[width],
        "CAUSAL": causal,
    }
    of_rows = {
        **strides("q", q, "bhld"),
        **strides("o", out, "bhld"),
        **strides("g", grad_out, "bhld"),
        **policy_arguments(lowered),
        "tiles": -(-queries // LINES),
        "heads": heads,
        "D": width,
        "LINES": LINES,
        "NUMBERS": NUMBERS,
    }
    programs = of_rows["tiles"] * batch * heads
    numbers = Launch(numbers_kernel, programs, shared | of_rows, {"num_warps": 8, **OPTIONS})
    streamed = {"q_desc": "scaled", "g_desc": "d_out", "k_desc": "k", "v_desc": "v"}
    options = {"num_warps": 4, **OPTIONS}
    programs, order = _programs(q, k, causal)
    edges = causal or k.shape[2] % LINES != 0 or queries % ROWS != 0
    by_query = Launch(
        hopper_query_kernel,
        programs,
        shared | order | {"keys": k.shape[2], "EDGES": edges, "HALVES": HALVES[width]},
        options,
        made=_tiles(streamed | {"out_desc": "dq"}),
    )
    programs, order = _programs(k, q, causal)
    results = {"dk_desc": "dk", "dv_desc": "dv"}
    made = _tiles(streamed | results) | _tiles({"n_desc": "numbers"}, NUMBERS)
    by_key = Launch(hopper_key_kernel, programs, shared | order, options, made=made)
    return numbers, by_query, by_key


def _tiles(sources: dict[str, str], rows: int = LINES) -> dict[str, Making]:
    """Arguments that are tiles of tensors, by the names of these."""
    return {name: (source, functools.partial(descriptor, rows=rows)) for name, source in sources.items()}


def _programs(owned: Form, streamed: Form, causal: bool) -> tuple[int, dict[str, int]]:
    """How many programs share the blocks of ``owned``, and in which order they take them."""
    batch, heads, length, width = owned.shape
    blocks, sequences = -(-length // ROWS), batch * heads
    bytes_streamed = 2 * streamed.shape[2] * width * owned.dtype.itemsize
    section = max(1, SECTION // bytes_streamed) if causal else 1
    items = blocks * sequences
    sizes = {"items": items, "section": min(section, sequences), "blocks": blocks}
    return min(items, processors(owned.device)), sizes | {"sequences": sequences, "heads": heads}
