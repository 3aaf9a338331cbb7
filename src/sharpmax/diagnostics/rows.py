"""The statistics of every attention row of one call, with and without the attention sink, from one pass.

The *sink* is the first key of a sequence, to which heads with nothing to say tend to attend. Statistics are computed of
all other keys and merged with the logit of the sink, a single product per row: subtracting it from the statistics of
the whole row would cancel exactly where the sink has all of the mass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.policies import Constant, PerHead
from ..core.stats import RowStats
from ..huggingface.interface import Call
from ..torch.attention import row_betas, row_stats
from ..torch.blocks import accumulation
from ..torch.checks import Inputs, checked
from ..torch.geometry import ALL

BLOCKS = 8
"""Blocks of rows in a sample."""


class CallRows(NamedTuple):
    """Rows of one call, ``[B, Hq, Lq]`` each: ``whole`` of all keys, ``rest`` of all but the sink, which has ``sink``.

    ``counts`` (``[B, Lq]``) is true for rows that belong to a token: padding has rows too, and they mean nothing.
    ``acting`` is the entropy after the beta of the model's own policy, NaN where it has none.
    """

    whole: RowStats
    rest: RowStats
    sink: RowStats
    counts: Tensor
    acting: Tensor

    @property
    def sink_mass(self) -> Tensor:
        """The coefficient of the sink, 0 where it is not seen."""
        return torch.where(self.sink.count > 0, torch.exp(self.sink.max - self.whole.lse), 0.0)

    @property
    def largest(self) -> Tensor:
        """The largest coefficient."""
        return torch.where(self.whole.count > 0, torch.exp(self.whole.max - self.whole.lse), 0.0)


def documents(call: Call) -> Iterator[Call]:
    """The call itself, or one for each document of a packed batch."""
    if call.documents is None:
        yield call
        return
    packed = [x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for x in (call.query, call.key, call.value)]
    for start, stop in pairwise(call.documents.tolist()):
        if stop > start:
            query, key, value = (x[:, :, start:stop] for x in packed)
            yield call._replace(query=query, key=key, value=value, documents=None)


def call_rows(call: Call, impl: str = "auto", sample: int | None = None) -> CallRows:
    """The statistics of every row of a call that is not packed; nothing of the size of the logits is held.

    With ``sample``, of about that many rows, in :data:`BLOCKS` blocks evenly apart, the last row among them; of all
    rows where a mask or lengths of keys make them differ.
    """
    with torch.no_grad():
        inputs = as_inputs(call)
        if sample is not None and _alike(inputs) and inputs.q.shape[2] > max(sample, BLOCKS):
            return _joined([call_rows(part, impl) for part in _blocks(call, inputs, sample)])
        first = _first_keys(inputs)
        rest = _without(inputs, call.options, first, impl)
        sink = _sink(inputs, first)
        whole = rest.merge(sink)
        return CallRows(whole, rest, sink, counting_rows(inputs), _acting(call, inputs, whole, impl))


def _acting(call: Call, inputs: Inputs, whole: RowStats, impl: str) -> Tensor:
    """The entropy of every row after the beta of the model's own policy; NaN where a head has plain softmax.

    Beta multiplies the query in the place of the logits. That is not the same where a cap or a bias comes between, and
    not done where beta is infinite: NaN there as well.
    """
    policy, mask = call.policy, inputs.mask
    bent = inputs.geometry.softcap > 0 or (mask is not None and mask.dtype != torch.bool)
    if call.mechanism is not None or bent or policy == Constant(1.0):
        return torch.full_like(whole.sum, math.nan)
    beta = row_betas(policy, whole)
    scaled = (inputs.q.to(beta.dtype) * torch.where(beta.isinf(), 1.0, beta)[..., None]).to(inputs.q.dtype)
    entropy = row_stats(scaled, inputs.k, impl=impl, **call.options).entropy
    heads = policy.policies if isinstance(policy, PerHead) else ()
    plain = torch.tensor([own == Constant(1.0) for own in heads] or [False], device=beta.device)
    return torch.where(beta.isinf() | plain[:, None], math.nan, entropy)


def as_inputs(call: Call) -> Inputs:
    """A call as attention sees it: one layout, plain numbers for what is visible."""
    options = {"is_causal": False, "scale": None, "window": None, "softcap": None, "enable_gqa": False} | call.options
    mask, lengths = (options.pop(name, None) for name in ("attn_mask", "key_lengths"))
    return checked(call.query.detach(), call.key.detach(), None, mask, lengths, **options)


def is_windowed(inputs: Inputs) -> bool:
    """Whether rows see a bounded number of keys, however many there are."""
    return ALL not in (inputs.geometry.left, inputs.geometry.right)


def last_logits(inputs: Inputs, last: Tensor) -> Tensor:
    """The logits ``[B, Hq, Lk]`` of the row ``last`` (``[B]``) of every sequence, ``-inf`` where a key is not seen."""
    q, k = inputs.q, inputs.k
    dtype = accumulation(q.dtype)
    at = last.view(-1, 1, 1, 1)
    query = q.gather(2, at.expand(-1, q.shape[1], 1, q.shape[3])).squeeze(2).unflatten(1, (k.shape[1], -1))
    z = _bent(inputs, torch.einsum("bhgd,bhld->bhgl", query.to(dtype), k.to(dtype)).flatten(1, 2))
    lengths = torch.full_like(last, k.shape[2]) if inputs.key_lengths is None else inputs.key_lengths.long()
    positions = torch.arange(k.shape[2], device=z.device)
    for b in range(q.shape[0]):
        seen = inputs.geometry.visible(last[b : b + 1], positions, q.shape[2], lengths[b].view(1, 1))
        z[b].masked_fill_(~(positions < lengths[b]) if seen is None else ~seen, -math.inf)
    if inputs.mask is not None:
        mask = inputs.mask.expand(q.shape[0], -1, q.shape[2], k.shape[2])
        mask = mask.gather(2, at.expand(-1, mask.shape[1], 1, mask.shape[3])).squeeze(2)
        z = torch.where(_shown(mask), z if mask.dtype == torch.bool else z + mask, -math.inf)
    return z


# ----------------------------------------------------------------------------------------------------------------
# A sample of rows
# ----------------------------------------------------------------------------------------------------------------


def _alike(inputs: Inputs) -> bool:
    """Whether rows differ by their position alone, and see all keys or none after it."""
    g = inputs.geometry
    aligned = g.lower_right or inputs.q.shape[2] == inputs.k.shape[2]
    return inputs.mask is None and inputs.key_lengths is None and (not g.banded or (g.right == 0 and aligned))


def _blocks(call: Call, inputs: Inputs, sample: int) -> Iterator[Call]:
    """Calls of some consecutive rows each, with the keys up to the last one's."""
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    size = max(1, sample // BLOCKS)
    for i in range(1, BLOCKS + 1):
        stop = round(i * queries / BLOCKS)
        options, last = call.options, keys
        if inputs.geometry.banded:
            options, last = {**options, "is_causal": "lower_right"}, keys - queries + stop
        rows = inputs.q[:, :, max(0, stop - size) : stop]
        yield call._replace(query=rows, key=call.key[:, :, :last], value=call.value[:, :, :last], options=options)


def _joined(parts: list[CallRows]) -> CallRows:
    """The rows of all parts, one after the other."""

    def stats(of: list[Any]) -> RowStats:
        return RowStats(*(torch.cat(fields, dim=-1) for fields in zip(*of, strict=True)))

    whole, rest, sink, counts, acting = zip(*parts, strict=True)
    return CallRows(
        stats(list(whole)), stats(list(rest)), stats(list(sink)), torch.cat(counts, dim=-1), torch.cat(acting, dim=-1)
    )


# ----------------------------------------------------------------------------------------------------------------
# The sink, and everything else
# ----------------------------------------------------------------------------------------------------------------


def _first_keys(inputs: Inputs) -> Tensor:
    """The first key of every sequence ``[B]``: after padding on the left, it is not that at 0."""
    batch = inputs.q.shape[0]
    if inputs.mask is None or inputs.mask.shape[3] == 1:
        return torch.zeros(batch, dtype=torch.long, device=inputs.q.device)
    shown = _shown(inputs.mask).any(dim=2).any(dim=1)
    return shown.to(torch.uint8).argmax(-1).expand(batch)


def _shown(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else ~(mask <= torch.finfo(mask.dtype).min / 2)


def _without(inputs: Inputs, options: dict[str, Any], first: Tensor, impl: str) -> RowStats:
    """The statistics of all keys but the first.

    Without a mask the key is cut off, and positions are counted so that all others stay where they were: from the end
    that is so by itself, from the start the first query, which sees that key alone, goes with it.
    """
    q, k, geometry = inputs.q, inputs.k, inputs.geometry
    given = {"with_min": True, "impl": impl, **options}
    from_start = geometry.banded and not geometry.lower_right
    if inputs.mask is not None or k.shape[2] == 0 or (from_start and geometry.right != 0):
        return row_stats(q, k, **{**given, "attn_mask": _hiding(inputs, first)})
    if inputs.key_lengths is not None:
        given["key_lengths"] = (inputs.key_lengths - 1).clamp(min=0)
    if not from_start:
        return row_stats(q, k[:, :, 1:], **given)
    stats = row_stats(q[:, :, 1:], k[:, :, 1:], **given)
    nothing: Any = _empty(stats.sum.new_zeros((*q.shape[:2], min(1, q.shape[2]))))
    fields: Any = zip(nothing, stats, strict=True)
    return RowStats(*(torch.cat(pair, dim=-1) for pair in fields))


def _hiding(inputs: Inputs, first: Tensor) -> Tensor:
    """The mask of a call with the first keys hidden as well."""
    others = torch.arange(inputs.k.shape[2], device=inputs.q.device) != first.view(-1, 1, 1, 1)
    mask = inputs.mask
    if mask is None:
        return others
    return mask & others if mask.dtype == torch.bool else torch.where(others, mask, -math.inf)


def _sink(inputs: Inputs, first: Tensor) -> RowStats:
    """Rows with one logit, that of the first key, where it is seen."""
    q, k = inputs.q, inputs.k
    dtype = accumulation(q.dtype)
    if k.shape[2] == 0:
        return _empty(q.new_zeros(q.shape[:3], dtype=dtype))
    at = first.view(-1, 1, 1, 1).expand(-1, k.shape[1], 1, k.shape[3])
    key = k.gather(2, at).squeeze(2).to(dtype)
    grouped = q.unflatten(1, (k.shape[1], -1)).to(dtype)
    z = _bent(inputs, torch.einsum("bhgld,bhd->bhgl", grouped, key).flatten(1, 2))
    rows = torch.arange(q.shape[2], device=q.device)
    lengths = k.shape[2] if inputs.key_lengths is None else inputs.key_lengths.view(-1, 1, 1)
    seen = inputs.geometry.visible(rows, first.view(-1, 1, 1), q.shape[2], lengths)
    shown = torch.ones_like(z, dtype=torch.bool)
    if seen is not None:
        shown &= seen.squeeze(-1).unsqueeze(1)
    if inputs.mask is not None:
        mask = inputs.mask.expand(q.shape[0], -1, -1, k.shape[2])
        mask = mask.gather(3, first.view(-1, 1, 1, 1).expand(*mask.shape[:3], 1)).squeeze(3)
        shown &= _shown(mask)
        z = z if mask.dtype == torch.bool else z + mask
    one = shown.to(dtype)
    return RowStats(
        torch.where(shown, z, -math.inf), one, torch.zeros_like(z), torch.where(shown, z, math.inf), shown.int()
    )


def _bent(inputs: Inputs, products: Tensor) -> Tensor:
    """Logits from products of query and key."""
    z = products * inputs.geometry.scale
    cap = inputs.geometry.softcap
    return cap * torch.tanh(z / cap) if cap > 0 else z


def _empty(zeros: Tensor) -> RowStats:
    return RowStats(zeros - math.inf, zeros, zeros, zeros + math.inf, zeros.int())


def counting_rows(inputs: Inputs) -> Tensor:
    """Which rows belong to a token: in self-attention those whose own key is one that some query may see."""
    q, k = inputs.q, inputs.k
    rows = torch.arange(q.shape[2], device=q.device).expand(q.shape[0], -1)
    lengths = torch.full_like(rows[:, :1], k.shape[2])
    if inputs.key_lengths is not None:
        lengths = inputs.key_lengths.view(-1, 1).long()
    if not inputs.geometry.lower_right and q.shape[2] != k.shape[2]:
        return torch.ones_like(rows, dtype=torch.bool)
    own = rows + lengths - q.shape[2] if inputs.geometry.lower_right else rows
    counting = (own >= 0) & (own < lengths)
    if inputs.mask is not None and inputs.mask.shape[3] > 1:
        shown = _shown(inputs.mask).any(dim=2).any(dim=1).expand(q.shape[0], -1)
        counting &= shown.gather(1, own.clamp(0, k.shape[2] - 1))
    return counting
