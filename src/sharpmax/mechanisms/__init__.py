"""Mechanisms: every way to turn attention logits into weights, under one interface.

    weights = sharpmax.mechanisms.find("sparsemax")(logits)

A mechanism is a frozen dataclass over the array API, so NumPy, PyTorch and JAX arrays all work.
"""

from __future__ import annotations

from ..core.policies import PAPER, PAPER_HELD, Constant, Hard, LearnableLogLength, LearnableTemperature, LogLength
from ..core.policies.base import Serialisable
from .asentmax import ASEntmax
from .base import About, Mechanism, load_mechanism, mechanism_from_dict
from .differential import Differential
from .entmax import Entmax, LearnedEntmax
from .linear import Linear, LinearFeatures
from .relu_squared import ReluSquared
from .selective import Selective
from .sigmoid import Sigmoid
from .sparsemax import Sparsemax
from .step import StepFeedForward
from .stick_breaking import StickBreaking
from .temperature import Temperature
from .threshold_relative import ThresholdRelative
from .top_k import TopK
from .window import Window

MECHANISMS: dict[str, Mechanism] = {
    "softmax": Temperature(),
    "adaptive": Temperature(PAPER),
    "adaptive_held": Temperature(PAPER_HELD),
    "constant": Temperature(Constant(4.0)),
    "log_n": Temperature(LogLength.relative(16)),
    "ssmax": Temperature(LearnableLogLength(scale=1 / 3)),
    "learned": Temperature(LearnableTemperature()),
    "hard": Temperature(Hard()),
    "sparsemax": Sparsemax(),
    "entmax15": Entmax(),
    "entmax": LearnedEntmax(),
    "asentmax": ASEntmax(),
    "top_k": TopK(),
    "window": Window(),
    "sigmoid": Sigmoid(),
    "linear": Linear(),
    "linear_elu": LinearFeatures(),
    "stick_breaking": StickBreaking(),
    "relu_squared": ReluSquared(),
    "selective": Selective(),
    "differential": Differential(),
    "threshold_relative": ThresholdRelative(),
    "step": StepFeedForward(),
}
"""Every mechanism by the name that the command line and attention functions know it by."""


def find(mechanism: Mechanism | str) -> Mechanism:
    """The mechanism that has a name, or the object itself."""
    if isinstance(mechanism, Mechanism):
        return mechanism
    if not isinstance(mechanism, str):
        remedy = "; a policy as a mechanism is Temperature(policy)" if isinstance(mechanism, Serialisable) else ""
        got = f"the class {mechanism.__name__}" if isinstance(mechanism, type) else type(mechanism).__name__
        raise TypeError(f"expected a mechanism or the name of one, got {got}{remedy}")
    if mechanism not in MECHANISMS:
        raise ValueError(f"expected a mechanism to be one of {', '.join(MECHANISMS)}, got {mechanism!r}")
    return MECHANISMS[mechanism]


__all__ = [
    "MECHANISMS",
    "About",
    "ASEntmax",
    "Differential",
    "Entmax",
    "LearnedEntmax",
    "Linear",
    "LinearFeatures",
    "Mechanism",
    "ReluSquared",
    "Selective",
    "Sigmoid",
    "Sparsemax",
    "StepFeedForward",
    "StickBreaking",
    "Temperature",
    "ThresholdRelative",
    "TopK",
    "Window",
    "find",
    "load_mechanism",
    "mechanism_from_dict",
]
