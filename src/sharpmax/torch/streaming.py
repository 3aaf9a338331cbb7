"""Row statistics and attention with beta in plain torch, on any device, without ever holding all logits.

Logits are computed block by block (see :mod:`.blocks`), forward and again backward, so memory grows with the number of
queries plus that of keys. With ``z`` the logits, ``t = z - max`` and ``w = softmax(beta * z)``:

    statistics    L = sum e^t, A = sum e^t t       dz = e^t (dL + dA (1 + t))
    attention     o = w v                          dz = beta g,  dbeta = sum g z,  g = w (do v^T - <do, o>)

Plain functions of tensors, without autograd: :mod:`.ops` makes operators of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.stats import ZERO_EXPONENT
from . import stock_on_cpu
from .blocks import Block, Call, Dropout, Rows, Span, add_product, hidden_logit, hiding, merged, product, shown
from .centring import centred
from .geometry import Geometry, visible_counts

LOG2E = math.log2(math.e)
SMALLEST_BETA = 1e-6
"""Below this, beta is not divided by."""


def row_stats(
    q: Tensor,
    k: Tensor,
    geometry: Geometry,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    with_min: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Maximum, sum, moment, minimum (``None`` unless asked for) and count of every row, ``[B, Hq, Lq]``."""
    call = Call(q, k, None, geometry, mask, key_lengths)
    highest, total, moment = (q.new_zeros(q.shape[:-1], dtype=call.dtype) for _ in range(3))
    highest.fill_(-math.inf)
    lowest = torch.full_like(highest, math.inf) if with_min else None
    count = _counts(call)
    hiding_adds, far = not with_min and call.hiding_adds(), call.far()
    for span in call.spans():
        for rows in span.rows():
            if not rows.keys:
                continue
            query = span.query(rows)
            parts = call.buffers("parts", 3, len(rows.keys), span.n, query.shape[1])
            smallest = None
            for i, keys in enumerate(rows.keys):
                block = span.logits(query, rows, keys, hiding_adds=hiding_adds)
                if with_min:
                    smallest = _minimum(span, block, smallest)
                _statistics(call, block.logits, parts[:, i], far)
            top, summed, weighted = _of_rows(parts)
            span.put_rows(highest, rows, top)
            span.put_rows(total, rows, summed)
            span.put_rows(moment, rows, weighted)
            if lowest is not None and smallest is not None:
                span.put_rows(lowest, rows, smallest)
    return highest, total, moment, lowest, count


