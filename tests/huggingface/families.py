"""Tiny random models of every family, with logits wide enough for the paper's policy to matter."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

import sharpmax.torch
from sharpmax.huggingface import Call, observe

VOCABULARY = 61
WIDTH = {"vocab_size": VOCABULARY, "initializer_range": 0.3}
DECODER = {
    **WIDTH,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW = {"sliding_window": 7}
LAYER_TYPES = {"layer_types": ["sliding_attention", "full_attention"]}

CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", DECODER),
    "gemma2": ("Gemma2", {**DECODER, **WINDOW, **LAYER_TYPES, "attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {**DECODER, **WINDOW, **LAYER_TYPES}),
    "llama": ("Llama", DECODER),
    "smollm": ("Llama", {**DECODER, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1,
                         "tie_word_embeddings": True}),
    "mistral": ("Mistral", {**DECODER, **WINDOW}),
    "qwen2": ("Qwen2", {**DECODER, **WINDOW, **LAYER_TYPES, "use_sliding_window": True}),
    "qwen3": ("Qwen3", DECODER),
    "gpt2": ("GPT2", {**WIDTH, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "eos_token_id": None,
                      "bos_token_id": 1, "pad_token_id": 0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
}  # fmt: skip


def causal(family: str, *, attention: str = "sharpmax", dtype: torch.dtype = torch.float64) -> Any:
    """A decoder with a language modelling head, the same weights on every call."""
    name, settings = CAUSAL[family]
    torch.manual_seed(0)
    config_name = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config_name)(**settings)
    cls = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    return finished(cls._from_config(config, attn_implementation=attention), dtype)


def bert(*, attention: str = "sharpmax", dtype: torch.dtype = torch.float64) -> Any:
    """An encoder."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **WIDTH, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return finished(transformers.BertModel._from_config(config, attn_implementation=attention), dtype)


def t5(*, attention: str = "sharpmax", dtype: torch.dtype = torch.float64) -> Any:
    """An encoder-decoder with a position bias."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
        "dropout_rate": 0.0, "initializer_factor": 1.0, "decoder_start_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    config = transformers.T5Config(**settings)
    model = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation=attention)
    return finished(model, dtype)


def gemma3_with_tower(*, attention: str = "sdpa", dtype: torch.dtype = torch.float64) -> Any:
    """A language model with a vision tower."""
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**CAUSAL["gemma3"][1]),
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16,
            patch_size=4,
        ),
        mm_tokens_per_image=4, image_token_index=60, boi_token_index=58, eoi_token_index=59,
    )  # fmt: skip
    model = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation=attention)
    return finished(model, dtype)


def finished(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return model.to(dtype).eval()


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(lengths: list[int], length: int, side: str) -> tuple[Tensor, Tensor]:
    """Random tokens and the mask of a padded batch."""
    ids, mask = tokens(len(lengths), length), torch.zeros(len(lengths), length, dtype=torch.long)
    for row, count in enumerate(lengths):
        mask[row, length - count :] = 1 if side == "left" else 0
        mask[row, :count] = mask[row, :count] if side == "left" else 1
    return ids * mask, mask


def acting_share(call: Any) -> float:
    """The share of attention rows on which the paper's policy acts (beta above 1.05) while ``call`` runs."""
    acted, rows = 0, 0

    def look(seen: Call) -> None:
        nonlocal acted, rows
        if seen.documents is None:
            stats = sharpmax.torch.row_stats(seen.query, seen.key, **seen.options)
            acted += int((sharpmax.PAPER(stats) > 1.05).sum())
            rows += stats.sum.numel()

    with observe(look), torch.no_grad():
        call()
    assert rows > 0
    return acted / rows
