"""One case that all of these mechanisms share, and what every one of them is held to."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from sharpmax.core.arrays import library_of
from sharpmax.mechanisms import Mechanism, find, load_mechanism
from tests.arrays import LIBRARIES, make, numbers
from tests.mechanisms.oracle_unnormalised import ORACLES

BATCH, HEADS, QUERIES, KEYS = 2, 2, 3, 5
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def mechanism(name: str) -> Mechanism:
    """The mechanism of that name, with parameters for each head where it has any."""
    found: Any = find(name)
    return replace(found, heads=HEADS) if found.initial() else found


@cache
def case(name: str) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Logits away from 0, a causal mask with one row that sees nothing, and learned numbers that differ by head."""
    random = np.random.default_rng(len(name))
    shape = (BATCH, HEADS * find(name).maps, QUERIES, KEYS)
    logits = random.normal(size=shape) * 2
    logits = logits + np.sign(logits) * 0.2
    logits = np.abs(logits) if name == "linear_elu" else logits
    visible = np.tril(np.ones((QUERIES, KEYS), bool), KEYS - QUERIES) & np.ones(shape, bool)
    visible[1, :, 1] = False
    learned = {key: np.array([0.3, -0.7]) + value for key, value in find(name).initial().items()}
    return logits, visible, learned


def expected(name: str, logits: np.ndarray, visible: np.ndarray, learned: dict[str, np.ndarray]) -> np.ndarray:
    """The oracle's weights of every batch."""
    per_head = {key: [float(v) for v in values] for key, values in learned.items()}
    return np.stack([ORACLES[name](one, mask, per_head) for one, mask in zip(logits, visible, strict=True)])


def spoilt(logits: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Logits with what must never be read in masked places."""
    return np.where(visible, logits, np.resize([math.nan, math.inf, -math.inf, 7.0], logits.shape))


def at_once(library: str, function: Any) -> Any:
    """``function``, compiled where the library is JAX: one operation after the other, each would be compiled."""
    return jax.jit(function) if library == "jax" else function


@cache
def cotangent() -> np.ndarray:
    """What weights are contracted with to a number."""
    return np.random.default_rng(1).normal(size=(BATCH, HEADS, QUERIES, KEYS))


@cache
def direction(name: str) -> np.ndarray:
    """Where logits move to in forward mode; learned numbers all move by 1."""
    return np.random.default_rng(2).normal(size=case(name)[0].shape)


@cache
def compiled(name: str) -> Any:
    """Weights, gradients, a derivative in forward mode, weights mapped over the batch: compiled by JAX once."""

    def scalar(logits: Any, learned: Any, visible: Any) -> Any:
        weights = mechanism(name)(logits, visible, parameters=learned)
        return jnp.sum(weights * cotangent()), weights

    def everything(logits: Any, learned: Any, visible: Any) -> Any:
        (_, weights), gradients = jax.value_and_grad(scalar, (0, 1), has_aux=True)(logits, learned, visible)
        tangents = (jnp.asarray(direction(name)), jax.tree.map(jnp.ones_like, learned))
        _, along, _ = jax.jvp(lambda a, b: scalar(a, b, visible), (logits, learned), tangents, has_aux=True)
        mapped = jax.vmap(lambda x, m: mechanism(name)(x, m, parameters=learned))(logits, visible)
        return weights, gradients, along, mapped

    return jax.jit(everything)


class ByJax(NamedTuple):
    """What JAX computes of a case, in float64."""

    weights: np.ndarray
    gradient: np.ndarray
    learned: dict[str, np.ndarray]
    along: float
    mapped: np.ndarray


def with_jax(name: str, logits: np.ndarray, visible: np.ndarray, learned: dict[str, np.ndarray]) -> ByJax:
    """Weights, both gradients, the derivative in forward mode, and weights mapped over the batch."""
    with jax.enable_x64(True):
        weights, (d_logits, d_learned), along, mapped = compiled(name)(logits, learned, visible)
        slopes = {key: numbers(value) for key, value in d_learned.items()}
        return ByJax(numbers(weights), numbers(d_logits), slopes, float(along), numbers(mapped))


def with_torch(name: str, logits: np.ndarray, visible: np.ndarray, learned: Any, dtype: str = "float64") -> Any:
    """Weights and both gradients."""
    x = make("torch", logits, dtype).requires_grad_()
    parameters = {key: make("torch", value, dtype).requires_grad_() for key, value in learned.items()}
    weights = mechanism(name)(x, torch.tensor(visible), parameters=parameters)
    (weights * make("torch", cotangent(), dtype)).sum().backward()
    assert x.grad is not None
    return numbers(weights), numbers(x.grad), {k: numbers(v.grad) for k, v in parameters.items()}


def check_values(name: str) -> None:
    """Every library gives the oracle's weights, whatever stands in masked places."""
    logits, visible, learned = case(name)
    want = expected(name, logits, visible, learned)
    assert (want[1, :, 1] == 0).all()
    for library in LIBRARIES:
        if library == "jax":
            found = with_jax(name, spoilt(logits, visible), visible, learned).weights
        else:
            parameters = {key: make(library, value, "float64") for key, value in learned.items()}
            found = numbers(
                mechanism(name)(
                    make(library, spoilt(logits, visible), "float64"),
                    make(library, visible, "bool"),
                    parameters=parameters,
                )
            )
        np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-15, err_msg=library)


