"""The zero-shot measurement on tiny random models: numbers against direct computation, cells, table and files."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sharpmax.core.claims import claimed
from sharpmax.inputs import InputError
from sharpmax.paper import zero_shot as exhibit
from sharpmax.tasks import zero_shot
from sharpmax.tasks.prompts import Prompt, maximum_question
from sharpmax.tasks.zero_shot import Settings, Subject, measures, policies, run
from sharpmax.tasks.zero_shot.policies import HeadStats
from sharpmax.tasks.zero_shot.study import Cell

SIZE: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.5,
    "pad_token_id": 256,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
SETTINGS = Settings(lengths=(512, 1024), items=(2,), policies=("off", "paper", "paper_sharp"), segments=2, prompts=2)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "<end>"])}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<end>", eos_token="<end>", bos_token="<end>")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZE)).eval()


@pytest.fixture
def subject(model: Any, tokenizer: Any) -> Subject:
    return Subject("tiny", model, tokenizer, 512)


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


def test_what_is_written_is_not_measured_again(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert zero_shot.measure(subject, SETTINGS, tmp_path) == []
    first = zero_shot.collect(tmp_path / "tiny")
    assert {(c["task"], c["size"]) for c in first["cells"]} == {
        ("perplexity", 512), ("perplexity", 1024), ("needle", 512), ("needle", 1024), ("maximum", 2)
    }  # fmt: skip
    assert len(first["cells"]) == 15
    assert (first["missing"], [maker["cells"] for maker in first["measured_by"]]) == ([], [16])
    assert first["measured_by"][0]["versions"]["torch"] == torch.__version__
    count = _counting(monkeypatch)
    assert zero_shot.measure(subject, SETTINGS, tmp_path) == []
    assert zero_shot.collect(tmp_path / "tiny") == first
    assert count == []
    (tmp_path / "tiny" / "needle_512_paper.json").unlink()
    assert zero_shot.collect(tmp_path / "tiny")["missing"] == ["needle at 512 (1 of 3 policies)"]
    zero_shot.measure(subject, SETTINGS, tmp_path)
    assert zero_shot.collect(tmp_path / "tiny")["cells"] == first["cells"]
    assert count == [("needle", 512)]


def test_a_part_of_a_study_is_measured_as_the_whole_is_and_sizes_can_be_added(subject: Subject, tmp_path: Path) -> None:
    whole = dataclasses.replace(SETTINGS, policies=("off",))
    zero_shot.measure(subject, whole, tmp_path)
    folder = tmp_path / "tiny"
    cell = folder / "perplexity_512_off.json"
    first = json.loads(cell.read_text())["result"]
    cell.unlink()
    zero_shot.measure(subject, zero_shot.settle(folder, lengths=(512,)), tmp_path)
    assert json.loads(cell.read_text())["result"] == first  # the same tokens, as 1,024 is still the study's longest
    more = zero_shot.settle(folder, lengths=(768,), items=(3,), policies=("held",))
    assert (more.prompts, more.segments) == (2, 2)
    zero_shot.measure(subject, more, tmp_path)
    found = zero_shot.collect(folder)
    assert found["settings"]["lengths"] == (512, 768, 1024)
    assert found["settings"]["items"] == (2, 3)
    assert {(c["task"], c["size"]) for c in found["cells"] if c["policy"] == "held"} == {
        ("perplexity", 768), ("needle", 768), ("maximum", 3)
    }  # fmt: skip
    assert found["missing"] == [
        "perplexity at 512 (1 of 2 policies), 768 (1 of 2 policies), 1,024 (1 of 2 policies)",
        "needle at 512 (1 of 2 policies), 768 (1 of 2 policies), 1,024 (1 of 2 policies)",
        "maximum at 2 (1 of 2 policies), 3 (1 of 2 policies)",
    ]
    tokens = measures.text_tokens(subject.tokenizer)
    ends = measures.stretch_ends(len(tokens), 1024, 2)
    with policies.switched("held", subject.model, subject.context, {}):
        expected = zero_shot.perplexity(subject.model, tokens, ends, 768)
    assert json.loads((folder / "perplexity_768_held.json").read_text())["result"] == expected


def test_cells_of_other_settings_or_weights_are_refused_and_kept(subject: Subject, tmp_path: Path) -> None:
    few = dataclasses.replace(SETTINGS, lengths=(512,), policies=("off",))
    zero_shot.measure(subject, few, tmp_path)
    folder = tmp_path / "tiny"
    kept = {path: path.read_bytes() for path in folder.glob("*.json")}
    with pytest.raises(ValueError, match="holds a study with prompts 2, got 3: choose another folder"):
        zero_shot.settle(folder, prompts=3)
    for lengths, said in (((512, 1024), "512 to 1,024"), ((256, 512), "256 to 512")):  # other stretches of text
        with pytest.raises(ValueError, match=rf"expected lengths from 512 to 512, as .* got {said}: choose another"):
            zero_shot.measure(subject, dataclasses.replace(few, lengths=lengths), tmp_path)
    with pytest.raises(ValueError, match="expected lengths of at most the text's"):
        zero_shot.measure(subject, dataclasses.replace(few, lengths=(512, 10**7)), tmp_path / "other")
    trained = copy.deepcopy(subject.model)
    with torch.no_grad():
        next(trained.parameters()).add_(0.1)
    changed = Subject("tiny", trained, subject.tokenizer, subject.context)
    with pytest.raises(ValueError, match="holds results with other weights"):
        zero_shot.measure(changed, few, tmp_path)
    assert {path: path.read_bytes() for path in folder.glob("*.json")} == kept
    for path in folder.glob("*_*.json"):
        path.unlink()
    with pytest.raises(ValueError, match="holds a study with other weights"):
        zero_shot.measure(changed, few, tmp_path)
    (folder / "study.json").write_text('{"schema": "something"}')
    with pytest.raises(ValueError, match=r"study\.json is not what a study left there"):
        zero_shot.settle(folder)


def test_a_file_that_is_no_cell_of_the_study_is_named(subject: Subject, tmp_path: Path) -> None:
    few = dataclasses.replace(SETTINGS, lengths=(512,), items=(4,), policies=("off",))
    zero_shot.measure(subject, few, tmp_path)
    cell = tmp_path / "tiny" / "maximum_4_off.json"
    other = json.loads(cell.read_text())
    other["settings"]["prompts"] += 1
    wrong = r"maximum_4_off\.json is not what a study left there .* remove it to measure it again"
    files = dict.fromkeys(["", "{", "[]", "{}", '{"settings": 1, "result": {}, "provenance": {}}'], wrong)
    files[json.dumps(other)] = r"holds results with other prompts \(maximum_4_off\.json\)"
    for content, words in files.items():
        cell.write_text(content)
        for attempt in (lambda: zero_shot.measure(subject, few, tmp_path), lambda: zero_shot.collect(cell.parent)):
            with pytest.raises(ValueError, match=words):
                attempt()
        assert cell.read_text() == content


def test_an_interrupted_measurement_goes_on(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = dataclasses.replace(SETTINGS, lengths=(512,), policies=("off",))
    with monkeypatch.context() as patch:
        patch.setattr(measures, "answers", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            zero_shot.measure(subject, few, tmp_path)
    count = _counting(monkeypatch)
    zero_shot.measure(subject, few, tmp_path)
    assert count == [("needle", 512), ("maximum", 2)]


def test_two_at_once_share_the_cells(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins and ends while the first is at its second cell: it takes all the others."""
    few = dataclasses.replace(SETTINGS, lengths=(512,), policies=("off", "paper"))
    second = dataclasses.replace(subject, model=copy.deepcopy(subject.model))
    measured, left = [], []
    honest = run._Work.measure

    def watched(self: Any, task: str, size: int) -> Any:
        measured.append((self.subject is second, task))
        if len(measured) == 2:
            left.extend(zero_shot.measure(second, few, tmp_path))
        return honest(self, task, size)

    monkeypatch.setattr(run._Work, "measure", watched)
    assert zero_shot.measure(subject, few, tmp_path) == []
    assert list(map(str, left)) == ["perplexity_512_paper"]
    tasks = ["needle", "needle", "maximum", "maximum"]
    assert measured == [(False, "perplexity")] * 2 + [(True, task) for task in tasks]
    assert zero_shot.collect(tmp_path / "tiny")["missing"] == []


