"""The gradient of attention with a policy of the entropy, on Hopper: which calls its kernels take, and their launch.

The gradient of attention and that of the statistics share the logits: 8 products in all, and nothing is added
atomically. Three kernels: one for numbers of every row, one by rows of queries (:mod:`.hopper_query_kernel`) and one by
keys (:mod:`.hopper_key_kernel`).

The numbers lie by tiles of 64 rows, ``[tile, NUMBERS, 64]``, in the order of ``hopper_query_kernel.place_of``. With
``D = <do, out>``, ``H`` the entropy, maximum ``m`` and sum ``L`` of the statistics, and logarithms to base 2:

    -lse, -D, beta unit, H - m - log L, g, slope of the policy (as ``g`` takes it), -D beta unit, nothing

The kernel of the queries gives ``g`` and, with the ``D`` of an output that was not rounded, ``-D beta unit``.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...core.policies.base import Lowered
from ..geometry import Geometry
from .hopper import LINES, fills, known_processors, plain_refusal, programs_in_order, tiles_of
from .hopper import strides as engine_strides
from .hopper_numbers_kernel import numbers_kernel
from .launch import (
    FORMS,
    LOG2E,
    OPTIONS,
    Form,
    Launch,
    form_of,
    policy_arguments,
    room_like,
    row_numbers,
    strides,
)

ROWS = 128
"""Rows of queries, or keys, that a program owns at a time."""
NUMBERS = 8
"""Numbers of a row."""
STAGES = {64: 6, 128: 3}
"""Tiles in shared memory, by the head size; other sizes are not served."""
HALVES = {64: False, 128: True}
"""Whether the kernel of the queries takes tiles half by half, by the head size; as measured better on an H200."""
HALF_KEYS = 65_536
"""Keys up to which ``2^x x``, whatever the logits, stays within the numbers of float16."""


def taken(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    geometry: Geometry,
    lowered: Lowered,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    dropout_p: float = 0.0,
) -> bool:
    """Whether :func:`adaptive_backward` gives the gradient of a call: where it serves, and keeps the card at work."""
    count = known_processors(q.device)
    if count == 0 or dropout_p > 0 or any(x is not None for x in (mask, key_lengths, cu_q, cu_k)):
        return False
    return _serves_and_pays(form_of(q), form_of(k), form_of(v), geometry, lowered, count)


@functools.lru_cache(FORMS)
def _serves_and_pays(q: Form, k: Form, v: Form, geometry: Geometry, lowered: Lowered, count: int) -> bool:
    return not refusal(q, k, v, geometry, lowered) and pays(q, k, geometry.banded, count)


def refusal(q: Tensor | Form, k: Tensor | Form, v: Tensor | Form, geometry: Geometry, lowered: Lowered) -> str:
    """Why the kernels do not give these gradients, or nothing where they do; devices are for others to look at."""
    refused = plain_refusal(q, k, v, geometry)
    if refused:
        return refused
    if q.dtype == torch.float16 and k.shape[2] > HALF_KEYS:
        return f"up to {HALF_KEYS:,} keys in float16"
    return "policies of the entropy, with beta at least 0" if lowered.constant or lowered.floor < 0 else ""


def pays(q: Tensor | Form, k: Tensor | Form, causal: bool, count: int) -> bool:
    """Whether ``count`` processors all have blocks of rows and of keys to do."""
    return all(fills(x.shape, ROWS, causal, count) for x in (q, k))


def adaptive_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    geometry: Geometry,
    lowered: Lowered,
    *,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    row_moment: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, the same bits every time; ``out`` and ``lse`` are what :func:`.prefill.attend` gives."""
    refused = refusal(q, k, v, geometry, lowered)
    if refused:
        raise ValueError(f"the gradient kernels for Hopper serve {refused}")
    given = _tensors(q, k, v, beta, out, lse, grad_out, row_max, row_sum, row_moment)
    forms = (form_of(given[name]) for name in ("q", "k", "out", "d_out"))
    for run in _launches(*forms, geometry, lowered):
        run(given, q)
    return given["dq"], given["dk"], given["dv"]


def _tensors(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, row_max: Tensor,
    row_sum: Tensor, row_moment: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    """What the kernels read and write, by name."""
    q, k, v, grad_out = (_placed(x) for x in (q, k, v, grad_out))
    rows = {"beta": beta, "lse": lse, "row_max": row_max, "row_sum": row_sum, "row_moment": row_moment}
    batch, heads, queries, _ = q.shape
    return {
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "d_out": grad_out,
        **{name: row_numbers(x, (batch, heads, queries)) for name, x in rows.items()},
        "numbers": q.new_empty((batch * heads, -(-queries // LINES), NUMBERS, LINES), dtype=torch.float32),
        **{f"d{name}": room_like(x, False) for name, x in (("q", q), ("k", k), ("v", v))},
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
        "STAGES": STAGES[width],
        "CAUSAL": causal,
    }
    of_rows = {
        **strides("o", out, "bhld"),
        **strides("g", grad_out, "bhld"),
        **policy_arguments(lowered),
        "tiles": -(-queries // LINES),
        "heads": heads,
        "scale": geometry.scale,
        "D": width,
        "LINES": LINES,
        "NUMBERS": NUMBERS,
    }
    programs = of_rows["tiles"] * batch * heads
    numbers = Launch(numbers_kernel, programs, shared | of_rows, {"num_warps": 8, **OPTIONS})
    streamed = {"q_desc": "q", "g_desc": "d_out", "k_desc": "k", "v_desc": "v"}
    options = {"num_warps": 4, **OPTIONS}
    programs, order = programs_in_order(q, ROWS, k, 2, causal)
    edges = causal or k.shape[2] % LINES != 0 or queries % ROWS != 0
    by_query = Launch(
        hopper_query_kernel,
        programs,
        shared | order | {"keys": k.shape[2], "EDGES": edges, "HALVES": HALVES[width]},
        options,
        made=tiles_of(streamed | {"out_desc": "dq"}, LINES),
    )
    programs, order = programs_in_order(k, ROWS, q, 2, causal)
    results = {"dk_desc": "dk", "dv_desc": "dv"}
    made = tiles_of(streamed | results, LINES) | tiles_of({"n_desc": "numbers"}, NUMBERS)
    by_key = Launch(hopper_key_kernel, programs, shared | order, options, made=made)
    return numbers, by_query, by_key
