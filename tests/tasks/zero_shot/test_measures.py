"""Numbers of the zero-shot measurement on tiny random models, against direct computation."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from sharpmax.tasks import zero_shot
from sharpmax.tasks.prompts import Prompt, maximum_question
from sharpmax.tasks.zero_shot import measures, policies
from sharpmax.tasks.zero_shot.policies import HeadStats

from .conftest import SIZE


def surprise(model: Any, ids: Tensor) -> Tensor:
    """Negative log-probability of every token but the first, from logits of the entire sequence."""
    with torch.no_grad():
        log_p = model(ids[None]).logits[0, :-1].log_softmax(-1)
    return -log_p.gather(-1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("bos", [None, 256])
def test_perplexity_is_that_of_the_same_last_tokens_after_any_context(model: Any, bos: int | None) -> None:
    tokens = torch.randint(0, 256, (2000,), generator=torch.Generator().manual_seed(1))
    for length in (600, 1000):
        found = zero_shot.perplexity(model, tokens, [1000, 1900], length, bos=bos, budget=1)
        for end, nll in zip((1000, 1900), found["nll_by_segment"], strict=True):
            begin = [] if bos is None else [bos]
            ids = torch.cat([torch.tensor(begin, dtype=torch.long), tokens[end - length + len(begin) : end]])
            assert len(ids) == length
            assert nll == pytest.approx(surprise(model, ids)[-256:].mean().item(), rel=1e-5)
        assert found["perplexity"] == pytest.approx(math.exp(sum(found["nll_by_segment"]) / 2))
        together = zero_shot.perplexity(model, tokens, [1000, 1900], length, bos=bos, budget=10_000)
        assert together["nll_by_segment"] == pytest.approx(found["nll_by_segment"], rel=1e-5)


def test_stretches_have_room_before_them_and_targets_of_their_own() -> None:
    ends = measures.stretch_ends(10_000, 4000, 16)
    assert (ends[0], ends[-1], len(ends)) == (4000, 10_000, 16)
    assert measures.stretch_ends(10_000, 9800, 16) == [10_000]
    crowded = measures.stretch_ends(10_000, 9000, 16)
    assert min(b - a for a, b in pairwise(crowded)) >= measures.TARGETS
    with pytest.raises(ValueError, match="expected lengths of at most the text's 100 tokens, got 200"):
        measures.stretch_ends(100, 200, 4)


def test_answers_of_a_padded_batch_are_those_of_prompts_one_by_one(model: Any, tokenizer: Any) -> None:
    prompts = [maximum_question(n, index=n) for n in (2, 9, 5)]
    together = zero_shot.answers(model, tokenizer, measures.read(prompts, tokenizer), budget=10_000)
    alone = [zero_shot.answers(model, tokenizer, measures.read([p], tokenizer), budget=1) for p in prompts]
    assert together["answer_nll"] == pytest.approx(sum(a["answer_nll"] for a in alone) / 3, rel=1e-4)
    assert together["example"]["reply"].startswith(alone[0]["example"]["reply"])
    for prompt, one in zip(prompts, alone, strict=True):
        ids = tokenizer(f"{prompt.text} {prompt.answer}", return_tensors="pt").input_ids[0]
        expected = surprise(model, ids)[-1 - len(prompt.answer) :].sum().item()
        assert one["answer_nll"] == pytest.approx(expected, rel=1e-4)
        with torch.no_grad():
            ids = tokenizer(prompt.text, return_tensors="pt").input_ids
            said = [ids := torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1) for _ in range(3)][-1]
        reply = tokenizer.decode(said[0, -3:], skip_special_tokens=True)
        assert one["example"]["reply"].startswith(reply)


def test_long_prompts_are_not_padded(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = measures.read([maximum_question(n, index=n) for n in (2, 9, 5, 9, 2)], tokenizer)
    expected = zero_shot.answers(model, tokenizer, questions, budget=10_000)
    sizes = []
    left_padded = measures._left_padded

    def watched(rows: Any, *rest: Any) -> Any:
        sizes.append({len(row) for row in rows})
        return left_padded(rows, *rest)

    monkeypatch.setattr(measures, "_left_padded", watched)
    monkeypatch.setattr(measures, "LONG", len(questions[1].prompt))
    found = zero_shot.answers(model, tokenizer, questions, budget=10_000)
    assert any(len(lengths) > 1 for lengths in sizes)
    assert all(len(lengths) == 1 for lengths in sizes if max(lengths) >= measures.LONG)
    assert found["answer_nll"] == pytest.approx(expected["answer_nll"], rel=1e-4)
    assert {k: v for k, v in found.items() if k != "answer_nll"} == {
        k: v for k, v in expected.items() if k != "answer_nll"
    }


class Parrot:
    """A model that answers every prompt with what it was told to."""

    device = torch.device("cpu")

    def __init__(self, tokenizer: Any, reply: str) -> None:
        self.ids = torch.tensor(tokenizer(reply).input_ids)

    def generate(self, input_ids: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        return torch.cat([input_ids, self.ids[:max_new_tokens].expand(len(input_ids), -1)], 1)

    def __call__(self, input_ids: Tensor, logits_to_keep: int, **options: Any) -> Any:
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape[:1], logits_to_keep, 257))


def test_right_answers_are_counted(tokenizer: Any) -> None:
    prompts = [Prompt("a", "31"), Prompt("abc", "7"), Prompt("ab", "31")]
    found = zero_shot.answers(Parrot(tokenizer, " 31. And"), tokenizer, measures.read(prompts, tokenizer), budget=100)
    assert (found["right"], found["prompts"], found["exact"]) == (2, 3, 2 / 3)
    assert found["answer_nll"] == pytest.approx(math.log(257) * (3 + 2 + 3) / 3)


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        (" 31", True),
        ("\n31.", True),
        ("31\n\nWhat", True),
        (" 310", False),
        (" 3", False),
        ("is 31", False),
        ("", False),
    ],
)
def test_an_answer_is_right_digit_for_digit(reply: str, right: bool) -> None:
    assert zero_shot.is_right(reply, "31") is right


def windowed() -> Any:
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SIZE, sliding_window=24, query_pre_attn_scalar=8, layer_types=kinds)
    return Gemma3ForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_heads_are_judged_by_the_attention_that_eager_shows(kind: str, model: Any) -> None:
    judged = model if kind == "llama" else windowed()
    prompts = [torch.randint(0, 256, (1, n), generator=torch.Generator().manual_seed(n)) for n in (50, 70)]
    found = zero_shot.head_stats(judged, prompts)
    before = judged.config._attn_implementation
    judged.set_attn_implementation("eager")
    entropies, sinks = [], []
    with torch.no_grad():
        for ids in prompts:
            p = torch.stack(judged(ids, output_attentions=True).attentions)[:, 0, :, -policies.ROWS :].double()
            sinks.append(p[..., 0].mean(-1))
            rest = p[..., 1:] / p[..., 1:].sum(-1, keepdim=True)
            rows = torch.arange(ids.shape[1] - policies.ROWS, ids.shape[1])
            seen = torch.stack([rows.clamp(max=24) if kind == "gemma3" else rows, rows])
            entropies.append((torch.special.entr(rest).sum(-1) / seen[:, None].log()).mean(-1))
    judged.set_attn_implementation(before)
    torch.testing.assert_close(found.entropy.double(), torch.stack(entropies).mean(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.sink.double(), torch.stack(sinks).mean(0), atol=1e-4, rtol=1e-4)


def test_sharp_heads_are_the_sharpest_that_are_no_sinks() -> None:
    entropy = torch.tensor([[0.1, 0.5, 0.9, 0.2], [0.3, 0.8, 0.05, 0.4]])
    sink = torch.tensor([[0.9, 0.1, 0.0, 0.2], [0.3, 0.0, 0.6, 0.5]])
    assert zero_shot.sharp_heads(HeadStats(entropy, sink), share=0.25) == {0: [3], 1: [0]}
    assert zero_shot.sharp_heads(HeadStats(entropy, sink), share=0.5) == {0: [1, 3], 1: [0, 3]}
    assert zero_shot.sharp_heads(HeadStats(entropy, sink), share=1) == {0: [1, 2, 3], 1: [0, 1, 3]}
    with pytest.raises(ValueError, match="expected heads that give the first token at most"):
        zero_shot.sharp_heads(HeadStats(entropy, sink + 1))


def test_a_policy_is_on_inside_of_its_block_only(model: Any) -> None:
    ids = torch.randint(0, 256, (1, 300), generator=torch.Generator().manual_seed(2))
    heads = {1: [0]}
    with torch.no_grad():
        plain = model(ids).logits
        for name in zero_shot.CHOICES:
            with policies.switched(name, model, 64, heads):
                changed = (model(ids).logits - plain).abs().max() > 1e-3
            assert changed == (name not in ("off", "log_512", "log_512_sharp")), name  # 300 tokens are below 512
            assert torch.equal(model(ids).logits, plain)
