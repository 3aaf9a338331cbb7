"""Descriptions of masks against the dense masks of transformers, and their size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomModel, masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from sharpmax import Constant
from sharpmax.huggingface import interface, register
from sharpmax.huggingface.masks import Kind, describe, is_description
from sharpmax.huggingface.stored import KEY, Rule, written

WINDOW = 4
CONFIG = SimpleNamespace(model_type="llama", sliding_window=WINDOW, **{KEY: written((Rule(Constant(0.0)),))})
CAUSAL: dict[str, Any] = {"mask_function": causal_mask_function}
SLIDING: dict[str, Any] = {"mask_function": sliding_window_causal_mask_function(WINDOW), "local_size": WINDOW}
FULL: dict[str, Any] = {
    "mask_function": bidirectional_mask_function,
    "allow_is_causal_skip": False,
    "allow_is_bidirectional_skip": True,
}
BAND: dict[str, Any] = {
    "mask_function": sliding_window_bidirectional_mask_function(WINDOW),
    "allow_is_causal_skip": False,
    "allow_is_bidirectional_skip": True,
    "local_size": WINDOW,
}
PADDINGS = {
    "none": None,
    "all": [[1] * 11, [1] * 11],
    "left": [[0] * 5 + [1] * 6, [1] * 11],
    "right": [[1] * 11, [1] * 7 + [0] * 4],
    "holes": [[1, 0] * 5 + [1], [0, 1] * 5 + [1]],
}


def seen(mask: Tensor | None, queries: int, keys: int, causal: bool) -> Tensor:
    """Which keys each query sees: with beta 0 all of them have the same weight, and values name the keys."""
    module = nn.Module()
    module.config, module.is_causal, module.layer_idx = CONFIG, causal, 0  # pyright: ignore[reportArgumentType]
    query, key = torch.randn(2, 3, queries, 4), torch.randn(2, 3, keys, 4)
    value = torch.eye(keys).expand(2, 3, keys, keys)
    output, weights = interface.attention(module, query, key, value, mask)
    assert weights is None
    return (output.transpose(1, 2) > 0)[:, :1]


def dense(settings: dict[str, Any], **sizes: Any) -> Tensor:
    mask = sdpa_mask(2, allow_is_causal_skip=False, mask_function=settings["mask_function"], **sizes)
    assert mask is not None
    return mask


SIZES = {
    "whole": (11, 11, 0, 0),
    "step": (1, 11, 10, 0),
    "piece": (3, 11, 8, 0),
    "cropped": (3, 6, 8, 5),
    "static prefill": (11, 16, 0, 0),
    "static piece": (3, 16, 8, 0),
    "static step": (1, 16, 10, 0),
}
KINDS = {"causal": CAUSAL, "sliding": SLIDING, "full": FULL, "band": BAND}
CASES = [(kind, size) for kind in KINDS for size in SIZES if kind in ("causal", "sliding") or "static" not in size]


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(("kind", "size"), CASES)
def test_descriptions_say_what_dense_masks_say(kind, size, padding):
    settings, (q_length, kv_length, q_offset, kv_offset) = KINDS[kind], SIZES[size]
    attention_mask = None if PADDINGS[padding] is None else torch.tensor(PADDINGS[padding]).bool()
    sizes = {"q_length": q_length, "kv_length": kv_length, "kv_offset": kv_offset, "attention_mask": attention_mask}
    for offset in (q_offset, torch.tensor(q_offset)):
        mask = describe(2, q_offset=offset, config=CONFIG, **sizes, **settings)
        assert mask is None or is_description(mask) or (kind == "band" and q_length != kv_length)
        found = seen(mask, q_length, kv_length, causal=kind in ("causal", "sliding"))
        assert torch.equal(found, dense(settings, q_offset=q_offset, **sizes).expand_as(found))


def test_kinds_are_told_by_shape():
    kinds = [Kind(*(bool(n & bit) for bit in (1, 2, 4, 8))) for n in range(16)]
    assert len({kind.code for kind in kinds}) == 16
    for kind in kinds:
        assert Kind.read(torch.zeros(1, 1, kind.code, 1, dtype=torch.int32)) == kind


@pytest.mark.parametrize(
    "settings",
    [
        {"mask_function": chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int)), "local_size": 3},
        {"mask_function": or_masks(causal_mask_function, lambda b, h, q, k: k == 7), "use_vmap": True,
         "allow_is_causal_skip": False},
        {"mask_function": and_masks(causal_mask_function, lambda b, h, q, k: k != 2), "use_vmap": True,
         "allow_is_causal_skip": False},
        {"mask_function": causal_mask_function, "allow_is_causal_skip": False},
    ],
    ids=["chunked", "or", "and", "asked for"],
)  # fmt: skip
def test_what_no_description_covers_is_dense(settings):
    sizes = {"q_length": 11, "kv_length": 11, "attention_mask": torch.tensor(PADDINGS["left"]).bool()}
    mask = describe(2, config=CONFIG, **sizes, **settings)
    assert mask is not None
    assert mask.dtype == torch.bool
    found = seen(mask, 11, 11, causal=True)
    expected = sdpa_mask(2, allow_is_causal_skip=False, **sizes, **{
        name: value for name, value in settings.items() if name in ("mask_function", "use_vmap")
    })  # fmt: skip
    assert expected is not None
    assert torch.equal(found, expected)


def test_blocks_of_image_tokens_are_dense():
    register()
    config = SimpleNamespace(_attn_implementation="sharpmax", sliding_window=None, is_causal=True)
    blocks = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, -1]])
    mask = masking_utils.create_causal_mask(
        config, torch.zeros(1, 9, 4), torch.ones(1, 9), None, block_sequence_ids=blocks  # pyright: ignore
    )  # fmt: skip
    assert isinstance(mask, Tensor)
    assert mask.dtype == torch.bool
    assert bool(mask[0, 0, 2, 4])
    assert not bool(mask[0, 0, 2, 6])


@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_131072_tokens_are_small(kind):
    settings = KINDS[kind]
    length = 131072
    padding = torch.ones(2, length, dtype=torch.bool)
    padding[0, :1000] = False
    mask = describe(2, length, length, config=CONFIG, attention_mask=padding, **settings)
    assert mask is not None
    assert mask.untyped_storage().nbytes() <= 8 * 2 * length
    bare = describe(2, length, length, config=CONFIG, attention_mask=~torch.zeros_like(padding), **settings)
    assert bare is None or bare.untyped_storage().nbytes() <= 64
    if kind in ("causal", "full"):
        assert bare is None


@pytest.mark.parametrize("kind", ["causal", "full"])
def test_models_whose_layers_do_not_tell_causality_get_a_description(kind):
    for model_type in ("bigbird_pegasus", "a model of one's own"):
        config = SimpleNamespace(**{**vars(CONFIG), "model_type": model_type})
        mask = describe(2, 11, 11, config=config, **KINDS[kind])
        assert is_description(mask)
        found = seen(mask, 11, 11, causal=kind != "causal")  # the layer says the opposite
        assert torch.equal(found, dense(KINDS[kind], q_length=11, kv_length=11).expand_as(found))


def test_packed_masks_of_131072_tokens_are_small():
    ids = (torch.arange(131072) // 1000)[None]
    function = and_masks(causal_mask_function, masking_utils.packed_sequence_mask_function(ids))
    mask = describe(1, 131072, 131072, mask_function=function, allow_is_causal_skip=False, config=CONFIG)
    assert mask is not None
    assert mask.untyped_storage().nbytes() <= 4 * 133


def test_models_with_attention_of_their_own_are_refused_before_they_misread_a_description():
    """BLOOM asks transformers for a mask, but not for its attention."""
    config = BloomConfig(vocab_size=9, hidden_size=8, n_layer=1, n_head=2)
    model = BloomModel._from_config(config, attn_implementation="sharpmax")
    with pytest.raises(ValueError, match="bloom models have attention of their own"):
        model(torch.zeros(1, 3, dtype=torch.long))


def test_a_mask_that_is_asked_for_is_dense_in_decoding_too():
    mask = describe(2, 1, 11, q_offset=10, config=CONFIG, allow_is_causal_skip=False)
    assert mask is not None
    assert mask.dtype == torch.bool
    assert mask.shape == (2, 1, 1, 11)
