"""Row statistics and attention with beta as torch operators: visible to ``torch.compile``, differentiable, vmappable.

``sharpmax::row_stats`` and ``sharpmax::attend`` with their backward operators take plain numbers for the
:class:`~sharpmax.torch.geometry.Geometry` and the name of the implementation, ``"streaming"`` or ``"triton"``. Packed
documents are ``[1, heads, tokens, columns]`` with offsets ``cu_q`` and ``cu_k``. What was not asked for comes back as a
tensor without elements.

``sharpmax::sharpened_query`` and ``sharpmax::adaptive_attention`` have the policy inside, which must lower to numbers,
and are served by Triton's kernels alone: fewer passes, and nothing of the policy's own in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..core.policies import Lowered
from . import streaming
from .blocks import accumulation
from .geometry import Geometry

IMPLEMENTATIONS = ("streaming", "triton")

Stats = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(0)


def _documents(cu_q: Tensor | None, cu_k: Tensor | None, q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """The queries and keys that belong together: all, or those of one packed document after the other."""
    if cu_q is None or cu_k is None:
        yield slice(0, q.shape[2]), slice(0, k.shape[2])
        return
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    for i in range(len(starts_q) - 1):
        yield slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])


def _triton() -> Any:
    from . import triton

    return triton


def _check_impl(impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"expected impl to be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")


def _full_precision(q: Tensor) -> Any:
    """Autocast has done its casts before; in here, float32 stays float32."""
    return torch.autocast(device_type=q.device.type, enabled=False)


# ----------------------------------------------------------------------------------------------------------------
# Row statistics
# ----------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("sharpmax::row_stats", mutates_args=())
def row_stats(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    lower_right: bool,
    with_min: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Maximum, sum, moment, minimum (no elements unless asked for) and count of every row, ``[B, Hq, Lq]``."""
    _check_impl(impl)
    geometry = Geometry(scale, softcap, left, right, lower_right)
    with _full_precision(q):
        if impl == "triton":
            found = _triton().row_stats(
                q, k, geometry, mask=mask, key_lengths=key_lengths, cu_q=cu_q, cu_k=cu_k, with_min=with_min
            )
            return *found[:3], _nothing(found[0]) if found[3] is None else found[3], found[4]
        if cu_q is None:
            found = streaming.row_stats(q, k, geometry, mask=mask, key_lengths=key_lengths, with_min=with_min)
            return *found[:3], _nothing(found[0]) if found[3] is None else found[3], found[4]
        fields = _empty_stats(q, with_min)
        for queries, keys in _documents(cu_q, cu_k, q, k):
            parts = streaming.row_stats(q[:, :, queries], k[:, :, keys], geometry, with_min=with_min)
            for field, part in zip(fields, parts, strict=True):
                if part is not None:
                    field[:, :, queries] = part
        return fields


def _empty_stats(q: Tensor, with_min: bool) -> Stats:
    shape, dtype = q.shape[:-1], accumulation(q.dtype)
    highest, total, moment = (q.new_empty(shape, dtype=dtype) for _ in range(3))
    lowest = q.new_empty(shape if with_min else (0,), dtype=dtype)
    return highest, total, moment, lowest, q.new_empty(shape, dtype=torch.int32)


@row_stats.register_fake
def _row_stats_fake(
    q: Tensor, k: Tensor, mask: Tensor | None, key_lengths: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None,
    scale: float, softcap: float, left: int, right: int, lower_right: bool, with_min: bool, impl: str,
) -> Stats:  # fmt: skip
    return _empty_stats(q, with_min)


