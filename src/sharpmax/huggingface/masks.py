"""Masks as small descriptions: what transformers would write out as queries x keys booleans.

transformers asks for one mask per kind of layer and hands it, unread, to every layer of that kind. Where nothing is
hidden but by causality, :func:`describe` gives ``None``, for models whose layers say themselves whether they are
causal. Otherwise it gives a description, an int32 tensor with four
axes, which is what transformers lets pass wherever it would let a mask pass (also where ``generate`` makes masks ahead
of a compiled step):

    [B, 1, code, keys or 1]    how many keys are valid, at each key; 0 where padding hides the key
    [1, 1, code, documents + 1]    where packed documents start, and the number of tokens (code has PACKED)

The length of the third axis, which takes no memory, says what the numbers mean (see :class:`Kind`), so that reading
a description never waits for a device. What no description covers (chunked attention, blocks of image tokens, mask
functions of the user's own) is a dense boolean mask, as in transformers' own implementations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES


class Kind(NamedTuple):
    """What a description describes.

    Attributes:
      banded: whether the layer's sliding window applies.
      bidirectional: whether queries see later keys.
      packed: whether the numbers are where documents start.
      cached: whether the queries stand at the end of the valid keys of a cache that is longer than those.
    """

    banded: bool = False
    bidirectional: bool = False
    packed: bool = False
    cached: bool = False

    @property
    def code(self) -> int:
        """The length of the third axis of a description."""
        return 1 + self.banded + 2 * self.bidirectional + 4 * self.packed + 8 * self.cached

    @staticmethod
    def read(description: Tensor) -> Kind:
        """The kind that the shape of a description says."""
        bits = description.shape[2] - 1
        return Kind(bool(bits & 1), bool(bits & 2), bool(bits & 4), bool(bits & 8))


def is_description(mask: Any) -> bool:
    """Whether ``mask`` is a description; masks of users are boolean or floating-point."""
    return isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.ndim == 4


def describe(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    *,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask function that is registered with transformers; the arguments are those of its ``sdpa_mask``."""
    if not _exchangeable(getattr(config, "model_type", "")):
        raise ValueError(f"{config.model_type} models have attention of their own, which transformers cannot exchange")
    bidirectional = allow_is_bidirectional_skip is not None
    may_skip = allow_is_bidirectional_skip if bidirectional else allow_is_causal_skip
    function = _name(mask_function)
    combined = function == "and_mask"
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    packed = (
        combined
        and not (bidirectional or allow_is_causal_skip)
        and attention_mask is None
        and aligned
        and q_length == kv_length
    )
    plain = function == ("bidirectional" if bidirectional else "causal")
    known = plain or packed or (combined and local_size is not None)
    banded = combined and local_size is not None and kv_length > local_size
    misplaced = bidirectional and banded and q_length != kv_length
    asked_for = not (may_skip or packed or (q_length == 1 and not aligned))
    if not known or use_vmap or misplaced or asked_for or _chunked(config, local_size):
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
    if packed:
        starts = _document_starts(batch_size, q_length, mask_function, device)
        return _written(Kind(banded=banded, packed=True), starts[None])
    kind = Kind(banded, bidirectional, cached=not bidirectional and not aligned)
    seen = _seen_keys(attention_mask, kv_length, kv_offset)
    if seen is None and not kind.banded and not kind.cached and _tells_causality(getattr(config, "model_type", "")):
        return None
    valid = q_offset + q_length - kv_offset if kind.cached else kv_length
    if not isinstance(valid, Tensor):
        valid = torch.full((), valid, device=device)
    if seen is None:
        return _written(kind, valid.to(torch.int32).reshape(1, 1).expand(batch_size, 1))
    return _written(kind, torch.where(seen, valid, 0).to(torch.int32))


def _written(kind: Kind, numbers: Tensor) -> Tensor:
    return numbers[:, None, None, :].expand(-1, 1, kind.code, -1)


def _name(function: Any) -> str:
    """Which of transformers' mask functions this is; its combinations are told by name, as tracing sees no more."""
    if function is causal_mask_function:
        return "causal"
    return "bidirectional" if function is bidirectional_mask_function else getattr(function, "__name__", "")


@torch.compiler.assume_constant_result
def _exchangeable(model_type: str) -> bool:
    """Whether models of a type ask transformers for their attention; others would take a description for a mask."""
    return _ask_transformers(model_type)


@functools.cache
def _ask_transformers(model_type: str) -> bool:
    return all(cls._can_set_attn_implementation() for cls in _classes(model_type))


@torch.compiler.assume_constant_result
def _tells_causality(model_type: str) -> bool:
    """Whether the layers of a model say truly whether they are causal: those do for which torch's SDPA relies on it."""
    return all(cls._supports_sdpa for cls in _classes(model_type)) and model_type in MODEL_MAPPING_NAMES


def _classes(model_type: str) -> list[Any]:
    """transformers' model classes of a type; none for a type that it does not know."""
    names = MODEL_MAPPING_NAMES.get(model_type, ())
    found = (getattr(transformers, name, None) for name in ((names,) if isinstance(names, str) else names))
    return [cls for cls in found if cls is not None]


def _chunked(config: Any, local_size: int | None) -> bool:
    """Whether a local pattern may be that of chunks (Llama 4) in place of a sliding window."""
    return local_size is not None and local_size != getattr(config, "sliding_window", None)


def _seen_keys(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """Which keys are no padding, ``[B, keys]``; ``None`` if all are as far as can be told without tracing."""
    if attention_mask is None:
        return None
    seen = attention_mask[:, kv_offset : kv_offset + kv_length]
    if not torch.compiler.is_compiling() and bool(seen.all()):
        return None
    missing = kv_length - seen.shape[1]
    return torch.nn.functional.pad(seen, (0, missing)) if missing > 0 else seen


def _document_starts(batch: int, length: int, mask_function: Callable[..., Any], device: Any) -> Tensor:
    """Where documents start among the ``batch * length`` tokens, and the number of tokens, int32.

    A document starts where a token does not see the one before it. Traced, the result has room for a document per
    token; documents that are not there are empty ones at the end.
    """
    rows = torch.arange(batch, device=device)[:, None, None, None]
    tokens = torch.arange(length, device=device)[None, None, :, None]
    joined = mask_function(rows, torch.zeros_like(rows), tokens, torch.clamp(tokens - 1, min=0))
    starts = ~joined.expand(batch, 1, length, 1).reshape(batch, length) | (tokens.reshape(1, length) == 0)
    total = batch * length
    if not torch.compiler.is_compiling():
        return torch.cat([starts.flatten().nonzero().flatten(), torch.full((1,), total, device=device)]).to(torch.int32)
    places = torch.where(starts.flatten(), torch.arange(total, device=device), total)
    return torch.cat([places.sort().values, torch.full((1,), total, device=device)]).to(torch.int32)
