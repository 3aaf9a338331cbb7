"""The paper's tables and figures, one module each.

An exhibit's module is imported when it runs, so listing the exhibits costs nothing. To add one: write a module with
``run(out, **options) -> list[Path]``, add a line to :data:`EXHIBITS`, and give it a command in ``sharpmax.cli``.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..extras import require


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


@dataclass(frozen=True)
class Exhibit:
    """A table or figure that can be made again: its name is that of the command, the module and the files."""

    name: str
    description: str
    heads: tuple[str, ...] = ()
    """Protocols whose trained heads ``sharpmax reproduce all`` makes it for; none for what needs no trained heads."""

    def run(self, out: Path, **options: Any) -> list[Path]:
        """Make the exhibit and write its files into the folder ``out``; returns their paths.

        Options that cannot be used raise :class:`InputError` before any work is done.
        """
        require("matplotlib", "experiments", "Drawing figures")
        check_folder(out)
        return importlib.import_module(f"{__name__}.{self.name}").run(out, **options)


EXHIBITS = {
    exhibit.name: exhibit
    for exhibit in (
        Exhibit("dispersion", "Figure 1 with numbers: the largest coefficient against n between Lemma 2.1's bounds."),
        Exhibit("fig2", "Figure 2: a trained head's coefficients over the 16 largest items as n doubles.", ("paper",)),
        Exhibit("fig5", "Figure 5: entropy of a 10-item power series over its base and the temperature."),
        Exhibit(
            "fig6", "Figure 6: optimal temperatures against entropy, and the polynomials through them.", ("paper",)
        ),
        Exhibit(
            "table1",
            "Table 1: accuracy of max retrieval against n, by policy, with paired t-tests over the seeds.",
            ("paper", "sharp"),
        ),
        Exhibit("fig7", "Figure 7: the heat maps of Figure 2 with and without adaptive temperature.", ("paper",)),
        Exhibit("fig9", "Figure 9: logit spread over training against the bound of Proposition 3.1.", ("paper",)),
        Exhibit("failure", "Corollary B.1: the n from which a trained head errs on {a, b, b, ...}.", ("paper",)),
        Exhibit("depth", "Remark C.1: one dispersed layer flattens all later ones, unless there are residuals."),
    )
}
"""Every exhibit by name, in the order in which ``sharpmax reproduce all`` makes them."""
