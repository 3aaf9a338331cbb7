"""The gradients of row statistics and of attention with beta (:mod:`.prefill`), as Triton kernels.

Plain functions of tensors, in the same layouts. Functions that end in ``_launch`` know forms of tensors alone, and are
cached.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.policies.base import Lowered
from ..geometry import Geometry
from .backward_kernel import key_kernel, query_kernel
from .launch import (
    FORMS,
    OPTIONS,
    Form,
    Launch,
    MaskForm,
    Masks,
    form_of,
    has_edges,
    policy_arguments,
    programs_of,
    room_like,
    row_numbers,
    shared_numbers,
    strides,
    tiled,
    usual_tiles,
    value_numbers,
)
from .stats_kernel import policy_gradient_kernel
from .tiles import Tiles

POLICY_ROWS, POLICY_WARPS = 1024, 4
"""Rows and warps of a program that takes the gradient of a policy."""


class Parts(NamedTuple):
    """What a backward kernel gives the gradient of."""

    attend: bool
    stats: bool
    scaled: bool
    beta: bool
    given_delta: bool


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    beta: Tensor | None,
    geometry: Geometry,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    grad_out: Tensor | None = None,
    row_max: Tensor | None = None,
    grad_sum: Tensor | None = None,
    grad_moment: Tensor | None = None,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    need_beta: bool = False,
    delta: Tensor | None = None,
    grad_scaled: Tensor | None = None,
    lowered: Lowered | None = None,
    row_sum: Tensor | None = None,
    row_moment: Tensor | None = None,
    config: tuple[Tiles | None, Tiles | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk, dv and dbeta (float32).

    With ``grad_out`` the gradient of :func:`.prefill.attend` (which needs ``v``, ``beta``, ``out`` and ``lse``), with
    ``grad_sum`` and ``grad_moment`` that of :func:`.prefill.row_stats` (which needs ``row_max``), with all of them the
    sum of both in one pass. ``need_beta`` asks for dbeta, and needs ``row_max`` too. ``delta`` is what
    :func:`beta_gradient` gave, if it ran before.

    ``grad_scaled``, the cotangent of ``beta * q``, comes alone, with ``beta``, the statistics ``row_max``, ``row_sum``
    and ``row_moment`` and the policy of the entropy that made beta of them (``lowered``): the gradient of all of that.
    """
    if grad_scaled is not None and lowered is None:
        raise ValueError("the gradient of beta * q needs the policy that made beta, lowered")
    masks, packed = Masks.of(mask, key_lengths, cu_q, cu_k), cu_q is not None
    given, parts = _given(
        q, k, v, beta, masks, out=out, lse=lse, grad_out=grad_out, row_max=row_max, grad_sum=grad_sum,
        grad_moment=grad_moment, delta=delta, need_beta=need_beta, seed=seed, grad_scaled=grad_scaled, row_sum=row_sum,
        row_moment=row_moment,
    )  # fmt: skip
    forms = [form_of(given[name]) for name in ("q", "k", "v", "d_out")]
    rest = (geometry, masks.form, parts, float(dropout_p))
    dq = room_like(q, packed)
    dbeta = room_like(given["row_max"], packed) if need_beta else None
    given |= {"dq": dq, "dbeta": given["delta"] if dbeta is None else dbeta}
    _query_launch(*forms, *rest, lowered, True, config[0])(given, q)
    dk = room_like(k, packed)
    dv = room_like(v, packed) if v is not None and grad_out is not None else None
    given |= {"dk": dk, "dv": dk if dv is None else dv}
    _key_launch(*forms, *rest, config[1])(given, q)
    return dq, dk, dv, dbeta


def beta_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    geometry: Geometry,
    *,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    row_max: Tensor,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    config: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """dbeta alone, at two products instead of seven, and delta: ``<grad_out, out>`` without the rounding of ``out``.

    What the policy makes of dbeta is the cotangent of the statistics, after which :func:`backward` does all the rest
    at once: nine products in place of the eleven of two backward passes one after the other.
    """
    masks = Masks.of(mask, key_lengths, cu_q, cu_k)
    given, parts = _given(
        q, k, v, beta, masks, out=out, lse=lse, grad_out=grad_out, row_max=row_max, need_beta=True, seed=seed
    )
    forms = [form_of(given[name]) for name in ("q", "k", "v", "d_out")]
    dbeta = room_like(given["row_max"], cu_q is not None)
    run = _query_launch(*forms, geometry, masks.form, parts, float(dropout_p), None, False, config)
    run(given | {"dq": q, "dbeta": dbeta}, q)
    return dbeta, given["delta"]


def policy_gradient(lowered: Lowered, row_sum: Tensor, row_moment: Tensor, dbeta: Tensor) -> tuple[Tensor, Tensor]:
    """The cotangents of sum and moment, from that of beta, under a policy of the entropy."""
    rows = {"dbeta": dbeta.contiguous(), "row_sum": row_sum.contiguous(), "row_moment": row_moment.contiguous()}
    grad_sum, grad_moment = (torch.empty_like(rows["row_sum"]) for _ in range(2))
    run = _policy_launch(form_of(rows["row_sum"]), lowered)
    run(rows | {"grad_sum": grad_sum, "grad_moment": grad_moment}, row_sum)
    return grad_sum, grad_moment


