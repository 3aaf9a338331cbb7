"""A model so small that only its form matters, and replies that are known in its place."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sharpmax.tasks.clrs_text import CharacterTokenizer, Encoder, Sample
from sharpmax.tasks.clrs_text.accuracy import Settings
from sharpmax.tasks.clrs_text.cells import Cell, cell_samples

Say = Callable[[Sample], str]


def tiny_model() -> Any:
    """A Llama with a token for each character, and random weights."""
    torch.manual_seed(0)
    vocabulary = len(CharacterTokenizer())
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    ).eval()  # fmt: skip


class Student:
    """Answers the questions of a set with what it was told to say, in any order; tells what it was asked."""

    def __init__(self, encoder: Encoder, settings: Settings, say: Say, *, stop_after: int | None = None) -> None:
        split = settings.split
        samples = [s for a in split.sizes for seed in split.seeds for s in cell_samples(Cell(a, seed), split)]
        self.known = {tuple(p): s for p, s in zip(encoder.prompts(samples), samples, strict=True)}
        self.encoder, self.say, self.stop_after = encoder, say, stop_after
        self.asked: list[Sample] = []
        self.limits: list[int] = []

    def __call__(
        self, model: Any, prompts: Sequence[list[int]], limits: Sequence[int], *, end: Collection[int], pad: int
    ) -> Iterator[tuple[int, list[int]]]:
        assert (set(end), pad) == ({2}, 0)
        order = list(range(len(prompts)))
        random.Random(0).shuffle(order)
        for done, i in enumerate(order if self.stop_after is None else sorted(order)):
            if done == self.stop_after:
                raise KeyboardInterrupt
            sample = self.known[tuple(prompts[i])]
            self.asked.append(sample)
            self.limits.append(limits[i])
            yield i, self.encoder.tokenizer(self.say(sample))["input_ids"][: limits[i]]


def even(sample: Sample) -> str:
    """Right for samples with an even index."""
    return "nonsense | 77\n\n" if sample.index % 2 else sample.answer