@torch.library.custom_op("sharpmax::row_stats_backward", mutates_args=())
def row_stats_backward(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    row_max: Tensor,
    grad_sum: Tensor,
    grad_moment: Tensor,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    lower_right: bool,
    need_mask: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and mask (no elements unless asked for)."""
    _check_impl(impl)
    geometry = Geometry(scale, softcap, left, right, lower_right)
    with _full_precision(q):
        if impl == "triton":
            dq, dk, _, _ = _triton().backward(
                q, k, None, None, geometry, row_max=row_max, grad_sum=grad_sum, grad_moment=grad_moment, mask=mask,
                key_lengths=key_lengths, cu_q=cu_q, cu_k=cu_k,
            )  # fmt: skip
            return dq, dk, _nothing(q)
        if cu_q is None:
            dq, dk, dmask = streaming.row_stats_backward(
                q, k, geometry, row_max, grad_sum, grad_moment, mask=mask, key_lengths=key_lengths, need_mask=need_mask
            )
            return _like(dq, q), _like(dk, k), _mask_gradient(dmask, mask, q)
        dq, dk = q.new_zeros(q.shape), k.new_zeros(k.shape)
        for queries, keys in _documents(cu_q, cu_k, q, k):
            rows = (x[:, :, queries] for x in (row_max, grad_sum, grad_moment))
            dq[:, :, queries], dk[:, :, keys], _ = streaming.row_stats_backward(
                q[:, :, queries], k[:, :, keys], geometry, *rows
            )
        return dq, dk, _nothing(q)


def _like(gradient: Tensor, x: Tensor) -> Tensor:
    """``gradient`` contiguous, as the fake operators promise."""
    return gradient.to(x.dtype).contiguous()


def _mask_gradient(gradient: Tensor | None, mask: Tensor | None, q: Tensor) -> Tensor:
    if gradient is None or mask is None:
        return _nothing(q)
    return gradient.to(mask.dtype).contiguous()


def _mask_like(mask: Tensor | None, need_mask: bool, q: Tensor) -> Tensor:
    return _nothing(q) if mask is None or not need_mask else mask.new_empty(mask.shape)


@row_stats_backward.register_fake
def _row_stats_backward_fake(
    q: Tensor, k: Tensor, mask: Tensor | None, key_lengths: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None,
    row_max: Tensor, grad_sum: Tensor, grad_moment: Tensor, scale: float, softcap: float, left: int, right: int,
    lower_right: bool, need_mask: bool, impl: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), _mask_like(mask, need_mask, q)


def _keep_stats(ctx: Any, inputs: tuple[Any, ...], output: Stats) -> None:
    ctx.save_for_backward(*inputs[:6], output[0])
    ctx.numbers, ctx.impl = inputs[6:11], inputs[12]
    ctx.mark_non_differentiable(output[0], output[3], output[4])


def _stats_gradients(ctx: Any, _: Any, grad_sum: Tensor | None, grad_moment: Tensor | None, *rest: Any) -> Any:
    q, k, mask, key_lengths, cu_q, cu_k, row_max = ctx.saved_tensors
    grad_sum, grad_moment = (torch.zeros_like(row_max) if g is None else g for g in (grad_sum, grad_moment))
    need_mask = ctx.needs_input_grad[2]
    dq, dk, dmask = row_stats_backward(
        q, k, mask, key_lengths, cu_q, cu_k, row_max, grad_sum, grad_moment, *ctx.numbers, need_mask, ctx.impl
    )
    return dq, dk, dmask if need_mask else None, *(None,) * 10


row_stats.register_autograd(_stats_gradients, setup_context=_keep_stats)


# ----------------------------------------------------------------------------------------------------------------
# Attention
# ----------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("sharpmax::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    row_max: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    lower_right: bool,
    dropout_p: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """``softmax(beta * z) v`` and ``logsumexp(beta * z)``; ``row_max`` (of the statistics) serves the backward."""
    _check_impl(impl)
    geometry = Geometry(scale, softcap, left, right, lower_right)
    drop: dict[str, Any] = {"dropout_p": dropout_p, "seed": 0 if seed is None else int(seed)}
    with _full_precision(q):
        if impl == "triton":
            out, lse = _triton().attend(
                q, k, v, beta, geometry, mask=mask, key_lengths=key_lengths, cu_q=cu_q, cu_k=cu_k, **drop
            )
            return out.contiguous(), lse.contiguous()
        if cu_q is None:
            return streaming.attend(q, k, v, beta, geometry, mask=mask, key_lengths=key_lengths, **drop)
        out, lse = _empty_output(q, v)
        for queries, keys in _documents(cu_q, cu_k, q, k):
            part = (q[:, :, queries], k[:, :, keys], v[:, :, keys], beta[:, :, queries])
            out[:, :, queries], lse[:, :, queries] = streaming.attend(*part, geometry, **drop)
            drop["seed"] += 1
        return out, lse


def _empty_output(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=accumulation(q.dtype))


@attend.register_fake
def _attend_fake(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, row_max: Tensor, mask: Tensor | None, key_lengths: Tensor | None,
    cu_q: Tensor | None, cu_k: Tensor | None, seed: Tensor | None, scale: float, softcap: float, left: int, right: int,
    lower_right: bool, dropout_p: float, impl: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _empty_output(q, v)


@torch.library.custom_op("sharpmax::attend_backward", mutates_args=())
def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    row_max: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    lower_right: bool,
    dropout_p: float,
    need_beta: bool,
    need_mask: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, beta and mask (the last two without elements unless asked for)."""
    _check_impl(impl)
    geometry = Geometry(scale, softcap, left, right, lower_right)
    drop: dict[str, Any] = {"dropout_p": dropout_p, "seed": 0 if seed is None else int(seed)}
    with _full_precision(q):
        if impl == "triton":
            dq, dk, dv, d_beta = _triton().backward(
                q, k, v, beta, geometry, out=out, lse=lse, grad_out=grad_out, row_max=row_max, mask=mask,
                key_lengths=key_lengths, cu_q=cu_q, cu_k=cu_k, need_beta=need_beta, **drop,
            )  # fmt: skip
            return dq, dk, dv, _nothing(lse) if d_beta is None else d_beta, _nothing(q)
        if cu_q is None:
            dq, dk, dv, d_beta, dmask = streaming.attend_backward(
                q, k, v, beta, geometry, out, lse, grad_out, mask=mask, key_lengths=key_lengths, need_beta=need_beta,
                need_mask=need_mask, **drop,
            )  # fmt: skip
            d_beta = _nothing(lse) if d_beta is None else _like(d_beta, lse)
            return _like(dq, q), _like(dk, k), _like(dv, v), d_beta, _mask_gradient(dmask, mask, q)
        dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
        d_beta = torch.zeros_like(lse) if need_beta else None
        for queries, keys in _documents(cu_q, cu_k, q, k):
            part = (q[:, :, queries], k[:, :, keys], v[:, :, keys], beta[:, :, queries])
            results = (x[:, :, queries] for x in (out, lse, grad_out))
            dq[:, :, queries], dk[:, :, keys], dv[:, :, keys], found, _ = streaming.attend_backward(
                *part, geometry, *results, need_beta=need_beta, **drop
            )
            if d_beta is not None and found is not None:
                d_beta[:, :, queries] = found
            drop["seed"] += 1
        return dq, dk, dv, _nothing(lse) if d_beta is None else d_beta, _nothing(q)


@attend_backward.register_fake
def _attend_backward_fake(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, row_max: Tensor, mask: Tensor | None, key_lengths: Tensor | None,
    cu_q: Tensor | None, cu_k: Tensor | None, seed: Tensor | None, out: Tensor, lse: Tensor, grad_out: Tensor,
    scale: float, softcap: float, left: int, right: int, lower_right: bool, dropout_p: float, need_beta: bool,
    need_mask: bool, impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, lse.new_empty(lse.shape if need_beta else (0,)), _mask_like(mask, need_mask, q)


def _keep_attend(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:10], *output)
    ctx.numbers, ctx.impl = inputs[10:16], inputs[16]
    ctx.mark_non_differentiable(output[1])


def _attend_gradients(ctx: Any, grad_out: Tensor, _: Any) -> Any:
    *tensors, out, lse = ctx.saved_tensors
    need_beta, need_mask = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
    dq, dk, dv, d_beta, dmask = attend_backward(
        *tensors, out, lse, grad_out, *ctx.numbers, need_beta, need_mask, ctx.impl
    )
    d_beta = d_beta.to(tensors[3].dtype) if need_beta else None
    return dq, dk, dv, d_beta, None, dmask if need_mask else None, *(None,) * 11


attend.register_autograd(_attend_gradients, setup_context=_keep_attend)


# ----------------------------------------------------------------------------------------------------------------
# A lowered policy inside: beta * q for torch's own attention, or attention as a whole
# ----------------------------------------------------------------------------------------------------------------


def policy_numbers(lowered: Lowered, detached: bool) -> tuple[list[float], float, float, float, float, bool, bool]:
    """A lowered policy as these operators take it; ``detached`` says that beta has no gradient."""
    variable, coefficients, lo, hi, threshold, floor = lowered
    return list(coefficients), lo, hi, threshold, floor, variable == "log_count", detached


def _lowered(
    coefficients: list[float], lo: float, hi: float, threshold: float, floor: float, log_count: bool
) -> Lowered:
    return Lowered("log_count" if log_count else "entropy", tuple(coefficients), lo, hi, threshold, floor)


@torch.library.custom_op("sharpmax::sharpened_query", mutates_args=())
def sharpened_query(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    lower_right: bool,
    coefficients: list[float],
    lo: float,
    hi: float,
    threshold: float,
    floor: float,
    log_count: bool,
    detached: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``beta * q`` in the type of ``q``, then maximum, sum, moment, count and beta of every row.

    Gradient flows through ``beta * q`` only.
    """
    geometry = Geometry(scale, softcap, left, right, lower_right)
    lowered = _lowered(coefficients, lo, hi, threshold, floor, log_count)
    with _full_precision(q):
        (top, total, moment, _, count), beta, scaled = _triton().row_stats_and_scaled_query(
            q, k, geometry, lowered, mask=mask, key_lengths=key_lengths
        )
    return scaled, top, total, moment, count, beta


@sharpened_query.register_fake
def _sharpened_query_fake(
    q: Tensor, k: Tensor, mask: Tensor | None, key_lengths: Tensor | None, scale: float, softcap: float, left: int,
    right: int, lower_right: bool, coefficients: list[float], lo: float, hi: float, threshold: float, floor: float,
    log_count: bool, detached: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    top, total, moment, _, count = _empty_stats(q, False)
    return q.new_empty(q.shape), top, total, moment, count, torch.empty_like(total)


@torch.library.custom_op("sharpmax::sharpened_query_backward", mutates_args=())
def sharpened_query_backward(
    grad_scaled: Tensor,
    beta: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    row_max: Tensor | None,
    row_sum: Tensor | None,
    row_moment: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    lower_right: bool,
    coefficients: list[float],
    lo: float,
    hi: float,
    threshold: float,
    floor: float,
    log_count: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of query and key; without ``q``, ``k`` and their statistics, those of a beta that is a constant."""
    with _full_precision(grad_scaled):
        if q is None or k is None or row_sum is None or row_moment is None:
            dq = grad_scaled.new_empty(grad_scaled.shape)
            return torch.mul(grad_scaled, beta[..., None], out=dq), _nothing(dq)
        grad_sum, grad_moment = _triton().policy_gradient(
            _lowered(coefficients, lo, hi, threshold, floor, log_count), row_sum, row_moment, q=q,
            grad_scaled=grad_scaled,
        )  # fmt: skip
        dq, dk, _, _ = _triton().backward(
            q, k, None, beta, Geometry(scale, softcap, left, right, lower_right), row_max=row_max, grad_sum=grad_sum,
            grad_moment=grad_moment, grad_scaled=grad_scaled, mask=mask, key_lengths=key_lengths,
        )  # fmt: skip
    return dq, dk


@sharpened_query_backward.register_fake
def _sharpened_query_backward_fake(
    grad_scaled: Tensor, beta: Tensor, mask: Tensor | None, key_lengths: Tensor | None, q: Tensor | None,
    k: Tensor | None, row_max: Tensor | None, row_sum: Tensor | None, row_moment: Tensor | None, scale: float,
    softcap: float, left: int, right: int, lower_right: bool, coefficients: list[float], lo: float, hi: float,
    threshold: float, floor: float, log_count: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return grad_scaled.new_empty(grad_scaled.shape), _nothing(grad_scaled) if k is None else k.new_empty(k.shape)


def _keep_sharpened(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, mask, key_lengths, *ctx.numbers, ctx.detached = inputs
    _, top, total, moment, count, beta = output
    ctx.constant = ctx.detached or _lowered(*ctx.numbers[5:]).constant
    ctx.save_for_backward(beta, *((None,) * 7 if ctx.constant else (mask, key_lengths, q, k, top, total, moment)))
    ctx.mark_non_differentiable(top, total, moment, count, beta)


def _sharpened_gradients(ctx: Any, grad_scaled: Tensor, *_: Any) -> Any:
    dq, dk = sharpened_query_backward(grad_scaled, *ctx.saved_tensors, *ctx.numbers)
    return dq, None if ctx.constant else dk, *(None,) * 14


sharpened_query.register_autograd(_sharpened_gradients, setup_context=_keep_sharpened)


@torch.library.custom_op("sharpmax::adaptive_attention", mutates_args=())
def adaptive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    lower_right: bool,
    coefficients: list[float],
    lo: float,
    hi: float,
    threshold: float,
    floor: float,
    log_count: bool,
    detached: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``softmax(beta * z) v``, then ``logsumexp(beta * z)``, maximum, sum, moment and beta of every row.

    Gradient flows through the output only.
    """
    geometry = Geometry(scale, softcap, left, right, lower_right)
    lowered = _lowered(coefficients, lo, hi, threshold, floor, log_count)
    masks: dict[str, Any] = {"mask": mask, "key_lengths": key_lengths}
    with _full_precision(q):
        (top, total, moment, _, _), beta, _ = _triton().row_stats_and_scaled_query(
            q, k, geometry, lowered, scaled_query=False, **masks
        )
        out, lse = _triton().attend(
            q, k, v, beta, geometry, dropout_p=dropout_p, seed=0 if seed is None else int(seed), **masks
        )
    return out, lse, top, total, moment, beta


@adaptive_attention.register_fake
def _adaptive_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, key_lengths: Tensor | None, seed: Tensor | None,
    scale: float, softcap: float, left: int, right: int, lower_right: bool, coefficients: list[float], lo: float,
    hi: float, threshold: float, floor: float, log_count: bool, detached: bool, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    top, total, moment, _, _ = _empty_stats(q, False)
    return *_empty_output(q, v), top, total, moment, torch.empty_like(total)


@torch.library.custom_op("sharpmax::adaptive_attention_backward", mutates_args=())
def adaptive_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    row_moment: Tensor,
    beta: Tensor,
    grad_out: Tensor,
    scale: float,
    softcap: float,
    left: int,
    right: int,
    lower_right: bool,
    coefficients: list[float],
    lo: float,
    hi: float,
    threshold: float,
    floor: float,
    log_count: bool,
    detached: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value: first that of beta, where it has one, then all the rest at once."""
    geometry = Geometry(scale, softcap, left, right, lower_right)
    lowered = _lowered(coefficients, lo, hi, threshold, floor, log_count)
    given: dict[str, Any] = {
        "out": out, "lse": lse, "grad_out": grad_out, "row_max": row_max, "mask": mask, "key_lengths": key_lengths,
        "dropout_p": dropout_p, "seed": 0 if seed is None else int(seed),
    }  # fmt: skip
    with _full_precision(q):
        if not (detached or lowered.constant):
            dbeta, delta = _triton().beta_gradient(q, k, v, beta, geometry, **given)
            grad_sum, grad_moment = _triton().policy_gradient(lowered, row_sum, row_moment, dbeta=dbeta)
            given |= {"grad_sum": grad_sum, "grad_moment": grad_moment, "delta": delta}
        dq, dk, dv, _ = _triton().backward(q, k, v, beta, geometry, **given)
    return dq, dk, dv


@adaptive_attention_backward.register_fake
def _adaptive_attention_backward_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, key_lengths: Tensor | None, seed: Tensor | None,
    out: Tensor, lse: Tensor, row_max: Tensor, row_sum: Tensor, row_moment: Tensor, beta: Tensor, grad_out: Tensor,
    scale: float, softcap: float, left: int, right: int, lower_right: bool, coefficients: list[float], lo: float,
    hi: float, threshold: float, floor: float, log_count: bool, detached: bool, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_adaptive(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.numbers = inputs[6:]
    ctx.mark_non_differentiable(*output[1:])


def _adaptive_gradients(ctx: Any, grad_out: Tensor, *_: Any) -> Any:
    return *adaptive_attention_backward(*ctx.saved_tensors, grad_out, *ctx.numbers), *(None,) * 16


adaptive_attention.register_autograd(_adaptive_gradients, setup_context=_keep_adaptive)


# ----------------------------------------------------------------------------------------------------------------
# vmap: the mapped axis is folded into the batch
# ----------------------------------------------------------------------------------------------------------------


def _folded(operator: Any, batched: int, mask: int, whole: tuple[int, ...]) -> Any:
    """A vmap rule for an operator whose first ``batched`` arguments are tensors ``[B, ...]`` or ``None``.

    ``mask`` is the one of them whose first axis may have size 1; ``whole`` are those that cannot be mapped over.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        if any(arguments[i] is not None for i in whole):
            raise ValueError("torch.func.vmap does not map over packed documents or dropout; loop over them instead")
        n = info.batch_size
        mapped: list[Any] = [
            x if i >= batched or x is None else x.expand(n, *x.shape) if axis is None else x.movedim(axis, 0)
            for i, (x, axis) in enumerate(zip(arguments, in_dims, strict=True))
        ]
        batch = mapped[0].shape[1]
        if mapped[mask] is not None:
            mapped[mask] = mapped[mask].expand(n, batch, *mapped[mask].shape[2:])
        results = operator(*(x.flatten(0, 1) if i < batched and x is not None else x for i, x in enumerate(mapped)))
        asked = [r.ndim > 1 for r in results]
        unfolded = (r.unflatten(0, (n, batch)) if there else r for r, there in zip(results, asked, strict=True))
        return tuple(unfolded), tuple(0 if there else None for there in asked)

    return rule


row_stats.register_vmap(_folded(row_stats, 6, 2, (4, 5)))
row_stats_backward.register_vmap(_folded(row_stats_backward, 9, 2, (4, 5)))
attend.register_vmap(_folded(attend, 10, 5, (7, 8, 9)))
attend_backward.register_vmap(_folded(attend_backward, 13, 5, (7, 8, 9)))
sharpened_query.register_vmap(_folded(sharpened_query, 4, 2, ()))
sharpened_query_backward.register_vmap(_folded(sharpened_query_backward, 9, 2, ()))
adaptive_attention.register_vmap(_folded(adaptive_attention, 6, 3, (5,)))
adaptive_attention_backward.register_vmap(_folded(adaptive_attention_backward, 13, 3, (5,)))
