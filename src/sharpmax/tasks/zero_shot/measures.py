"""What is measured of a model as it stands: perplexity of a text, and answers to prompts.

perplexity        the same tokens of a text, with more and more of the text before them
answers           greedy answers that are right, and the log-probability of the right answer
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...inputs import token_ids
from ..prompts import Prompt

TARGETS = 256
"""Tokens at the end of a stretch of text that are predicted; all before them is context."""

MOST_NEW = 12
"""Tokens of an answer, at most."""

LONG = 2048
"""Prompts of this many tokens and more share a batch only if they are equally long: padding would cost their attention
the kernels for causal rows, and stock attention a mask of queries x keys."""


def text() -> str:
    """A real text: the reference manual of the Python language (Python 3.11.7, pydoc_data.topics)."""
    return resources.files("sharpmax.tasks.zero_shot").joinpath("text.txt").read_text(encoding="utf-8")


@functools.cache
def text_hash() -> str:
    """The SHA-256 of :func:`text`."""
    return hashlib.sha256(text().encode()).hexdigest()


def text_tokens(tokenizer: Any, content: str | None = None) -> Tensor:
    """The text's tokens, without one that begins or ends it."""
    return torch.tensor(token_ids(tokenizer, text() if content is None else content, add_special_tokens=False))


def stretch_ends(tokens: int, longest: int, segments: int) -> list[int]:
    """Where stretches of text end: evenly spread, with room for ``longest`` tokens before, and targets apart."""
    if longest > tokens:
        raise ValueError(f"expected lengths of at most the text's {tokens:,} tokens, got {longest:,}")
    count = max(1, min(segments, 1 + (tokens - longest) // TARGETS))
    return [tokens - round(i * (tokens - longest) / max(1, count - 1)) for i in range(count)][::-1]


@torch.no_grad()
def perplexity(
    model: Any,
    tokens: Tensor,
    ends: Sequence[int],
    length: int,
    *,
    targets: int = TARGETS,
    bos: int | None = None,
    budget: int = 4096,
) -> dict[str, Any]:
    """Perplexity of the last ``targets`` of ``length`` tokens that end at each of ``ends``.

    A token that begins texts, ``bos``, is one of the ``length``; ``budget`` is how many tokens go through at once.
    """
    start = [] if bos is None else [bos]
    rows = [torch.cat([torch.tensor(start, dtype=tokens.dtype), tokens[e - length + len(start) : e]]) for e in ends]
    losses: list[float] = []
    for part in _batches(torch.stack(rows), budget // length):
        ids = part.to(model.device)
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=targets + 1).logits[:, :-1]
        losses += _surprise(logits, ids[:, -targets:]).mean(-1).tolist()
    mean = math.fsum(losses) / len(losses)
    return {"perplexity": math.exp(mean), "nll_by_segment": losses, "targets": targets}


class Question(NamedTuple):
    """A prompt and its answer in tokens."""

    prompt: list[int]
    written: list[int]
    """The answer, as it would follow the prompt."""

    answer: str


def read(prompts: Sequence[Prompt], tokenizer: Any) -> list[Question]:
    """Prompts in tokens."""
    return [
        Question(tokenizer(p.text).input_ids, tokenizer(f" {p.answer}", add_special_tokens=False).input_ids, p.answer)
        for p in prompts
    ]


@torch.no_grad()
def answers(model: Any, tokenizer: Any, questions: Sequence[Question], budget: int) -> dict[str, Any]:
    """How many greedy answers are right, and the mean negative log-probability of the right ones, in nats.

    An answer is right if its first word is the number asked for, digit for digit.
    """
    replies, surprises = [""] * len(questions), [0.0] * len(questions)
    for chosen in _alike(questions, budget):
        asked = [questions[i] for i in chosen]
        ids, mask = _left_padded([q.prompt for q in asked], tokenizer, model.device)
        new = min(MOST_NEW, 1 + max(len(q.written) for q in asked))
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=_pad(tokenizer)
        )
        for i, row in zip(chosen, out[:, ids.shape[1] :], strict=True):
            replies[i] = tokenizer.decode(row, skip_special_tokens=True)
        for i, value in zip(chosen, _answer_surprise(model, tokenizer, asked), strict=True):
            surprises[i] = value
    right = [is_right(reply, question.answer) for reply, question in zip(replies, questions, strict=True)]
    return {
        "exact": sum(right) / len(right),
        "right": sum(right),
        "prompts": len(right),
        "answer_nll": math.fsum(surprises) / len(surprises),
        "tokens": round(sum(len(q.prompt) for q in questions) / len(questions)),
        "example": {"reply": replies[0], "answer": questions[0].answer},
    }


def is_right(reply: str, answer: str) -> bool:
    """Whether a reply begins with the number ``answer``, white space aside."""
    found = re.match(r"\s*(\d+)", reply)
    return found is not None and found[1] == answer


def _answer_surprise(model: Any, tokenizer: Any, asked: Sequence[Question]) -> list[float]:
    ids, mask = _left_padded([q.prompt + q.written for q in asked], tokenizer, model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    keep = max(len(q.written) for q in asked)
    logits = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=keep + 1
    ).logits[:, :-1]
    surprise = _surprise(logits, ids[:, -keep:])
    return [float(row[-len(q.written) :].sum()) for q, row in zip(asked, surprise, strict=True)]


def _surprise(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-probabilities of ``targets``, in float32, one sequence at a time: vocabularies are large."""
    each = [
        torch.nn.functional.cross_entropy(x.float(), y, reduction="none") for x, y in zip(logits, targets, strict=True)
    ]
    return torch.stack(each)


def _left_padded(rows: Sequence[list[int]], tokenizer: Any, device: Any) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), _pad(tokenizer))
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :] = torch.tensor(row)
        mask[i, longest - len(row) :] = 1
    return ids.to(device), mask.to(device)


def _pad(tokenizer: Any) -> int:
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def _alike(questions: Sequence[Question], budget: int) -> Iterator[list[int]]:
    """Numbers of questions that go through together, short ones with padding and long ones without any."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, q in enumerate(questions):
        groups.setdefault((len(q.prompt), len(q.written)) if len(q.prompt) >= LONG else (0, 0), []).append(i)
    for chosen in groups.values():
        ordered = sorted(chosen, key=lambda i: len(questions[i].prompt))
        yield from _batches(ordered, budget // (len(questions[ordered[-1]].prompt) + MOST_NEW))


def _batches(rows: Any, size: int) -> Iterator[Any]:
    size = max(1, size)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
