"""``scaled_dot_product_attention`` with adaptive temperature or another mechanism, and the statistics of its rows.

query, key  ->  row_stats  ->  policy  ->  beta  ->  softmax(beta * logits) value
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from ..core.policies import PAPER, Detached, Lowered, Policy, lowered, needs_spread
from ..core.stats import RowStats
from ..mechanisms import Mechanism
from . import choice, fused, mechanisms, ops, reference, stock
from .blocks import accumulation
from .checks import Causal, Inputs, Window, check_dropout, check_policy, checked, full_precision, needs_gradient
from .geometry import LARGEST_POLYNOMIAL, visible_counts
from .learnable import Learnable

HARDEST = 1e4
"""What stands for infinite beta where it is not served."""

Starts = tuple[Tensor, Tensor] | tuple[None, None]
"""Where packed documents of queries and of keys start, if there are any."""


class Attention(NamedTuple):
    """What ``return_stats=True`` returns: the output, and of every row the statistics and beta, ``[..., Hq, Lq]``.

    The statistics are those of the logits before they are multiplied by beta.
    """

    output: Tensor
    stats: RowStats
    beta: Tensor


@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: Causal = False, scale: float | None = None, enable_gqa: bool = False, *, policy: Policy = PAPER,
    mechanism: Mechanism | Learnable | str | None = None, window: Window = None, softcap: float | None = None,
    key_lengths: Tensor | None = None, impl: str = "auto", return_stats: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: Causal = False, scale: float | None = None, enable_gqa: bool = False, *, policy: Policy = PAPER,
    mechanism: Mechanism | Learnable | str | None = None, window: Window = None, softcap: float | None = None,
    key_lengths: Tensor | None = None, impl: str = "auto", return_stats: Literal[True],
) -> Attention: ...  # fmt: skip
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: Causal = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    policy: Policy = PAPER,
    mechanism: Mechanism | Learnable | str | None = None,
    window: Window = None,
    softcap: float | None = None,
    key_lengths: Tensor | None = None,
    impl: str = "auto",
    return_stats: bool = False,
) -> Tensor | Attention:
    """Attention whose inverse temperature is chosen row by row: ``torch.nn.functional``'s, with a policy.

    Args:
      query: ``[..., Hq, Lq, D]``.
      key, value: ``[..., H, Lk, D]`` and ``[..., H, Lk, Dv]``. The axes before the heads are those of the query: none
        is broadcast (``x.expand`` repeats one without a copy).
      attn_mask: broadcasts against the logits ``[..., Hq, Lq, Lk]``. Boolean: true where a key is seen. Floating-point:
        added to the logits; ``-inf`` hides a key, and so does anything at or below ``finfo.min / 2`` of the mask's type
        or of the type that logits are computed in. Or a ``CausalBias`` of ``torch.nn.attention.bias``.
      dropout_p: the probability that a weight is dropped. As in torch's function it is always applied: pass 0 (the
        default) when not training.
      is_causal: ``True`` counts positions from the first query and key, as torch does; ``"lower_right"`` from the
        last, as a cache needs it. May be combined with a mask.
      scale: what products of query and key are multiplied by; ``1 / sqrt(D)`` by default.
      enable_gqa: allow more heads of the query than of the key; keys and values are not repeated in memory.
      policy: maps :class:`~sharpmax.RowStats` ``[B, Hq, Lq]`` to beta; any callable, module or built-in policy, by
        default :data:`sharpmax.PAPER`. ``sharpmax.Constant(1.0)`` is plain softmax. Gradient flows through what beta
        has of entropy, lse and mean, unless the policy is :func:`~sharpmax.detached`. Betas should not be negative:
        ``"triton"`` does not check, and may give infinities or NaN for them, as the others do where powers grow too
        large. Rows of infinite beta are hard, uniform over their largest logits, with ``"reference"`` and
        ``"streaming"``; ``"triton"`` and ``"stock"`` refuse :class:`~sharpmax.Hard`, and take 10,000 for an infinity
        that any other policy gives.
      mechanism: what makes weights of logits in the place of softmax and policy: a name of
        ``sharpmax.mechanisms.MECHANISMS``, a mechanism (with the parameters that it starts from, if it has any), or a
        :class:`~sharpmax.torch.Learnable` that holds them. The default policy is not used then, and any other is
        refused. A mechanism that has a policy is handled like that policy, and ``Window`` like ``window=``, its keys
        counted back from the last unless ``is_causal=True``. The others are served by ``"reference"``, and those that
        fold by ``"streaming"``. Differential attention takes query and key with two heads for each of value, and
        a mechanism with features no scale.
      window: ``w``: keys less than ``w`` positions away are seen (the ``w`` latest, if causal); or ``(left, right)``,
        how many keys before and after its own position a query sees, -1 for all, as flash-attention's ``window_size``.
      softcap: logits are ``softcap * tanh(logits / softcap)``, before the mask is added; beta multiplies the result.
      key_lengths: ``[B]``, or of the query's batch axes; keys from there on are not seen, whatever they hold. Numbers
        outside of 0 to Lk are taken as the nearest of these.
      impl: ``"reference"`` (all logits at once), ``"streaming"`` (any device), ``"triton"`` (GPU), ``"stock"`` (torch's
        own attention on ``beta * query``), or ``"auto"``, the default, which takes the first that serves the call (the
        page docs/attention.md has the order). An implementation that cannot serve a call says so.
      return_stats: also return the statistics and beta of every row; not for a mechanism without a policy.

    Returns:
      The output ``[..., Hq, Lq, Dv]``, of the query's type, or with ``return_stats`` an :class:`Attention`: ``output``,
      ``stats`` of the logits before beta, and ``beta``, the last two ``[..., Hq, Lq]``.

    A query that sees no key gets 0, and so do gradients.
    """
    check_policy(policy)
    check_dropout(dropout_p)
    if value is None:
        raise TypeError("expected value to be a torch tensor, got NoneType")
    held = None
    if mechanism is not None:
        choice.check_impl(impl)
        policy, held, size = mechanisms.settled(mechanism, policy)
        if size is not None:
            window, is_causal = mechanisms.latest(size, window, is_causal, attn_mask)
        if held is not None:
            mechanisms.check_served(held, scale, return_stats)
    inputs = checked(
        query, key, value, attn_mask, key_lengths, is_causal=is_causal, scale=scale, window=window, softcap=softcap,
        enable_gqa=enable_gqa, maps=1 if held is None else held.mechanism.maps,
    )  # fmt: skip
    if held is not None:
        return inputs.restore(mechanisms.attention(held, inputs, dropout_p, impl))
    may_round = impl == "auto" and not choice.own_kernels_pay(inputs, policy, dropout_p, return_stats)
    chosen = choice.choose(impl, inputs, policy, may_round=may_round, drops=dropout_p > 0)
    with full_precision(inputs.q):
        form = None if return_stats else lowered(policy)
        if form is not None:
            if (beta := _beta_without_statistics(inputs, form)) is not None:
                return inputs.restore(_attend(inputs, beta, None, chosen, dropout_p))
            if policy_inside(inputs, policy, form, chosen):
                detached = isinstance(policy, Detached)
                return inputs.restore(with_policy_inside(inputs, form, detached, chosen, dropout_p))
        stats = _statistics(inputs, chosen, needs_spread(policy))
        beta = served_betas(row_betas(policy, stats), chosen)
        output = _attend(inputs, beta, stats.max, chosen, dropout_p)
    if not return_stats:
        return inputs.restore(output)
    fields = (None if field is None else inputs.restore(field) for field in stats)
    return Attention(inputs.restore(output), RowStats(*fields), inputs.restore(beta))


def row_stats(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | None = None,
    is_causal: Causal = False,
    attn_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    window: Window = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    with_min: bool = False,
    impl: str = "auto",
) -> RowStats:
    """The :class:`~sharpmax.RowStats` of every attention row: entropy (in nats), logsumexp, mean, maximum and count.

    Args:
      query, key, scale, is_causal, attn_mask, key_lengths, window, softcap, enable_gqa: as in
        :func:`scaled_dot_product_attention`.
      with_min: also compute the minimum, which :attr:`~sharpmax.RowStats.spread` needs.
      impl: ``"reference"`` (all logits at once), ``"streaming"``, ``"triton"``, or ``"auto"``.

    Returns:
      Statistics of the logits, before any temperature; fields are ``[..., Hq, Lq]``, float64 for float64 and else
      float32. Entropy, lse and mean are differentiable; maximum, minimum and count, and so the spread, have no
      gradient. Nothing of the size of the logits is held, except by ``impl="reference"``.
    """
    inputs = checked(
        query, key, None, attn_mask, key_lengths, is_causal=is_causal, scale=scale, window=window, softcap=softcap,
        enable_gqa=enable_gqa,
    )  # fmt: skip
    chosen = choice.choose(impl, inputs, None, among=("reference", "streaming", "triton"), what="row_stats")
    with full_precision(inputs.q):
        stats = _statistics(inputs, chosen, with_min)
    return RowStats(*(None if field is None else inputs.restore(field) for field in stats))


def row_betas(policy: Policy, stats: RowStats) -> Tensor:
    """Beta of every row; a policy may give one number for several of them."""
    beta = policy(stats)
    if not isinstance(beta, Tensor):
        try:
            beta = torch.as_tensor(beta, dtype=stats.sum.dtype, device=stats.sum.device)
        except (RuntimeError, TypeError, ValueError):
            raise TypeError(f"expected the policy to give numbers, got {type(beta).__name__}") from None
    if beta.dtype.is_complex:
        raise TypeError(f"expected the policy to give numbers, got {beta.dtype}")
    try:
        return beta.to(stats.sum.dtype).expand(stats.sum.shape)
    except RuntimeError:
        raise ValueError(
            f"expected the policy to give beta for rows of shape {tuple(stats.sum.shape)}, got {tuple(beta.shape)}"
        ) from None


def served_betas(beta: Tensor, impl: str) -> Tensor:
    """Beta as an implementation takes it: :data:`HARDEST` for infinity, where that is not served."""
    return beta if impl in ("reference", "streaming") else torch.where(beta.isposinf(), HARDEST, beta)


def _statistics(inputs: Inputs, impl: str, with_min: bool) -> RowStats:
    q, k, geometry, masks = inputs.q, inputs.k, inputs.geometry, (inputs.mask, inputs.key_lengths)
    if impl == "reference":
        return reference.row_stats(q, k, geometry, mask=masks[0], key_lengths=masks[1], with_min=with_min)
    if impl == "stock":
        impl = "streaming" if choice.triton_refusal(inputs, None) else "triton"
    top, total, moment, lowest, count = ops.row_stats(q, k, *masks, None, None, geometry.numbers, with_min, impl)
    return RowStats(top, total, moment, lowest if with_min else None, count)


def is_number(form: Lowered) -> bool:
    """Whether a policy gives every row the same beta."""
    return len(form.coefficients) == 1 and form.threshold == -math.inf


def _beta_without_statistics(inputs: Inputs, form: Lowered) -> Tensor | None:
    """Beta of a policy that is a number, or one of how many keys a row sees where no mask needs to be counted."""
    q, k, _, mask, key_lengths, geometry, _ = inputs
    if not (is_number(form) or (form.variable == "log_count" and mask is None)):
        return None
    rows = torch.arange(q.shape[2], device=q.device)
    lengths = k.shape[2] if key_lengths is None else key_lengths[:, None, None]
    count = visible_counts(geometry, rows, q.shape[2], lengths).expand(q.shape[:3])
    empty = torch.zeros(q.shape[:3], dtype=accumulation(q.dtype), device=q.device)
    return form(RowStats(empty, empty, empty, None, count))


def policy_inside(inputs: Inputs, policy: Policy, form: Lowered, impl: str) -> bool:
    """Whether operators with a policy inside serve a call that ``impl`` was chosen for; ``form`` is the policy's."""
    return (
        impl in ("stock", "triton")
        and len(form.coefficients) <= LARGEST_POLYNOMIAL
        and 0 not in (*inputs.q.shape, *inputs.k.shape)
        and (impl == "triton" or not choice.triton_refusal(inputs, policy))
    )


