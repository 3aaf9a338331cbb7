"""Policies: values, ranges, JSON, lowering, composition, and what they refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import sharpmax
from sharpmax.core.policies import LearnableStructure, Lowered, lowered
from tests.arrays import LIBRARIES, gradient, make, numbers

RNG = np.random.default_rng(2)
SIZES = (1, 3, 20, 300, 3000)
POLYNOMIAL = sharpmax.PAPER.coefficients
EVERY = [
    sharpmax.Constant(1.7),
    sharpmax.PAPER,
    sharpmax.PAPER_HELD,
    sharpmax.EntropyPolynomial(POLYNOMIAL, domain=(0.6, 5.0), beyond="hold_end"),
    sharpmax.EntropyPolynomial(POLYNOMIAL, domain=(0.6, 5.0), beyond="hold_peak"),
    sharpmax.EntropyPolynomial(POLYNOMIAL, domain=(0.0, 50.0), beyond="raise"),
    sharpmax.EntropyPolynomial((2.0,), threshold=0, floor=0),
    sharpmax.EntropyCurve((0.5, 2.0, 6.0), (1.0, 3.0, 4.0)),
    sharpmax.LogLength(),
    sharpmax.LogLength(0.4, 0.2),
    sharpmax.LogLength.relative(16),
    sharpmax.LogLength.yarn(16),
    sharpmax.LogLength.llama4(16),
    sharpmax.Hard(),
    sharpmax.detached(sharpmax.PAPER),
    sharpmax.PerHead((sharpmax.PAPER, sharpmax.Constant(2.0))),
]


def stats_of(library: str, dtype: str = "float32") -> sharpmax.RowStats:
    """Statistics of rows of many lengths and entropies, [2 heads, rows]."""
    rng = np.random.default_rng(3)
    rows = np.full((2 * len(SIZES) * 4, max(SIZES)), -np.inf)
    for i, row in enumerate(rows):
        n = SIZES[i % len(SIZES)]
        row[:n] = rng.normal(size=n) * 10 ** rng.uniform(-2, 1)
    return sharpmax.row_stats(make(library, rows.reshape(2, -1, max(SIZES)), dtype))


def of_entropy(entropy: float) -> sharpmax.RowStats:
    """Statistics with a given entropy: ``n`` equal logits have log n, and a real ``n`` will do."""
    one = np.ones(())
    return sharpmax.RowStats(0 * one, np.exp(entropy) * one, 0 * one, 0 * one, np.int32(np.ceil(np.exp(entropy))))


def test_the_paper_polynomial() -> None:
    for entropy in (0.2, 0.5, 0.6, 1.0, 2.0, 4.412, 5.0, 5.94, 5.95, 7.0, 12.0):
        value = np.polyval([-0.037, 0.481, -2.3, 4.917, -1.791], entropy)
        expected = max(value, 1.0) if entropy > 0.5 else 1.0
        assert sharpmax.PAPER(of_entropy(entropy)) == pytest.approx(expected, rel=1e-12)
    assert sharpmax.PAPER_HELD(of_entropy(4.0)) == sharpmax.PAPER(of_entropy(4.0))
    peak = sharpmax.PAPER_HELD(of_entropy(12.0))
    assert peak == pytest.approx(2.421, abs=5e-4)
    assert peak == pytest.approx(
        max(float(sharpmax.PAPER(of_entropy(h))) for h in np.linspace(0.5, 6, 20001)), rel=1e-7
    )


def test_beyond_the_fitted_range() -> None:
    line = {"coefficients": (1.0, 0.0), "domain": (2.0, 3.0), "threshold": 0.5}
    beta = {b: sharpmax.EntropyPolynomial(beyond=b, **line) for b in ("extrapolate", "hold_end", "hold_peak", "raise")}
    assert [float(beta["extrapolate"](of_entropy(h))) for h in (1.5, 2.5, 5.0)] == pytest.approx([1.5, 2.5, 5.0])
    assert [float(beta["hold_end"](of_entropy(h))) for h in (1.5, 2.5, 5.0)] == pytest.approx([2.0, 2.5, 3.0])
    assert [float(beta["hold_peak"](of_entropy(h))) for h in (1.5, 2.5, 5.0)] == pytest.approx([2.0, 2.5, 3.0])
    assert float(beta["raise"](of_entropy(2.5))) == pytest.approx(2.5)
    with pytest.raises(ValueError, match=r"entropy \(5\) is outside of the fitted range 2 to 3"):
        beta["raise"](of_entropy(5.0))
    hill = sharpmax.EntropyPolynomial((-1.0, 4.0, -1.0), domain=(1.0, 3.0), beyond="hold_peak")
    assert [float(hill(of_entropy(h))) for h in (1.5, 2.0, 2.5, 9.0)] == pytest.approx([2.75, 3.0, 3.0, 3.0])
    valley = sharpmax.EntropyPolynomial((1.0, -4.0, 6.0), domain=(1.0, 2.5), beyond="hold_peak")
    assert [float(valley(of_entropy(h))) for h in (0.8, 1.0, 9.0)] == pytest.approx([3.0, 3.0, 3.0])


def test_raise_is_refused_where_there_are_no_values() -> None:
    policy = sharpmax.EntropyPolynomial(POLYNOMIAL, domain=(0.0, 50.0), beyond="raise")
    with pytest.raises(ValueError, match="being traced"):
        jax.jit(lambda x: sharpmax.adaptive_temperature_softmax(x, policy=policy))(jnp.ones(4))


@pytest.mark.parametrize("n", [1, 7, 16, 17, 100, 40000])
def test_length_policies(n: int) -> None:
    stats = sharpmax.row_stats(np.zeros((1, n)))
    for policy, expected in (
        (sharpmax.LogLength(), math.log(n)),
        (sharpmax.LogLength(0.43, 0.1), 0.43 * math.log(n) + 0.1),
        (sharpmax.LogLength.relative(16), max(1.0, math.log(n) / math.log(16))),
        (sharpmax.LogLength.yarn(16), (1 + 0.1 * math.log(max(n / 16, 1))) ** 2),
        (sharpmax.LogLength.llama4(16), 1 + 0.1 * math.log(n // 16 + 1)),
    ):
        assert float(policy(stats)[0]) == pytest.approx(expected, rel=1e-12, abs=1e-12), policy


def test_only_what_is_not_masked_counts_as_length() -> None:
    x = np.zeros((1, 100))
    masked = sharpmax.adaptive_temperature_softmax(x, where=np.arange(100) < 10, policy=sharpmax.LogLength())
    np.testing.assert_allclose(masked[0, :10], 0.1)
    beta = sharpmax.LogLength()(sharpmax.row_stats(x, where=np.arange(100) < 10))
    assert float(beta[0]) == pytest.approx(math.log(10))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("policy", EVERY, ids=str)
def test_every_library_gives_the_same_beta(library: str, policy: Any) -> None:
    stats, expected = stats_of(library), numbers(policy(stats_of("numpy", "float64")))
    beta = policy(stats)
    assert beta.dtype == stats.sum.dtype
    assert tuple(beta.shape) == tuple(stats.sum.shape)
    np.testing.assert_allclose(numbers(beta), expected, rtol=3e-4)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("policy", [p for p in EVERY if lowered(p)], ids=str)
def test_the_lowered_form_is_the_same_policy(library: str, policy: Any) -> None:
    stats = stats_of(library)
    form = lowered(policy)
    assert form is not None
    np.testing.assert_allclose(numbers(form(stats)), numbers(policy(stats)), rtol=2e-6)
    assert all(isinstance(c, float) for c in form.coefficients)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("policy", [p for p in EVERY if lowered(p)], ids=str)
def test_the_slope_is_the_derivative_of_beta(library: str, policy: Any) -> None:
    form = lowered(policy)
    assert form is not None
    v = np.random.default_rng(5).uniform(0.01, 9.0, size=50)
    total = torch.tensor(np.exp(v), requires_grad=True)  # the entropy is log(sum), and the other variable log(count)
    zero = torch.zeros_like(total)
    beta = form(sharpmax.RowStats(zero, total, zero, None, total)) + 0 * total
    expected = numbers(torch.autograd.grad(beta.sum(), total)[0] * total)
    fields = (make(library, x) for x in (0 * v, np.exp(v), 0 * v, 0 * v, np.exp(v)))
    slope = form.slope(sharpmax.RowStats(*fields))
    np.testing.assert_allclose(numbers(slope), expected, rtol=1e-3, atol=1e-5)
    assert not form.constant or form.variable == "log_count" or not expected.any()


def test_the_slope_at_a_bound_is_that_of_autograd() -> None:
    line = Lowered("entropy", (2.0, 0.5), lo=0.0, hi=math.log(2.0), threshold=-1.0, floor=0.5)
    total = torch.tensor([1.0, 1.5, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    stats = sharpmax.RowStats(torch.zeros(4), total, torch.zeros(4, dtype=torch.float64), None, torch.ones(4))
    (expected,) = torch.autograd.grad(line(stats).sum(), total)
    torch.testing.assert_close(line.slope(stats).detach(), expected * total.detach())
    assert expected[0] == 0.5  # one half for the bound, one half for the floor


def test_what_has_no_lowered_form_says_so() -> None:
    checking = sharpmax.EntropyPolynomial(POLYNOMIAL, domain=(0.0, 50.0), beyond="raise")
    for policy in (
        checking,
        sharpmax.Hard(),
        sharpmax.LogLength.llama4(),
        sharpmax.PerHead((sharpmax.PAPER,)),
        lambda stats: 1.0,
    ):
        assert lowered(policy) is None


@pytest.mark.parametrize(
    "policy", [*EVERY, sharpmax.LearnableTemperature(4), sharpmax.LearnableLogLength(2, bias=0.1)], ids=str
)
def test_json_round_trip(policy: Any, tmp_path: Path) -> None:
    policy.save(tmp_path / "policy.json")
    loaded = sharpmax.load_policy(tmp_path / "policy.json")
    assert loaded == policy
    assert hash(loaded) == hash(policy)
    content = json.loads((tmp_path / "policy.json").read_text())
    assert content["schema"] == "sharpmax.policy/1"
    assert sharpmax.policy_from_dict(content) == policy
    assert [p.name for p in tmp_path.iterdir()] == ["policy.json"]


def test_loading_refuses_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    for content, message in (
        ("not json", "is not a policy file"),
        ("[]", "schema 'sharpmax.policy/1', got None"),
        ('{"schema": "sharpmax.policy/9"}', "got 'sharpmax.policy/9'"),
        ('{"schema": "sharpmax.policy/1", "kind": "Wrong"}', "unknown policy kind 'Wrong'; known are"),
        ('{"schema": "sharpmax.policy/1", "kind": [1]}', "unknown policy kind"),
        ('{"schema": "sharpmax.mechanism/1", "kind": "Entmax"}', "expected a policy .* got 'sharpmax.mechanism/1'"),
        ('{"schema": "sharpmax.policy/1", "kind": "Entmax"}', "unknown policy kind 'Entmax'; known are"),
        ('{"schema": "sharpmax.policy/1", "kind": "LearnableStructure"}', "unknown policy kind 'LearnableStructure'"),
        ('{"schema": "sharpmax.policy/1", "kind": "Constant", "theta": 1}', "has no field theta; its fields are beta"),
        ('{"schema": "sharpmax.policy/1", "kind": "Constant", "beta": "x"}', "finite number of at least 0, got 'x'"),
        ('{"schema": "sharpmax.policy/1", "kind": "EntropyPolynomial"}', "not complete"),
        ('{"schema": "sharpmax.policy/1", "kind": "EntropyPolynomial", "coefficients": [NaN]}', "finite numbers"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message) as caught:
            sharpmax.load_policy(path)
        assert "\n" not in str(caught.value)
    path.write_text(json.dumps(sharpmax.Constant(2).to_dict()))
    with pytest.raises(ValueError, match="holds a Constant, not a Hard"):
        sharpmax.Hard.load(path)


def test_bad_policies_are_refused() -> None:
    for call in (
        lambda: sharpmax.Constant(-1),
        lambda: sharpmax.Constant(float("nan")),
        lambda: sharpmax.EntropyPolynomial(()),
        lambda: sharpmax.EntropyPolynomial((1.0, float("nan"))),
        lambda: sharpmax.EntropyPolynomial(3.0),  # pyright: ignore[reportArgumentType]
        lambda: sharpmax.EntropyPolynomial((1.0,), threshold=-1),
        lambda: sharpmax.EntropyPolynomial((1.0,), beyond="hold_end"),
        lambda: sharpmax.EntropyPolynomial((1.0, 0.0), beyond="hold_peak"),
        lambda: sharpmax.EntropyPolynomial((1.0,), beyond="hope"),  # pyright: ignore[reportArgumentType]
        lambda: sharpmax.EntropyPolynomial((1.0,), domain=(2.0, 1.0)),
        lambda: sharpmax.EntropyCurve((1.0, 1.0), (1.0, 2.0)),
        lambda: sharpmax.EntropyCurve((1.0, 2.0), (1.0,)),
        lambda: sharpmax.LogLength(-1),
        lambda: sharpmax.LogLength(power=2),
        lambda: sharpmax.LogLength(bias=1, reference=16),
        lambda: sharpmax.LogLength.relative(1),
        lambda: sharpmax.PerHead(()),
        lambda: sharpmax.PerHead((sharpmax.PerHead((sharpmax.PAPER,)),)),
        lambda: sharpmax.PerHead(sharpmax.PAPER),  # pyright: ignore[reportArgumentType]
        lambda: sharpmax.EntropyPolynomial("123"),  # pyright: ignore[reportArgumentType]
        lambda: sharpmax.EntropyPolynomial((True, 1.0)),
        lambda: sharpmax.Constant(10**400),
        lambda: sharpmax.LogLength(steps="no"),  # pyright: ignore[reportArgumentType]
        lambda: sharpmax.LearnableTemperature(heads=0),
        lambda: sharpmax.LearnableTemperature(init=0),
    ):
        with pytest.raises(ValueError, match=r"expected|need|exclude") as caught:
            call()
        assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match="callable with RowStats, got int"):
        sharpmax.detached(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("library", LIBRARIES)
def test_per_head(library: str) -> None:
    x = make(library, RNG.normal(size=(3, 2, 5, 30)))
    policy = sharpmax.PerHead((sharpmax.PAPER, sharpmax.Hard()))
    weights = numbers(sharpmax.adaptive_temperature_softmax(x, policy=policy))
    np.testing.assert_allclose(weights[:, 0], numbers(sharpmax.adaptive_temperature_softmax(x[:, 0])), atol=1e-6)
    np.testing.assert_array_equal(weights[:, 1], numbers(sharpmax.softmax(x[:, 1], beta=math.inf)))
    with pytest.raises(ValueError, match=r"\[..., 2 heads, length\], got \(3, 5\)"):
        sharpmax.adaptive_temperature_softmax(x[:, 0], policy=policy)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_detached_stops_the_gradient_through_beta_and_nothing_else(library: str) -> None:
    x = make(library, RNG.normal(size=30))
    cotangent = make(library, RNG.normal(size=30))
    beta = float(numbers(sharpmax.PAPER(sharpmax.row_stats(x))))
    got = gradient(
        library,
        lambda a: (
            sharpmax.adaptive_temperature_softmax(a, policy=sharpmax.detached(sharpmax.PAPER)) * cotangent
        ).sum(),
        x,
    )
    constant = gradient(library, lambda a: (sharpmax.softmax(a, beta=beta) * cotangent).sum(), x)
    through = gradient(library, lambda a: (sharpmax.adaptive_temperature_softmax(a) * cotangent).sum(), x)
    np.testing.assert_allclose(got, constant, atol=1e-6)
    assert np.abs(got - through).max() > 1e-4
    assert sharpmax.detached(sharpmax.detached(sharpmax.PAPER)) == sharpmax.detached(sharpmax.PAPER)


def test_any_callable_is_a_policy_and_sees_the_spread() -> None:
    x = RNG.normal(size=(4, 9))
    weights = sharpmax.adaptive_temperature_softmax(x, policy=lambda stats: 1 + stats.spread)
    expected = sharpmax.softmax(x, beta=1 + x.max(-1) - x.min(-1))
    np.testing.assert_allclose(weights, expected)


def test_policies_are_static_arguments_of_jit() -> None:
    compiled = jax.jit(sharpmax.adaptive_temperature_softmax, static_argnames="policy")
    x = jnp.asarray(RNG.normal(size=(4, 9)), jnp.float32)
    for policy in (sharpmax.PAPER, sharpmax.LogLength()):
        np.testing.assert_allclose(
            compiled(x, policy=policy), sharpmax.adaptive_temperature_softmax(x, policy=policy), rtol=1e-5
        )


def test_structures_with_parameters_say_what_to_do() -> None:
    for structure in (sharpmax.LearnableTemperature(), sharpmax.LearnableLogLength(), LearnableStructure()):
        with pytest.raises(TypeError, match=r"sharpmax\.torch\.Learnable"):
            structure(sharpmax.row_stats(np.zeros(3)))
    with pytest.raises(TypeError, match="abstract"):
        LearnableStructure().parameters()


def test_a_policy_with_a_module_inside_is_not_saved() -> None:
    policy = sharpmax.detached(torch.nn.Identity())
    with pytest.raises(TypeError, match="Identity cannot be saved as JSON"):
        policy.to_dict()
