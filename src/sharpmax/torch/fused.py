"""Operators with a lowered policy inside, on the Triton kernels: nothing between statistics and beta is left to torch.

``sharpmax::sharpened_query`` gives ``beta * q`` for torch's own attention, ``sharpmax::adaptive_attention`` is all our
own; each has its backward operator. Any other policy goes through the operators of :mod:`~sharpmax.torch.ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.policies.base import Lowered
from .checks import full_precision
from .geometry import Geometry
from .operator import operator
from .ops import empty_output, empty_stats, kernels, no_second_derivative, nothing
from .vmapped import folded


def policy_numbers(lowered: Lowered) -> list[float]:
    """A lowered policy as operators take it: its bounds, whether it is one of the length, its coefficients."""
    variable, coefficients, lo, hi, threshold, floor = lowered
    return [lo, hi, threshold, floor, float(variable == "log_count"), *coefficients]


def policy_of(numbers: Sequence[float]) -> Lowered:
    """The lowered policy that has these :func:`policy_numbers`."""
    lo, hi, threshold, floor, log_count, *coefficients = numbers
    return Lowered("log_count" if log_count else "entropy", tuple(coefficients), lo, hi, threshold, floor)


@operator("sharpmax::sharpened_query")
def sharpened_query(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    numbers: list[float],
    policy: list[float],
    detached: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``beta * q`` in the type of ``q``, then maximum, sum, moment and beta of every row.

    Gradient flows through ``beta * q`` only.
    """
    geometry = Geometry.of(numbers)
    lowered = policy_of(policy)
    with full_precision(q):
        (top, total, moment, _, _), beta, scaled = kernels().row_stats_and_scaled_query(
            q, k, geometry, lowered, mask=mask, key_lengths=key_lengths
        )
    return scaled, top, total, moment, beta


@sharpened_query.register_fake
def _sharpened_query_fake(
    q: Tensor, k: Tensor, mask: Tensor | None, key_lengths: Tensor | None, numbers: list[float],
    policy: list[float], detached: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    top, total, moment, _, _ = empty_stats(q, False)
    return q.new_empty(q.shape), top, total, moment, torch.empty_like(total)


@operator("sharpmax::sharpened_query_backward")
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
    numbers: list[float],
    policy: list[float],
) -> tuple[Tensor, Tensor]:
    """The gradients of query and key; without ``q``, ``k`` and their statistics, those of a beta that is a constant."""
    with full_precision(grad_scaled):
        if q is None or k is None or row_sum is None or row_moment is None:
            dq = grad_scaled.new_empty(grad_scaled.shape)
            return torch.mul(grad_scaled, beta[..., None], out=dq), nothing(dq)
        dq, dk, _, _ = kernels().backward(
            q, k, None, beta, Geometry.of(numbers), row_max=row_max, row_sum=row_sum,
            row_moment=row_moment, lowered=policy_of(policy),
            grad_scaled=grad_scaled, mask=mask, key_lengths=key_lengths,
        )  # fmt: skip
    return dq, dk


