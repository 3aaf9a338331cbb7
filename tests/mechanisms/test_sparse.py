"""Sparsemax, alpha-entmax and ASEntmax: against the entmax package, and in their limits."""

from __future__ import annotations

import math
from typing import Any

import entmax as package
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from sharpmax.mechanisms import ASEntmax, Entmax, LearnedEntmax, Sparsemax, deformed
from sharpmax.mechanisms.deformed import entmax_by_steps
from tests.arrays import LIBRARIES, make, numbers
from tests.jax.attention_cases import quick
from tests.mechanisms import oracle

ALPHAS = (1.05, 1.25, 1.4999, 1.5, 1.75, 1.999, 2.0)


def rows() -> np.ndarray:
    """Random rows, and rows that take many steps: levels, ties, and logits on the edge of the support."""
    n = 60
    random = np.random.default_rng(0).normal(size=(6, n)) * np.array([[0.01], [0.3], [1], [3], [10], [40]])
    flat, edge = np.zeros(n), np.full(n, -0.999)
    edge[0] = 0
    levels = np.repeat(-0.3 * np.arange(6), [1, 2, 4, 8, 16, 29])
    return np.stack([*random, flat, edge, levels, -np.linspace(0, 1, n), -np.geomspace(1e-9, 10, n)])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_weights_are_those_of_a_bisection(alpha: float) -> None:
    want = np.stack([oracle.entmax(s, alpha) for s in rows()])
    found = Entmax(alpha)(rows())
    np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-12)
    np.testing.assert_allclose(Entmax(alpha)(rows().astype(np.float32)), want, rtol=1e-4, atol=2e-6)
    if alpha == 2:
        np.testing.assert_array_equal(Sparsemax()(rows()), found)


def by_package(logits: torch.Tensor, alpha: Any) -> torch.Tensor:
    if alpha == 2:
        return package.sparsemax(logits, dim=-1)
    return package.entmax15(logits, dim=-1) if alpha == 1.5 else by_bisection(logits, alpha)


def by_bisection(logits: torch.Tensor, alpha: Any) -> torch.Tensor:
    return package.entmax_bisect(logits, alpha, n_iter=100)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 1.7, 2.0])
