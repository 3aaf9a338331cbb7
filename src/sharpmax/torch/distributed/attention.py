"""Attention with adaptive temperature over a sequence whose queries, keys and values are spread over ranks.

keys travel -> row statistics of all keys, merged -> policy -> beta -> keys and values travel -> outputs, merged

Statistics are merged before beta: beta is a function of whole rows, so merging outputs of parts that chose a beta of
their own would be wrong. The same two operators as on one device, :func:`~sharpmax.torch.ops.row_stats` and
:func:`~sharpmax.torch.ops.attend`, see a pair of shards at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...core.policies import PAPER, Policy, is_hard, needs_spread
from ...core.stats import RowStats
from .. import ops
from ..attention import Attention, row_betas, served_betas
from ..blocks import accumulation
from ..checks import Causal, Inputs, Window, check_policy, checked, full_precision, misfit, needs_gradient
from ..choice import choose
from ..geometry import Geometry, visible_counts
from ..learnable import parameters_of
from .group import Group, Member, check_agreement, check_device, member_of
from .layout import Pair, Stop, check_layout, parts, route
from .policies import beta_has_gradient, form_without_statistics
from .ring import Homeward, Shards, check_communication, tour

AMONG = ("streaming", "triton")
"""The implementations that work on pairs of shards."""
BENT = "the gradient of beta over ranks with a softcap"


@overload
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, group: Group = None, is_causal: Causal = False,
    scale: float | None = None, policy: Policy = PAPER, window: Window = None, softcap: float | None = None,
    layout: str = "zigzag", communication: str = "ring", impl: str = "auto", check: bool = True,
    return_stats: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, group: Group = None, is_causal: Causal = False,
    scale: float | None = None, policy: Policy = PAPER, window: Window = None, softcap: float | None = None,
    layout: str = "zigzag", communication: str = "ring", impl: str = "auto", check: bool = True,
    return_stats: Literal[True],
) -> Attention: ...  # fmt: skip
@torch.compiler.disable
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group = None,
    is_causal: Causal = False,
    scale: float | None = None,
    policy: Policy = PAPER,
    window: Window = None,
    softcap: float | None = None,
    layout: str = "zigzag",
    communication: str = "ring",
    impl: str = "auto",
    check: bool = True,
    return_stats: bool = False,
    **unserved: Any,
) -> Tensor | Attention:
    """What :func:`~sharpmax.torch.scaled_dot_product_attention` gives for the whole sequence, at this rank's tokens.

    Every rank of the group calls it with its own tokens, and every rank runs the backward pass.

    Args:
      query: ``[..., Hq, n, D]``, the queries of the ``n`` tokens that this rank holds; as many on every rank.
      key, value: ``[..., H, n, D]`` and ``[..., H, n, Dv]`` of the same tokens; ``Hq`` is a multiple of ``H``.
      group: the process group, the default one if not given.
      is_causal, scale, window, softcap: as in :func:`~sharpmax.torch.scaled_dot_product_attention`, by positions in the
        whole sequence. Masks, key lengths, packed documents and dropout are not served.
      policy: maps the statistics ``[B, Hq, n]`` of whole rows to beta; any but :class:`~sharpmax.Hard`. An infinite
        beta is taken as 10,000, and a row of beta 0 gives no gradient of beta. A learnable policy's gradients are those
        of this rank's rows: add them over the ranks, as for every other parameter.
      layout: which tokens a rank holds, as :func:`~sharpmax.torch.distributed.shard` gives them: ``"zigzag"`` (the same
        work for all under causality) or ``"contiguous"``.
      communication: ``"ring"`` lets keys travel twice, once for the statistics, once with the values, and holds two
        foreign shards at a time; ``"gather"`` holds on to all keys after the first time.
      impl: ``"streaming"`` (any device), ``"triton"`` (GPU), or ``"auto"``.
      check: compare shapes and settings of all ranks first, with one small message for which a GPU is waited for.
        Without it, a rank that differs may leave the others waiting.
      return_stats: return :class:`~sharpmax.torch.Attention` in place of the output.
    """
    if unserved:
        raise TypeError(
            f"ring_attention does not serve {', '.join(unserved)}; it serves causality, windows and softcaps, of "
            "sequences without padding"
        )
    check_policy(policy)
    check_layout(layout)
    check_communication(communication)
    if is_hard(policy):
        raise ValueError("ring_attention does not serve hard attention; a large beta, as Constant(1e4), comes close")
    inputs = checked(
        query, key, value, None, None, is_causal=is_causal, scale=scale, window=window, softcap=softcap, enable_gqa=True
    )
    if inputs.q.shape[2] != inputs.k.shape[2]:
        raise misfit("as many queries as keys on a rank", [query, key])
    inputs = inputs._replace(geometry=inputs.geometry._replace(lower_right=False))
    chosen = _choose(impl, inputs, policy)
    member = member_of(group)
    check_device(member, inputs.q)
    form = None if return_stats else form_without_statistics(policy)
    if check:
        described = _described(inputs, policy, chosen, form is None, layout=layout, communication=communication)
        check_agreement(member, described, inputs.q.device)
    stops = route(member.rank, member.size, inputs.q.shape[2], layout, inputs.geometry)
    trip = _Trip(member, stops, inputs.geometry, chosen, communication == "gather")
    with full_precision(inputs.q):
        if form is not None:
            stats, beta = None, form(_counts(inputs, member, layout))
        else:
            with_min = needs_spread(policy)
            top, total, moment, lowest, count = _Statistics.apply(trip, with_min, inputs.q, inputs.k)
            stats = RowStats(top, total, moment, lowest if with_min else None, count)
            beta = served_betas(row_betas(policy, stats), "triton")
        if chosen == "triton" and inputs.geometry.softcap > 0 and beta.requires_grad:
            raise ValueError(f"impl={impl!r} does not serve {BENT}; streaming can")
        output = _Attend.apply(trip, inputs.q, inputs.k, inputs.v, beta)
    if stats is None or not return_stats:
        return inputs.restore(output)
    fields = (None if field is None else inputs.restore(field) for field in stats)
    return Attention(inputs.restore(output), RowStats(*fields), inputs.restore(beta))


def _choose(impl: str, inputs: Inputs, policy: Policy) -> str:
    """The implementation; Triton's kernels give dbeta for whole rows only, and with a softcap dq does not tell it."""
    differentiated = needs_gradient(inputs.q, inputs.k, *parameters_of(policy))
    if inputs.geometry.softcap > 0 and differentiated and beta_has_gradient(policy):
        return choose(impl, inputs, policy, among=AMONG[:1], what=BENT)
    return choose(impl, inputs, policy, among=AMONG, what="shards")


