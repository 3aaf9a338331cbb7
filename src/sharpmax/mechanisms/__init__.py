"""Mechanisms: every way to turn attention logits into weights, under one interface.

    weights = sharpmax.mechanisms.find("sparsemax")(logits)

A mechanism is a frozen dataclass over the array API, so NumPy, PyTorch and JAX arrays all work.
"""

from __future__ import annotations

from ..core.policies import PAPER, PAPER_HELD, Constant, Hard, LearnableLogLength, LearnableTemperature, LogLength
from .base import About, Mechanism, load_mechanism, mechanism_from_dict
from .temperature import Temperature

MECHANISMS: dict[str, Mechanism] = {
    "softmax": Temperature(),
    "adaptive": Temperature(PAPER),
    "adaptive_held": Temperature(PAPER_HELD),
    "constant": Temperature(Constant(4.0)),
    "log_n": Temperature(LogLength.relative(16)),
    "ssmax": Temperature(LearnableLogLength(scale=1 / 3)),
    "learned": Temperature(LearnableTemperature()),
    "hard": Temperature(Hard()),
}
"""Every mechanism by the name that the command line and attention functions know it by."""


def find(mechanism: Mechanism | str) -> Mechanism:
    """The mechanism that has a name, or the object itself."""
    if isinstance(mechanism, Mechanism):
        return mechanism
    if not isinstance(mechanism, str):
        raise TypeError(f"expected a mechanism or the name of one, got {type(mechanism).__name__}")
    if mechanism not in MECHANISMS:
        raise ValueError(f"expected a mechanism to be one of {', '.join(MECHANISMS)}, got {mechanism!r}")
    return MECHANISMS[mechanism]


__all__ = [
    "MECHANISMS",
    "About",
    "Mechanism",
    "Temperature",
    "find",
    "load_mechanism",
    "mechanism_from_dict",
]
