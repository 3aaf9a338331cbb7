"""Logits and gradients of tiny models of every family, against Figure 4 written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpmax import Constant
from sharpmax.huggingface import register, sharpen
from tests.huggingface import families
from tests.huggingface.oracle import NAME as ORACLE
from tests.huggingface.oracle import PRINTED, register_oracle

register()
register_oracle()

TOLERANCE = 1e-10


def outputs(model: Any, run: Callable[[Any], Tensor], weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """What ``run`` gives where ``weight`` counts it, and the gradient of its weighted sum in every parameter."""
    model.zero_grad()
    output = run(model) * weight
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)).sum().backward()
    return output.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_same(make: Callable[[str], Any], run: Callable[[Any], Tensor], weight: Tensor) -> None:
    """sharpmax agrees with the oracle in output and in every gradient, and differs from plain softmax."""
    ours, grads = outputs(make("sharpmax"), run, weight)
    theirs, expected = outputs(make(ORACLE), run, weight)
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        scale = float(expected[name].abs().max()) + 1.0
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=TOLERANCE * scale, msg=lambda m, n=name: n + m)
    plain = make("sharpmax")
    with torch.no_grad(), sharpen(plain, Constant(1.0)):
        assert float((run(plain) * weight - ours).abs().max()) > 1e-2


def all_tokens(model: Any) -> Tensor:
    return model(families.tokens(2, 21)).logits


@pytest.mark.parametrize("family", families.CAUSAL)
def test_decoders_give_what_figure_4_gives(family):
    assert families.acting_share(lambda: all_tokens(families.causal(family))) > 0.4
    check_same(lambda name: families.causal(family, attention=name), all_tokens, torch.ones(()))


def test_what_figure_4_adds_to_probabilities_moves_little():
    with torch.no_grad():
        ours, printed = (all_tokens(families.causal("llama", attention=name)) for name in ("sharpmax", PRINTED))
    difference = float((ours - printed).abs().max())
    assert 1e-10 < difference < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", families.CAUSAL)
def test_padding_is_not_seen(family, side):
    ids, mask = families.padded([21, 9, 14], 21, side)

    def run(model: Any) -> Tensor:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return model(ids, attention_mask=mask, position_ids=positions).logits

    check_same(lambda name: families.causal(family, attention=name), run, mask[..., None])


@pytest.mark.parametrize("family", families.CAUSAL)
def test_beta_1_is_the_stock_model(family):
    ids, mask = families.padded([21, 9], 21, "left")
    name, dtype, tolerance = ("eager", torch.float32, 1e-4) if family == "gemma2" else ("sdpa", torch.float64, 1e-11)
    ours, stock = (families.causal(family, attention=name, dtype=dtype) for _ in range(2))
    sharpen(ours, Constant(1.0))
    with torch.no_grad():
        found, expected = (model(ids, attention_mask=mask).logits * mask[..., None] for model in (ours, stock))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("side", ["left", "right"])
def test_bert_gives_what_figure_4_gives(side):
    ids, mask = families.padded([19, 8], 19, side)

    def run(model: Any) -> Tensor:
        return model(ids, attention_mask=mask).last_hidden_state

    assert families.acting_share(lambda: run(families.bert())) > 0.4
    check_same(lambda name: families.bert(attention=name), run, mask[..., None])


def test_t5_gives_what_figure_4_gives_position_bias_and_all():
    ids, mask = families.padded([17, 8], 17, "right")
    decoder_ids, decoder_mask = families.padded([12, 7], 12, "right")

    def run(model: Any) -> Tensor:
        return model(
            input_ids=ids, attention_mask=mask, decoder_input_ids=decoder_ids, decoder_attention_mask=decoder_mask
        ).logits

    assert families.acting_share(lambda: run(families.t5())) > 0.3
    check_same(lambda name: families.t5(attention=name), run, decoder_mask[..., None])


def test_bfloat16_stays_near_float32():
    ids = families.tokens(2, 21)
    with torch.no_grad():
        narrow = families.causal("llama", dtype=torch.bfloat16)(ids).logits
        wide = families.causal("llama", dtype=torch.float32)(ids).logits
        stock_narrow = families.causal("llama", attention="eager", dtype=torch.bfloat16)(ids).logits
        stock_wide = families.causal("llama", attention="eager", dtype=torch.float32)(ids).logits
    assert narrow.dtype == torch.bfloat16
    error = float((narrow.float() - wide).abs().mean())
    assert error < 4 * float((stock_narrow.float() - stock_wide).abs().mean())


def test_autocast_casts_as_it_does_for_stock_attention():
    ids, mask = families.padded([21, 9], 21, "left")
    model = families.causal("llama", attention="sdpa", dtype=torch.float32)
    for kwargs in ({"attention_mask": mask}, {"position_ids": torch.arange(21)[None] % 11, "use_cache": False}):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            expected = model(ids, **kwargs).logits
            with sharpen(model, Constant(1.0)):
                found = model(ids, **kwargs).logits
        assert found.dtype == expected.dtype == torch.bfloat16
        seen = mask.bool() if "attention_mask" in kwargs else torch.ones_like(mask).bool()
        assert float((found - expected)[seen].abs().mean()) < 0.05 * float(expected[seen].abs().mean())


def test_a_decoder_whose_layers_deny_causality_is_causal_all_the_same():
    from transformers import BigBirdPegasusConfig, BigBirdPegasusForCausalLM

    torch.manual_seed(0)
    config = BigBirdPegasusConfig(
        d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=32, vocab_size=50,
        max_position_embeddings=64, is_decoder=True,
    )  # fmt: skip
    model = BigBirdPegasusForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    ids = torch.randint(5, 50, (2, 17))
    stock = model(ids).logits
    with sharpen(model, Constant(1.0)):
        assert torch.allclose(model(ids).logits, stock, atol=1e-4)
