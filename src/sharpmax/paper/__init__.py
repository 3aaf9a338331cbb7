"""The paper's tables and figures, one module each.

An exhibit's module is imported when it runs, so listing the exhibits costs nothing. To add one: write a module with
``run(out, **options) -> list[Path]``, add a line to :data:`EXHIBITS`, and give it a command in ``sharpmax.cli``.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..extras import require
from ..inputs import check_folder


@dataclass(frozen=True)
class Exhibit:
    """A table or figure that can be made again: its name is that of the command, the module and the files."""

    name: str
    description: str
    heads: tuple[str, ...] = ()
    """Protocols whose trained heads ``sharpmax reproduce all`` makes it for; none for what needs no trained heads."""
    models: tuple[str, ...] = ()
    """Packaged models that it is about."""
    inputs: tuple[str, ...] = ()
    """Options that name results it is made from. ``sharpmax reproduce all`` has none of them: it takes those that come
    with a checkout, or draws it again where its JSON file is there."""

    @property
    def command(self) -> str:
        """Its name on the command line."""
        return self.name.replace("_", "-")

    def ready(self, out: Path) -> bool:
        """Whether what it is made from is there without being named."""
        return not self.inputs or self._module().ready(out)

    def run(self, out: Path, **options: Any) -> list[Path]:
        """Make the exhibit and write its files into the folder ``out``; returns their paths.

        Options that cannot be used raise :class:`InputError` before any work is done.
        """
        require("matplotlib", "experiments", "Drawing figures")
        if self.heads:
            require("jax", "experiments", "Trained heads")
        check_folder(out)
        return self._module().run(out, **options)

    def _module(self) -> Any:
        return importlib.import_module(f"{__name__}.{self.name}")


EXHIBITS = {
    exhibit.name: exhibit
    for exhibit in (
        Exhibit("dispersion", "Figure 1 with numbers: the largest coefficient against n between Lemma 2.1's bounds."),
        Exhibit("fig2", "Figure 2: a trained head's coefficients over the 16 largest items as n doubles.", ("paper",)),
        Exhibit(
            "fig3",
            "Figure 3: entropy of the first-layer heads of real models as the prompt gets more items.",
            models=("smollm2-135m-instruct", "gemma-3-270m"),
        ),
        Exhibit(
            "spread_table",
            "The logit spreads of Section 2: over a source file, in real models.",
            models=("smollm2-135m-instruct", "gemma-3-270m"),
        ),
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
        Exhibit(
            "fig8",
            "Figure 8: accuracy on CLRS-Text against size, of models trained with and without adaptive temperature.",
            inputs=("baseline", "adaptive"),
        ),
        Exhibit("fig9", "Figure 9: logit spread over training against the bound of Proposition 3.1.", ("paper",)),
        Exhibit("failure", "Corollary B.1: the n from which a trained head errs on {a, b, b, ...}.", ("paper",)),
        Exhibit("depth", "Remark C.1: one dispersed layer flattens all later ones, unless there are residuals."),
    )
}
"""Every exhibit by name, in the order in which ``sharpmax reproduce all`` makes them."""
