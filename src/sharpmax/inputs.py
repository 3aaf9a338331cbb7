"""What users give to commands: checked before any work, and answered in one sentence."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class InputError(ValueError):
    """What the user gave cannot be used: the command line answers with this one sentence and exit code 2."""


@contextmanager
def user_input() -> Iterator[None]:
    """Around checks of what the user gave: a ValueError inside becomes an :class:`InputError`."""
    try:
        yield
    except ValueError as error:
        raise InputError(str(error)) from error


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
