"""Tokenisers for the benchmark: those of transformers, and a small one with a token for each character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .text import Sample

CHARACTERS = "\n (),-.0123456789:AP[]_abcdefghijklmnopqrstuvwxyz|"
"""Every character of the benchmark."""

_PROBES = (
    CHARACTERS,
    "graham_scan:\nx: [-0.248 1.2e-05 0 -1], y: [0.355 0.0509 10 1], initial_trace: [0 0 0 0]\ntrace | in_hull:\n",
    "[[0 -1 12], [1 1 0]], [[0 0 0], [1 2 3]] | (0, 15)\n\n",
    " | [[-1 1 2]]\n\n",
)


class CharacterTokenizer:
    """A token for each character of the benchmark, and three of its own: padding 0, beginning 1, end 2.

    It has the few methods of a transformers tokenizer that this package uses.
    """

    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2
    name_or_path = "characters"

    def __init__(self) -> None:
        self._ids = {character: i for i, character in enumerate(CHARACTERS, 3)}

    def __len__(self) -> int:
        return len(CHARACTERS) + 3

    def __call__(self, texts: str | Sequence[str], add_special_tokens: bool = False) -> dict[str, Any]:
        """``{"input_ids": ...}``, of one text or of several."""
        if isinstance(texts, str):
            return {"input_ids": self._encode(texts, add_special_tokens)}
        return {"input_ids": [self._encode(text, add_special_tokens) for text in texts]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, **_: Any) -> str:
        """The text of tokens; padding, beginning and end are nothing, or ``<0>``, ``<1>`` and ``<2>``."""
        special = (lambda i: "") if skip_special_tokens else (lambda i: f"<{i}>")
        return "".join(special(int(i)) if i < 3 else CHARACTERS[int(i) - 3] for i in ids)

    def batch_decode(self, rows: Sequence[Sequence[int]], **options: Any) -> list[str]:
        """The text of each row."""
        return [self.decode(row, **options) for row in rows]

    def _encode(self, text: str, special: bool) -> list[int]:
        try:
            ids = [self._ids[character] for character in text]
        except KeyError as error:
            raise ValueError(f"expected characters of CLRS-Text, got {error.args[0]!r}") from None
        return [self.bos_token_id, *ids] if special else ids


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ValueError unless text of the benchmark comes back from ``tokenizer`` as it was."""
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    lost = [character for character in CHARACTERS if character not in _round_trip(tokenizer, f"a{character}a")]
    if lost:
        shown = ", ".join(map(repr, lost))
        raise ValueError(f"expected a tokenizer with all characters of CLRS-Text, got {name!r}, which loses {shown}")
    for text in _PROBES:
        if _round_trip(tokenizer, text) != text:
            raise ValueError(
                f"expected a tokenizer that gives back text as it was, got {name!r}, which makes "
                f"{_round_trip(tokenizer, text)!r} of {text!r}"
            )


def _round_trip(tokenizer: Any, text: str) -> str:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    unknown = getattr(tokenizer, "unk_token_id", None)
    plain = [i for i in ids if unknown is None or i != unknown]
    return tokenizer.decode(plain, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Document(NamedTuple):
    """A sample in tokens."""

    ids: np.ndarray
    """int32; the question, the answer, and the tokens that begin and end texts where they are asked for."""

    question: int
    """How many of them are the question's, with the beginning."""


class Encoder:
    """Samples to tokens. Question and answer are tokenised on their own, so a question alone is a prompt as trained on.

    Args:
      tokenizer: of transformers, or a :class:`CharacterTokenizer`; one that does not give text back is refused.
      begin: whether documents begin with the token that begins texts (Gemma needs it, SmolLM2 does not).
      end: whether answers end with the token that ends texts, after their empty line.
    """

    def __init__(self, tokenizer: Any, *, begin: bool = False, end: bool = True) -> None:
        check_tokenizer(tokenizer)
        self.tokenizer, self.begin, self.end = tokenizer, begin, end
        self.before = [_special(tokenizer, "bos_token_id", "begins")] if begin else []
        self.after = [_special(tokenizer, "eos_token_id", "ends")] if end else []
        pad = getattr(tokenizer, "pad_token_id", None)
        self.pad: int = pad if pad is not None else _special(tokenizer, "eos_token_id", "ends")

    def __call__(self, samples: Sequence[Sample]) -> list[Document]:
        """The samples in tokens."""
        if not samples:
            return []
        texts = [text for sample in samples for text in (sample.question, sample.answer)]
        ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [
            Document(np.array(self.before + q + a + self.after, np.int32), len(self.before) + len(q))
            for q, a in zip(ids[::2], ids[1::2], strict=True)
        ]

    def prompts(self, samples: Sequence[Sample]) -> list[list[int]]:
        """The questions alone, as they stand in documents."""
        if not samples:
            return []
        ids = self.tokenizer([sample.question for sample in samples], add_special_tokens=False)["input_ids"]
        return [self.before + q for q in ids]

    def settings(self) -> dict[str, Any]:
        """What decides the tokens, as far as it can be told."""
        probe = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in _PROBES[1:]]
        return {"vocabulary": len(self.tokenizer), "before": self.before, "after": self.after, "probe": probe}


def _special(tokenizer: Any, name: str, does: str) -> int:
    found = getattr(tokenizer, name, None)
    if found is None:
        raise ValueError(f"expected a tokenizer with a token that {does} texts, got one whose {name} is None")
    return int(found)
