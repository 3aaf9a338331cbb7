"""The keywords that models pass to an attention function: served, known to be without effect, or refused."""

from __future__ import annotations

from typing import Any

SERVED = frozenset({"softcap", "sliding_window", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k"})

WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "deterministic",
        "kernel_options",
        "labels",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "seq_idx",
        "token_type_ids",
        "use_cache",
    }
)
"""Keywords that say how other implementations should compute, or that are not about attention."""

REFUSED = {
    "s_aux": "attention sinks (s_aux) add a logit that no key has",
    "head_mask": "head_mask scales the weights of heads, which are not held",
    "cache": "paged caches of continuous batching are not served",
    "output_attentions": "the weights are not held, so output_attentions=True has nothing to return (statistics of "
    "them are what sharpmax.diagnostics.record gives)",
}
REMEDY = 'use attn_implementation="eager" for this model'


def check_keywords(keywords: dict[str, Any]) -> None:
    """Refuse a keyword that would change the result and is not served."""
    for name, value in keywords.items():
        if value is None or value is False or name in SERVED or name in WITHOUT_EFFECT:
            continue
        raise ValueError(f"{REFUSED.get(name, f'sharpmax attention does not know the keyword {name}')}; {REMEDY}")
