"""Remark B.2 on random stacks: whether one item a among n - 1 items b can still be told from b alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from .figures import numbers
from .stacks import random_layers, stacked

LAYERS, FEATURES, HEADS, GAIN, STACKS = 2, 64, 4, 1.0, 5
SIZES = tuple(2**k for k in range(1, 41))
LARGEST_LAID_OUT = 256
ARRANGEMENTS = {
    "bert": "BERT: {a, b, ..., b}, read at any b",
    "gpt_last": "GPT: (b, ..., b, a), read at a, the last token",
    "gpt_first": "GPT: (a, b, ..., b), read at the last token",
    "bert_residual": "BERT with residuals, read at any b",
    "gpt_last_residual": "GPT with residuals: (b, ..., b, a), read at a",
}
"""Remark B.2's Transformers, and the order it does not look at."""


def order_effects(seed: int = 0) -> dict[str, Any]:
    """How far {a, b, ..., b} and {b, ..., b} are apart after a stack of random layers, for every n and arrangement."""
    found = [_of_stack(np.random.default_rng((seed, i))) for i in range(STACKS)]
    by = {name: [of_stack[name] for of_stack in found] for name in ARRANGEMENTS}
    return {
        "layers": LAYERS,
        "features": FEATURES,
        "heads": HEADS,
        "gain": GAIN,
        "stacks": STACKS,
        "seed": seed,
        "distance": "of the output at the token that is read from that of {b, ..., b}, relative to its norm",
        "arrangements": {
            name: {
                "label": label,
                "n": list(SIZES[: len(by[name][0])]),
                "low": numbers(np.min(by[name], axis=0)),
                "median": numbers(np.median(by[name], axis=0)),
                "high": numbers(np.max(by[name], axis=0)),
            }
            for name, label in ARRANGEMENTS.items()
        },
    }


def _of_stack(generator: np.random.Generator) -> dict[str, list[float]]:
    """The distances of one stack. Only with a first in a causal stack is every token another one, and laid out."""
    layers = random_layers(generator, LAYERS, FEATURES, HEADS, GAIN)
    a, b = generator.standard_normal((2, FEATURES))
    both = np.stack([a, b])

    def distance(h: np.ndarray, counts: np.ndarray, read_at: int, residual: bool) -> float:
        alone = stacked(layers, b[None], np.ones(1), residual=residual)[-1].h[0]
        got = stacked(layers, h, counts, residual=residual)[-1].h[read_at]
        return float(np.linalg.norm(got - alone) / np.linalg.norm(alone))

    found = {}
    for residual, suffix in ((False, ""), (True, "_residual")):
        found[f"bert{suffix}"] = [distance(both, np.array([1, n - 1]), 1, residual) for n in SIZES]
        seen = [np.array([[1, n - 1], [0, 1]]) for n in SIZES]  # by the last token, a, and by a token b: b alone
        found[f"gpt_last{suffix}"] = [distance(both, counts, 0, residual) for counts in seen]
    found["gpt_first"] = []
    for n in SIZES:
        if n <= LARGEST_LAID_OUT:
            h = np.concatenate([a[None], np.repeat(b[None], n - 1, axis=0)])
            found["gpt_first"].append(distance(h, np.tril(np.ones((n, n))), -1, residual=False))
    return found
