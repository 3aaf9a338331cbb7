"""Keys in chunks: every mechanism that folds gives the output of the whole row, in value and gradient."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch

from sharpmax.mechanisms import MECHANISMS, Mechanism, TopK
from sharpmax.mechanisms.base import counts
from tests.arrays import make, numbers
from tests.mechanisms import cases_unnormalised as cases

KEYS = 7
FOLDING = {name: mechanism for name, mechanism in MECHANISMS.items() if mechanism.folds} | {"top_k": TopK(3)}
"""Every mechanism that folds; top-k of fewer keys than a row has."""


def inputs(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Logits, a causal mask with a row that sees nothing, values, and what the output is contracted with."""
    random = np.random.default_rng(5)
    logits = random.normal(size=(2, 3, KEYS)) * 2
    visible = np.tril(np.ones((2, 3, KEYS), bool), KEYS - 3)
    visible[1, 0] = False
    logits = np.abs(logits) + 0.1 if name == "linear_elu" else logits
    return logits, visible, random.normal(size=(2, KEYS, 4)), random.normal(size=(2, 3, 4))


def folded(mechanism: Any, xp: Any, logits: Any, visible: Any, value: Any, size: int) -> Any:
    """The output, from chunks of ``size`` keys."""
    held = xp.where(visible, logits, 0.0)
    count = counts(xp, visible, held)
    starts = list(range(0, KEYS, size))
    carry = None
    for start in reversed(starts) if mechanism.last_first else starts:
        keys = slice(start, start + size)
        carry = mechanism.fold(xp, carry, held[..., keys], visible[..., keys], value[..., keys, :], count, {})
    return mechanism.finish(xp, carry)


def test_what_folds() -> None:
    assert {"sigmoid", "linear", "linear_elu", "stick_breaking", "relu_squared", "top_k"} <= set(FOLDING)
    assert not {"softmax", "selective", "differential", "threshold_relative", "step"} & set(FOLDING)
    assert not Mechanism.folds


@pytest.mark.parametrize("name", FOLDING)
def test_values_and_gradients_of_chunks(name: str) -> None:
    logits, visible, value, cotangent = inputs(name)
    mechanism = FOLDING[name]
    x, v = (make("torch", a, "float64").requires_grad_() for a in (logits, value))
    want = mechanism(x, torch.tensor(visible)) @ v
    whole = torch.autograd.grad((want * make("torch", cotangent, "float64")).sum(), (x, v))
    assert want[1, 0].eq(0).all()
    for size in (1, 3, KEYS):
        as_numpy = folded(mechanism, np, logits, visible, value, size)
        np.testing.assert_allclose(as_numpy, numbers(want), rtol=1e-12, atol=1e-14)
        found = folded(mechanism, cases.namespace("torch"), x, torch.tensor(visible), v, size)
        np.testing.assert_allclose(numbers(found), numbers(want), rtol=1e-12, atol=1e-14)
        parts = torch.autograd.grad((found * make("torch", cotangent, "float64")).sum(), (x, v))
        for part, all_at_once in zip(parts, whole, strict=True):
            np.testing.assert_allclose(numbers(part), numbers(all_at_once), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", FOLDING)
def test_chunks_in_jax(name: str) -> None:
    logits, visible, value, cotangent = inputs(name)

    def total(x: Any, v: Any) -> Any:
        output = folded(FOLDING[name], cases.namespace("jax"), x, jax.numpy.asarray(visible), v, 3)
        return (output * cotangent).sum(), output

    with jax.enable_x64(True):
        gradients, output = jax.jit(jax.grad(total, (0, 1), has_aux=True))(logits, value)
    x, v = (make("torch", a, "float64").requires_grad_() for a in (logits, value))
    want = FOLDING[name](x, torch.tensor(visible)) @ v
    whole = torch.autograd.grad((want * make("torch", cotangent, "float64")).sum(), (x, v))
    np.testing.assert_allclose(numbers(output), numbers(want), rtol=1e-12, atol=1e-14)
    for part, all_at_once in zip(gradients, whole, strict=True):
        np.testing.assert_allclose(numbers(part), numbers(all_at_once), rtol=1e-11, atol=1e-13)


def test_stick_breaking_in_chunks_of_large_logits() -> None:
    """What is left is carried as a logarithm: keys that take all, or nothing, in float32."""
    logits = np.array([[1e4, -1e4, 0.5, 1e4, -0.2, -1e4, 0.1]], np.float32)
    visible, value = np.ones((1, KEYS), bool), np.eye(KEYS, dtype=np.float32)
    mechanism = MECHANISMS["stick_breaking"]
    found = folded(mechanism, np, logits, visible, value, 2)
    np.testing.assert_allclose(found, mechanism(logits), rtol=1e-6, atol=1e-30)
