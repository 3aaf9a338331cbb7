"""The attention function that transformers calls, and a way to watch its calls.

register()    makes attn_implementation="sharpmax" known, with the function below and masks of its own
observe()     shows every call to a callback
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ..core.policies import Constant, Policy
from ..mechanisms import Mechanism, Window
from ..torch import decode_attention, scaled_dot_product_attention, varlen_attention
from ..torch.checks import needs_gradient
from ..torch.decode import MOST_QUERIES
from .keywords import REMEDY, check_keywords
from .masks import Kind, describe, is_description
from .stored import choice_of

NAME = "sharpmax"
IMPL = "sharpmax_impl"
"""The attribute of an attention module that holds the ``impl`` asked for, if any."""


class Call(NamedTuple):
    """One call of attention by a model, in the terms of :mod:`sharpmax.torch`.

    Attributes:
      module: the model's attention module.
      query: ``[B, H, Lq, D]``.
      key, value: ``[B, Hkv, Lk, D]``; heads are not repeated.
      options: the keyword arguments of ``scaled_dot_product_attention``, less policy, mechanism, dropout and impl.
      policy: the policy of that module; that of softmax where it has a mechanism.
      documents: where packed documents start, int32 ``[documents + 1]``, over the ``B * Lq`` tokens; else ``None``.
      mechanism: what makes weights of logits in the place of softmax and policy, if anything.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    policy: Policy
    documents: Tensor | None = None
    mechanism: Mechanism | None = None


class _Watching(threading.local):
    def __init__(self) -> None:
        self.callbacks: list[Callable[[Call], None]] = []


_watching = _Watching()


@contextmanager
def observe(callback: Callable[[Call], None]) -> Iterator[None]:
    """Show ``callback`` every :class:`Call` made on this thread, before it is served.

    Calls inside of what ``torch.compile`` compiled are not seen.
    """
    _watching.callbacks.append(callback)
    try:
        yield
    finally:
        _watching.callbacks.remove(callback)


def register(name: str = NAME) -> None:
    """Make ``attn_implementation="sharpmax"`` known to transformers; more than once does no harm."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, describe)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with adaptive temperature, as transformers calls it; the output is ``[B, Lq, H, D]``."""
    check_keywords(kwargs)
    if getattr(getattr(module, "config", None), "output_attentions", False):
        check_keywords({"output_attentions": True})
    call = _call(module, query, key, value, attention_mask, scaling, is_causal, kwargs)
    if not torch.compiler.is_compiling():
        for callback in tuple(_watching.callbacks):
            callback(call)
    impl = getattr(module, IMPL, "auto")
    return _serve(call, dropout, impl).transpose(1, 2).contiguous(), None


def _call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> Call:
    queries, keys = query.shape[2], key.shape[2]
    options: dict[str, Any] = {
        "attn_mask": None,
        "is_causal": False,
        "window": None,
        "softcap": kwargs.get("softcap"),
        "scale": scaling,
        "key_lengths": None,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    window, documents = kwargs.get("sliding_window"), kwargs.get("cu_seq_lens_q")
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        kind = Kind(bidirectional=not causal)
        options["window"] = window if window is not None and keys > window else None
    elif is_description(mask):
        kind = Kind.read(mask)
        numbers = mask[:, 0, 0, :]
        if kind.packed:
            documents = numbers[0] if documents is None else documents
        else:
            if kind.cached:
                options["key_lengths"] = numbers.amax(-1)
            if numbers.shape[1] > 1 or keys == 1:
                options["attn_mask"] = numbers[:, None, None, :] > 0
    else:
        kind = Kind(bidirectional=True)
        options["attn_mask"] = _dense(mask, keys)
    if not kind.bidirectional:
        options["is_causal"] = True if queries == keys and not kind.cached else "lower_right"
    if kind.banded:
        options["window"] = _window(module, window, kind.bidirectional)
    if (bias := kwargs.get("position_bias")) is not None:
        options["attn_mask"] = _biased(bias, options["attn_mask"])
    if documents is not None:
        _check_packed(options, queries, keys)
    choice = choice_of(module, query.shape[1])
    if not isinstance(choice, Mechanism):
        return Call(module, query, key, value, options, choice, documents)
    options = _for_mechanism(choice, options, documents, query, keys)
    return Call(module, query, key, value, options, Constant(1.0), None, choice)


def _for_mechanism(
    mechanism: Mechanism, options: dict[str, Any], documents: Tensor | None, query: Tensor, keys: int
) -> dict[str, Any]:
    """The options for a mechanism: a mask in the place of packed documents, and no scale where there are features."""
    queries = query.shape[2]
    if mechanism.reads == "rows" and (queries != keys or documents is not None):
        raise ValueError(
            f"{mechanism.about.title} reads the logits of earlier queries, which a cache or packed documents do not "
            f"keep apart: expected one document in a row and as many queries as keys, got {queries} and {keys}; call "
            "the model on whole sequences with use_cache=False"
        )
    if isinstance(mechanism, Window) and queries != keys and not options["is_causal"]:
        raise ValueError(
            f"a {mechanism.about.title} counts back from a query's own key, which cross-attention has not and a dense "
            f"mask does not tell: expected as many queries as keys, or a causal mask, got {queries} and {keys}"
        )
    options = dict(options)
    if documents is not None:
        options["attn_mask"] = _same_document(documents, query.shape[0], queries)
    if mechanism.features is not None:
        options["scale"] = None
    return options


def _same_document(starts: Tensor, batch: int, length: int) -> Tensor:
    """Which of the ``batch * length`` tokens are of one document, ``[B, 1, length, length]``."""
    tokens = torch.arange(batch * length, device=starts.device, dtype=starts.dtype)
    document = torch.searchsorted(starts.contiguous(), tokens, right=True).view(batch, 1, length)
    return document[..., None] == document[..., None, :]


def _dense(mask: Any, keys: int) -> Tensor:
    if not isinstance(mask, Tensor) or mask.ndim != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        got = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"expected a mask with 4 axes, boolean or floating-point, got {got}; {REMEDY}")
    return mask[..., :keys]


