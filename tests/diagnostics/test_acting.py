"""The entropy of the coefficients that a sharpened model uses, after the beta of its own policies."""

from __future__ import annotations

import pytest
import torch

from sharpmax import Constant, EntropyPolynomial, Hard
from sharpmax.diagnostics import record
from sharpmax.huggingface import sharpen
from tests.diagnostics.models import batch, build


@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_the_entropy_of_what_a_sharpened_model_uses(family: str, padding: str) -> None:
    if padding == "left" and family == "bert":
        pytest.skip("encoders are padded on the right")
    model, inputs = build(family), batch(padding)
    policy = EntropyPolynomial((0.5, 1.5), threshold=0.1)
    with torch.no_grad(), sharpen(model, policy):
        with record(model, policy, attention=range(3)) as stats:
            model(**inputs)
        with record(model, sample=8) as sampled:
            model(**inputs)
    assert len(stats.attention) == len(stats)
    for row, shown in zip(stats, stats.attention, strict=True):
        weights = shown.sharpened.double()
        entropy = float(-(weights * weights.clamp(min=1e-300).log()).sum())
        assert row["acting_last"] == pytest.approx(entropy, rel=1e-4, abs=1e-5)
    assert any(abs(row["acting_last"] - row["entropy_last"]) > 0.1 for row in stats)
    if not padding and family != "bert":  # rows of which a sample is taken
        assert [row["acting_last"] for row in sampled] == pytest.approx([row["acting_last"] for row in stats], abs=1e-5)
        assert sampled.column("acting_mean") != stats.column("acting_mean")


def test_the_mean_of_acting_entropies_is_that_of_a_constant_temperature() -> None:
    model, inputs = build("llama"), batch("")
    with torch.no_grad(), sharpen(model, Constant(2.0), layers=[0]):
        with record(model, layers=[0]) as stats:
            model(**inputs)
        weights = build("llama", "eager")(**inputs, output_attentions=True).attentions[0]
    sharper = weights.double().square()
    sharper /= sharper.sum(-1, keepdim=True)
    entropy = -(sharper * sharper.clamp(min=1e-300).log()).sum(-1).mean(-1)
    assert stats.column("acting_mean") == pytest.approx(entropy.flatten().tolist(), rel=1e-3, abs=1e-4)


def test_where_the_entropy_after_beta_is_not_known() -> None:
    inputs = batch("")
    for family, policy in (("gemma2", Constant(2.0)), ("llama", Hard()), ("llama", Constant(1.0))):
        model = build(family)
        with torch.no_grad(), sharpen(model, policy), record(model) as stats:
            model(**inputs)
        assert {row["acting_mean"] for row in stats} == {None}


def test_heads_of_a_layer_may_differ_in_having_a_policy() -> None:
    model, inputs = build("llama"), batch("")
    with torch.no_grad(), sharpen(model, Constant(3.0), heads={0: [1]}), record(model) as stats:
        model(**inputs)
    acting = {(row["layer"], row["head"]) for row in stats if row["acting_mean"] is not None}
    assert acting == {(0, 1)}
