"""One case that mechanisms which normalise their rows share, and what every library makes of it."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from sharpmax.core.policies import LearnableLogLength, LearnableTemperature
from sharpmax.mechanisms import ASEntmax, LearnedEntmax, Mechanism, Temperature, TopK, Window, find
from tests.arrays import make, numbers
from tests.jax.attention_cases import quick
from tests.mechanisms import oracle

HEADS, QUERIES, KEYS = 2, 4, 9
SHAPE = (HEADS, QUERIES, KEYS)
TEMPERATURES = ("softmax", "adaptive", "adaptive_held", "constant", "log_n", "ssmax", "learned", "hard")
SPARSE = ("sparsemax", "entmax15", "entmax", "asentmax")
NAMES = (*TEMPERATURES, *SPARSE, "top_k", "window")
OTHERS: dict[str, Mechanism] = {
    "ssmax": Temperature(LearnableLogLength(HEADS, scale=1 / 3)),
    "learned": Temperature(LearnableTemperature(HEADS)),
    "entmax": LearnedEntmax(HEADS),
    "asentmax": ASEntmax(HEADS),
    "top_k": TopK(oracle.TOP),
    "window": Window(oracle.WIDTH),
}
LEARNED = {
    "ssmax": {"scale": np.array([0.3, 1.1])},
    "learned": {"log_beta": np.array([-0.4, 0.9])},
    "entmax": {"alpha_logit": np.array([-1.7, 0.8])},
    "asentmax": {"beta_raw": np.array([-0.5, 0.4]), "gamma_raw": np.array([0.3, -0.8])},
}


def mechanism(name: str) -> Mechanism:
    """The mechanism of that name, for two heads where it has parameters, and small enough to show where it cuts."""
    return OTHERS.get(name) or find(name)


def random_logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=SHAPE) * 1.5


VISIBLE = np.tril(np.ones((QUERIES, KEYS), bool), KEYS - QUERIES) & (np.random.default_rng(1).random(SHAPE) < 0.85)
VISIBLE[0, 1] = False
COTANGENT = np.random.default_rng(2).normal(size=SHAPE)
DIRECTION = np.random.default_rng(3).normal(size=SHAPE)


def learned_of(name: str) -> dict[str, np.ndarray]:
    return LEARNED.get(name, {})


def expected(name: str, logits: np.ndarray, visible: np.ndarray, learned: dict[str, np.ndarray]) -> np.ndarray:
    """The oracle's weights ``[heads, queries, keys]``."""
    heads, queries, keys = logits.shape
    found = [
        oracle.row(name, logits[h, q], visible[h, q], q + keys - queries, {k: float(v[h]) for k, v in learned.items()})
        for h in range(heads)
        for q in range(queries)
    ]
    return np.reshape(found, logits.shape)


def spoilt(logits: np.ndarray) -> np.ndarray:
    """Logits with what must never be read in masked places."""
    return np.where(VISIBLE, logits, np.resize([math.nan, math.inf, -math.inf, 7.0], logits.shape))


@cache
def compiled(name: str) -> Any:
    """Of a batch of logits, mapped: weights and gradients; of its first: weights, and a derivative in forward mode."""
    by_name = mechanism(name)

    def scalar(logits: Any, learned: Any, visible: Any) -> Any:
        weights = by_name(logits, visible, parameters=learned)
        return jnp.sum(weights * COTANGENT), weights

    def everything(batch: Any, learned: Any, visible: Any) -> Any:
        mapped = jax.vmap(jax.value_and_grad(scalar, (0, 1), has_aux=True), (0, None, None))
        (_, weights), gradients = mapped(batch, learned, visible)
        tangents = (jnp.asarray(DIRECTION), jax.tree.map(jnp.ones_like, learned))
        _, along, alone = jax.jvp(lambda a, b: scalar(a, b, visible), (batch[0], learned), tangents, has_aux=True)
        return weights, gradients, along, alone

    return quick(everything)


def with_jax(name: str, logits: np.ndarray, visible: np.ndarray = VISIBLE) -> Any:
    """Weights, gradients of logits and of what is learned, the derivative along a direction, weights of +- logits."""
    with jax.enable_x64(True):
        batch = np.stack([logits, -logits])
        weights, (d_logits, d_learned), along, alone = compiled(name)(batch, learned_of(name), visible)
        slopes = {key: numbers(value)[0] for key, value in d_learned.items()}
        return numbers(alone), numbers(d_logits)[0], slopes, float(along), numbers(weights)


def with_torch(name: str, logits: np.ndarray, visible: np.ndarray = VISIBLE, dtype: str = "float64") -> Any:
    """Weights, and gradients of logits and of what is learned."""
    x = make("torch", logits, dtype).requires_grad_()
    parameters = {key: make("torch", value, dtype).requires_grad_() for key, value in learned_of(name).items()}
    weights = mechanism(name)(x, torch.tensor(visible), parameters=parameters)
    (weights * make("torch", COTANGENT, dtype)).sum().backward()
    assert x.grad is not None
    return numbers(weights), numbers(x.grad), {k: numbers(v.grad) for k, v in parameters.items()}


def with_numpy(name: str, logits: np.ndarray, visible: np.ndarray = VISIBLE) -> np.ndarray:
    """Weights."""
    return mechanism(name)(logits, visible, parameters=learned_of(name))
