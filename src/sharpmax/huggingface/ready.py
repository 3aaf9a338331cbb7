"""Masks made ahead of a forward pass, by callers that know where documents start or how much of a cache is valid.

A model of transformers takes them as its ``attention_mask``, so that nothing is made of positions, or read from a
device, within the pass.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .masks import Kind

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_windows(config: Any) -> dict[str, int | None]:
    """The sliding window of each kind of layer that a text model has, ``None`` for layers without.

    A model with one kind of layers takes one mask, called ``full_attention`` here, and one with two a mask for each.
    """
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or (FULL,))
    if not kinds <= {FULL, SLIDING}:
        raise ValueError(
            f"expected layers of {FULL} and {SLIDING}, got {config.model_type} with {', '.join(sorted(kinds))}"
        )
    if getattr(config, "layer_types", None) is None:
        return {FULL: window if getattr(config, "use_sliding_window", True) else None}
    return {kind: window if kind == SLIDING else None for kind in sorted(kinds)}


def packed_masks(config: Any, starts: Tensor, length: int) -> Any:
    """The mask of packed documents, for a batch whose sequences have ``length`` tokens.

    ``starts``, int32 ``[documents + 1]``, is where documents start among all tokens of the batch, and their number.
    """
    return _masks(config, starts[None], length, packed=True)


def cached_masks(config: Any, valid: Tensor, capacity: int) -> Any:
    """The mask of sequences that each have their own part of a cache with room for ``capacity`` tokens.

    ``valid``, int32 ``[B]``, is how many keys are valid, those of the queries, which stand at the end, included.
    """
    return _masks(config, valid[:, None], capacity, cached=True)


def _masks(config: Any, numbers: Tensor, length: int, **kind: bool) -> Any:
    made = {
        name: numbers[:, None, None, :].expand(
            -1, 1, Kind(banded=window is not None and window < length, **kind).code, -1
        )
        for name, window in layer_windows(config).items()
    }
    return made if getattr(config.get_text_config(), "layer_types", None) is not None else made[FULL]
