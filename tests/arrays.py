"""Making arrays of every library, for tests that run on all three."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

LIBRARIES = ("numpy", "torch", "jax")


def make(library: str, values: Any, dtype: str = "float32") -> Any:
    """``values`` as an array of ``library``."""
    if library == "numpy":
        return np.asarray(values).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if library == "torch":
        return torch.tensor(np.asarray(values)).to(getattr(torch, dtype))
    return jnp.asarray(np.asarray(values)).astype(dtype)


def numbers(array: Any) -> np.ndarray:
    """``array`` as float64 NumPy."""
    if isinstance(array, torch.Tensor):
        array = array.detach().double().numpy()
    return np.asarray(array).astype(np.float64)


def gradient(library: str, function: Callable[[Any], Any], x: Any) -> np.ndarray:
    """The gradient of the scalar ``function`` at ``x``, by torch's autograd or JAX's."""
    if library == "torch":
        x = x.detach().clone().requires_grad_()
        function(x).backward()
        return numbers(x.grad)
    return numbers(jax.grad(function)(x))
