"""Attention with a mechanism that folds: keys in chunks, within blocks of queries, and never all logits at once.

Backward, the logits of a block of queries are computed again and differentiated by autograd: memory is that of a block
of queries and all keys, whatever the number of queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.arrays import library_of
from ..mechanisms import Mechanism
from .blocks import Call, Rows, Span, accumulation
from .geometry import Geometry
from .ops import no_second_derivative


def attend(
    mechanism: Mechanism,
    given: Mapping[str, Tensor] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    geometry: Geometry,
) -> Tensor:
    """``weights @ value`` in the type of ``q``; ``given`` are the arrays of parameters, ``None`` for the first ones."""
    logits = q.new_zeros((), dtype=accumulation(q.dtype)).expand(*q.shape[:3], k.shape[2])  # a shape without memory
    mechanism.check_shape(tuple(logits.shape))
    found = mechanism.broadcast(library_of(q).xp, logits, given)
    if mechanism.heads is not None:
        found = {name: array[..., 0, 0] for name, array in found.items()}
    output: Any = _Streamed.apply(mechanism, tuple(found), geometry, q, k, v, mask, key_lengths, *found.values())
    return output


class _Streamed(torch.autograd.Function):
    """``weights @ value``; what backward needs of a block of queries is computed again."""

    @staticmethod
    def forward(ctx: Any, mechanism: Mechanism, names: tuple[str, ...], geometry: Geometry, *tensors: Any) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.given = (mechanism, names, geometry)
        q, k, v, mask, key_lengths, *parameters = tensors
        call = Call(q, k, v, geometry, mask, key_lengths)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        for span in call.spans():
            for rows in span.rows():
                if rows.keys:
                    leaves = _Leaves(span, rows, mechanism.last_first, parameters)
                    span.put_rows(out, rows, _output(mechanism, names, span, rows, leaves))
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        found: Any = _Gradients.apply(*ctx.given, ctx.needs_input_grad[6], grad_out, *ctx.saved_tensors)
        return None, None, None, *found


class _Gradients(torch.autograd.Function):
    """The gradients of what :class:`_Streamed` takes; they have none themselves."""

    @staticmethod
    def forward(
        ctx: Any,
        mechanism: Mechanism,
        names: tuple[str, ...],
        geometry: Geometry,
        of_mask: bool,
        grad_out: Tensor,
        *tensors: Any,
    ) -> Any:
        q, k, v, mask, key_lengths, *parameters = tensors
        call = Call(q, k, v, geometry, mask, key_lengths)
        chunks = -(-k.shape[2] // call.sizes.keys)  # all of them are held for a block of queries, so heads are fewer
        call.sizes = call.sizes._replace(logits=call.sizes.logits // max(1, chunks))
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k, dtype=call.dtype), torch.zeros_like(v, dtype=call.dtype)
        dmask = torch.zeros_like(mask, dtype=call.dtype) if of_mask else None
        learned = [torch.zeros_like(p) for p in parameters]
        for span in call.spans():
            for rows in span.rows():
                if not rows.keys:
                    continue
                leaves = _Leaves(span, rows, mechanism.last_first, parameters).tracked(dmask is not None)
                with torch.enable_grad():
                    out = _output(mechanism, names, span, rows, leaves)
                gradients = leaves.gradients(out, span.of_rows(grad_out, rows).to(call.dtype))
                span.put_rows(dq, rows, gradients.query)
                learned = [total + part for total, part in zip(learned, gradients.parameters, strict=True)]
                for chunk in gradients.chunks:
                    keys = slice(*chunk.keys)
                    for whole, part in ((dk, chunk.key), (dv, chunk.value)):
                        whole[span.batches, span.heads, keys] += part.view(*span.shape[:2], *part.shape[1:])
                    if dmask is not None:
                        dmask[span.mask_index(rows, chunk.keys)] += chunk.bias
        if dmask is not None:
            dmask = dmask.to(mask.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), dmask, None, *learned

    @staticmethod
    def backward(ctx: Any, *grad: Any) -> Any:
        return no_second_derivative()


class _Chunk(NamedTuple):
    """Keys ``[first, last)`` of a span: keys and values ``[n, keys, columns]``, and the part of a mask of numbers."""

    keys: tuple[int, int]
    key: Tensor
    value: Tensor
    bias: Any


class _Leaves:
    """What the output of a block of queries is made of: tensors that are tracked, or their gradients."""

    biases = False
    """Whether parts of the mask are tracked too."""

    def __init__(self, span: Span, rows: Rows, last_first: bool, parameters: list[Tensor]) -> None:
        self.query = span.of_rows(span.call.q, rows).to(span.call.dtype)
        self.parameters = parameters
        self.chunks = list(_chunks(span, rows, last_first))

    def tracked(self, biased: bool) -> _Leaves:
        """The same, each tensor the start of a graph."""
        self.query = _leaf(self.query)
        self.parameters = [_leaf(p) for p in self.parameters]
        self.chunks = [
            _Chunk(c.keys, _leaf(c.key), _leaf(c.value), _leaf(c.bias) if biased else c.bias) for c in self.chunks
        ]
        self.biases = biased
        return self

    def gradients(self, out: Tensor, grad_out: Tensor) -> _Leaves:
        """The gradients, in the place of what they are the gradients of."""
        parts = [x for c in self.chunks for x in ((c.key, c.value, c.bias) if self.biases else (c.key, c.value))]
        leaves = [self.query, *self.parameters, *parts]
        found = iter(torch.autograd.grad(out, leaves, grad_out, allow_unused=True, materialize_grads=True))
        self.query, self.parameters = next(found), [next(found) for _ in self.parameters]
        self.chunks = [
            _Chunk(c.keys, next(found), next(found), next(found) if self.biases else None) for c in self.chunks
        ]
        return self


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _chunks(span: Span, rows: Rows, last_first: bool) -> Iterator[_Chunk]:
    assert span.value is not None
    for keys in reversed(rows.keys) if last_first else rows.keys:
        bias = None
        if span.call.mask is not None and span.call.biased:
            bias = span.call.mask[span.mask_index(rows, keys)].to(span.call.dtype)
        yield _Chunk(keys, span.key[:, slice(*keys)], span.value[:, slice(*keys)], bias)


def _output(mechanism: Any, names: tuple[str, ...], span: Span, rows: Rows, leaves: _Leaves) -> Tensor:
    """The output of a block of queries, ``[n, rows, columns]``."""
    call, xp = span.call, library_of(leaves.query).xp
    learned = dict(zip(names, (_for_span(span, mechanism, p) for p in leaves.parameters), strict=True))
    shape = (*span.shape, rows.last - rows.first)
    seen = [_visible(span, rows, chunk.keys, shape) for chunk in leaves.chunks]
    count = torch.stack([visible.sum(-1, keepdim=True) for visible in seen]).sum(0).clamp_(min=1).to(call.dtype)
    query, carry = leaves.query * call.geometry.scale, None
    for chunk, visible in zip(leaves.chunks, seen, strict=True):
        z = span.wide(query @ chunk.key.mT)
        if call.geometry.softcap > 0:
            z = call.geometry.softcap * torch.tanh(z / call.geometry.softcap)
        if chunk.bias is not None:
            z = z + _grouped(span, chunk.bias)
        value = chunk.value.view(*span.shape[:2], 1, *chunk.value.shape[1:])
        carry = mechanism.fold(xp, carry, torch.where(visible, z, 0.0), visible, value, count, learned)
    return mechanism.finish(xp, carry).reshape(*leaves.query.shape[:2], -1)


def _for_span(span: Span, mechanism: Mechanism, parameter: Tensor) -> Tensor:
    """A parameter that broadcasts against ``[b, h, group, rows, keys]``."""
    if mechanism.heads is None:
        return parameter
    return parameter.unflatten(0, (-1, span.call.group))[span.heads, :, None, None]


def _visible(span: Span, rows: Rows, keys: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    """Which logits of a block count, ``[b, h, group, rows, keys]``."""
    visible = torch.ones((*shape, keys[1] - keys[0]), dtype=torch.bool, device=span.key.device)
    if (hidden := span.hidden(rows, keys)) is not None:
        visible[..., hidden.first :] &= hidden.kept != 0
    return visible


def _grouped(span: Span, tile: Tensor) -> Tensor:
    """A part of a mask, broadcastable to ``[b, h, group, rows, keys]``."""
    return tile.unsqueeze(2) if tile.shape[1] == 1 else tile.unflatten(1, span.shape[1:])
