"""Rows of logits from seeds, the same numbers for ever.

Long rows are stored as recipes and made anew by whoever reads them, so nothing here may depend on a library's random
generator or on its transcendental functions: bits come from splitmix64, and numbers from them by exact or correctly
rounded arithmetic alone (the "normal" numbers are sums of four uniform ones, which is all the bell that is needed).
"""

from __future__ import annotations

import hashlib
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}

LOWEST = {
    "float16": -65504.0,
    "bfloat16": -(2.0 - 2.0**-7) * 2.0**127,
    "float32": -(2.0 - 2.0**-23) * 2.0**127,
    "float64": -(2.0 - 2.0**-52) * 2.0**1023,
}
"""The lowest finite number of every type; half of it and below means masked."""


def bits(seed: int, n: int) -> np.ndarray:
    """``n`` outputs of splitmix64 started at ``seed``."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def uniform(seed: int, n: int) -> np.ndarray:
    """Multiples of 2**-53 in [0, 1)."""
    return (bits(seed, n) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normal(seed: int, n: int) -> np.ndarray:
    """Numbers of mean 0 and variance 1, within +-3.5."""
    total = np.zeros(n)
    for part in range(4):
        total = total + uniform(seed * 4 + part + 1, n)
    return (total - 2.0) * 1.7320508075688772


def quantise(values: np.ndarray, dtype: str) -> np.ndarray:
    """``values`` rounded to ``dtype``, as float64."""
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float64).astype(DTYPES[dtype]).astype(np.float64)


def make_logits(recipe: dict[str, Any], dtype: str) -> np.ndarray:
    """The logits of a recipe: a shape, ``scale``, ``offset``, rounding to ``dtype``, and a mask inside the logits."""
    n, seed = int(recipe["n"]), int(recipe["seed"])
    kind, scale, offset = recipe["kind"], float(recipe.get("scale", 1.0)), float(recipe.get("offset", 0.0))
    if kind == "normal":
        values = normal(seed, n)
    elif kind == "sparse":  # a few tall logits over a flat floor
        values = np.where(uniform(seed + 7, n) < 0.06, 2.0 + normal(seed, n), -2.0)
    elif kind == "tied":  # few levels, so that many logits are equal, the largest among them
        values = np.minimum(np.floor(normal(seed, n)), 1.0)
    elif kind == "equal":
        values = np.zeros(n)
    elif kind == "needle":  # one logit above everything else
        values = normal(seed, n)
        values[n // 3] = float(recipe["height"])
    elif kind == "extremes":  # both ends of the type's range, whose difference overflows it
        values = np.where(np.arange(n) == n // 3, -LOWEST[dtype] * 0.9, LOWEST[dtype] * 0.3)
    else:
        raise ValueError(f"unknown recipe {kind!r}")
    values = quantise(values * scale + offset, dtype)
    if (inside := recipe.get("mask")) is not None:
        masked = ~keep_mask(inside, n)
        values[masked] = {"inf": -np.inf, "lowest": LOWEST[dtype]}[inside["by"]]
    return values


def keep_mask(mask: dict[str, Any], n: int) -> np.ndarray:
    """Which of ``n`` logits count; at least one of them if any share is to be kept."""
    keep = uniform(int(mask["seed"]), n) < float(mask["keep"])
    if float(mask["keep"]) > 0 and n and not keep.any():
        keep[0] = True
    return keep


def make_where(mask: dict[str, Any] | None, n: int) -> np.ndarray | None:
    """The ``where`` argument of a recipe."""
    return None if mask is None else keep_mask(mask, n)


def fill_masked(logits: np.ndarray, where: np.ndarray | None, fill: float | None) -> np.ndarray:
    """``logits`` with rubbish where ``where`` is false: padding is often uninitialised, and must not be read."""
    return logits if where is None or fill is None else np.where(where, logits, fill)


def make_cotangent(seed: int, n: int) -> np.ndarray:
    """Multiples of 1/64 in [-2, 2], exact in every type."""
    return (bits(seed, n) % np.uint64(257)).astype(np.float64) / 64.0 - 2.0


def make_probe(seed: int, n: int) -> np.ndarray:
    """A vector of +-1 to take dot products with."""
    return (bits(seed, n) % np.uint64(2)).astype(np.float64) * 2.0 - 1.0


def digest(values: np.ndarray) -> str:
    """The first half of the sha256 of ``values`` as little-endian float64."""
    return hashlib.sha256(np.ascontiguousarray(values, "<f8").tobytes()).hexdigest()[:32]