def with_policy_inside(
    inputs: Inputs, form: Lowered, detached: bool, impl: str, dropout_p: float, starts: Starts = (None, None)
) -> Tensor:
    """The output of a call that :func:`policy_inside` holds for; ``starts`` of packed documents, for ``"triton"``."""
    q, k, v, mask, key_lengths, geometry, _ = inputs
    assert v is not None
    if impl == "stock":
        return stock.with_lowered(inputs, form, detached, dropout_p)
    given = (geometry.numbers, fused.policy_numbers(form), detached)
    return fused.adaptive_attention(
        q, k, v, mask, key_lengths, *starts, dropout_seed(dropout_p), *given, float(dropout_p)
    )[0]


def dropout_seed(dropout_p: float) -> Tensor | None:
    """What decides which weights are dropped, if any are."""
    return torch.randint(1 << 31, ()) if dropout_p > 0 else None


def _attend(inputs: Inputs, beta: Tensor, row_max: Tensor | None, impl: str, dropout_p: float) -> Tensor:
    q, k, v, mask, key_lengths, geometry, _ = inputs
    assert v is not None
    if impl == "reference":
        return reference.attend(
            q, k, v, beta, geometry, mask=mask, key_lengths=key_lengths, dropout_p=dropout_p
        )  # fmt: skip
    if impl == "stock":
        if 0 not in (*q.shape, *k.shape):
            return stock.with_betas(inputs, beta, dropout_p)
        impl = "streaming"
    output, _ = ops.attend(
        q, k, v, beta, row_max, mask, key_lengths, None, None, dropout_seed(dropout_p), geometry.numbers,
        float(dropout_p), impl, not needs_gradient(q, k, v, beta, mask),
    )  # fmt: skip
    return output.to(q.dtype)
