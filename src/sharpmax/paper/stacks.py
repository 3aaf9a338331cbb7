"""Stacks of attention layers with random weights, over tokens that come in kinds.

Tokens without positions that are equal at the start are equal after every layer. So a layer over n tokens of a few
kinds is a layer over the kinds, where each counts as often as it occurs, and n may be as large as a double.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Layer(NamedTuple):
    """Weights of one block.

    ``query``, ``key`` and ``value`` are ``[heads, d, d / heads]``, ``out`` ``[d, d]``; ``up`` ``[d, 2 d]`` and ``down``
    ``[2 d, d]`` are those of the feedforward network. There are no biases.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    out: np.ndarray
    up: np.ndarray
    down: np.ndarray


class Attended(NamedTuple):
    """What a block gives.

    Attributes:
      h: embeddings ``[kinds, d]`` after it.
      coefficients: ``[heads, kinds, kinds]``, what a token of one kind gives to each single token of another, 0 where
        it sees none.
      entropy: ``[heads, kinds]``, of the coefficients of a token over all tokens it sees, in nats.
    """

    h: np.ndarray
    coefficients: np.ndarray
    entropy: np.ndarray


def random_layers(generator: np.random.Generator, layers: int, features: int, heads: int, gain: float) -> list[Layer]:
    """Normal weights that keep the variance of their inputs; ``gain`` is the standard deviation of the logits."""
    width = features // heads

    def draw(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape) / math.sqrt(shape[-2])

    return [
        Layer(
            query=gain * draw(heads, features, width),
            key=draw(heads, features, width),
            value=draw(heads, features, width),
            out=draw(features, features),
            up=math.sqrt(2) * draw(features, 2 * features),
            down=draw(2 * features, features),
        )
        for _ in range(layers)
    ]


def block(layer: Layer, h: np.ndarray, counts: np.ndarray, *, residual: bool, beta: float = 1.0) -> Attended:
    """Attention and a feedforward network, each after a layer normalisation: ``h <- [h +] f(norm(h))``.

    Args:
      layer: the weights.
      h: embeddings ``[kinds, d]``.
      counts: how many tokens of each kind there are, ``[kinds]``; or, where it depends on the kind that looks, how many
        it sees, ``[kinds, kinds]``.
      residual: whether inputs are added to what is made of them.
      beta: inverse temperature; 0 gives all tokens that are seen the same coefficient.
    """
    x = normalised(h)
    query, key, value = (x @ weights for weights in (layer.query, layer.key, layer.value))
    logits = beta / math.sqrt(query.shape[-1]) * (query @ np.swapaxes(key, -1, -2))
    shown = np.broadcast_to(counts, logits.shape)
    exponent = logits - np.max(np.where(shown > 0, logits, -np.inf), axis=-1, keepdims=True)
    scaled = np.where(shown > 0, np.exp(np.minimum(exponent, 0.0)), 0.0)
    coefficients = scaled / np.sum(shown * scaled, axis=-1, keepdims=True)
    shares = shown * coefficients
    entropy = -np.sum(shares * np.log(np.where(coefficients > 0, coefficients, 1.0)), axis=-1)
    attended = np.swapaxes(shares @ value, 0, 1).reshape(len(h), -1) @ layer.out
    h = h + attended if residual else attended
    fed = np.maximum(normalised(h) @ layer.up, 0.0) @ layer.down
    return Attended(h + fed if residual else fed, coefficients, entropy)


def stacked(
    layers: Sequence[Layer],
    h: np.ndarray,
    counts: np.ndarray,
    *,
    residual: bool,
    betas: Sequence[float] | None = None,
) -> list[Attended]:
    """What every block of the stack gives."""
    found = []
    for i, layer in enumerate(layers):
        found.append(block(layer, h, counts, residual=residual, beta=1.0 if betas is None else betas[i]))
        h = found[-1].h
    return found


def normalised(h: np.ndarray) -> np.ndarray:
    """Layer normalisation without parameters."""
    centred = h - h.mean(axis=-1, keepdims=True)
    return centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + 1e-12)
