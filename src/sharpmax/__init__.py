"""sharpmax keeps attention sharp as inputs grow.

    logits s  ->  RowStats  ->  policy  ->  beta  ->  softmax(beta * s)

NumPy, PyTorch and JAX arrays all work; importing this imports neither torch nor jax.
"""

from . import theory
from .core.fitting import OptimalTemperatures, fit_monotone, fit_policy, optimal_temperatures
from .core.policies import (
    PAPER,
    PAPER_HELD,
    Constant,
    EntropyCurve,
    EntropyPolynomial,
    Hard,
    LearnableLogLength,
    LearnableTemperature,
    LogLength,
    PerHead,
    Policy,
    detached,
    load_policy,
    policy_from_dict,
)
from .core.softmax import adaptive_temperature_softmax, softmax
from .core.stats import RowStats, row_stats

__version__ = "0.1.0"

__all__ = [
    # the softmax
    "adaptive_temperature_softmax",
    "softmax",
    "row_stats",
    "RowStats",
    # policies
    "Policy",
    "PAPER",
    "PAPER_HELD",
    "Constant",
    "EntropyCurve",
    "EntropyPolynomial",
    "Hard",
    "LogLength",
    "LearnableLogLength",
    "LearnableTemperature",
    "PerHead",
    "detached",
    "load_policy",
    "policy_from_dict",
    # fitting
    "fit_policy",
    "fit_monotone",
    "optimal_temperatures",
    "OptimalTemperatures",
    # theory
    "theory",
]
