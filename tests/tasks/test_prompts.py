"""Prompts: their form, their answers, and that a seed decides them."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from sharpmax.tasks.prompts import (
    maximum_items,
    maximum_prompt,
    maximum_question,
    needle_question,
    sized,
)


class Words:
    """A tokenizer with a token for each word."""

    def __call__(self, text: str, verbose: bool = True) -> dict[str, list[str]]:
        return {"input_ids": text.split()}


def test_the_maximum_prompt_is_that_of_figure_3() -> None:
    assert maximum_prompt([3, 17, 5]) == ("What is the maximum in the following sequence: 3, 17, 5? The maximum is:")


@pytest.mark.parametrize("count", [1, 2, 16, 1000])
def test_there_are_as_many_items_as_asked_for_and_one_maximum(count: int) -> None:
    items = maximum_items(count, seed=3)
    assert len(items) == count
    assert items.count(max(items)) == 1
    assert min(items) >= 0
    assert 1 <= max(items) <= 99


def test_the_maximum_of_a_long_list_is_no_easier_to_guess_than_that_of_a_short_one() -> None:
    for count in (4, 1000):
        maxima = Counter(max(maximum_items(count, index=i)) for i in range(300))
        assert maxima.most_common(1)[0][1] < 15
        assert sum(maximum < 50 for maximum in maxima.elements()) > 100


def test_the_maximum_stands_anywhere() -> None:
    places = {(items := maximum_items(4, index=i)).index(max(items)) for i in range(100)}
    assert places == {0, 1, 2, 3}


def test_answers_of_maximum_questions_are_the_maxima_of_their_prompts() -> None:
    for index in range(20):
        question = maximum_question(9, seed=1, index=index, shots=3)
        *solved, asked = question.text.split("\n\n")
        assert len(solved) == 3
        for text, answer in (*(s.rsplit(" ", 1) for s in solved), (asked, question.answer)):
            assert text.endswith("? The maximum is:")
            assert max(map(int, re.findall(r"\d+", text))) == int(answer)
        assert asked == maximum_prompt(maximum_items(9, seed=1, index=index))


def test_examples_are_neither_the_question_nor_each_other() -> None:
    texts = [part for i in range(10) for part in maximum_question(9, index=i, shots=3).text.split("\n\n")]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_needle_stands_at_its_depth(depth: float) -> None:
    question = needle_question(200, depth=depth, index=5)
    head, body, asked = question.text.split("\n\n")
    found = re.search(r"The magic number of the (\w+) is (\d{4})\.", body)
    assert found is not None
    assert found[2] == question.answer
    assert asked.endswith(f"The magic number of the {found[1]} is")
    assert found.start() / (len(body) - len(found[0])) == pytest.approx(depth, abs=0.02)
    assert question.answer not in head


def test_distractors_are_numbers_of_other_things() -> None:
    question = needle_question(50, distractors=4)
    pairs = re.findall(r"The magic number of the (\w+) is (\d{4})\.", question.text)
    assert len({key for key, _ in pairs}) == 5
    asked = re.search(r"What is the magic number of the (\w+)\?", question.text)
    assert asked is not None
    assert dict(pairs)[asked[1]] == question.answer


def test_a_seed_and_an_index_decide_everything() -> None:
    for make in (maximum_question, needle_question):
        assert make(30, seed=1, index=2) == make(30, seed=1, index=2)
        assert len({make(30, seed=seed, index=index) for seed in range(3) for index in range(3)}) == 9


def test_a_longer_needle_prompt_hides_the_same_number() -> None:
    assert len({needle_question(n, index=4).answer for n in (1, 10, 100)}) == 1


@pytest.mark.parametrize("tokens", [60, 61, 500])
def test_a_prompt_is_the_longest_that_fits(tokens: int) -> None:
    question = sized(needle_question, tokens, Words())
    (sentences,) = (n for n in range(60) if needle_question(n) == question)
    assert len(question.text.split()) <= tokens < len(needle_question(sentences + 1).text.split())


def test_what_cannot_be_made_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="expected at least 1 items, got 0"):
        maximum_items(0)
    with pytest.raises(ValueError, match=r"expected depth to be from 0 to 1, got 1\.5"):
        needle_question(3, depth=1.5)
    with pytest.raises(ValueError, match="expected distractors to be from 0 to 39, got 40"):
        needle_question(3, distractors=40)
    with pytest.raises(ValueError, match=r"expected room for \d+ tokens, the shortest such prompt, got 5"):
        sized(needle_question, 5, Words())
