"""Top-k and the window: what they keep, ties, where a query stands, and keys in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from sharpmax.core.arrays import library_of
from sharpmax.mechanisms import TopK, Window, find
from sharpmax.mechanisms.base import counts
from tests.arrays import LIBRARIES, make, numbers
from tests.jax.attention_cases import quick
from tests.mechanisms import oracle


@pytest.mark.parametrize("library", LIBRARIES)
def test_of_equal_logits_the_earliest_keys_are_taken(library: str) -> None:
    logits = make(library, [[1.0, 2.0, 1.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0], [3.0, 1.0, 1.0, 2.0, 1.0]])
    where = make(library, [[True] * 5, [False, True, True, True, True], [True] * 5], "bool")
    weights = numbers(TopK(3)(logits, where))
    np.testing.assert_array_equal(weights > 0, np.array([[1, 1, 0, 0, 1], [0, 1, 1, 1, 0], [1, 1, 0, 1, 0]], bool))
    np.testing.assert_allclose(weights[0], np.array([1, np.e, 0, 0, np.e]) / (1 + 2 * np.e), rtol=1e-6)


@pytest.mark.parametrize("library", LIBRARIES)
def test_k_beyond_the_row_is_softmax(library: str) -> None:
    logits = make(library, np.random.default_rng(0).normal(size=(3, 5)))
    for mechanism in (TopK(5), TopK(50), Window(50)):
        row = slice(-1, None) if isinstance(mechanism, Window) else slice(None)
        np.testing.assert_allclose(numbers(mechanism(logits))[row], numbers(find("softmax")(logits))[row], rtol=1e-6)


@pytest.mark.parametrize(("kind", "name"), [(TopK, "k"), (Window, "size")])
def test_sizes_are_whole_numbers(kind: Any, name: str, tmp_path: Path) -> None:
    found = kind(np.int64(3))
    found.save(tmp_path / "saved.json")
    assert found == kind(3) == kind.load(tmp_path / "saved.json")
    for wrong in (0, 2.0, True, "3", None):
        with pytest.raises(ValueError, match=f"expected {name} to be a whole number of at least 1, got {wrong!r}"):
            kind(wrong)


def test_at_most_k_share_a_row() -> None:
    random = np.random.default_rng(1)
    for n in (1, 7, 400):
        logits = random.integers(0, 4, size=(20, n)).astype(np.float32)
        for k in (1, 3, 16):
            weights = TopK(k)(logits)
            np.testing.assert_array_equal(np.count_nonzero(weights, axis=-1), min(k, n))
            assert (weights.max(-1) >= 1 / k - 1e-6).all()


@pytest.mark.parametrize(
    ("library", "queries", "keys"),
    [(library, 2, 5) for library in LIBRARIES] + [("numpy", 4, 4), ("torch", 1, 6), ("numpy", 5, 3)],
)
def test_where_a_query_stands(library: str, queries: int, keys: int) -> None:
    """The last query beside the last key; queries before the first key see nothing."""
    weights = numbers(Window(2)(make(library, np.zeros((queries, keys)))))
    for q in range(queries):
        own = q + keys - queries
        seen = [k for k in (own - 1, own) if 0 <= k < keys]
        want = np.zeros(keys)
        want[seen] = 1 / max(len(seen), 1)
        np.testing.assert_allclose(weights[q], want, rtol=1e-6)


def test_a_window_counts_masked_keys_too() -> None:
    where = np.array([True, True, True, False, True])
    np.testing.assert_allclose(Window(3)(np.zeros(5), where), [0, 0, 0.5, 0, 0.5])


def chunks(mechanism: TopK, size: int) -> Any:
    """The output of attention with keys in chunks of ``size``."""

    def output(logits: Any, visible: Any, value: Any) -> Any:
        xp = library_of(logits).xp
        held = xp.where(visible, logits, 0.0)
        carry = None
        for start in range(0, logits.shape[-1], size):
            keys = slice(start, start + size)
            carry = mechanism.fold(
                xp, carry, held[..., keys], visible[..., keys], value[..., keys, :], counts(xp, visible, held), {}
            )
        assert carry is not None
        return mechanism.finish(xp, carry)

    return output


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("size", [2, 5])
def test_keys_in_chunks(library: str, size: int) -> None:
    """Ties across chunks, rows with fewer keys than k, and a row without any; gradients of logits and values."""
    random = np.random.default_rng(2)
    logits = random.integers(0, 3, size=(2, 3, 9)) + 0.0
    visible = random.random((2, 3, 9)) < 0.6
    visible[0, 0], visible[1, 1, 2:] = False, False
    value, cotangent = random.normal(size=(2, 9, 4)), make(library, random.normal(size=(2, 3, 4)))
    places = [(h, q) for h in range(2) for q in range(3)]
    weights = np.reshape([oracle.row("top_k", logits[p], visible[p], 8, {}) for p in places], logits.shape)
    mask, run = make(library, visible, "bool"), chunks(TopK(oracle.TOP), size)
    found = (quick(run) if library == "jax" else run)(make(library, logits), mask, make(library, value))
    np.testing.assert_allclose(numbers(found), weights @ value, rtol=1e-5, atol=1e-6)
    if library == "numpy" or size == 2:
        return
    slopes = pulled(library, run, cotangent)(make(library, logits), mask, make(library, value))
    pull = numbers(cotangent) @ np.swapaxes(value, -1, -2)
    want = weights * (pull - np.sum(weights * pull, axis=-1, keepdims=True))
    np.testing.assert_allclose(numbers(slopes[0]), want, rtol=1e-4, atol=1e-6)
    by_value = np.swapaxes(weights, -1, -2) @ numbers(cotangent)
    np.testing.assert_allclose(numbers(slopes[1]), by_value, rtol=1e-5, atol=1e-6)


def pulled(library: str, run: Any, cotangent: Any) -> Any:
    """The gradients of logits and of values."""

    def scalar(logits: Any, mask: Any, value: Any) -> Any:
        return (run(logits, mask, value) * cotangent).sum()

    if library == "jax":
        return quick(jax.grad(scalar, (0, 2)))

    def by_torch(logits: Any, mask: Any, value: Any) -> Any:
        inputs = logits.requires_grad_(), value.requires_grad_()
        return torch.autograd.grad(scalar(inputs[0], mask, inputs[1]), inputs)

    return by_torch
