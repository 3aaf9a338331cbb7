"""Row statistics and attention with beta as torch operators: visible to ``torch.compile``, differentiable, vmappable.

``sharpmax::row_stats`` and ``sharpmax::attend`` with their backward operators take the numbers of a
:class:`~sharpmax.torch.geometry.Geometry` and the name of the implementation, ``"streaming"`` or ``"triton"``. Packed
documents are ``[1, heads, tokens, columns]`` with offsets ``cu_q`` and ``cu_k``. What was not asked for comes back as a
tensor without elements. Operators with a policy inside are in :mod:`~sharpmax.torch.fused`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import streaming
from .blocks import accumulation
from .checks import full_precision
from .geometry import Geometry
from .operator import operator
from .vmapped import folded

IMPLEMENTATIONS = ("streaming", "triton")
NO_KEYS = (-math.inf, 0.0, 0.0, math.inf, 0)
"""Maximum, sum, moment, minimum and count of a row that sees nothing."""

Stats = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def nothing(like: Tensor) -> Tensor:
    """What stands for a result that was not asked for."""
    return like.new_empty(0)


def _documents(cu_q: Tensor | None, cu_k: Tensor | None, q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """The queries and keys that belong together: all, or those of one packed document after the other."""
    if cu_q is None or cu_k is None:
        yield slice(0, q.shape[2]), slice(0, k.shape[2])
        return
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    check_starts("cu_seqlens_q", starts_q, q.shape[2])
    check_starts("cu_seqlens_k", starts_k, k.shape[2])
    for i in range(len(starts_q) - 1):
        yield slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])


def check_starts(name: str, starts: list[int], tokens: int) -> None:
    """Refuse offsets of documents that fall, or lie outside of the tokens."""
    if starts[0] < 0 or starts[-1] > tokens or any(a > b for a, b in itertools.pairwise(starts)):
        raise ValueError(
            f"expected {name} to be offsets into the {tokens} tokens on axis 0, from 0 to {tokens} and never falling, "
            f"got {starts}"
        )


@functools.cache
def kernels() -> Any:
    """The Triton implementation, imported when it is first needed."""
    from . import triton

    return triton


def _check_impl(impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"expected impl to be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")


def no_second_derivative(*_: Any) -> Any:
    """The backward of a backward operator."""
    raise NotImplementedError(
        "a second derivative is served by scaled_dot_product_attention and row_stats with impl='reference' only; the "
        "other implementations have the first alone"
    )


# ----------------------------------------------------------------------------------------------------------------
# Row statistics
# ----------------------------------------------------------------------------------------------------------------


@operator("sharpmax::row_stats")
def row_stats(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    numbers: list[float],
    with_min: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Maximum, sum, moment, minimum (no elements unless asked for) and count of every row, ``[B, Hq, Lq]``."""
    _check_impl(impl)
    geometry = Geometry.of(numbers)
    with full_precision(q):
        if impl == "triton":
            found = kernels().row_stats(
                q, k, geometry, mask=mask, key_lengths=key_lengths, cu_q=cu_q, cu_k=cu_k, with_min=with_min
            )
            return *found[:3], nothing(found[0]) if found[3] is None else found[3], found[4]
        if cu_q is None:
            found = streaming.row_stats(q, k, geometry, mask=mask, key_lengths=key_lengths, with_min=with_min)
            return *found[:3], nothing(found[0]) if found[3] is None else found[3], found[4]
        fields = empty_stats(q, with_min)
        for field, value in zip(fields, NO_KEYS, strict=True):
            field.fill_(value)
        for queries, keys in _documents(cu_q, cu_k, q, k):
            parts = streaming.row_stats(q[:, :, queries], k[:, :, keys], geometry, with_min=with_min)
            for field, part in zip(fields, parts, strict=True):
                if part is not None:
                    field[:, :, queries] = part
        return fields


def empty_stats(q: Tensor, with_min: bool) -> Stats:
    """Room for the statistics of every row."""
    shape, dtype = q.shape[:-1], accumulation(q.dtype)
    highest, total, moment = (q.new_empty(shape, dtype=dtype) for _ in range(3))
    lowest = q.new_empty(shape if with_min else (0,), dtype=dtype)
    return highest, total, moment, lowest, q.new_empty(shape, dtype=torch.int32)


@row_stats.register_fake
def _row_stats_fake(
    q: Tensor, k: Tensor, mask: Tensor | None, key_lengths: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None,
    numbers: list[float], with_min: bool, impl: str,
) -> Stats:  # fmt: skip
    return empty_stats(q, with_min)


