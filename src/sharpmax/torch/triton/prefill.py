"""Row statistics and attention with beta for many queries, as Triton kernels; gradients are in :mod:`.gradient`.

Plain functions of tensors, without autograd: ``sharpmax.torch`` makes operators of them. Nothing here is ever of size
queries x keys, keys and values of grouped heads are not repeated, and tensors may have any strides. Packed batches are
``[1, heads, tokens, columns]`` with document offsets ``cu_q`` and ``cu_k`` (int32, one more than there are documents).

Functions that end in ``_launch`` know forms of tensors alone, and are cached.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import torch
from torch import Tensor

from ...core.policies.base import Lowered
from ..geometry import Geometry
from . import hopper
from .attend_kernel import attend_kernel
from .launch import (
    FORMS,
    Form,
    Launch,
    MaskForm,
    Masks,
    form_of,
    has_edges,
    policy_arguments,
    programs_of,
    room,
    room_like,
    row_numbers,
    shared_numbers,
    tiled,
    usual_tiles,
    value_numbers,
)
from .stats_kernel import stats_kernel
from .tiles import Tiles

Config = Tiles | Literal["hopper"]
"""Which kernel to take: the portable one with these tiles, or the one for Hopper."""


def row_stats(
    q: Tensor,
    k: Tensor,
    geometry: Geometry,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    with_min: bool = False,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Maximum, sum, moment, minimum (``None`` unless asked for) and count of every row, ``[B, H, Lq]``."""
    return _stats(q, k, geometry, Masks.of(mask, key_lengths, cu_q, cu_k), with_min, None, False, config)[0]


def row_stats_and_scaled_query(
    q: Tensor,
    k: Tensor,
    geometry: Geometry,
    lowered: Lowered,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    scaled_query: bool = True,
    config: Config | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor, None, Tensor], Tensor, Tensor | None]:
    """The statistics, beta of a lowered policy (float32), and ``beta * q`` in the type of ``q``, from one kernel."""
    masks = Masks.of(mask, key_lengths, cu_q, cu_k)
    stats, beta, scaled = _stats(q, k, geometry, masks, False, lowered, scaled_query, config)
    assert beta is not None
    return stats, beta, scaled


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    geometry: Geometry,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    row_max: Tensor | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """``softmax(beta * z) v`` in the type of ``q``, and ``logsumexp(beta * z)`` in float32 (``-inf`` for empty rows).

    ``beta`` is ``[B, H, Lq]``, finite and not negative; ``row_max`` are the maxima of ``z`` that :func:`row_stats`
    gave, if it did: with them, the kernel for Hopper may be taken.
    """
    masks = Masks.of(mask, key_lengths, cu_q, cu_k)
    forms = (form_of(q), form_of(k), form_of(v))
    run = _attend_launch(*forms, geometry, masks.form, float(dropout_p), row_max is not None, config)
    rows, packed = q.shape[:-1], cu_q is not None
    beta = row_numbers(beta, rows)
    out, lse = room(q, (*rows, v.shape[-1]), packed), room_like(beta, packed, -math.inf)
    given = {"q": q, "k": k, "v": v, "beta": beta, "out": out, "lse": lse, "seed": seed}
    if row_max is not None:
        given["row_max"] = row_numbers(row_max, rows)
    run(given | masks.given(q), q)
    return out, lse


def _stats(
    q: Tensor, k: Tensor, geometry: Geometry, masks: Masks, with_min: bool, lowered: Lowered | None, scaled: bool,
    config: Config | None,
) -> Any:  # fmt: skip
    scaled = scaled and lowered is not None
    run = _stats_launch(form_of(q), form_of(k), geometry, masks.form, with_min, lowered, scaled, config)
    packed = masks.cu_q is not None
    highest = room(q, q.shape[:-1], packed, torch.float32, -math.inf)
    total, moment = room_like(highest, packed), room_like(highest, packed)
    count = room_like(highest, packed, dtype=torch.int32)
    lowest = room_like(highest, packed, math.inf) if with_min else None
    beta = room_like(highest, packed) if lowered is not None else None
    query = room_like(q, packed) if scaled else None
    given = {
        "q": q,
        "k": k,
        "out_max": highest,
        "out_sum": total,
        "out_moment": moment,
        "out_min": total if lowest is None else lowest,
        "out_count": count,
        "out_beta": total if beta is None else beta,
        "out_q": q if query is None else query,
    }
    run(given | masks.given(q), q)
    return (highest, total, moment, lowest, count), beta, query


@functools.lru_cache(FORMS)
def _stats_launch(
    q: Form, k: Form, geometry: Geometry, masks: MaskForm, with_min: bool, lowered: Lowered | None, scaled_query: bool,
    config: Config | None,
) -> Launch:  # fmt: skip
    shared, policy = shared_numbers(q, k, None, geometry, masks), policy_arguments(lowered)
    refused = hopper.refusal(q, k, shared, with_min, policy["LOG_COUNT"])
    if _on_hopper("statistics", refused, q, shared["RIGHT"], hopper.ROWS, config):
        return hopper.stats_launch(q, k, shared, policy, scaled_query)
    tiles = config if isinstance(config, Tiles) else usual_tiles("stats", q.shape[-1], q, geometry, masks)
    return tiled(
        stats_kernel,
        programs_of(shared, tiles.rows, by_key=False),
        tiles,
        shared,
        (q, k),
        **policy,
        WITH_MIN=with_min,
        SCALED_QUERY=scaled_query,
        EDGES=shared["k_len"] % tiles.keys != 0 or has_edges(shared),
    )


def _on_hopper(what: str, refused: str, q: Form, causal: bool, rows: int, config: Config | None) -> bool:
    """Whether a kernel for Hopper is taken: where it was asked for, or serves and keeps the card at work."""
    if isinstance(config, Tiles):
        return False
    if config == "hopper" and refused:
        raise ValueError(f"the {what} kernel for Hopper serves {refused}")
    return not refused and (config == "hopper" or hopper.pays(q, causal, rows))


@functools.lru_cache(FORMS)
def _attend_launch(
    q: Form, k: Form, v: Form, geometry: Geometry, masks: MaskForm, dropout_p: float, with_max: bool,
    config: Config | None,
) -> Launch:  # fmt: skip
    shared = shared_numbers(q, k, v, geometry, masks)
    refused = hopper.attend_refusal(q, k, v, shared, dropout_p) if with_max else "calls with the maxima of rows"
    if _on_hopper("attention", refused, q, shared["RIGHT"], hopper.ATTEND_ROWS, config):
        return hopper.attend_launch(q, k, shared)
    width = max(q.shape[-1], v.shape[-1])
    tiles = config if isinstance(config, Tiles) else usual_tiles("attend", width, q, geometry, masks)
    return tiled(
        attend_kernel,
        programs_of(shared, tiles.rows, by_key=False),
        tiles,
        shared,
        (q, k, v),
        **value_numbers(v, dropout_p),
        EDGES=shared["k_len"] % tiles.keys != 0 or has_edges(shared),
    )
