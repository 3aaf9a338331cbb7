"""What a model is given while it is diagnosed: inputs that grow."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..inputs import token_ids

MAX_LENGTHS = (4, 16, 64, 256)
TEXT_LENGTHS = (64, 256, 1024, 4096)


class Source(Protocol):
    """Inputs by length. ``unit`` says what a length counts, ``about`` what the inputs are (JSON)."""

    unit: str

    @property
    def about(self) -> dict[str, Any]: ...

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths to take where none are asked for."""
        ...

    def check(self, tokenizer: Any, lengths: Sequence[int]) -> None:
        """Refuse lengths for which there is no input."""
        ...

    def inputs(self, tokenizer: Any, length: int) -> list[list[int]]:
        """The token ids of every input of this length."""
        ...


@dataclass(frozen=True)
class MaximumPrompts:
    """The prompt of Figure 3, "What is the maximum in the following sequence: ...", with ``length`` items."""

    prompts: int = 8
    seed: int = 0

    unit = "items"
    lengths = MAX_LENGTHS

    def __post_init__(self) -> None:
        if self.prompts < 1:
            raise ValueError(f"expected at least one prompt for each length, got {self.prompts}")

    @property
    def about(self) -> dict[str, Any]:
        from ..tasks.prompts import maximum_prompt

        return {"kind": "max", "prompts": self.prompts, "seed": self.seed, "example": maximum_prompt(self.items(4, 0))}

    def items(self, length: int, index: int) -> list[int]:
        """The items of prompt ``index``."""
        from ..tasks.prompts import maximum_items

        return maximum_items(length, seed=self.seed, index=index)

    def check(self, tokenizer: Any, lengths: Sequence[int]) -> None:
        pass

    def inputs(self, tokenizer: Any, length: int) -> list[list[int]]:
        from ..tasks.prompts import maximum_prompt

        return [token_ids(tokenizer, maximum_prompt(self.items(length, i))) for i in range(self.prompts)]


class Prefixes:
    """The first ``length`` tokens of each text that is long enough."""

    unit = "tokens"
    lengths = TEXT_LENGTHS

    def __init__(self, texts: Sequence[str], name: str) -> None:
        self.texts, self.name = tuple(texts), name
        if not any(text.strip() for text in self.texts):
            raise ValueError(f"expected {name} to hold some text, and it is empty")
        self._tokens: list[list[int]] | None = None

    @property
    def about(self) -> dict[str, Any]:
        digest = hashlib.sha256("\0".join(self.texts).encode()).hexdigest()
        return {"kind": "text", "name": self.name, "texts": len(self.texts), "sha256": digest}

    def tokens(self, tokenizer: Any) -> list[list[int]]:
        """All texts as token ids."""
        if self._tokens is None:
            self._tokens = [token_ids(tokenizer, text) for text in self.texts]
        return self._tokens

    def check_bytes(self, lengths: Sequence[int]) -> None:
        """Refuse, before there is a tokenizer, lengths beyond the number of bytes: no token has less than one."""
        longest = max(len(text.encode()) for text in self.texts)
        if max(lengths) > longest + 2:
            raise ValueError(f"{self.name} has {longest:,} bytes, so it has no {max(lengths):,} tokens; ask for less")

    def check(self, tokenizer: Any, lengths: Sequence[int]) -> None:
        longest = max(map(len, self.tokens(tokenizer)))
        if max(lengths) > longest:
            raise ValueError(
                f"{self.name} has {longest:,} tokens, and a length of {max(lengths):,} was asked for; ask for less"
            )

    def inputs(self, tokenizer: Any, length: int) -> list[list[int]]:
        return [ids[:length] for ids in self.tokens(tokenizer) if len(ids) >= length]