@operator("sharpmax::row_stats_backward")
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
    numbers: list[float],
    need_mask: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and mask (no elements unless asked for)."""
    _check_impl(impl)
    geometry = Geometry.of(numbers)
    with full_precision(q):
        if impl == "triton":
            dq, dk, _, _ = kernels().backward(
                q, k, None, None, geometry, row_max=row_max, grad_sum=grad_sum, grad_moment=grad_moment, mask=mask,
                key_lengths=key_lengths, cu_q=cu_q, cu_k=cu_k,
            )  # fmt: skip
            return dq, dk, nothing(q)
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
        return dq, dk, nothing(q)


def _like(gradient: Tensor, x: Tensor) -> Tensor:
    """``gradient`` contiguous, as the fake operators promise."""
    return gradient.to(x.dtype).contiguous()


def _mask_gradient(gradient: Tensor | None, mask: Tensor | None, q: Tensor) -> Tensor:
    if gradient is None or mask is None:
        return nothing(q)
    return gradient.to(mask.dtype).contiguous()


def _mask_like(mask: Tensor | None, need_mask: bool, q: Tensor) -> Tensor:
    return nothing(q) if mask is None or not need_mask else mask.new_empty(mask.shape)


@row_stats_backward.register_fake
def _row_stats_backward_fake(
    q: Tensor, k: Tensor, mask: Tensor | None, key_lengths: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None,
    row_max: Tensor, grad_sum: Tensor, grad_moment: Tensor, numbers: list[float], need_mask: bool, impl: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), _mask_like(mask, need_mask, q)


def _keep_stats(ctx: Any, inputs: tuple[Any, ...], output: Stats) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], output[0])
    ctx.numbers, _, ctx.impl = inputs[6:]
    ctx.mark_non_differentiable(output[0], output[3], output[4])


def _stats_gradients(ctx: Any, _: Any, grad_sum: Tensor | None, grad_moment: Tensor | None, *rest: Any) -> Any:
    if grad_sum is None and grad_moment is None:
        return (None,) * 9
    q, k, mask, key_lengths, cu_q, cu_k, row_max = ctx.saved_tensors
    grad_sum, grad_moment = (torch.zeros_like(row_max) if g is None else g for g in (grad_sum, grad_moment))
    need_mask = ctx.needs_input_grad[2]
    dq, dk, dmask = row_stats_backward(
        q, k, mask, key_lengths, cu_q, cu_k, row_max, grad_sum, grad_moment, ctx.numbers, need_mask, ctx.impl
    )
    return dq, dk, dmask if need_mask else None, *(None,) * 6


row_stats.register_autograd(_stats_gradients, setup_context=_keep_stats)
row_stats_backward.register_autograd(no_second_derivative)


# ----------------------------------------------------------------------------------------------------------------
# Attention
# ----------------------------------------------------------------------------------------------------------------


@operator("sharpmax::attend")
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    row_max: Tensor | None,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    numbers: list[float],
    dropout_p: float,
    impl: str,
    rounded: bool,
) -> tuple[Tensor, Tensor]:
    """``softmax(beta * z) v`` and ``logsumexp(beta * z)``; ``row_max``, the maxima of ``z``, where known.

    ``"streaming"`` rounds its output to the type of ``q`` only if asked to: ``D = <do, o>`` of the gradient would be
    off, and that of beta is a difference of large numbers beside it. The kernels always do, and take out what that does
    to ``D``.
    """
    _check_impl(impl)
    geometry = Geometry.of(numbers)
    drop: dict[str, Any] = {"dropout_p": dropout_p, "seed": 0 if seed is None else int(seed)}
    with full_precision(q):
        if impl == "triton":
            out, lse = kernels().attend(
                q, k, v, beta, geometry, row_max=row_max, mask=mask, key_lengths=key_lengths, cu_q=cu_q, cu_k=cu_k,
                **drop,
            )  # fmt: skip
            return out.contiguous(), lse.contiguous()
        if cu_q is None:
            return streaming.attend(
                q, k, v, beta, geometry, mask=mask, key_lengths=key_lengths, rounded=rounded, **drop
            )  # fmt: skip
        out, lse = empty_output(q, v, rounded)
        out.zero_()
        lse.fill_(-math.inf)
        for queries, keys in _documents(cu_q, cu_k, q, k):
            part = (q[:, :, queries], k[:, :, keys], v[:, :, keys], beta[:, :, queries])
            out[:, :, queries], lse[:, :, queries] = streaming.attend(*part, geometry, rounded=rounded, **drop)
            drop["seed"] += 1
        return out, lse


def empty_output(q: Tensor, v: Tensor, rounded: bool = True) -> tuple[Tensor, Tensor]:
    """Room for the output and the logsumexp of every row."""
    wide = accumulation(q.dtype)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype if rounded else wide)
    return out, q.new_empty(q.shape[:-1], dtype=wide)


@attend.register_fake
def _attend_fake(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, row_max: Tensor | None, mask: Tensor | None,
    key_lengths: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, seed: Tensor | None,
    numbers: list[float], dropout_p: float, impl: str, rounded: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return empty_output(q, v, rounded or impl == "triton")


@operator("sharpmax::attend_backward")
def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    row_max: Tensor | None,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    numbers: list[float],
    dropout_p: float,
    need_beta: bool,
    need_mask: bool,
    whole: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, beta and mask (the last two without elements unless asked for).

    ``whole`` says that there are no keys but these; where there are, elsewhere, ``out`` and ``lse`` are of all of them.
    """
    _check_impl(impl)
    geometry = Geometry.of(numbers)
    drop: dict[str, Any] = {"dropout_p": dropout_p, "seed": 0 if seed is None else int(seed)}
    with full_precision(q):
        if impl == "triton":
            if row_max is None and need_beta:  # any number will do, but near the maximum sums are more exact
                row_max = torch.zeros_like(lse)
            dq, dk, dv, d_beta = kernels().backward(
                q, k, v, beta, geometry, out=out, lse=lse, grad_out=grad_out, row_max=row_max, mask=mask,
                key_lengths=key_lengths, cu_q=cu_q, cu_k=cu_k, need_beta=need_beta, **drop,
            )  # fmt: skip
            return dq, dk, dv, nothing(lse) if d_beta is None else d_beta, nothing(q)
        if cu_q is None:
            dq, dk, dv, d_beta, dmask = streaming.attend_backward(
                q, k, v, beta, geometry, out, lse, grad_out, row_max=row_max, mask=mask, key_lengths=key_lengths,
                need_beta=need_beta, need_mask=need_mask, whole=whole, **drop,
            )  # fmt: skip
            d_beta = nothing(lse) if d_beta is None else _like(d_beta, lse)
            return _like(dq, q), _like(dk, k), _like(dv, v), d_beta, _mask_gradient(dmask, mask, q)
        dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
        d_beta = torch.zeros_like(lse) if need_beta else None
        for queries, keys in _documents(cu_q, cu_k, q, k):
            part = (q[:, :, queries], k[:, :, keys], v[:, :, keys], beta[:, :, queries])
            results = (x[:, :, queries] for x in (out, lse, grad_out))
            top = None if row_max is None else row_max[:, :, queries]
            dq[:, :, queries], dk[:, :, keys], dv[:, :, keys], found, _ = streaming.attend_backward(
                *part, geometry, *results, row_max=top, need_beta=need_beta, **drop
            )
            if d_beta is not None and found is not None:
                d_beta[:, :, queries] = found
            drop["seed"] += 1
        return dq, dk, dv, nothing(lse) if d_beta is None else d_beta, nothing(q)


