"""Row statistics, attention with beta and their gradients for many queries, as Triton kernels.

Plain functions of tensors, without autograd: ``sharpmax.torch`` makes operators of them. Nothing here is ever of size
queries x keys, keys and values of grouped heads are not repeated, and tensors may have any strides. Packed batches are
``[1, heads, tokens, columns]`` with document offsets ``cu_q`` and ``cu_k`` (int32, one more than there are documents).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from ...core.policies.base import Lowered
from ..geometry import Geometry
from . import hopper
from .attend_kernel import attend_kernel
from .backward_kernel import key_kernel, query_kernel
from .launch import (
    OPTIONS,
    check_device,
    has_edges,
    launch,
    padded,
    policy_arguments,
    programs_of,
    room,
    row_numbers,
    shared_arguments,
    strides,
)
from .stats_kernel import policy_gradient_kernel, stats_kernel
from .tiles import Tiles, tiles_for

StatsConfig = Tiles | Literal["hopper"]
"""Which kernel gives the statistics: the portable one with these tiles, or the one for Hopper."""
QUERY_ONLY = ("out", "row_sum", "row_moment", "NEED_BETA", "GIVEN_DELTA", "SCALED")
"""What only the first of the backward kernels takes."""
POLICY_ROWS, POLICY_WARPS = 1024, 4
"""Rows and warps of a program that takes the gradient of a policy."""


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
    config: StatsConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Maximum, sum, moment, minimum (``None`` unless asked for) and count of every row, ``[B, H, Lq]``."""
    shared = shared_arguments(q, k, None, geometry, mask, key_lengths, cu_q, cu_k)
    return _stats(q, k, shared, with_min, None, False, config)[0]


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
    with_min: bool = False,
    scaled_query: bool = True,
    config: StatsConfig | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor], Tensor, Tensor | None]:
    """The statistics, beta of a lowered policy (float32), and ``beta * q`` in the type of ``q``, from one kernel."""
    shared = shared_arguments(q, k, None, geometry, mask, key_lengths, cu_q, cu_k)
    stats, beta, scaled = _stats(q, k, shared, with_min, lowered, scaled_query, config)
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
    config: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """``softmax(beta * z) v`` in the type of ``q``, and ``logsumexp(beta * z)`` in float32 (``-inf`` for empty rows).

    ``beta`` is ``[B, H, Lq]``, finite and not negative.
    """
    shared = shared_arguments(q, k, v, geometry, mask, key_lengths, cu_q, cu_k)
    tiles = config or tiles_for("attend", max(q.shape[-1], v.shape[-1]), q.dtype, q.device, geometry.banded)
    packed = cu_q is not None
    out = room(q, (*q.shape[:-1], v.shape[-1]), packed)
    lse = room(q, q.shape[:-1], packed, torch.float32, -math.inf)
    launch(
        attend_kernel,
        programs_of(shared, tiles.rows, by_key=False),
        tiles,
        shared,
        q,
        v=v,
        **strides("v", v, "bhld"),
        beta=row_numbers(beta, q),
        out=out,
        lse=lse,
        dropout_p=float(dropout_p),
        seed=seed,
        DV=v.shape[-1],
        BLOCK_DV=padded(v.shape[-1]),
        DROPOUT=dropout_p > 0,
        EDGES=shared["k_len"] % tiles.keys != 0 or has_edges(shared),
    )
    return out, lse


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

    With ``grad_out`` the gradient of :func:`attend` (which needs ``v``, ``beta``, ``out`` and ``lse``), with
    ``grad_sum`` and ``grad_moment`` that of :func:`row_stats` (which needs ``row_max``), with all of them the sum of
    both in one pass. ``need_beta`` asks for dbeta, and needs ``row_max`` too. ``delta`` is what :func:`beta_gradient`
    gave, if it ran before.

    ``grad_scaled``, the cotangent of ``beta * q``, comes alone, with ``beta``, the statistics ``row_max``, ``row_sum``
    and ``row_moment`` and the policy of the entropy that made beta of them (``lowered``): the gradient of all of that.
    """
    if grad_scaled is not None and lowered is None:
        raise ValueError("the gradient of beta * q needs the policy that made beta, lowered")
    shared = shared_arguments(q, k, v, geometry, mask, key_lengths, cu_q, cu_k)
    gradients = _gradients(
        q, v, beta, out, lse, grad_out, row_max, grad_sum, grad_moment, delta, need_beta, dropout_p, seed, grad_scaled,
        row_sum, row_moment,
    )  # fmt: skip
    packed = cu_q is not None
    dq = room(q, q.shape, packed)
    dbeta = room(q, q.shape[:-1], packed, torch.float32) if need_beta else None
    _query_gradient(q, shared, gradients, dq, dbeta, lowered, config[0])
    dk = room(k, k.shape, packed)
    dv = room(v, v.shape, packed) if v is not None and grad_out is not None else None
    width = max(q.shape[-1], gradients["DV"])
    kernel = "key" if gradients["ATTEND"] else "stats key"
    tiles = config[1] or tiles_for(kernel, width, q.dtype, q.device, geometry.banded)
    passed = {name: value for name, value in gradients.items() if name not in QUERY_ONLY}
    uneven = shared["k_len"] % tiles.keys != 0 or shared["q_len"] % tiles.rows != 0
    launch(
        key_kernel,
        programs_of(shared, tiles.keys, by_key=True),
        tiles,
        shared,
        q,
        **passed,
        dk=dk,
        dv=dk if dv is None else dv,
        scale=geometry.scale,
        EDGES=uneven or has_edges(shared),
    )
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
    shared = shared_arguments(q, k, v, geometry, mask, key_lengths, cu_q, cu_k)
    gradients = _gradients(q, v, beta, out, lse, grad_out, row_max, None, None, None, True, dropout_p, seed)
    dbeta = room(q, q.shape[:-1], cu_q is not None, torch.float32)
    _query_gradient(q, shared, gradients, None, dbeta, None, config)
    return dbeta, gradients["delta"]


def policy_gradient(lowered: Lowered, row_sum: Tensor, row_moment: Tensor, dbeta: Tensor) -> tuple[Tensor, Tensor]:
    """The cotangents of sum and moment, from that of beta, under a policy of the entropy."""
    row_sum, row_moment, dbeta = row_sum.contiguous(), row_moment.contiguous(), dbeta.contiguous()
    grad_sum, grad_moment = torch.empty_like(row_sum), torch.empty_like(row_moment)
    numbers = {name: x for name, x in policy_arguments(lowered).items() if name not in ("POLICY", "LOG_COUNT")}
    if row_sum.numel() > 0:
        kernel: Any = policy_gradient_kernel
        check_device(kernel, row_sum)
        with torch.cuda.device_of(row_sum):
            kernel[(triton.cdiv(row_sum.numel(), POLICY_ROWS),)](
                dbeta, row_sum, row_moment, grad_sum, grad_moment, row_sum.numel(), **numbers,
                ROWS=POLICY_ROWS, num_warps=POLICY_WARPS, **OPTIONS,
            )  # fmt: skip
    return grad_sum, grad_moment


def _stats(
    q: Tensor, k: Tensor, shared: dict[str, Any], with_min: bool, lowered: Lowered | None, scaled: bool,
    config: StatsConfig | None,
) -> Any:  # fmt: skip
    shape, packed = q.shape[:-1], shared["PACKED"]
    highest, total, moment = (room(q, shape, packed, torch.float32, fill) for fill in (-math.inf, 0.0, 0.0))
    count = room(q, shape, packed, torch.int32)
    lowest = room(q, shape, packed, torch.float32, math.inf) if with_min else None
    beta = room(q, shape, packed, torch.float32) if lowered is not None else None
    query = room(q, q.shape, packed) if lowered is not None and scaled else None
    policy = policy_arguments(lowered)
    outputs = {
        "out_max": highest,
        "out_sum": total,
        "out_moment": moment,
        "out_count": count,
        "out_beta": total if beta is None else beta,
    }
    if _on_hopper(q, k, shared, with_min, policy, config):
        hopper.row_stats(q, k, shared, outputs, policy, query)
        return (highest, total, moment, lowest, count), beta, query
    banded = shared["LEFT"] or shared["RIGHT"]
    tiles = config if isinstance(config, Tiles) else tiles_for("stats", q.shape[-1], q.dtype, q.device, banded)
    launch(
        stats_kernel,
        programs_of(shared, tiles.rows, by_key=False),
        tiles,
        shared,
        q,
        **outputs,
        out_min=total if lowest is None else lowest,
        out_q=q if query is None else query,
        **policy,
        WITH_MIN=with_min,
        SCALED_QUERY=query is not None,
        EDGES=shared["k_len"] % tiles.keys != 0 or has_edges(shared),
    )
    return (highest, total, moment, lowest, count), beta, query


def _on_hopper(
    q: Tensor, k: Tensor, shared: dict[str, Any], with_min: bool, policy: dict[str, Any], config: StatsConfig | None
) -> bool:
    """Whether the kernel for Hopper is taken: where it was asked for, or serves and keeps the card at work."""
    if isinstance(config, Tiles):
        return False
    refused = hopper.refusal(q, k, shared, with_min, policy["LOG_COUNT"])
    if config == "hopper" and refused:
        raise ValueError(f"the statistics kernel for Hopper serves {refused}")
    return not refused and (config == "hopper" or hopper.pays(q, shared["RIGHT"]))


def _gradients(
    q: Tensor, v: Tensor | None, beta: Tensor | None, out: Tensor | None, lse: Tensor | None, grad_out: Tensor | None,
    row_max: Tensor | None, grad_sum: Tensor | None, grad_moment: Tensor | None, delta: Tensor | None, need_beta: bool,
    dropout_p: float, seed: int, grad_scaled: Tensor | None = None, row_sum: Tensor | None = None,
    row_moment: Tensor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The arguments that both backward kernels take; a tensor that is not needed is stood in for by ``q``."""
    attends, scaled = grad_out is not None, grad_scaled is not None
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
        grad_sum, grad_moment = (torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) for _ in range(2))
    elif counts:
        zero = torch.zeros(q.shape[:-1], dtype=torch.float32, device=q.device) if None in (grad_sum, grad_moment) else q
        grad_sum, grad_moment = (zero if g is None else g for g in (grad_sum, grad_moment))
    if grad_out is None or v is None:
        grad_out, v = q if grad_scaled is None else grad_scaled, q
    given_delta = delta is not None
    if delta is None:
        delta = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    return {
        "v": v,
        "d_out": grad_out,
        "out": q if out is None else out.contiguous(),
        **{
            name: q if values is None else row_numbers(values, q)
            for name, values in {
                "beta": beta, "lse": lse, "row_max": row_max, "row_sum": row_sum, "row_moment": row_moment,
                "grad_sum": grad_sum, "grad_moment": grad_moment,
            }.items()
        },
        "delta": row_numbers(delta, q),
        **strides("v", v, "bhld"),
        **strides("g", grad_out, "bhld"),
        "dropout_p": float(dropout_p),
        "seed": seed,
        "DV": v.shape[-1],
        "BLOCK_DV": padded(v.shape[-1]),
        "DROPOUT": dropout_p > 0,
        "ATTEND": attends,
        "STATS": counts,
        "NEED_BETA": need_beta,
        "GIVEN_DELTA": given_delta,
        "SCALED": scaled,
    }  # fmt: skip


def _query_gradient(
    q: Tensor, shared: dict[str, Any], gradients: dict[str, Any], dq: Tensor | None, dbeta: Tensor | None,
    lowered: Lowered | None, config: Tiles | None,
) -> None:  # fmt: skip
    kernel = "stats query" if not gradients["ATTEND"] else "query" if dq is not None else "beta"
    width = max(q.shape[-1], gradients["DV"])
    tiles = config or tiles_for(kernel, width, q.dtype, q.device, shared["LEFT"] or shared["RIGHT"])
    numbers = {name: x for name, x in policy_arguments(lowered).items() if name not in ("POLICY", "LOG_COUNT")}
    launch(
        query_kernel,
        programs_of(shared, tiles.rows, by_key=False),
        tiles,
        shared,
        q,
        **gradients,
        **numbers,
        dq=q if dq is None else dq,
        dbeta=gradients["delta"] if dbeta is None else dbeta,
        scale=shared["SCALE"],
        NEED_QUERY=dq is not None,
        EDGES=shared["k_len"] % tiles.keys != 0 or has_edges(shared),
    )
