"""``sharpmax bound``: Theorem 2.2 in numbers."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..paper.bound import bound_report
from ..paper.published import GEMMA_SPREADS
from .groups import Epsilon, Spread, Theta

DEFAULT_SPREAD = GEMMA_SPREADS[0].average


def bound(
    spread: Spread = DEFAULT_SPREAD,
    theta: Theta = 1.0,
    epsilon: Epsilon = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """From how many items on softmax must have dispersed (Theorem 2.2).

    Given how far apart logits can be, softmax cannot keep any coefficient above epsilon once there are enough of
    them. This prints that number, the one that some logits really reach, and both for the spreads that the paper
    reports of Gemma.
    """
    report = bound_report(spread, theta, epsilon)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print_bound(report)


def _print_bound(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    spread, theta, epsilon, n = (report[key] for key in ("spread", "theta", "epsilon", "n"))
    console.print(
        f"Of [bold]{_digits(n['paper'])}[/bold] or more logits within a spread of {spread:g}, "
        f"softmax at temperature {theta:g} gives none a coefficient of {epsilon:g} or more (Theorem 2.2).\n"
        f"The same holds from {_digits(n['attained'])} on, but not before: one logit at the top and all others at the "
        "bottom reach that extreme.\n"
        "It falls below the machine epsilon (Corollary B.1) from "
        + ", ".join(f"{_digits(v)} in {dtype}" for dtype, v in report["machine_epsilon_n"].items())
        + ".\n"
    )
    table = Table(title=f"Spreads that the paper reports for all heads, at temperature {theta:g}, epsilon {epsilon:g}")
    table.add_column("Model")
    table.add_column("Head")
    for heading in ("Spread", "n, Theorem 2.2", "n, attained"):
        table.add_column(heading, justify="right")
    for example in report["examples"]:
        for which in ("lowest", "average", "highest"):
            entry = example[which]
            deviation = f" ± {example['deviation']:g}" if which == "average" else ""
            lengths = (_digits(entry["n"][kind]) for kind in ("paper", "attained"))
            table.add_row(
                example["model"], which, f"{entry['spread']:g}{deviation}", *lengths, end_section=which == "highest"
            )
    console.print(table)


def _digits(n: int | None) -> str:
    """``n`` to read: in full as long as that is short."""
    if n is None:
        return "over 10^300"
    return f"{n:,}" if n < 10**15 else f"about {n // 10 ** (len(str(n)) - 3) / 100:g}e{len(str(n)) - 1}"
