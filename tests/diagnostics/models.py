"""Tiny random models, and a tokenizer of characters."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

LENGTH = 21
"""Tokens of a :func:`batch`."""

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(family: str, implementation: str | None = None) -> Any:
    """A model with the same weights every time; windows are 9 keys wide. Stock attention is SDPA, but for Gemma 2."""
    torch.manual_seed(0)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SMALL))
    elif family == "gemma2":
        model = Gemma2ForCausalLM(
            Gemma2Config(**SMALL, sliding_window=9, attn_logit_softcapping=4.0, query_pre_attn_scalar=8)
        )
    elif family == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.6)
        )
    else:
        model = BertModel(
            BertConfig(
                vocab_size=128,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=64,
                initializer_range=0.6,
            )
        )
    if implementation is not None:
        model.set_attn_implementation(implementation)
    return model.eval()


class Characters:
    """A tokenizer whose tokens are the characters of ASCII."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [min(ord(character), 127) for character in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def batch(padding: str) -> dict[str, torch.Tensor]:
    """Two sequences of tokens, one of which may be padded on the left or on the right."""
    ids = torch.randint(3, 128, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[0, :6] = 0
    elif padding == "right":
        mask[1, 15:] = 0
    return {"input_ids": ids, "attention_mask": mask}
