"""Softmax with a temperature as a mechanism: its policy, and what is said of each."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import sharpmax
from sharpmax.mechanisms import MECHANISMS, Temperature, find
from tests.mechanisms import cases


@pytest.mark.parametrize("name", cases.TEMPERATURES)
def test_the_policy_gives_the_same_weights(name: str) -> None:
    mechanism = find(name)
    logits = np.random.default_rng(0).normal(size=(3, 20)) * 2
    assert isinstance(mechanism, Temperature)
    assert mechanism.policy is mechanism.chosen_by
    learned = bool(mechanism.initial())
    assert mechanism.inference is not learned
    assert learned == (name in ("ssmax", "learned"))
    if not learned:
        want = sharpmax.adaptive_temperature_softmax(logits, policy=mechanism.policy)
        np.testing.assert_array_equal(mechanism(logits), want)


def test_a_learned_policy_starts_as_it_says() -> None:
    logits = np.random.default_rng(1).normal(size=(2, 1, 20))
    np.testing.assert_allclose(find("learned")(logits), find("softmax")(logits), rtol=1e-6)
    ssmax = sharpmax.softmax(logits, beta=math.log(20) / 3)
    np.testing.assert_allclose(find("ssmax")(logits), ssmax, rtol=1e-6)
    four = Temperature(sharpmax.LearnableTemperature(2, init=4.0))
    assert (four.heads, four.parameters()["log_beta"].shape) == (2, (2,))
    np.testing.assert_allclose(four(logits), find("constant")(logits), rtol=1e-6)


REFITTED = sharpmax.EntropyPolynomial((-0.1, 1.0, 0.2), domain=(0.5, 4.0))
TITLES: list[tuple[Any, str, bool]] = [
    (sharpmax.Constant(), "softmax", True),
    (sharpmax.Constant(2.0), "softmax, constant temperature", True),
    (sharpmax.PAPER, "adaptive temperature", True),
    (REFITTED, "adaptive temperature", True),
    (sharpmax.detached(sharpmax.PAPER), "adaptive temperature", True),
    (sharpmax.PAPER_HELD, "adaptive temperature, held", True),
    (sharpmax.EntropyCurve((0.5, 2.0), (1.0, 3.0)), "adaptive temperature, held", True),
    (sharpmax.EntropyPolynomial((1.0, 0.0)), "adaptive temperature, growing", False),
    (sharpmax.LogLength(), "log-n scaling", False),
    (sharpmax.LogLength.llama4(16), "log-n scaling", False),
    (sharpmax.LogLength(0.0, bias=2.0), "softmax, constant temperature", True),
    (sharpmax.LearnableLogLength(4), "SSMax", False),
    (sharpmax.LearnableTemperature(4), "learned temperature", True),
    (sharpmax.Hard(), "hard attention", False),
    (sharpmax.PerHead((sharpmax.PAPER, sharpmax.Constant(2.0))), "softmax with a temperature", True),
    (sharpmax.PerHead((sharpmax.PAPER, sharpmax.Hard())), "softmax with a temperature", False),
    (lambda stats: stats.sum, "softmax with a temperature", True),
]


@pytest.mark.parametrize(
    ("policy", "title", "disperses"), TITLES, ids=[f"{t}-{i}" for i, (_, t, _) in enumerate(TITLES)]
)
def test_what_is_said_is_said_of_the_policy(policy: Any, title: str, disperses: bool) -> None:
    about = Temperature(policy).about
    assert (about.title, about.disperses) == (title, disperses)
    assert all(isinstance(text, str) and text for text in about[:5])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (find("sigmoid"), r"expected a policy, got the mechanism Sigmoid\(\)"),
        (sharpmax.Constant, "expected chosen_by to be a policy of sharpmax, got <class"),
        ("adaptive", "expected chosen_by to be a policy of sharpmax, got 'adaptive'"),
    ],
)
def test_what_is_no_policy_is_refused(wrong: Any, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        Temperature(wrong)


def test_every_registered_temperature_has_words_of_its_own() -> None:
    about = [MECHANISMS[name].about for name in cases.TEMPERATURES]
    for part in ("title", "equation", "theorem"):
        assert len({getattr(a, part) for a in about}) == len(about), part


def row(n: int, lead: float) -> np.ndarray:
    return np.append(np.zeros(n - 1), lead)


def test_the_bound_of_the_lemma_holds_where_it_is_said_to_apply() -> None:
    """Lemma 2.1, a_i <= exp(beta spread) / n, with the largest beta of each policy."""
    for name, beta in (
        ("softmax", 1.0),
        ("constant", 4.0),
        ("adaptive", 2.4215),
        ("adaptive_held", 2.4215),
        ("learned", 1),
    ):
        for n in (10, 1000, 100_000):
            for lead in (0.5, 3.0):
                assert find(name)(row(n, lead)).max() <= math.exp(beta * lead) / n + 1e-9, name


def test_the_paper_polynomial_switches_off_and_the_held_one_does_not() -> None:
    flat = row(2000, 1.0)
    np.testing.assert_allclose(find("adaptive")(flat), find("softmax")(flat), rtol=1e-6)
    assert find("adaptive_held")(flat).max() > 3 * find("softmax")(flat).max()


@pytest.mark.parametrize(("name", "least"), [("log_n", math.log(16)), ("ssmax", 3.0)])
def test_the_lead_that_log_n_needs(name: str, least: float) -> None:
    """Above 1 / scale the weight goes to 1, at it to one half, below it to 0."""
    for lead, limits in ((least + 0.5, (0.85, 1.0)), (least, (0.49, 0.51)), (least - 0.5, (0.0, 0.12))):
        weights = [find(name)(row(n, lead)).max() for n in (10**3, 10**6)]
        assert limits[0] <= weights[1] <= limits[1]
        assert lead == least or (weights[1] > weights[0]) == (lead > least)


def test_a_squared_log_n_needs_no_lead() -> None:
    yarn = Temperature(sharpmax.LogLength.yarn(16, scale=2.0))
    assert yarn(row(10**6, 0.1)).max() > 0.99


def test_a_beta_that_grows_with_the_entropy_keeps_its_weight() -> None:
    growing = Temperature(sharpmax.EntropyPolynomial((1.0, 0.0)))
    assert growing(row(10**6, 1.5)).max() > 0.99
    assert growing(row(10**6, 0.5)).max() < 0.01


def test_hard_attention_is_shared_by_ties_alone() -> None:
    np.testing.assert_allclose(find("hard")(np.array([1.0, 1.0 - 1e-9, 1.0, 0.0])), [0.5, 0, 0.5, 0])
