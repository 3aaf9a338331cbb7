"""Which inputs a model has places for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def check_tokens(model: nn.Module, tokens: Sequence[int]) -> None:
    """Refuse inputs of a single token, and those that are longer than a table of learned positions."""
    if min(tokens) < 2:
        raise ValueError("an input of one token has one key, on which all heads are alike; ask for 2 tokens or more")
    positions = learned_positions(model)
    if positions is not None and max(tokens) > positions:
        raise ValueError(
            f"the model has learned positions for {positions:,} tokens, and an input has {max(tokens):,}; "
            "ask for shorter lengths"
        )


def learned_positions(model: nn.Module) -> int | None:
    """How many tokens a table of learned positions has a place for; ``None`` for a model without such a table."""
    tables = [
        module.num_embeddings - _first_position(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and ("position" in name or name.endswith("wpe"))
    ]
    return min(tables, default=None)


def _first_position(table: nn.Embedding) -> int:
    """Where the first token stands: OPT and BART leave two places free, RoBERTa those up to that of padding."""
    offset = getattr(table, "offset", None)
    if isinstance(offset, int):
        return offset
    return 0 if table.padding_idx is None else table.padding_idx + 1