def _described(
    inputs: Inputs, policy: Policy, impl: str, statistics: bool, **words: str
) -> dict[str, tuple[Any, ...]]:  # fmt: skip
    """What must be the same on every rank."""
    q, k, v, _, _, geometry, _ = inputs
    assert v is not None
    tensors = {"query": q, "key": k, "value": v}
    return {
        **{f"the shape [B, H, n, D] of {name}": tuple(x.shape) for name, x in tensors.items()},
        "the type of query": (str(q.dtype).removeprefix("torch."),),
        "what needs a gradient (query, key, value)": tuple(x.requires_grad for x in tensors.values()),
        "scale, softcap and the bounds of the window": tuple(geometry[:4]),
        "whether statistics are needed, and have a gradient": (statistics, beta_has_gradient(policy)),
        "impl": (impl,),
        **{name: (word,) for name, word in words.items()},
    }


def _counts(inputs: Inputs, member: Member, layout: str) -> RowStats:
    """Statistics of nothing but how many keys each row sees."""
    q, tokens = inputs.q, inputs.q.shape[2]
    found = parts(member.rank, member.size, tokens, layout)
    rows = torch.cat([torch.arange(part.start, part.stop, device=q.device) for part in found])
    whole = tokens * member.size
    count = visible_counts(inputs.geometry, rows, whole, whole).expand(q.shape[:3])
    empty = torch.zeros(q.shape[:3], dtype=accumulation(q.dtype), device=q.device)
    return RowStats(empty, empty, empty, None, count)


class _Trip:
    """A call's way around the ranks, the same forward and backward; ``held`` are keys that need not come again."""

    def __init__(self, member: Member, stops: tuple[Stop, ...], geometry: Geometry, impl: str, gather: bool) -> None:
        self.member, self.stops, self.geometry, self.impl, self.gather = member, stops, geometry, impl, gather
        self.offsets = tuple(stop.offset for stop in stops)
        self.held: list[Tensor] = []

    def visits(self, keys: Tensor, *others: Tensor, again: bool = False) -> Iterator[tuple[tuple[Pair, ...], Shards]]:
        """The pairs that live at every stop, and the shards there; ``again`` if keys will be asked for once more."""
        held, self.held = self.held, []
        keep = self.gather and again
        travelling = others if held else (keys, *others)
        for i, shards in enumerate(tour(self.member, travelling, self.offsets, keep=int(keep and not held))):
            found = (held[i], *shards) if held else shards
            if keep:
                self.held.append(found[0])
            yield self.stops[i].pairs, found

    def homeward(self) -> Homeward:
        """Where the gradients of the shards go."""
        return Homeward(self.member, self.offsets)