def check_gradients(name: str) -> None:
    """Gradients of torch and JAX are the oracle's finite differences; none reaches what is masked."""
    logits, visible, learned = case(name)

    def value(at: np.ndarray, numbers_at: dict[str, np.ndarray]) -> float:
        return float(np.sum(expected(name, at, visible, numbers_at) * cotangent()))

    want = np.zeros(logits.shape)
    for place in zip(*np.nonzero(visible), strict=True):
        above, below = logits.copy(), logits.copy()
        above[place] += 1e-5
        below[place] -= 1e-5
        want[place] = (value(above, learned) - value(below, learned)) / 2e-5
    _, by_torch, learned_torch = with_torch(name, spoilt(logits, visible), visible, learned)
    _, by_jax, learned_jax, along, _ = with_jax(name, spoilt(logits, visible), visible, learned)
    np.testing.assert_allclose(by_torch, want, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(by_jax, by_torch, rtol=1e-10, atol=1e-13)
    assert (by_torch[~visible] == 0).all()
    assert (by_jax[~visible] == 0).all()
    for key, numbers_of in learned.items():
        for h in range(HEADS):
            shift = np.eye(HEADS)[h] * 1e-5
            slope = (
                value(logits, {**learned, key: numbers_of + shift})
                - value(logits, {**learned, key: numbers_of - shift})
            ) / 2e-5
            np.testing.assert_allclose([learned_torch[key][h], learned_jax[key][h]], slope, rtol=1e-6, atol=1e-8)
    by_hand = np.sum(by_jax * direction(name)) + sum(slopes.sum() for slopes in learned_jax.values())
    np.testing.assert_allclose(along, by_hand, rtol=1e-9)


def check_large(name: str) -> None:
    """Logits of 1e4 and -1e4 give finite weights and gradients, those of the oracle."""
    logits, visible, learned = case(name)
    large = np.sign(logits) * 1e4
    want = expected(name, large, visible, learned)
    scale = np.abs(want).max()
    for weights, gradient, *_ in (
        with_torch(name, large, visible, learned, "float32"),
        with_jax(name, large, visible, learned),
    ):
        np.testing.assert_allclose(weights, want, rtol=1e-5, atol=1e-5 * scale)
        assert np.isfinite(gradient).all()
    as_numpy = mechanism(name)(large.astype(np.float32), visible)
    assert np.isfinite(as_numpy).all()


def check_half(name: str) -> None:
    """Narrow types are computed in float32 and rounded once."""
    logits, visible, learned = case(name)
    for library in LIBRARIES:
        parameters = {key: make(library, value) for key, value in learned.items()}
        mask = make(library, visible, "bool")
        inputs = {dtype: make(library, logits, dtype) for dtype in EPSILON}

        def weigh(inputs: Any, mask: Any = mask, parameters: Any = parameters) -> Any:
            return {dtype: mechanism(name)(x, mask, parameters=parameters) for dtype, x in inputs.items()}

        for dtype, found in at_once(library, weigh)(inputs).items():
            assert str(found.dtype).endswith(dtype)
            rounded = {key: value.astype(np.float32) for key, value in learned.items()}
            want = expected(name, numbers(inputs[dtype]), visible, rounded)
            np.testing.assert_allclose(numbers(found), want, rtol=EPSILON[dtype], atol=1e-6, err_msg=library)


def check_vmap(name: str) -> None:
    """torch and JAX map over the batch as they compute it whole."""
    logits, visible, learned = case(name)
    want = expected(name, logits, visible, learned)
    parameters = {key: make("torch", value, "float64") for key, value in learned.items()}
    mapped = torch.func.vmap(lambda x, m: mechanism(name)(x, m, parameters=parameters))(
        make("torch", logits, "float64"), torch.tensor(visible)
    )
    np.testing.assert_allclose(numbers(mapped), want, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(
        with_jax(name, spoilt(logits, visible), visible, learned).mapped, want, rtol=1e-12, atol=1e-15
    )


def check_file(name: str, folder: Any) -> None:
    """Saved and read again, it is the same; what is said of it is complete."""
    saved = mechanism(name)
    saved.save(folder / "mechanism.json")
    assert load_mechanism(folder / "mechanism.json") == saved
    assert all(isinstance(text, str) and text for text in saved.about[:5])
    assert isinstance(saved.about.disperses, bool)
    assert not saved.inference
    assert {k: v.shape for k, v in saved.parameters().items()} == dict.fromkeys(saved.initial(), (HEADS,))


def namespace(library: str) -> Any:
    """The array-API namespace of a library."""
    return library_of(make(library, [0.0])).xp
