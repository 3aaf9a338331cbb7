"""From which n on softmax must have dispersed: what ``sharpmax bound`` says, as data."""

from __future__ import annotations

from typing import Any

from ..inputs import user_input
from ..theory import dispersion_length, failure_length
from .published import GEMMA_SPREADS

LARGEST_EXPONENT = 700.0
"""Beyond this spread / theta, exp overflows a double and the n in question has more than 300 digits."""

FAILURE_DTYPES = ("float32", "float16", "bfloat16")


def check_exponent(spread: float, theta: float) -> None:
    """Raise ValueError for a spread and a temperature whose bounds are no numbers to work with."""
    dispersion_length(0.0, 1.0, theta)  # theory's own words for a bad theta
    if spread / theta > LARGEST_EXPONENT:
        raise ValueError(f"expected spread / theta to be at most {LARGEST_EXPONENT:g}, got {spread / theta:g}")


def bound_report(spread: float, theta: float = 1.0, epsilon: float = 0.01) -> dict[str, Any]:
    r"""From which n on every coefficient of logits within ``spread`` is below ``epsilon``.

    ``n.paper`` is the n of Theorem 2.2, the first integer above :math:`e^{\delta/\theta} / \epsilon`; ``n.attained``
    follows from the extreme that some logits reach. ``machine_epsilon_n`` is the n of Corollary B.1, by type.
    ``examples`` asks the same of the spreads that the paper reports; its n are ``None`` where spread / theta is above
    :data:`LARGEST_EXPONENT`.
    """
    with user_input():
        check_exponent(spread, theta)
        lengths = dispersion_length(spread, epsilon, theta)
    return {
        "spread": spread,
        "theta": theta,
        "epsilon": epsilon,
        "n": lengths._asdict(),
        "machine_epsilon_n": {dtype: failure_length(spread, dtype, theta) for dtype in FAILURE_DTYPES},
        "examples": [
            {
                "model": model.model,
                "source": "the paper, Section 2, Practical Values of delta",
                "deviation": model.deviation,
                **{
                    which: {"spread": value, "n": _lengths(value, theta, epsilon)}
                    for which, value in (
                        ("lowest", model.lowest),
                        ("average", model.average),
                        ("highest", model.highest),
                    )
                },
            }
            for model in GEMMA_SPREADS
        ],
    }


def _lengths(spread: float, theta: float, epsilon: float) -> dict[str, int | None]:
    if spread / theta > LARGEST_EXPONENT:
        return {"paper": None, "attained": None}
    return dict(dispersion_length(spread, epsilon, theta)._asdict())
