"""torch's own attention on ``beta * query``: ``impl="stock"``.

``beta * query`` is as large as the query. With many keys, where neither a gradient nor dropout needs all of it,
attention goes through the heads in slices, and holds that of one slice at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ..core.policies import Lowered
from . import choice, fused
from .checks import Inputs, needs_gradient
from .operator import stand_for_others

FEWEST = 3
"""Slices from which on they spare memory: one of the output is held beside that of ``beta * query``."""
LONG = 65_536
"""Keys from which on slices are taken: with fewer, their launches would cost more of the time."""
SLICE = 64 << 20
"""Bytes of ``beta * query`` of a slice, or those of one key head where that has more: enough to keep a GPU at work."""


class _Slice(NamedTuple):
    """Batch elements, and the heads of queries and of keys."""

    batches: slice
    heads: slice
    key_heads: slice


def with_lowered(inputs: Inputs, numbers: Lowered, detached: bool, dropout_p: float) -> Tensor:
    """The output with beta from a lowered policy, evaluated by the kernel that gives ``beta * query``."""
    given = (inputs.geometry.numbers, fused.policy_numbers(numbers))

    def output(part: Inputs, _: Tensor | None) -> Tensor:
        scaled = fused.sharpened_query(part.q, part.k, part.mask, part.key_lengths, *given, detached)[0]
        return _attend(part, scaled, dropout_p)

    return _in_slices(output, inputs, None, dropout_p)


def with_betas(inputs: Inputs, beta: Tensor, dropout_p: float) -> Tensor:
    """The output with betas that are known."""

    def output(part: Inputs, beta: Tensor | None) -> Tensor:
        assert beta is not None
        return _attend(part, _sharpened(part.q, beta), dropout_p)

    return _in_slices(output, inputs, beta, dropout_p)


def _in_slices(
    output: Callable[[Inputs, Tensor | None], Tensor], inputs: Inputs, beta: Tensor | None, dropout_p: float
) -> Tensor:
    """``output`` of inputs and betas, by slices where that spares memory and may be done."""
    q, k, v, mask, _, _, _ = inputs
    assert v is not None
    tensors = [x for x in (q, k, v, mask, beta) if x is not None]
    whole = (
        k.shape[2] < LONG
        or dropout_p > 0  # a checkpoint's two passes, without a gradient and with one, have to drop the same weights
        or needs_gradient(*tensors)
        or torch.compiler.is_compiling()
        or stand_for_others(tensors)
    )
    slices = [] if whole else list(_slices(q, k))
    if len(slices) < FEWEST:
        return output(inputs, beta)
    found = q.new_empty((*q.shape[:3], v.shape[-1]))
    for part in slices:
        found[part.batches, part.heads] = output(*_part(inputs, beta, part))
    return found


def _slices(q: Tensor, k: Tensor) -> Iterator[_Slice]:
    """What to do at a time: whole batch elements, or some heads of one."""
    (batch, heads), key_heads = q.shape[:2], k.shape[1]
    group = heads // key_heads
    of_head = group * q.shape[2] * q.shape[3] * q.element_size()
    some_heads = min(key_heads, max(1, SLICE // of_head))
    some_batches = max(1, SLICE // (of_head * key_heads)) if some_heads == key_heads else 1
    for b in range(0, batch, some_batches):
        for h in range(0, key_heads, some_heads):
            end = h + some_heads
            yield _Slice(slice(b, b + some_batches), slice(group * h, group * end), slice(h, end))


def _part(inputs: Inputs, beta: Tensor | None, part: _Slice) -> tuple[Inputs, Tensor | None]:
    q, k, v, mask, key_lengths, _, _ = inputs
    assert v is not None
    if mask is not None:
        one_element, one_head = (size == 1 for size in mask.shape[:2])
        mask = mask[slice(None) if one_element else part.batches, slice(None) if one_head else part.heads]
    of_inputs = inputs._replace(
        q=q[part.batches, part.heads],
        k=k[part.batches, part.key_heads],
        v=v[part.batches, part.key_heads],
        mask=mask,
        key_lengths=None if key_lengths is None else key_lengths[part.batches],
    )
    return of_inputs, None if beta is None else beta[part.batches, part.heads]


def _sharpened(q: Tensor, beta: Tensor) -> Tensor:
    """``beta * q`` in the type of ``q``, whose numbers no row leaves: a smaller beta keeps it within them."""
    if q.dtype == torch.float16:
        room = torch.finfo(q.dtype).max / q.detach().abs().amax(-1).clamp(min=1e-3).to(beta.dtype)
        beta = torch.minimum(beta, room)
    return (q * beta[..., None]).to(q.dtype)


def _attend(inputs: Inputs, scaled: Tensor, dropout_p: float) -> Tensor:
    """torch's own attention on ``scaled``, which is ``beta * query``."""
    q, k, v, mask, key_lengths, geometry, _ = inputs
    assert v is not None
    if key_lengths is not None:
        seen = torch.arange(k.shape[2], device=k.device) < key_lengths.view(-1, 1, 1, 1)
        mask = seen if mask is None else mask & seen
        k, v = (torch.where(seen.mT, x, 0.0) for x in (k, v))
    grouped: Any = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    with backends(q.device):
        return torch.nn.functional.scaled_dot_product_attention(
            scaled, k, v, mask, dropout_p, geometry.banded, scale=geometry.scale, **grouped
        )


def backends(device: torch.device) -> Any:
    """Where cuDNN is the fastest of torch's backends, ask for it first; what the user switched off stays off.

    ``torch.compile`` does not trace these switches: there the choice is torch's.
    """
    if (
        torch.compiler.is_compiling()
        or choice.compute_capability(device) not in choice.CUDNN_FIRST
        or not torch.backends.cuda.cudnn_sdp_enabled()
    ):
        return contextlib.nullcontext()
    return _CudnnFirst()


class _CudnnFirst:
    """Within it, torch's attention tries cuDNN before its other backends.

    What ``sdpa_kernel(..., set_priority=True)`` does, without setting every switch twice, which takes the host longer
    than the call within.
    """

    def __enter__(self) -> None:
        first, now = SDPBackend.CUDNN_ATTENTION.value, torch._C._get_sdp_priority_order()
        self.before = None if now[0] == first else now  # another thread may be within, too, and will undo it
        if self.before is not None:
            torch._C._set_sdp_priority_order([first, *(backend for backend in now if backend != first)])

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            torch._C._set_sdp_priority_order(self.before)
