"""The paper's theory as functions: dispersion bounds, the spread bound, the slope of the entropy."""

from .dispersion import (
    MACHINE_EPSILON,
    CoefficientBounds,
    DispersionLength,
    coefficient_bounds,
    dispersion_length,
    failure_length,
)
from .sharpness import entropy_slope, spread_bound

__all__ = [
    "MACHINE_EPSILON",
    "CoefficientBounds",
    "DispersionLength",
    "coefficient_bounds",
    "dispersion_length",
    "entropy_slope",
    "failure_length",
    "spread_bound",
]
