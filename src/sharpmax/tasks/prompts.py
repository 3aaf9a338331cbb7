"""Prompts with one right answer, of any length: the largest of a list (Figure 3), and a number hidden in a text.

Everything is decided by a seed, the index of the prompt and its size; no model or file is needed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..inputs import token_ids

MAXIMUM = "What is the maximum in the following sequence: {seq}? The maximum is:"
"""The prompt of Figure 3. The paper does not say what the elements are; here they are whole numbers below 100."""

LARGEST = 99
SHOT_ITEMS = (2, 12)
"""Fewest and most items of a solved example before the question."""

KEYS = (
    "apple", "anchor", "basket", "bridge", "candle", "castle", "desert", "dragon", "engine", "falcon", "forest",
    "garden", "guitar", "hammer", "island", "jacket", "ladder", "lemon", "marble", "mirror", "needle", "ocean",
    "orange", "palace", "pencil", "pepper", "planet", "rabbit", "ribbon", "river", "saddle", "silver", "spider",
    "temple", "ticket", "tunnel", "valley", "violin", "window", "winter",
)  # fmt: skip
SUBJECTS = (
    "The baker", "A young teacher", "The old captain", "My neighbour", "The gardener", "Her brother",
    "The shopkeeper", "A tired traveller", "The night watchman", "Our aunt", "The librarian",
    "A farmer from the hills",
)  # fmt: skip
VERBS = (
    "walked along", "wrote a letter about", "painted a picture of", "told a story about", "looked after",
    "spoke about", "took a photograph of", "remembered", "was fond of", "dreamed of",
)  # fmt: skip
OBJECTS = (
    "the quiet road", "the little harbour", "the green fields", "the market square", "an old stone house",
    "the orchard", "a narrow street", "the long wooden bench", "the blue hills", "the lighthouse",
    "a wide river bank", "the church yard",
)  # fmt: skip
TIMES = (
    "in the early morning", "after the rain", "on a Sunday", "before supper", "during the summer",
    "late in the year", "when the shops were closed", "as the sun went down", "without saying a word",
    "while the others slept",
)  # fmt: skip

NEEDLE = "The magic number of the {key} is {number}."
NEEDLE_HEAD = "Somewhere in the following text there is a magic number. Remember it."
NEEDLE_QUESTION = "Question: What is the magic number of the {key}?\nAnswer: The magic number of the {key} is"


class Prompt(NamedTuple):
    """A text to continue, and what the continuation must begin with, white space aside."""

    text: str
    answer: str


def maximum_items(count: int, *, seed: int = 0, index: int = 0, largest: int = LARGEST) -> list[int]:
    """``count`` whole numbers for Figure 3's prompt, of which one is the largest.

    The maximum is drawn first, evenly from 1 to ``largest``, and the others evenly from below it: were all drawn alike,
    the maximum of a long list would nearly always be ``largest``, and guessing it would do.
    """
    _check_count(count, "items")
    generator = random.Random(f"maximum {seed} {index} {count}")
    maximum = generator.randint(1, largest)
    items = [generator.randrange(maximum) for _ in range(count - 1)]
    items.insert(generator.randint(0, count - 1), maximum)
    return items


def maximum_prompt(items: Sequence[int]) -> str:
    """Figure 3's prompt for ``items``."""
    return MAXIMUM.format(seq=", ".join(map(str, items)))


def maximum_question(count: int, *, seed: int = 0, index: int = 0, shots: int = 0) -> Prompt:
    """Figure 3's prompt for ``count`` items and its answer, after ``shots`` short solved examples."""
    generator = random.Random(f"shots {seed} {index}")
    parts = []
    for shot in range(shots):
        items = maximum_items(generator.randint(*SHOT_ITEMS), seed=seed, index=-1 - shot - shots * index)
        parts.append(f"{maximum_prompt(items)} {max(items)}\n\n")
    items = maximum_items(count, seed=seed, index=index)
    return Prompt("".join(parts) + maximum_prompt(items), str(max(items)))


def needle_question(
    sentences: int, *, depth: float | None = None, seed: int = 0, index: int = 0, digits: int = 4, distractors: int = 0
) -> Prompt:
    """A number hidden among ``sentences`` plain sentences, and a question for it.

    Args:
      sentences: how many sentences there are besides the needle.
      depth: where the needle stands, from 0, before all of them, to 1, after all; drawn evenly if not given.
      seed, index: which prompt.
      digits: of the number.
      distractors: magic numbers of other things, at places of their own.
    """
    _check_count(sentences, "sentences", least=0)
    if depth is not None and not 0 <= depth <= 1:
        raise ValueError(f"expected depth to be from 0 to 1, got {depth!r}")
    if not 0 <= distractors < len(KEYS):
        raise ValueError(f"expected distractors to be from 0 to {len(KEYS) - 1}, got {distractors!r}")
    generator = random.Random(f"needle {seed} {index}")
    drawn = generator.random()
    keys = generator.sample(KEYS, 1 + distractors)
    numbers = [str(generator.randrange(10 ** (digits - 1), 10**digits)) for _ in keys]
    hidden = [NEEDLE.format(key=key, number=number) for key, number in zip(keys, numbers, strict=True)]
    text = [_sentence(generator) for _ in range(sentences)]
    for other in hidden[1:]:
        text.insert(generator.randint(0, len(text)), other)
    text.insert(round((drawn if depth is None else depth) * len(text)), hidden[0])
    question = NEEDLE_QUESTION.format(key=keys[0])
    return Prompt(f"{NEEDLE_HEAD}\n\n{' '.join(text)}\n\n{question}", numbers[0])


def sized(make: Callable[[int], Prompt], tokens: int, tokenizer: Any) -> Prompt:
    """The largest prompt ``make(size)`` of at most ``tokens`` tokens, special ones included."""

    def length(size: int) -> int:
        return len(token_ids(tokenizer, make(size).text))

    low, shortest = 1, length(1)
    if shortest > tokens:
        raise ValueError(f"expected room for {shortest} tokens, the shortest such prompt, got {tokens}")
    high, room, rate = None, tokens - shortest, max(1.0, (length(65) - shortest) / 64)
    while high is None or high - low > 1:  # lengths are nearly linear in sizes, so a few guesses do
        guess = low + max(1, round(room / rate))
        if high is not None:
            guess = min(guess, high - 1)
        if (found := length(guess)) <= tokens:
            low, room = guess, tokens - found
        else:
            high = guess
            rate = max(rate, (found - (tokens - room)) / (high - low))
    return make(low)


def _sentence(generator: random.Random) -> str:
    return " ".join(generator.choice(words) for words in (SUBJECTS, VERBS, OBJECTS, TIMES)) + "."


def _check_count(count: int, what: str, least: int = 1) -> None:
    if count < least:
        raise ValueError(f"expected at least {least} {what}, got {count}")
