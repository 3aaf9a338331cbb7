"""Right or wrong: exact match of what is asked for, as in the paper; of the trace before it, separately."""

from __future__ import annotations

from typing import NamedTuple

SEPARATOR = " | "
END = "\n\n"


class Answer(NamedTuple):
    """An answer in its two parts."""

    trace: str | None
    """The steps between the beginning, which the question holds, and the end; ``None`` in an answer without a trace."""

    final: str


class Score(NamedTuple):
    """What of an answer is right. Without a trace there is none to be right or wrong."""

    final: bool
    trace: bool | None


def split_answer(text: str) -> Answer:
    """``text``, an answer or a model's, up to its empty line and in its two parts.

    What follows the empty line is another document. The final answer is what follows the last bar.
    """
    body = text.split(END, 1)[0]
    trace, bar, final = body.rpartition("|")
    return Answer(trace.strip(), final.strip()) if bar else Answer(None, body.strip())


def score(given: str, expected: str, *, cut: bool = False) -> Score:
    """Compare what a model wrote with the sample's answer, character by character but for spaces at the ends.

    A final answer without the trace that was expected can be right; so can one after a wrong trace. One that was
    ``cut`` off before its empty line has no end, and is wrong.
    """
    ours, theirs = split_answer(given), split_answer(expected)
    ended = END in given or not cut
    return Score(ended and ours.final == theirs.final, None if theirs.trace is None else ours.trace == theirs.trace)