def _window(module: nn.Module, window: int | None, bidirectional: bool) -> int | tuple[int, int]:
    """The sliding window that a mask was made for; transformers' bidirectional masks include both ends."""
    size = getattr(getattr(module, "config", None), "sliding_window", None) or window
    if size is None:
        raise ValueError(f"the mask has a sliding window, but {type(module).__name__} does not say which; {REMEDY}")
    return (size, size) if bidirectional else size


def _biased(bias: Tensor, mask: Tensor | None) -> Tensor:
    """A position bias (T5's) with what a mask hides hidden."""
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _check_packed(options: dict[str, Any], queries: int, keys: int) -> None:
    if options["attn_mask"] is not None or options["key_lengths"] is not None or queries != keys:
        raise ValueError("packed documents (cu_seq_lens_q) cannot be combined with a mask, a position bias or a cache")


def _serve(call: Call, dropout: float, impl: str) -> Tensor:
    """The output, ``[B, H, Lq, D]``."""
    if call.documents is not None:
        return _packed(call, dropout, impl)
    if _decodes(call, dropout, impl):
        options = call.options
        output = decode_attention(
            call.query, call.key, call.value, options["key_lengths"], key_mask=_key_mask(options["attn_mask"]),
            scale=options["scale"], policy=call.policy, window=options["window"], softcap=options["softcap"],
        )  # fmt: skip
        assert isinstance(output, Tensor)
        return output
    return scaled_dot_product_attention(
        call.query, call.key, call.value, dropout_p=dropout, impl=impl, **_chosen(call), **call.options
    )


def _chosen(call: Call) -> dict[str, Any]:
    return {"policy": call.policy} if call.mechanism is None else {"mechanism": call.mechanism}


def _decodes(call: Call, dropout: float, impl: str) -> bool:
    """Whether the kernels for decoding serve the call: a few queries at the end of a cache, and no gradient."""
    query, key, value, options = call.query, call.key, call.value, call.options
    return (
        impl == "auto"
        and call.mechanism is None
        and query.shape[2] <= MOST_QUERIES
        and query.shape[2] < key.shape[2]
        and options["is_causal"] == "lower_right"
        and _is_key_mask(options["attn_mask"], query.shape[0], key.shape[2])
        and dropout == 0.0
        and not needs_gradient(query, key, value)
        and not torch.is_autocast_enabled(query.device.type)
    )


def _is_key_mask(mask: Tensor | None, batch: int, keys: int) -> bool:
    """Whether a mask hides the same keys from every head and query, as padding does."""
    return mask is None or (mask.dtype == torch.bool and mask.shape == (batch, 1, 1, keys))


def _key_mask(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask[:, 0, 0]


def _packed(call: Call, dropout: float, impl: str) -> Tensor:
    options, documents = call.options, call.documents
    assert documents is not None
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (call.query, call.key, call.value))
    output = varlen_attention(
        query, key, value, documents, documents, dropout_p=dropout, causal=bool(options["is_causal"]),
        scale=options["scale"], policy=call.policy, window=options["window"], softcap=options["softcap"], impl=impl,
    )  # fmt: skip
    assert isinstance(output, Tensor)
    return output.unflatten(0, (call.query.shape[0], call.query.shape[2])).transpose(1, 2)
