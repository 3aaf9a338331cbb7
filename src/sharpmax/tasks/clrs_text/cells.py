"""Cells of an evaluation: the samples of an algorithm and a seed at all sizes, as questions in tokens, with replies."""

from __future__ import annotations

import gzip
import itertools
import json
import multiprocessing
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .benchmark import Split
from .outcomes import DIGITS, LEFT_OUT
from .scoring import Score, score
from .shards import cores, question_digests, start_worker
from .text import Sample, generate_samples
from .tokens import Encoder

FEW = 500
"""Up to so many samples, making them is quicker here than in processes of their own."""


class Cell(NamedTuple):
    """An algorithm and a seed."""

    algorithm: str
    seed: int

    def file(self, out: Path) -> Path:
        """Where it is kept."""
        return out / "cells" / f"{self.algorithm}_{self.seed}.json"

    def replies(self, out: Path) -> Path:
        """Where the model's words are kept."""
        return out / "replies" / f"{self.algorithm}_{self.seed}.jsonl.gz"


def longest_reply(answer: int) -> int:
    """New tokens that a reply may have where the true answer has so many: a quarter more, and sixteen."""
    return answer + answer // 4 + 16


@dataclass
class Question:
    """A sample that fits, in tokens, and what the model answered."""

    sample: Sample
    prompt: list[int]
    limit: int
    tokens: int = 0
    """Of the reply."""

    reply: str = ""
    score: Score | None = None


class Asked:
    """The questions of a cell, and how many replies are missing."""

    def __init__(self, cell: Cell, samples: list[Sample], encoder: Encoder, length: int) -> None:
        self.cell, self.samples, self.encoder = cell, samples, encoder
        self.questions: dict[tuple[int, int], Question] = {}
        for sample, document in zip(samples, encoder(samples), strict=True):
            if len(document.ids) <= length:
                limit = min(longest_reply(len(document.ids) - document.question), length - document.question)
                prompt = document.ids[: document.question].tolist()
                self.questions[sample.size, sample.index] = Question(sample, prompt, limit)
        self.missing = len(self.questions)

    def take(self, question: Question, reply: list[int]) -> bool:
        """Keep a reply; whether it was the last that was missing."""
        tokenizer = self.encoder.tokenizer
        question.tokens = len(reply)
        question.reply = tokenizer.decode(reply, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        cut = len(reply) == question.limit
        question.score = score(question.reply, question.sample.answer, cut=cut)
        self.missing -= 1
        return self.missing == 0

    def result(self) -> dict[str, Any]:
        """What is kept of the cell, ready for JSON."""
        questions = list(self.questions.values())
        by_size = itertools.groupby(self.samples, lambda sample: sample.size)
        example = questions[0] if questions else None
        return {
            "sizes": {str(size): self._size(list(samples)) for size, samples in by_size},
            "asked": len(questions),
            "prompt_tokens": sum(len(question.prompt) for question in questions),
            "tokens": sum(question.tokens for question in questions),
            "example": None
            if example is None
            else {"question": example.sample.question, "answer": example.sample.answer, "reply": example.reply},
        }

    def _size(self, samples: list[Sample]) -> dict[str, Any]:
        """A character for each sample: whether it is right, wrong or left out. And how long replies are."""
        places = [self.questions.get((sample.size, sample.index)) for sample in samples]
        asked = [question for question in places if question is not None]
        final = [None if q is None or q.score is None else q.score.final for q in places]
        trace = [None if q is None or q.score is None else q.score.trace for q in places]
        return {
            "final": _marks(final),
            "trace": None if all(right is None for right in trace) else _marks(trace),
            "too_long": len(places) - len(asked),
            "cut": sum(question.tokens == question.limit for question in asked),
            "reply_tokens": sum(question.tokens for question in asked) / len(asked) if asked else None,
            "questions": "".join(f"{d:016x}"[:DIGITS] for d in question_digests(s.question for s in samples)),
        }

    def lines(self) -> bytes:
        """What the model wrote, a line of JSON for each sample, compressed."""
        rows = (
            {"size": size, "index": index, "reply": q.reply, **({} if q.score is None else q.score._asdict())}
            for (size, index), q in self.questions.items()
        )
        return gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), 6, mtime=0)


def is_whole(kept: dict[str, Any], sizes: Sequence[int], samples: int) -> bool:
    """Whether what was kept of a cell has an outcome and a question for each sample, and all numbers."""
    if list(kept["sizes"]) != [str(size) for size in sizes]:
        return False
    for row in kept["sizes"].values():
        texts = [text for text in (row["final"], row["trace"]) if text is not None]
        if any(len(text) != samples or not set(text) <= {"0", "1", LEFT_OUT} for text in texts):
            return False
        if row["final"] is None or len(row["questions"]) != DIGITS * samples or "reply_tokens" not in row:
            return False
        if row["final"].count(LEFT_OUT) != row["too_long"] or not 0 <= row["cut"] <= samples:
            return False
    return all(kept[key] >= 0 for key in ("asked", "prompt_tokens", "tokens", "seconds")) and "provenance" in kept


def _marks(right: Sequence[bool | None]) -> str:
    return "".join(LEFT_OUT if one is None else str(int(one)) for one in right)


def cell_samples(cell: Cell, split: Split) -> list[Sample]:
    """The samples of a cell, size by size."""
    return [
        sample
        for size in split.sizes[cell.algorithm]
        for sample in generate_samples(cell.algorithm, size, cell.seed, count=split.samples, traces=split.traces)
    ]


def made_samples(cells: Sequence[Cell], split: Split) -> Generator[tuple[Cell, list[Sample]], None, None]:
    """Cells with their samples; where there are many, other processes make them while the model answers."""
    count = sum(len(split.sizes[cell.algorithm]) for cell in cells) * split.samples
    if count <= FEW:
        yield from ((cell, cell_samples(cell, split)) for cell in cells)
        return
    context = multiprocessing.get_context("spawn")
    processes = min(cores(), len(cells))
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=start_worker)
    try:
        making: deque[Future[list[Sample]]] = deque()
        waiting = iter(cells)
        for cell in cells:
            for following in itertools.islice(waiting, processes + 2 - len(making)):
                making.append(pool.submit(cell_samples, following, split))
            yield cell, making.popleft().result()
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
