"""Answers in two parts, and exact match of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sharpmax.tasks.clrs_text import UNTRACED, Answer, Score, score, split_answer

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2, 2 | 3\n\n", Answer("2, 2", "3")),
        (" | [[-1 1], [0 0]]\n\n", Answer("", "[[-1 1], [0 0]]")),
        ("[0.1 0.2]\n\n", Answer(None, "[0.1 0.2]")),
        ("1 | 2\n\nminimum:\nkey: [0.1]", Answer("1", "2")),
        ("1 | 2", Answer("1", "2")),
        ("", Answer(None, "")),
        ("1 | 2 | 3\n\n", Answer("1 | 2", "3")),
        ("(0, 1) | (0, 0)\n\n", Answer("(0, 1)", "(0, 0)")),
    ],
)
def test_answers_are_split(text, expected):
    assert split_answer(text) == expected


@pytest.mark.parametrize(
    ("given", "expected", "found"),
    [
        ("1, 2 | 3\n\n", "1, 2 | 3\n\n", Score(True, True)),
        ("1, 1 | 3\n\n", "1, 2 | 3\n\n", Score(True, False)),
        ("1, 2 | 4\n\n", "1, 2 | 3\n\n", Score(False, True)),
        ("3\n\n", "1, 2 | 3\n\n", Score(True, False)),
        ("3", "3\n\n", Score(True, None)),
        ("", "3\n\n", Score(False, None)),
        ("1, 2 | 33\n\n", "1, 2 | 3\n\n", Score(False, True)),
        ("1, 2 | 3 junk", "1, 2 | 3\n\n", Score(False, True)),
    ],
)
def test_scores(given, expected, found):
    assert score(given, expected) == found


def test_every_golden_answer_is_right_and_no_other():
    for entry in GOLDEN["samples"]:
        for _, answer in entry["texts"]:
            traced = entry["traces"] and entry["algorithm"] not in UNTRACED
            assert score(answer, answer) == Score(True, True if traced else None)
            trace, final = split_answer(answer)
            assert (answer if not traced else f"{trace} | {final}\n\n").strip() == answer.strip()
