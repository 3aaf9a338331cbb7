"""The paper's Figure 4, letter by letter, in NumPy, torch and JAX: the peer of benchmarks and of tests."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
import torch

COEFFICIENTS = [-0.037, 0.481, -2.3, 4.917, -1.791]


def jax_figure4(logits: Any) -> Any:
    original_probs = jax.nn.softmax(logits)
    poly_fit = jnp.array(COEFFICIENTS)
    entropy = jnp.sum(-original_probs * jnp.log(original_probs + 1e-9), axis=-1, keepdims=True)
    beta = jnp.where(entropy > 0.5, jnp.maximum(jnp.polyval(poly_fit, entropy), 1.0), 1.0)
    return jax.nn.softmax(logits * beta)


def torch_figure4(logits: torch.Tensor) -> torch.Tensor:
    original_probs = torch.softmax(logits, dim=-1)
    entropy = torch.sum(-original_probs * torch.log(original_probs + 1e-9), dim=-1, keepdim=True)
    polynomial = torch.zeros_like(entropy)
    for coefficient in COEFFICIENTS:
        polynomial = polynomial * entropy + coefficient
    beta = torch.where(entropy > 0.5, torch.clamp(polynomial, min=1.0), 1.0)
    return torch.softmax(logits * beta, dim=-1)


def numpy_figure4(logits: np.ndarray) -> np.ndarray:
    original_probs = scipy.special.softmax(logits, axis=-1)
    entropy = np.sum(-original_probs * np.log(original_probs + logits.dtype.type(1e-9)), axis=-1, keepdims=True)
    polynomial = np.polyval(np.array(COEFFICIENTS, logits.dtype), entropy)
    beta = np.where(entropy > 0.5, np.maximum(polynomial, 1), 1).astype(logits.dtype)
    return scipy.special.softmax(logits * beta, axis=-1)