def row_stats_backward(
    q: Tensor,
    k: Tensor,
    geometry: Geometry,
    row_max: Tensor,
    grad_sum: Tensor,
    grad_moment: Tensor,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    need_mask: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of query, key and, if asked for, mask."""
    call = Call(q, k, None, geometry, mask, key_lengths)
    gradients = _Gradients(call, need_mask)
    shift = torch.where(row_max.isinf(), 0.0, row_max)
    hiding_adds, far = call.hiding_adds(), call.far()
    for span in call.spans():
        dk = torch.zeros_like(span.key)
        for rows in span.rows():
            query = span.query(rows)
            top, d_sum, d_moment = (span.of_rows(x, rows)[..., None] for x in (shift, grad_sum, grad_moment))
            constant, dq = d_sum + d_moment, torch.zeros_like(query)
            for keys in rows.keys:
                block = span.logits(query, rows, keys, slope=True, hiding_adds=hiding_adds)
                t = block.logits.sub_(top)
                if far:
                    t.clamp_(min=ZERO_EXPONENT)
                dz = torch.addcmul(constant, t, d_moment, out=call.buffers("gradient", *t.shape)).mul_(powers_(t))
                span.fill(dz, block.hidden, 0.0)
                gradients.add(span, rows, keys, dz, block, query, dq, dk)
            span.put_rows(gradients.dq, rows, dq.mul_(geometry.scale))
        span.put_keys(gradients.dk, dk)
    return gradients.dq, gradients.dk, gradients.dmask


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    geometry: Geometry,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    rounded: bool = False,
) -> tuple[Tensor, Tensor]:
    """``softmax(beta * z) v`` and ``logsumexp(beta * z)`` (``-inf`` for empty rows).

    The first is in the type of ``q`` if ``rounded``, else in that which it was computed in. Rows of infinite beta are
    hard: uniform over their maxima. Their second result means nothing.
    """
    if stock_on_cpu.serves(q, k, v, beta, geometry, mask, key_lengths, dropout_p):
        out, lse = stock_on_cpu.attend(q, k, v, beta, geometry, mask, key_lengths)
        if stock_on_cpu.exact(lse) and not _overflowed(Call(q, k, v, geometry, mask, key_lengths), lse):
            return out.to(q.dtype) if rounded else out, lse
    call = Call(q, k, v, geometry, mask, key_lengths)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=q.dtype if rounded else call.dtype)
    lse = q.new_full(q.shape[:-1], -math.inf, dtype=call.dtype)
    dropout = Dropout(call, dropout_p, seed)
    for span in call.spans():
        assert span.value is not None
        for rows in span.rows():
            query = span.query(rows)
            factor = _Factor(span.of_rows(beta, rows)[..., None])
            top = torch.full_like(factor.beta, hidden_logit(call.dtype))
            total, result = torch.zeros_like(top), query.new_zeros((*query.shape[:-1], v.shape[-1]))
            for keys in rows.keys:
                block = span.logits(query, rows, keys)
                w, fade, top, total = _powers(span, block, factor, top, total)
                dropout.apply(w)
                add_product(result.mul_(fade), w, span.value[:, slice(*keys)])
            empty = total == 0
            span.put_rows(out, rows, result.div_(total.masked_fill(empty, 1.0)))
            sums = (factor.beta * top + total.log()).clamp_(min=torch.finfo(call.dtype).min)
            span.put_rows(lse, rows, sums.masked_fill_(empty, -math.inf).squeeze(-1))
    return out, lse


def _overflowed(call: Call, lse: Tensor) -> bool:
    """Whether beta times what a mask adds is infinite in all of a row that sees keys, whose sum is that of none."""
    empty = lse == -math.inf
    return call.biased and bool(empty.any()) and bool((_counts(call)[empty] > 0).any())


def _powers(
    span: Span, block: Block, factor: _Factor, top: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Powers of a block's logits, what fades those before it, and the maximum and the sum of all so far."""
    higher = torch.maximum(top, block.logits.amax(-1, keepdim=True))
    fade = factor.exponent(top - higher).exp_().masked_fill_(total == 0, 0.0)  # beta may be negative
    w = factor.exponent(block.logits.sub_(higher))
    span.fill(w, block.hidden, -math.inf)
    return w, fade, higher, total.mul_(fade).add_(powers_(w).sum(-1, keepdim=True))


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    geometry: Geometry,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    row_max: Tensor | None = None,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    need_beta: bool = False,
    need_mask: bool = False,
    whole: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of query, key, value and, if asked for, beta and mask.

    That of a small beta is exact where ``row_max`` is given, the maxima of logits. Where rows have keys elsewhere, too,
    which ``out`` and ``lse`` know of, they are not ``whole``.
    """
    own = k.dtype
    by_torch = stock_on_cpu.serves(
        q, k, v, beta, geometry, mask, key_lengths, dropout_p, of_numbers=need_beta or need_mask
    ) and stock_on_cpu.exact(lse)
    if whole and (less := centred(q, k, beta, geometry, key_lengths)) is not None:
        k = less.keys
        lse = torch.where(_far(lse, beta), lse, lse - beta * less.shift)
        row_max = None if row_max is None else row_max - less.shift
    if by_torch:
        found = stock_on_cpu.backward(q, k, v, beta, geometry, mask, key_lengths, out, lse, grad_out, need_beta)
        if all(x is None or stock_on_cpu.of_numbers(x) for x in found):  # products of what is not seen may overflow
            return found[0], found[1].to(own), *found[2:], None
    call = Call(q, k, v, geometry, mask, key_lengths)
    gradients = _Gradients(call, need_mask)
    grad_value = torch.zeros_like(v)
    grad_beta = torch.zeros_like(lse) if need_beta else None
    hiding_adds = call.hiding_adds() and bool((beta > SMALLEST_BETA).all())
    dropout = Dropout(call, dropout_p, seed)
    for span in call.spans():
        assert span.value is not None
        dk, dv = torch.zeros_like(span.key), torch.zeros_like(span.value)
        for rows in span.rows():
            query, do = span.query(rows), span.of_rows(grad_out, rows).to(call.dtype)
            delta = (do * span.of_rows(out, rows)).sum(-1, keepdim=True)
            factor = _Factor(span.of_rows(beta, rows)[..., None])
            of_rows = span.of_rows(lse, rows)[..., None]
            centre, constant = _normaliser(span, rows, query, factor, of_rows, row_max, whole)
            dq, d_beta = torch.zeros_like(query), torch.zeros_like(delta)
            for keys in rows.keys:
                block = span.logits(query, rows, keys, slope=True, hiding_adds=hiding_adds)
                t = block.logits.sub_(centre)
                w = factor.exponent(torch.add(t, 0.0, out=call.buffers("weights", *t.shape))).add_(constant)
                span.fill(w, block.hidden, -math.inf)
                powers_(w)
                g = product(do, span.value[:, slice(*keys)].mT, call.buffers("gradient", *t.shape))
                kept = dropout.draw(w)
                if kept is not None:
                    g.mul_(kept)
                g.sub_(delta).mul_(w)
                add_product(dv[:, slice(*keys)], (w if kept is None else w.mul_(kept)).mT, do)
                if need_beta:
                    d_beta += (t.mul_(g)).sum(-1, keepdim=True)
                gradients.add(span, rows, keys, g.mul_(factor.slope), block, query, dq, dk)
            span.put_rows(gradients.dq, rows, dq.mul_(geometry.scale))
            if grad_beta is not None:
                span.put_rows(grad_beta, rows, d_beta.squeeze(-1))
        span.put_keys(gradients.dk, dk)
        span.put_keys(grad_value, dv)
    return gradients.dq, gradients.dk.to(own), grad_value, grad_beta, gradients.dmask


# ----------------------------------------------------------------------------------------------------------------
# Statistics
# ----------------------------------------------------------------------------------------------------------------


def _counts(call: Call) -> Tensor:
    """How many keys each row sees, ``[B, Hq, Lq]``."""
    geometry, mask, queries = call.geometry, call.mask, call.q.shape[2]
    lengths = call.k.shape[2] if call.key_lengths is None else call.key_lengths[:, None, None]
    rows = torch.arange(queries, device=call.q.device)
    if mask is None:
        return visible_counts(geometry, rows, queries, lengths).expand(call.q.shape[:-1]).contiguous()
    count = torch.empty(call.q.shape[:-1], dtype=torch.int32, device=call.q.device)
    lengths = lengths[..., None] if isinstance(lengths, Tensor) else lengths
    whole = mask.shape[2] == 1 and not geometry.banded  # one row of the mask is that of all
    step = max(1, queries if whole else call.sizes.logits // max(1, mask[:, :, :1].numel()))
    for first in range(0, queries, step):
        part = slice(first, first + step)
        tile = mask if mask.shape[2] == 1 else mask[:, :, part]
        if call.biased and call.key_lengths is None and not geometry.banded:
            hides = torch.le(tile, hiding(tile.dtype, call.dtype), out=call.buffers("hides", *tile.shape))
            count[:, :, part] = call.k.shape[2] - hides.sum(-1) * (1 if tile.shape[-1] > 1 else call.k.shape[2])
            continue
        seen = tile if tile.dtype == torch.bool else shown(tile, call.dtype)
        visible = geometry.visible(rows[part], call.positions, queries, lengths)
        seen = seen if visible is None else seen & visible
        count[:, :, part] = seen.sum(-1, dtype=torch.int32) * (1 if seen.shape[-1] > 1 else call.k.shape[2])
    return count


def powers_(t: Tensor) -> Tensor:
    """``e^t`` in place of ``t``; by powers of 2, since ``exp`` takes many times as long far below 0, on a CPU."""
    return t.mul_(LOG2E).exp2_()


def _statistics(call: Call, z: Tensor, into: Tensor, far: bool) -> None:
    """Maximum, sum and moment of the rows of a block, which is overwritten; differences may be ``far`` below 0."""
    top = torch.amax(z, -1, keepdim=True, out=into[0, ..., None])
    t = z.sub_(top)
    if far:
        t.clamp_(min=ZERO_EXPONENT)
    e = torch.mul(t, LOG2E, out=call.buffers("exponentials", *t.shape)).exp2_()
    torch.sum(e, -1, out=into[1])
    torch.sum(e.mul_(t), -1, out=into[2])


def _of_rows(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics of rows from those of their blocks ``[3, blocks, n, rows]``."""
    highest, total, moment = merged(parts[0], parts[1], parts[2], 0)
    empty = highest <= hidden_logit(parts.dtype)
    return highest.masked_fill(empty, -math.inf), total.masked_fill_(empty, 0.0), moment.masked_fill_(empty, 0.0)


def _minimum(span: Span, block: Block, smallest: Tensor | None) -> Tensor:
    z = block.logits if block.hidden is None else block.logits.clone()
    span.fill(z, block.hidden, math.inf)
    lowest = z.amin(-1)
    return lowest if smallest is None else torch.minimum(lowest, smallest)


# ----------------------------------------------------------------------------------------------------------------
# Attention
# ----------------------------------------------------------------------------------------------------------------


class _Factor:
    """Beta of a block of rows ``[n, rows, 1]``; hard rows count their maxima alone, with exponent 0."""

    def __init__(self, beta: Tensor) -> None:
        self.hard = beta.isinf()
        self.any_hard = bool(self.hard.any())
        self.beta = torch.where(self.hard, 1.0, beta)
        self.slope = torch.where(self.hard, 0.0, beta)

    def exponent(self, t: Tensor) -> Tensor:
        """``beta * t`` in place of ``t = z - max``."""
        if self.any_hard:
            t.masked_fill_(self.hard & (t < 0), -math.inf)
        return t.mul_(self.beta)


def _far(lse: Tensor, beta: Tensor) -> Tensor:
    """Which logsumexps are too far from 0 for the digits of differences."""
    return ~(lse.abs() <= stock_on_cpu.LARGEST) & (beta > 0)


def _normaliser(
    span: Span, rows: Rows, query: Tensor, factor: _Factor, lse: Tensor, row_max: Tensor | None, whole: bool
) -> tuple[Tensor, Tensor]:
    """The ``centre`` and ``constant`` of ``w = exp(beta * (z - centre) + constant)``.

    The centre is ``lse / beta``, near the largest logit: subtracting it first keeps the digits that a common offset of
    the logits would take. With a beta below 1 that is further and further away; there it is the largest logit, where
    that is known. Where that is too far from 0 for the digits of differences, and in hard rows, which are uniform over
    their maxima, both are found anew, if rows are whole.
    """
    empty = lse == -math.inf
    if row_max is None:
        apart, top = factor.beta < SMALLEST_BETA, torch.zeros_like(lse)
    else:
        apart, top = factor.beta < 1.0, span.of_rows(row_max, rows)[..., None]
    centre = torch.where(empty, 0.0, torch.where(apart, top, lse / factor.beta))
    constant = torch.where(empty, hidden_logit(lse.dtype), torch.where(apart, factor.beta * top - lse, 0.0))
    again = ~empty & (factor.hard | _far(lse, factor.beta))
    if not whole or not again.any():
        return centre, constant
    top, total = torch.full_like(centre, hidden_logit(lse.dtype)), torch.zeros_like(centre)
    for keys in rows.keys:
        _, _, top, total = _powers(span, span.logits(query, rows, keys), factor, top, total)
    return torch.where(again, top, centre), torch.where(again, -total.log(), constant)


class _Gradients:
    """The gradients of query, key and mask, made of those of the logits."""

    def __init__(self, call: Call, need_mask: bool) -> None:
        self.dq, self.dk = torch.zeros_like(call.q), torch.zeros_like(call.k)
        self.dmask = None
        if need_mask:
            assert call.mask is not None
            self.dmask = torch.zeros_like(call.mask, dtype=call.dtype)

    def add(
        self, span: Span, rows: Rows, keys: tuple[int, int], dz: Tensor, block: Block, query: Tensor, dq: Tensor,
        dk: Tensor,
    ) -> None:  # fmt: skip
        """Add what the gradient ``dz`` of a block's logits gives; ``query`` holds the scale already, ``dq`` not yet."""
        if self.dmask is not None:
            whole = span.wide(dz).flatten(1, 2)
            axes = [axis for axis in range(4) if self.dmask.shape[axis] == 1]
            self.dmask[span.mask_index(rows, keys)] += whole.sum(axes, keepdim=True) if axes else whole
        if block.slope is not None:
            dz.mul_(block.slope)
        add_product(dq, dz, span.key[:, slice(*keys)])
        add_product(dk[:, slice(*keys)], dz.mT, query)
