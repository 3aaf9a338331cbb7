"""Attention over packed documents of different lengths, without padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.policies import PAPER, Detached, Lowered, Policy, lowered, needs_spread
from ..core.stats import RowStats
from . import ops
from .attention import (
    Attention,
    Starts,
    dropout_seed,
    is_number,
    policy_inside,
    row_betas,
    served_betas,
    with_policy_inside,
)
from .blocks import accumulation
from .checks import (
    Inputs,
    Window,
    check_dropout,
    check_policy,
    check_tensors,
    check_whole,
    full_precision,
    geometry_of,
    misfit,
    needs_gradient,
    readable,
    under_autocast,
)
from .choice import choose


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    *,
    policy: Policy = PAPER,
    window: Window = None,
    softcap: float | None = None,
    impl: str = "auto",
    return_stats: bool = False,
) -> Tensor | Attention:
    """Attention of every document to itself, with the inverse temperature that ``policy`` chooses for each row.

    Args:
      query: ``[Tq, Hq, D]``, the queries of all documents one after the other.
      key, value: ``[Tk, H, D]`` and ``[Tk, H, Dv]``, likewise; ``Hq`` is a multiple of ``H``.
      cu_seqlens_q, cu_seqlens_k: offsets, not lengths: where each document starts and where the last one ends, whole
        numbers ``[documents + 1]`` that never fall, on the query's device or on the CPU. ``[0, 10, 30]`` are documents
        of 10 and of 20 tokens. Tokens before the first offset and after the last belong to no document: their output
        is 0, and so are their gradients. Offsets are checked on a CPU alone, since a GPU would have to be waited for.
      max_seqlen_q, max_seqlen_k: not used; here for the sake of flash-attention's signature.
      dropout_p: the probability that a weight is dropped.
      causal: whether a query sees no later keys. Positions are counted from the end of each document (lower-right), as
        flash-attention does; where a document has as many keys as queries that is the usual causality.
      scale, policy, window, softcap: as in :func:`~sharpmax.torch.scaled_dot_product_attention`; a window too is
        counted from the end.
      impl: ``"streaming"`` (document after document), ``"triton"``, or ``"auto"``, the default.
      return_stats: also return the statistics and beta of every row.

    Returns:
      The output ``[Tq, Hq, Dv]``, of the query's type, or with ``return_stats`` an :class:`~sharpmax.torch.Attention`,
      whose statistics (of the logits before beta) and beta are ``[Hq, Tq]``.
    """
    del max_seqlen_q, max_seqlen_k
    check_policy(policy)
    check_dropout(dropout_p)
    check_tensors({"query": query, "key": key, "value": value})
    query, key, value = under_autocast(query, key, value)
    _check_packed(query, key, value, cu_seqlens_q, cu_seqlens_k)
    if not isinstance(causal, bool | np.bool_):
        raise ValueError(f"expected causal to be True or False, got {causal!r}")
    geometry = geometry_of(query, causal, scale, window, softcap)._replace(lower_right=True)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    inputs = Inputs(q, k, v, None, None, geometry, ())
    chosen = choose(impl, inputs, policy, among=("streaming", "triton"), what="packed documents")
    starts = (cu_seqlens_q.to(q.device, torch.int32), cu_seqlens_k.to(q.device, torch.int32))
    with full_precision(q):
        form = None if return_stats else lowered(policy)
        if form is not None and (is_number(form) or policy_inside(inputs, policy, form, chosen)):
            return _without_statistics(inputs, policy, form, starts, dropout_p, chosen)[0].transpose(0, 1)
        with_min, numbers = needs_spread(policy), geometry.numbers
        top, total, moment, lowest, count = ops.row_stats(q, k, None, None, *starts, numbers, with_min, chosen)
        stats = RowStats(top, total, moment, lowest if with_min else None, count)
        beta = served_betas(row_betas(policy, stats), chosen)
        output = _attend(inputs, beta, top, starts, dropout_p, chosen)[0].transpose(0, 1)
    if not return_stats:
        return output
    return Attention(output, RowStats(*(None if field is None else field[0] for field in stats)), beta[0])


def _without_statistics(
    inputs: Inputs, policy: Policy, form: Lowered, starts: Starts, dropout_p: float, impl: str
) -> Tensor:
    """The output, where no statistics are needed between operators."""
    if not is_number(form):
        return with_policy_inside(inputs, form, isinstance(policy, Detached), impl, dropout_p, starts)
    none = torch.zeros(inputs.q.shape[:3], dtype=accumulation(inputs.q.dtype), device=inputs.q.device)
    beta = row_betas(policy, RowStats(none, none, none, None, none))
    return _attend(inputs, beta, None, starts, dropout_p, impl)


def _attend(
    inputs: Inputs, beta: Tensor, row_max: Tensor | None, starts: Starts, dropout_p: float, impl: str
) -> Tensor:
    q, k, v, _, _, geometry, _ = inputs
    assert v is not None
    seed = dropout_seed(dropout_p)
    rest = (geometry.numbers, float(dropout_p), impl, not needs_gradient(q, k, v, beta))
    return ops.attend(q, k, v, beta, row_max, None, None, *starts, seed, *rest)[0].to(q.dtype)


def _check_packed(query: Tensor, key: Tensor, value: Tensor, cu_q: Any, cu_k: Any) -> None:
    tensors = [query, key, value]
    if any(x.ndim != 3 for x in tensors):
        raise misfit("query, key and value [tokens, heads, columns]", tensors)
    if key.shape[:2] != value.shape[:2] or query.shape[2] != key.shape[2] or query.shape[2] == 0:
        raise misfit("query, key and value that fit together", tensors)
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise misfit("the query's heads to be a multiple of the key's", tensors)
    for name, starts in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        check_whole(name, starts)
        if starts.ndim != 1 or starts.shape[0] < 1:
            raise ValueError(f"expected {name} of shape [documents + 1], got shape {tuple(starts.shape)}")
        if starts.device != query.device and starts.device.type != "cpu":
            raise ValueError(f"expected {name} on the query's device {query.device}, got it on {starts.device}")
    if cu_q.shape != cu_k.shape:
        raise ValueError(f"expected as many documents of queries as of keys, got {len(cu_q) - 1} and {len(cu_k) - 1}")
    for name, starts, x in (("cu_seqlens_q", cu_q, query), ("cu_seqlens_k", cu_k, key)):
        if readable(starts):
            ops.check_starts(name, starts.tolist(), x.shape[0])
