"""What users give to commands: checked before any work, and answered in one sentence."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .core.policies import load_policy

MOST_NUMBERS = 10_000


class InputError(ValueError):
    """What the user gave cannot be used: the command line answers with this one sentence and exit code 2."""


@contextmanager
def user_input(*kinds: type[Exception]) -> Iterator[None]:
    """Around checks of what the user gave: a ValueError inside, or what else is named, becomes an InputError."""
    try:
        yield
    except (ValueError, *kinds) as error:
        raise InputError(" ".join(str(error).split())) from error


def parse_numbers(text: str, what: str) -> list[int]:
    """``"16,64,256"`` or ``"0-3,8"`` as numbers, sorted, each once."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not first.isdecimal() or (dash and not (last.isdecimal() and int(last) >= int(first))):
            raise InputError(f"expected {what} to be whole numbers or ranges with commas between them, got {text!r}")
        several = range(int(first), int(last if dash else first) + 1)
        if several.stop - several.start + len(found) > MOST_NUMBERS:
            raise InputError(f"expected at most {MOST_NUMBERS:,} {what}, got {text!r}")
        found.update(several)
    return sorted(found)


def find_policy(name: str, named: Mapping[str, Any]) -> Any:
    """The policy that ``name`` means: one of ``named``, or that of a policy file."""
    if name in named:
        return named[name]
    if not Path(name).is_file():
        raise InputError(f"expected the policy to be {', '.join(named)} or a policy file, got {name!r}")
    try:
        return load_policy(name)
    except (ValueError, TypeError) as error:
        raise InputError(str(error) if name in str(error) else f"{name}: {error}") from None


def check_folder(folder: Path) -> None:
    """Raise InputError unless files can be written into ``folder``; it is tried, and nothing of that is left."""
    new: list[Path] = []
    try:
        new += [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"expected a folder that files can be written to, got {str(folder)!r}: {reason}") from error
    finally:
        for path in new:
            with suppress(OSError):
                path.rmdir()


def token_ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """The tokens of ``text``; InputError where a tokenizer of transformers has none for some of it."""
    try:
        found = tokenizer(text, verbose=False, **options)
    except Exception as error:  # what is wrong in there has no class of its own
        raise InputError(f"expected a text that the model's tokenizer can read, and it says: {error}") from error
    return list(found["input_ids"])