def _given(
    q: Tensor, k: Tensor, v: Tensor | None, beta: Tensor | None, masks: Masks, *, out: Tensor | None,
    lse: Tensor | None, grad_out: Tensor | None, row_max: Tensor | None, need_beta: bool, seed: int,
    grad_sum: Tensor | None = None, grad_moment: Tensor | None = None, delta: Tensor | None = None,
    grad_scaled: Tensor | None = None, row_sum: Tensor | None = None, row_moment: Tensor | None = None,
) -> tuple[dict[str, Any], Parts]:  # fmt: skip
    """The tensors that both backward kernels take; one that is not needed is stood in for by ``q``."""
    attends, scaled, shape = grad_out is not None, grad_scaled is not None, q.shape[:-1]
    counts = scaled or grad_sum is not None or grad_moment is not None
    if attends and (v is None or beta is None or out is None or lse is None):
        raise ValueError("the gradient of attention needs v, beta, out and lse")
    if need_beta and not attends:
        raise ValueError("the gradient of beta needs grad_out")
    if (counts or need_beta) and row_max is None:
        raise ValueError("the gradient of the statistics or of beta needs row_max")
    if scaled and (attends or any(x is None for x in (beta, row_sum, row_moment))):
        raise ValueError("the gradient of beta * q needs beta, row_sum and row_moment, and comes without grad_out")
    if not attends and not counts:
        raise ValueError("expected grad_out, grad_scaled, or grad_sum and grad_moment, got none of them")
    if scaled:
        grad_sum, grad_moment = (q.new_empty(shape, dtype=torch.float32) for _ in range(2))
    elif counts and (grad_sum is None or grad_moment is None):  # "in" would ask a tensor whether it equals None
        zero = q.new_zeros(shape, dtype=torch.float32)
        grad_sum, grad_moment = (zero if g is None else g for g in (grad_sum, grad_moment))
    if grad_out is None or v is None:
        grad_out, v = q if grad_scaled is None else grad_scaled, q
    parts = Parts(attends, counts, scaled, need_beta, delta is not None)
    if delta is None:
        delta = q.new_empty(shape, dtype=torch.float32)
    rows = {
        "beta": beta, "lse": lse, "row_max": row_max, "row_sum": row_sum, "row_moment": row_moment,
        "grad_sum": grad_sum, "grad_moment": grad_moment, "delta": delta,
    }  # fmt: skip
    tensors = {"q": q, "k": k, "v": v, "d_out": grad_out, "out": q if out is None else out.contiguous(), "seed": seed}
    tensors |= {name: q if x is None else row_numbers(x, shape) for name, x in rows.items()}
    return tensors | masks.given(q), parts


def _of_gradients(v: Form, grad_out: Form, parts: Parts, dropout_p: float) -> dict[str, Any]:
    """The numbers that both backward kernels take."""
    return {
        **value_numbers(v, dropout_p),
        **strides("g", grad_out, "bhld"),
        "ATTEND": parts.attend,
        "STATS": parts.stats,
        "NEED_BETA": parts.beta,
        "GIVEN_DELTA": parts.given_delta,
        "SCALED": parts.scaled,
    }


@functools.lru_cache(FORMS)
def _query_launch(
    q: Form, k: Form, v: Form, grad_out: Form, geometry: Geometry, masks: MaskForm, parts: Parts, dropout_p: float,
    lowered: Lowered | None, need_query: bool, config: Tiles | None,
) -> Launch:  # fmt: skip
    shared = shared_numbers(q, k, v if parts.attend else None, geometry, masks)
    kernel = "stats query" if not parts.attend else "query" if need_query else "beta"
    width = max(q.shape[-1], v.shape[-1])
    tiles = config or usual_tiles(kernel, width, q, geometry, masks)
    return tiled(
        query_kernel,
        programs_of(shared, tiles.rows, by_key=False),
        tiles,
        shared,
        (q, k, v, grad_out),
        **_of_gradients(v, grad_out, parts, dropout_p),
        **policy_arguments(lowered),
        NEED_QUERY=need_query,
        EDGES=shared["k_len"] % tiles.keys != 0 or has_edges(shared),
    )


@functools.lru_cache(FORMS)
def _key_launch(
    q: Form, k: Form, v: Form, grad_out: Form, geometry: Geometry, masks: MaskForm, parts: Parts, dropout_p: float,
    config: Tiles | None,
) -> Launch:  # fmt: skip
    shared = shared_numbers(q, k, v if parts.attend else None, geometry, masks)
    width = max(q.shape[-1], v.shape[-1])
    kernel = "key" if parts.attend else "stats key"
    tiles = config or usual_tiles(kernel, width, q, geometry, masks)
    uneven = shared["k_len"] % tiles.keys != 0 or shared["q_len"] % tiles.rows != 0
    return tiled(
        key_kernel,
        programs_of(shared, tiles.keys, by_key=True),
        tiles,
        shared,
        (q, k, v, grad_out),
        **_of_gradients(v, grad_out, parts, dropout_p),
        EDGES=uneven or has_edges(shared),
    )


@functools.lru_cache(FORMS)
def _policy_launch(rows: Form, lowered: Lowered) -> Launch:
    count = math.prod(rows.shape)
    numbers = {"rows": count, **policy_arguments(lowered), "ROWS": POLICY_ROWS}
    options = {"num_warps": POLICY_WARPS, **OPTIONS}
    return Launch(policy_gradient_kernel, -(-count // POLICY_ROWS), numbers, options)