@attend_backward.register_fake
def _attend_backward_fake(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, row_max: Tensor | None, mask: Tensor | None,
    key_lengths: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, seed: Tensor | None,
    out: Tensor, lse: Tensor, grad_out: Tensor, numbers: list[float], dropout_p: float, need_beta: bool,
    need_mask: bool, whole: bool, impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, lse.new_empty(lse.shape if need_beta else (0,)), _mask_like(mask, need_mask, q)


def _keep_attend(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:10], *output)
    ctx.numbers, ctx.dropout_p, ctx.impl, _ = inputs[10:]
    ctx.mark_non_differentiable(output[1])


def _attend_gradients(ctx: Any, grad_out: Tensor | None, _: Any) -> Any:
    if grad_out is None:
        return (None,) * 14
    *tensors, out, lse = ctx.saved_tensors
    need_beta, need_mask = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
    dq, dk, dv, d_beta, dmask = attend_backward(
        *tensors, out, lse, grad_out, ctx.numbers, ctx.dropout_p, need_beta, need_mask, True, ctx.impl
    )
    d_beta = d_beta.to(tensors[3].dtype) if need_beta else None
    return dq, dk, dv, d_beta, None, dmask if need_mask else None, *(None,) * 8


attend.register_autograd(_attend_gradients, setup_context=_keep_attend)
attend_backward.register_autograd(no_second_derivative)


row_stats.register_vmap(folded(row_stats, 6, 2, (4, 5)))
row_stats_backward.register_vmap(folded(row_stats_backward, 9, 2, (4, 5)))
attend.register_vmap(folded(attend, 10, 5, (7, 8, 9)))
attend_backward.register_vmap(folded(attend_backward, 13, 5, (7, 8, 9)))
