"""Continuations from slots against transformers' own generation, prompt by prompt."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from sharpmax import PAPER
from sharpmax.huggingface import register, sharpen
from sharpmax.tasks.clrs_text import generation
from sharpmax.tasks.clrs_text.generation import generate
from tests.huggingface import families

register()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS, LIMITS = [12, 5, 9, 1, 7, 3, 20], [6, 11, 1, 9, 0, 14, 4]


def prompts() -> list[list[int]]:
    ids = families.tokens(len(LENGTHS), max(LENGTHS))
    return [row[:length].tolist() for row, length in zip(ids, LENGTHS, strict=True)]


def alone(model: Any, prompt: list[int], limit: int, end: int | None = None) -> list[int]:
    """What transformers generates of one prompt, without a cache."""
    if limit == 0:
        return []
    ids = torch.tensor([prompt], device=model.device)
    settings: dict[str, Any] = {"do_sample": False, "use_cache": False, "pad_token_id": 0, "eos_token_id": end}
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, **settings)
    found = tokens[0, len(prompt) :].tolist()
    return found[:-1] if end is not None and found[-1] == end else found


@pytest.fixture(autouse=True)
def one_thread():
    """Models are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[7, 3, 1])
def slots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setitem(generation.MOST_SLOTS, DEVICE, request.param)
    return request.param


@pytest.mark.parametrize("family", families.CAUSAL)
def test_the_same_as_one_by_one(family):
    model = families.causal(family).to(DEVICE)
    expected = [alone(model, prompt, limit) for prompt, limit in zip(prompts(), LIMITS, strict=True)]
    found = dict(generate(model, prompts(), LIMITS, end=(), pad=0, budget=3 * 30))
    assert [found[i] for i in range(len(LIMITS))] == expected


@pytest.mark.parametrize("steps", [1, 4])
def test_slots_are_used_again(slots, steps, monkeypatch):
    monkeypatch.setitem(generation.STEPS, DEVICE, steps)
    monkeypatch.setitem(generation.READ, DEVICE, 25)
    model = families.causal("llama").to(DEVICE)
    counts = []
    made = generation._Slots

    def counted(model, count, *rest):
        counts.append(count)
        return made(model, count, *rest)

    monkeypatch.setattr(generation, "_Slots", counted)
    expected = [alone(model, prompt, limit) for prompt, limit in zip(prompts(), LIMITS, strict=True)]
    found = list(generate(model, prompts(), LIMITS, end=(), pad=0))
    assert sorted(i for i, _ in found) == list(range(len(LIMITS)))
    assert [dict(found)[i] for i in range(len(LIMITS))] == expected
    assert counts == [min(slots, 6)]


def test_a_token_that_ends(slots):
    model = families.causal("llama").to(DEVICE)
    free = [alone(model, prompt, 14) for prompt in prompts()]
    end = free[1][3]
    expected = [alone(model, prompt, 14, end) for prompt in prompts()]
    found = dict(generate(model, prompts(), [14] * len(LENGTHS), end={end}, pad=0))
    assert [found[i] for i in range(len(LENGTHS))] == expected
    assert len(expected[1]) < 14


def test_policies_act_and_nothing_is_held_back():
    model = families.causal("llama").to(DEVICE)
    with sharpen(model, PAPER):
        expected = [alone(model, prompt, 5) for prompt in prompts()]
        stream = generate(model, prompts(), [5] * len(LENGTHS), end=(), pad=0)
        first = next(stream)
        found = dict([first, *stream])
    assert [found[i] for i in range(len(LENGTHS))] == expected
    assert torch.is_grad_enabled()


def test_slots_stay_from_call_to_call_while_they_suffice(monkeypatch):
    model = families.causal("llama").to(DEVICE)
    made, counts = generation._Slots, []
    monkeypatch.setattr(generation, "_Slots", lambda model, *size: counts.append(size[:2]) or made(model, *size))
    answer = generation.Generation()

    def check(which: list[int], limit: int) -> None:
        some = [prompts()[i] for i in which]
        found = dict(answer(model, some, [limit] * len(some), end=(), pad=0))
        assert [found[i] for i in range(len(some))] == [alone(model, prompt, limit) for prompt in some]

    check([0, 1, 2], 4)
    check([4, 5], 4)
    assert counts == [(3, 16)]
    check([1, 2, 3, 4], 3)  # more prompts
    assert counts == [(3, 16), (4, 16)]
    check([6], 2)  # a longer one
    assert counts == [(3, 16), (4, 16), (1, 22)]


def test_nothing_keeps_slots_that_nobody_needs():
    slots = generation._Slots(families.causal("llama").to(DEVICE), 2, 8, 0)
    slots.read([0], [[1, 2]])
    slots.write(1)
    gone = weakref.ref(slots)
    gc.disable()
    try:
        del slots
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_another_gpu_than_the_current_one():
    model = families.causal("llama").to("cuda:1")
    expected = [alone(model, prompt, 5) for prompt in prompts()]
    found = dict(generate(model, prompts(), [5] * len(LENGTHS), end=(), pad=0))
    assert [found[i] for i in range(len(LENGTHS))] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_model_that_cannot_be_captured_runs_step_by_step(monkeypatch):
    model = families.causal("llama").to(DEVICE)

    class Refusing:
        def __init__(self, graph):
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", Refusing)
    expected = [alone(model, prompt, 5) for prompt in prompts()]
    with pytest.warns(UserWarning, match="a LlamaForCausalLM cannot be captured as a CUDA graph"):
        found = dict(generate(model, prompts(), [5] * len(LENGTHS), end=(), pad=0))
    assert [found[i] for i in range(len(LENGTHS))] == expected


def test_refused():
    model = families.causal("llama")
    with pytest.raises(ValueError, match="none empty, got 2 and 1"):
        next(generate(model, [[1], [2]], [3], end=(), pad=0))
    with pytest.raises(ValueError, match="none empty"):
        next(generate(model, [[]], [3], end=(), pad=0))
    stock = families.causal("llama", attention="sdpa")
    with pytest.raises(ValueError, match="attn_implementation='sharpmax'"):
        next(generate(stock, [[1]], [3], end=(), pad=0))
    assert list(generate(model, [], [], end=(), pad=0)) == []