def _interrupt(*arguments: Any) -> Any:
    raise KeyboardInterrupt


def _counting(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    honest = run._Work.measure

    def counted(self: Any, task: str, size: int) -> Any:
        found.append((task, size))
        return honest(self, task, size)

    monkeypatch.setattr(run._Work, "measure", counted)
    return found


def test_calibration_prompts_are_not_scored(tokenizer: Any) -> None:
    scored = {p.text for task in ("needle", "maximum") for p in run.prompts(task, 512, tokenizer, SETTINGS)}
    assert not scored & {maximum_question(512, index=run.CALIBRATION + i, shots=5).text for i in range(4)}
    assert SETTINGS.prompts < run.CALIBRATION


def test_settings_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected policies of off, paper, .*, got best"):
        Settings(policies=("off", "best"))
    with pytest.raises(ValueError, match="expected lengths of at least 128 tokens"):
        Settings(lengths=(64,))


def test_the_table_stars_what_is_beyond_the_context() -> None:
    cells = [
        {"task": "perplexity", "size": n, "policy": p, "perplexity": n / 10 + (p == "paper")}
        for n in (512, 1024)
        for p in ("off", "paper")
    ]
    cells += [
        {"task": task, "size": 16, "policy": p, "exact": 0.25, "tokens": tokens}
        for task, tokens in (("needle", 16), ("maximum", 700))
        for p in ("off", "paper")
    ]
    cells.pop()
    labels = {"off": "off", "paper": "the paper's"}
    lacking = ["maximum at 16 (1 of 2 policies)"]
    results = {"model": "m", "context": 512, "policies": labels, "cells": cells, "missing": lacking}
    perplexity, needle, maximum, missing = zero_shot.zero_shot_table(results).split("\n\n")
    assert perplexity.splitlines() == [
        "| Perplexity, by tokens, m | 512 | 1,024* |",
        "| --- | ---: | ---: |",
        "| off | 51.20 | 102 |",
        "| the paper's | 52.20 | 103 |",
    ]
    assert "| 16 |" in needle
    assert "| 16* |" in maximum
    assert "| off | 25 |\n| the paper's | - |" in maximum
    assert missing == "Not measured: maximum at 16 (1 of 2 policies)."


def test_the_exhibit_writes_picture_numbers_and_table(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    asked: dict[str, Any] = {
        "model": str(tmp_path / "tiny"),
        "lengths": "512",
        "items": "2,4",
        "policies": "off,held_sharp",
    }
    out, cell = tmp_path / "out", Cell("needle", 512, "off")
    with claimed(cell.claim(out / "zero_shot" / "tiny")):
        assert exhibit.run(out, **asked, prompts=2) == ([], ["needle_512_off"])
    assert [path.name for path in out.iterdir()] == ["zero_shot"]
    partial = json.loads(exhibit.run(out, "tiny", report=True).paths[2].read_text())
    assert partial["caption"].endswith("Not measured: needle at 512 (1 of 2 policies).")
    paths = exhibit.run(out, **asked).paths
    assert [path.name for path in paths] == [f"zero_shot_tiny.{suffix}" for suffix in ("png", "pdf", "json", "md")]
    data = json.loads(paths[2].read_text())
    assert data["settings"]["items"] == [2, 4]
    assert (len(partial["cells"]), len(data["cells"])) == (7, 8)
    assert "in the 2 of 8 heads" in data["caption"]
    assert "Not measured" not in data["caption"]
    assert zero_shot.zero_shot_table(data) + "\n" == paths[3].read_text()
    assert str(tmp_path) not in paths[2].read_text()


def test_the_exhibit_refuses_what_it_cannot_use_before_loading_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero_shot, "find_subject", None)
    with pytest.raises(InputError, match="expected policies of off"):
        exhibit.run(tmp_path, policies="nothing")
    with pytest.raises(InputError, match="holds no study to report on; leave --report out"):
        exhibit.run(tmp_path, report=True)