def test_values_and_gradients_are_those_of_the_package(alpha: float) -> None:
    logits = torch.tensor(np.random.default_rng(1).normal(size=(5, 11)) * 2)
    cotangent = torch.tensor(np.random.default_rng(2).normal(size=(5, 11)))
    results = []
    for function in (Entmax(alpha), lambda x: by_package(x, torch.tensor(alpha, dtype=torch.float64))):
        x = logits.clone().requires_grad_()
        weights = function(x)
        results.append((weights, torch.autograd.grad((weights * cotangent).sum(), x)[0]))
    torch.testing.assert_close(*(weights for weights, _ in results), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(*(slopes for _, slopes in results), rtol=1e-7, atol=1e-10)


def test_the_gradient_of_alpha_is_that_of_the_package() -> None:
    logits = torch.tensor(np.random.default_rng(3).normal(size=(3, 1, 11)) * 2)
    raw = torch.tensor([-1.0, 0.0, 1.5], dtype=torch.float64, requires_grad=True)
    cotangent = torch.tensor(np.random.default_rng(4).normal(size=(3, 1, 11)))
    ours = LearnedEntmax(3)(logits, parameters={"alpha_logit": raw})
    theirs = by_bisection(logits, (1 + torch.sigmoid(raw))[:, None, None])
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    slopes = [torch.autograd.grad((weights * cotangent).sum(), raw)[0] for weights in (ours, theirs)]
    torch.testing.assert_close(*slopes, rtol=1e-7, atol=1e-10)


def test_second_derivatives() -> None:
    """Where weights come by steps; sorting is differentiated as it stands."""
    z = torch.tensor([[0.3, -0.2, 0.9, -1.1], [1.4, 1.0, -3.0, 0.2]], dtype=torch.float64, requires_grad=True)
    alpha_logit = torch.tensor(-0.4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(Entmax(1.3), (z,), fast_mode=True)
    learned = LearnedEntmax()
    assert torch.autograd.gradgradcheck(lambda z, a: learned(z, parameters={"alpha_logit": a}), (z, alpha_logit))


def test_an_alpha_of_1_is_said_to_be_softmax() -> None:
    about = Entmax(1.0).about
    assert about.disperses
    assert about.theorem.startswith("applies")
    assert not Entmax(1.01).about.disperses
    row = np.append(np.zeros(10**5), 2.0)
    np.testing.assert_allclose(Entmax(1.0)(row).max(), math.exp(2) / (10**5 + math.exp(2)), rtol=1e-9)


def test_zeros_are_zeros_and_have_no_gradient() -> None:
    x = torch.tensor([3.0, 2.8, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    for mechanism in (Sparsemax(), Entmax(), Entmax(1.8)):
        weights = mechanism(x)
        assert (weights[2:] == 0).all()
        (gradient,) = torch.autograd.grad(weights[0], x)
        assert (gradient[2:] == 0).all()
        assert gradient[0] == pytest.approx(-float(gradient[1]))


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_limit_of_softmax(library: str, dtype: str) -> None:
    """At e = alpha - 1 = 0: p = softmax(s), and dp / de = p (sum_j p_j log(p_j)^2 - log(p)^2) / 2."""
    s = np.random.default_rng(5).normal(size=8) * 2
    p = oracle.softmax(s, 1.0)
    cotangent = np.random.default_rng(6).normal(size=8)
    slope = np.sum(cotangent * p * (np.sum(p * np.log(p) ** 2) - np.log(p) ** 2) / 2)
    tolerance = 2e-6 if dtype == "float32" else 1e-12
    for e in (0.0, 1e-9):
        weights, found = by_hand(library, dtype, s - s.max(), e, cotangent)
        np.testing.assert_allclose(weights, p, rtol=tolerance * 10, atol=1e-8 if e else 1e-16)
        assert found == pytest.approx(slope, rel=tolerance * 10 + 100 * e)


def by_hand(library: str, dtype: str, z: np.ndarray, e: float, cotangent: np.ndarray) -> tuple[np.ndarray, float]:
    """Weights at e, and the derivative of their product with the cotangent with respect to it."""
    if library == "torch":
        import array_api_compat.torch as xp

        at = make("torch", [e], dtype).requires_grad_()
        weights = entmax_by_steps(xp, make("torch", z, dtype), torch.ones(len(z), dtype=torch.bool), at)
        (slope,) = torch.autograd.grad((weights * make("torch", cotangent, dtype)).sum(), at)
        return numbers(weights), float(slope[0])
    with jax.enable_x64(dtype == "float64"):
        weights, slope = limit_in_jax(*(make("jax", a, dtype) for a in (z, [e], cotangent)))
        return numbers(weights), float(slope[0])


@quick
def limit_in_jax(z: Any, e: Any, cotangent: Any) -> Any:
    def scalar(at: Any) -> Any:
        weights = entmax_by_steps(jnp, z, jnp.ones(len(z), bool), at)
        return jnp.sum(weights * cotangent), weights

    slope, weights = jax.grad(scalar, has_aux=True)(e)
    return weights, slope


@pytest.mark.parametrize("alpha_logit", [-200.0, -30.0, 30.0, 200.0])
def test_a_saturated_alpha_is_softmax_or_sparsemax(alpha_logit: float) -> None:
    x = torch.tensor(np.random.default_rng(7).normal(size=(4, 9)), dtype=torch.float32, requires_grad=True)
    raw = torch.tensor(alpha_logit, requires_grad=True)
    weights = LearnedEntmax()(x, parameters={"alpha_logit": raw})
    want = torch.softmax(x, -1) if alpha_logit < 0 else package.sparsemax(x, dim=-1)
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad((weights**2).sum(), (x, raw))
    assert all(torch.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("gap", [0.2, 0.7, 1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_the_least_weight_of_a_key_that_leads(alpha: float, gap: float) -> None:
    """min((alpha - 1) g, 1)^(1 / (alpha - 1)) whatever n; reached as n grows if all others are equal."""
    least = min((alpha - 1) * gap, 1) ** (1 / (alpha - 1))
    for n in (2, 30, 1000, 50000):
        others = -gap - np.abs(np.random.default_rng(n).normal(size=n)) * 0.3
        assert Entmax(alpha)(np.append(others, 0.0)).max() >= least - 1e-12
    n = 200_000
    low = (1 / n) ** (alpha - 1)  # all others together have at most 1
    bound = min(((alpha - 1) * gap + low), 1) ** (1 / (alpha - 1))
    assert least - 1e-12 <= Entmax(alpha)(np.append(np.full(n, -gap), 0.0)).max() <= bound + 1e-12
    if (alpha - 1) * gap >= 1:
        assert np.count_nonzero(Entmax(alpha)(np.append(np.full(n, -gap), 0.0))) == 1


@pytest.mark.parametrize("mechanism", [Sparsemax(), Entmax(), Entmax(1.3), Entmax(1.0)], ids=str)
def test_long_rows_in_float32(mechanism: Any) -> None:
    """A hundred thousand keys that share a row: weights of 1e-5 keep their digits."""
    n = 100_000
    np.testing.assert_allclose(mechanism(np.full((1, n), 7.0, np.float32)), 1 / n, rtol=1e-5)
    s = (np.random.default_rng(8).random(n) * 2e-5).astype(np.float32)
    np.testing.assert_allclose(mechanism(s), mechanism(s.astype(np.float64)), rtol=2e-2, atol=1e-8)


@pytest.mark.parametrize("library", LIBRARIES)
def test_asentmax_grows_with_the_length(library: str) -> None:
    """Scale 1 + softplus(b) log(n + 1)^(2 tanh(g)), where n does not count what is masked."""
    logits = np.random.default_rng(9).normal(size=(1, 2, 6))
    visible = np.ones((1, 2, 6), bool)
    visible[:, 1, 3:] = False
    parameters = {"beta_raw": make(library, np.array([0.7])), "gamma_raw": make(library, np.array([0.2]))}
    weigh = ASEntmax(1, alpha=2.0, delta=0.5)
    found = (quick(weigh) if library == "jax" else weigh)(
        make(library, logits), make(library, visible, "bool"), parameters=parameters
    )
    for q, n in enumerate((6, 3)):
        scale = 0.5 + math.log(1 + math.exp(0.7)) * math.log(n + 1) ** (2 * math.tanh(0.2))
        np.testing.assert_allclose(numbers(found)[0, q, :n], oracle.entmax(scale * logits[0, q, :n], 2.0), atol=1e-6)


def test_where_learned_numbers_start() -> None:
    assert LearnedEntmax(init=1.5).initial() == {"alpha_logit": 0.0}
    s = np.random.default_rng(10).normal(size=(1, 7))
    np.testing.assert_allclose(LearnedEntmax(init=1.2)(s), Entmax(1.2)(s), rtol=1e-5)
    assert {k: v.shape for k, v in ASEntmax(3).parameters().items()} == {"beta_raw": (3,), "gamma_raw": (3,)}
    np.testing.assert_allclose(ASEntmax()(s), Entmax()((1 + math.log(2)) * s), rtol=1e-6)


def test_steps_are_compiled_once_for_a_shape_in_jax() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 37)), jnp.float32)
    Entmax(1.7)(x)
    search: Any = deformed._jax_search()
    before = search._cache_size()
    for alpha in (1.7, 1.3):
        Entmax(alpha)(x)
    assert search._cache_size() == before