class _Statistics(torch.autograd.Function):
    """Maximum, sum, moment, minimum and count of whole rows."""

    @staticmethod
    def forward(ctx: Any, trip: _Trip, with_min: bool, q: Tensor, k: Tensor) -> ops.Stats:
        fields = ops.empty_stats(q, with_min)
        for field, value in zip(fields, ops.NO_KEYS, strict=True):
            field.fill_(value)
        for pairs, (keys,) in trip.visits(k, again=True):
            for rows, columns, geometry in pairs:
                found = ops.row_stats(
                    q[:, :, rows], keys[:, :, columns], None, None, None, None, geometry.numbers, with_min, trip.impl
                )
                _merge_statistics([field[:, :, rows] if field.ndim > 1 else None for field in fields], found)
        ctx.trip = trip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, fields[0])
        ctx.mark_non_differentiable(fields[0], fields[3], fields[4])
        return fields

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        _, d_sum, d_moment, _, _ = gradients
        if d_sum is None and d_moment is None:
            return (None,) * 4
        q, k, top = ctx.saved_tensors
        d_sum, d_moment = (torch.zeros_like(top) if g is None else g for g in (d_sum, d_moment))
        trip, homeward = ctx.trip, ctx.trip.homeward()
        dq = torch.zeros_like(q, dtype=top.dtype)
        for pairs, (keys,) in trip.visits(k):
            dk = torch.zeros_like(keys, dtype=top.dtype)
            for rows, columns, geometry in pairs:
                of_rows = (x[:, :, rows].contiguous() for x in (top, d_sum, d_moment))
                part_q, part_k, _ = ops.row_stats_backward(
                    q[:, :, rows], keys[:, :, columns], None, None, None, None, *of_rows, geometry.numbers, False,
                    trip.impl,
                )  # fmt: skip
                dq[:, :, rows] += part_q
                dk[:, :, columns] += part_k
            homeward.add((dk,))
        return None, None, dq.to(q.dtype), homeward.home()[0].to(k.dtype)


def _merge_statistics(fields: list[Tensor | None], part: ops.Stats) -> None:
    """Make ``fields`` those of rows that have the keys of ``part`` besides their own."""
    found = RowStats(*(x if field is not None else None for x, field in zip(part, fields, strict=True)))
    for field, value in zip(fields, RowStats(*fields).merge(found), strict=True):
        if field is not None and value is not None:
            field.copy_(value)


class _Attend(torch.autograd.Function):
    """``softmax(beta * z) v`` over whole rows."""

    @staticmethod
    def forward(ctx: Any, trip: _Trip, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        dtype = accumulation(q.dtype)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=dtype)
        beta = beta.contiguous()
        for pairs, (keys, values) in trip.visits(k, v):
            for rows, columns, geometry in pairs:
                factor = beta[:, :, rows].contiguous()
                part, of_part = ops.attend(
                    q[:, :, rows], keys[:, :, columns], values[:, :, columns], factor, None, None, None, None, None,
                    None, geometry.numbers, 0.0, trip.impl, False,
                )  # fmt: skip
                _merge_output(out[:, :, rows], lse[:, :, rows], part, of_part)
        ctx.trip = trip
        ctx.save_for_backward(q, k, v, beta, out, lse)  # not rounded: the gradient takes differences beside it
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, beta, out, lse = ctx.saved_tensors
        (grad_out,) = gradients
        trip, homeward = ctx.trip, ctx.trip.homeward()
        need_beta, bent = ctx.needs_input_grad[4], trip.geometry.softcap > 0
        dq, d_beta = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(lse)
        for pairs, (keys, values) in trip.visits(k, v, again=need_beta):
            dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (keys, values))
            for rows, columns, geometry in pairs:
                factor, output, of_rows, d_out = (x[:, :, rows].contiguous() for x in (beta, out, lse, grad_out))
                part_q, part_k, part_v, part_beta, _ = ops.attend_backward(
                    q[:, :, rows], keys[:, :, columns], values[:, :, columns], factor, None, None, None, None, None,
                    None, output, of_rows, d_out, geometry.numbers, 0.0, need_beta and bent, False, False, trip.impl,
                )  # fmt: skip
                dq[:, :, rows] += part_q
                dk[:, :, columns] += part_k
                dv[:, :, columns] += part_v
                if need_beta and bent:
                    d_beta[:, :, rows] += part_beta
            homeward.add((dk, dv))
        if need_beta and not bent:  # dq is beta times that of beta * q, and logits are products with beta * q
            d_beta = torch.where(beta == 0, 0.0, (dq * q).sum(-1) / beta)
        dk, dv = homeward.home()
        return None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_beta if need_beta else None


def _merge_output(out: Tensor, lse: Tensor, part: Tensor, of_part: Tensor) -> None:
    """Make ``out`` and ``lse`` those of rows that have the keys of ``part`` besides their own."""
    both = torch.logaddexp(lse, of_part)
    shift = torch.where(both == -math.inf, 0.0, both)
    out.mul_((lse - shift).exp()[..., None]).add_(part * (of_part - shift).exp()[..., None])
    lse.copy_(both)
