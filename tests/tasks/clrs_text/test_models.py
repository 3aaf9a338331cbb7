"""Models to train: where they come from, what they attend with, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from sharpmax import PAPER, Constant
from sharpmax.huggingface import Rule, stored_rules
from sharpmax.huggingface.weights import load
from sharpmax.tasks.clrs_text import CHARACTERS, CharacterTokenizer, Encoder, generate_samples
from sharpmax.tasks.clrs_text.models import SCRATCH_CONFIG, character_tokenizer, encoder_for, find_model, save_model

TINY = SCRATCH_CONFIG | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def written(folder, **changes) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(TINY | changes))
    return str(path)


def embeddings(model: Any) -> torch.Tensor:
    return model.get_input_embeddings().weight


def test_characters_have_the_same_tokens_with_transformers_and_without(tmp_path):
    ours, theirs = CharacterTokenizer(), character_tokenizer()
    theirs.save_pretrained(tmp_path)
    for tokenizer in (theirs, AutoTokenizer.from_pretrained(tmp_path)):
        assert len(tokenizer) == len(ours)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            assert getattr(tokenizer, name) == getattr(ours, name)
        samples = list(generate_samples("graham_scan", 5, seed=0, count=3))
        texts = [CHARACTERS, *(sample.question + sample.answer for sample in samples)]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        assert ids == ours(texts)["input_ids"]
        assert tokenizer.batch_decode(ids) == texts
        assert Encoder(tokenizer).settings() == Encoder(ours).settings()


def test_documents_begin_as_the_tokenizer_has_it():
    assert not encoder_for(character_tokenizer()).begin

    class Beginning(CharacterTokenizer):
        def __call__(self, texts, add_special_tokens=True):
            return super().__call__(texts, add_special_tokens)

    assert encoder_for(Beginning()).begin


def test_the_small_model_is_what_it_says():
    model: Any
    model, tokenizer = find_model("scratch", policy=PAPER)
    assert 2.5e6 < sum(p.numel() for p in model.parameters()) < 3.5e6
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_random_weights_come_from_the_seed_and_leave_other_random_numbers_alone(tmp_path):
    name = written(tmp_path)
    state = torch.get_rng_state()
    first, again, other = (embeddings(find_model(name, seed=seed)[0]) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("policy", "expected"), [(None, Constant(1.0)), (PAPER, PAPER)])
def test_every_head_follows_the_policy_that_is_asked_for(tmp_path, policy, expected):
    model, _ = find_model(written(tmp_path), policy=policy)
    assert model.config._attn_implementation == "sharpmax"
    assert stored_rules(model) == (Rule(expected),)


def test_a_saved_model_is_read_with_its_policy_and_the_policy_can_be_replaced(tmp_path):
    model, tokenizer = find_model(written(tmp_path), policy=PAPER)
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    save_model(model, tokenizer, tensors, tmp_path / "float32", "float32")
    save_model(model, tokenizer, tensors, tmp_path / "bfloat16", "bfloat16")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = model(ids).logits
        same, read = load(tmp_path / "float32")
        assert torch.equal(same(ids).logits, expected)
        assert not torch.allclose(find_model(str(tmp_path / "float32"))[0](ids).logits, expected, atol=1e-6)
    assert stored_rules(same) == (Rule(PAPER),)
    assert read("a | b")["input_ids"] == tokenizer("a | b")["input_ids"]
    assert load(tmp_path / "bfloat16", dtype="auto")[0].dtype == torch.bfloat16
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "float32", "bfloat16"}


def test_what_cannot_be_used_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"expected a file with the config of a model, got .*: No such file"):
        find_model(str(tmp_path / "none.json"))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match='with "model_type", and "tokenizer"'):
        find_model(str(tmp_path / "list.json"))
    (tmp_path / "half.json").write_text("{")
    with pytest.raises(ValueError, match=r"expected .* to be JSON"):
        find_model(str(tmp_path / "half.json"))
    for wrong in (
        {"model_type": "nothing"},
        {"hidden_size": 33, "num_attention_heads": 2},
        {"hidden_size": "x"},
        {"num_attention_heads": 0},
    ):
        with pytest.raises(ValueError, match="the config of the model cannot be used"):
            find_model(written(tmp_path, **wrong))
    with pytest.raises(ValueError, match="a vocabulary of at least 53 tokens, got 7"):
        find_model(written(tmp_path, vocab_size=7))
    with pytest.raises(ValueError, match="no tokenizer was found for"):
        find_model(written(tmp_path, tokenizer=str(tmp_path / "nothing")))
    with pytest.raises(ValueError, match="expected a packaged model"):
        find_model(str(tmp_path / "nothing"))