@sharpened_query_backward.register_fake
def _sharpened_query_backward_fake(
    grad_scaled: Tensor, beta: Tensor, mask: Tensor | None, key_lengths: Tensor | None, q: Tensor | None,
    k: Tensor | None, row_max: Tensor | None, row_sum: Tensor | None, row_moment: Tensor | None,
    numbers: list[float], policy: list[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return grad_scaled.new_empty(grad_scaled.shape), nothing(grad_scaled) if k is None else k.new_empty(k.shape)


def _keep_sharpened(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, mask, key_lengths, ctx.numbers, ctx.policy, detached = inputs
    _, top, total, moment, beta = output
    ctx.constant = detached or policy_of(ctx.policy).constant
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(beta, *((None,) * 7 if ctx.constant else (mask, key_lengths, q, k, top, total, moment)))
    ctx.mark_non_differentiable(top, total, moment, beta)


def _sharpened_gradients(ctx: Any, grad_scaled: Tensor | None, *_: Any) -> Any:
    if grad_scaled is None:
        return (None,) * 7
    dq, dk = sharpened_query_backward(grad_scaled, *ctx.saved_tensors, ctx.numbers, ctx.policy)
    return dq, None if ctx.constant else dk, *(None,) * 5


sharpened_query.register_autograd(_sharpened_gradients, setup_context=_keep_sharpened)
sharpened_query_backward.register_autograd(no_second_derivative)


@operator("sharpmax::adaptive_attention")
def adaptive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    numbers: list[float],
    policy: list[float],
    detached: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``softmax(beta * z) v``, then ``logsumexp(beta * z)``, maximum, sum, moment and beta of every row.

    Gradient flows through the output only.
    """
    geometry = Geometry.of(numbers)
    lowered = policy_of(policy)
    masks: dict[str, Any] = {"mask": mask, "key_lengths": key_lengths, "cu_q": cu_q, "cu_k": cu_k}
    with full_precision(q):
        (top, total, moment, _, _), beta, _ = kernels().row_stats_and_scaled_query(
            q, k, geometry, lowered, scaled_query=False, **masks
        )
        out, lse = kernels().attend(
            q, k, v, beta, geometry, row_max=top, dropout_p=dropout_p, seed=0 if seed is None else int(seed), **masks
        )
    return out, lse, top, total, moment, beta


@adaptive_attention.register_fake
def _adaptive_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, key_lengths: Tensor | None, cu_q: Tensor | None,
    cu_k: Tensor | None, seed: Tensor | None,
    numbers: list[float], policy: list[float], detached: bool, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    top, total, moment, _, _ = empty_stats(q, False)
    return *empty_output(q, v), top, total, moment, torch.empty_like(total)


@operator("sharpmax::adaptive_attention_backward")
def adaptive_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    row_moment: Tensor,
    beta: Tensor,
    grad_out: Tensor,
    numbers: list[float],
    policy: list[float],
    detached: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value.

    On Hopper, where :func:`.triton.adaptive_backward_taken` says so, by kernels of its own; else first that of beta,
    where it has one, then all the rest at once.
    """
    geometry = Geometry.of(numbers)
    lowered = policy_of(policy)
    given: dict[str, Any] = {"out": out, "lse": lse, "grad_out": grad_out, "row_max": row_max}
    hiding: dict[str, Any] = {
        "mask": mask, "key_lengths": key_lengths, "cu_q": cu_q, "cu_k": cu_k, "dropout_p": dropout_p
    }  # fmt: skip
    with full_precision(q):
        if not detached and kernels().adaptive_backward_taken(q, k, v, geometry, lowered, **hiding):
            return kernels().adaptive_backward(
                q, k, v, beta, geometry, lowered, **given, row_sum=row_sum, row_moment=row_moment
            )
        given |= hiding | {"seed": 0 if seed is None else int(seed)}
        if not (detached or lowered.constant):
            dbeta, delta = kernels().beta_gradient(q, k, v, beta, geometry, **given)
            grad_sum, grad_moment = kernels().policy_gradient(lowered, row_sum, row_moment, dbeta)
            given |= {"grad_sum": grad_sum, "grad_moment": grad_moment, "delta": delta}
        dq, dk, dv, _ = kernels().backward(q, k, v, beta, geometry, **given)
    return dq, dk, dv


@adaptive_attention_backward.register_fake
def _adaptive_attention_backward_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, key_lengths: Tensor | None, cu_q: Tensor | None,
    cu_k: Tensor | None, seed: Tensor | None,
    out: Tensor, lse: Tensor, row_max: Tensor, row_sum: Tensor, row_moment: Tensor, beta: Tensor, grad_out: Tensor,
    numbers: list[float], policy: list[float], detached: bool, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_adaptive(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:8], *output)
    ctx.rest = inputs[8:]
    ctx.mark_non_differentiable(*output[1:])


def _adaptive_gradients(ctx: Any, grad_out: Tensor | None, *_: Any) -> Any:
    if grad_out is None:
        return (None,) * 12
    return *adaptive_attention_backward(*ctx.saved_tensors, grad_out, *ctx.rest), *(None,) * 9


adaptive_attention.register_autograd(_adaptive_gradients, setup_context=_keep_adaptive)
adaptive_attention_backward.register_autograd(no_second_derivative)


sharpened_query.register_vmap(folded(sharpened_query, 4, 2, ()))
sharpened_query_backward.register_vmap(folded(sharpened_query_backward, 9, 2, ()))
adaptive_attention.register_vmap(folded(adaptive_attention, 8, 3, (5, 6, 7)))
adaptive_attention_backward.register_vmap(folded(adaptive_attention_backward, 15, 3, (5, 6, 7)))
