"""Queries, keys and values that a real model gives to its attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.diagnostics import tokens
from sharpmax.huggingface.weights import load

NAME = "benchmark_recorded_heads"


def recorded_heads(
    name: str, length: int, layers: Sequence[int], device: str, batch: int = 1
) -> Iterator[tuple[int, list[Tensor]]]:
    """Of each of the layers, q, k and v ``[batch, heads, length, columns]``, in bfloat16, over this package's source.

    Each of ``batch`` goes on where the one before ends. Keys and values are repeated for the query heads that share
    them.
    """
    found: dict[int, list[Tensor]] = {}

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        if module.layer_idx in layers:
            shared = query.shape[1] // key.shape[1]
            found[module.layer_idx] = [query, *(t.repeat_interleave(shared, 1) for t in (key, value))]
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    loaded, tokenizer = load(name, dtype=torch.bfloat16, attn_implementation=NAME)
    model: Any = loaded
    model.to(device)
    with torch.no_grad():
        model.base_model(input_ids=tokens(tokenizer, batch * length, device).view(batch, length), use_cache=False)
    missing = sorted(set(layers) - set(found))
    if missing:
        raise SystemExit(f"{name} has {model.config.num_hidden_layers} layers: there is no layer {missing[0]}")
    yield from sorted(found.items())
