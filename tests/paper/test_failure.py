"""Corollary B.1 on trained heads: closed forms against rows laid out, places where heads err against the model."""

import dataclasses
import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharpmax
from sharpmax.inputs import InputError
from sharpmax.paper import failure, failure_lengths, failure_order
from sharpmax.paper.max_retrieval import Heads, find_heads
from sharpmax.tasks.max_retrieval.data import Batch
from sharpmax.tasks.max_retrieval.model import forward
from sharpmax.tasks.max_retrieval.step import State
from sharpmax.theory import MACHINE_EPSILON, dispersion_length, failure_length
from tests.nested import strings
from tests.paper.test_depth import token_by_token

SEEDS, GAPS = 2, (0.1, 0.01)


@pytest.fixture(scope="module")
def heads() -> Heads:
    """The first of the shipped heads."""
    checkpoint = find_heads("paper", None).checkpoint
    assert checkpoint.state.average is None
    state = State(np.asarray(checkpoint.state.theta)[:SEEDS], None, None, None)
    history = [{key: v[:SEEDS] if isinstance(v, list) else v for key, v in e.items()} for e in checkpoint.history]
    few = dataclasses.replace(checkpoint, seeds=checkpoint.seeds[:SEEDS], state=state, history=history)
    return Heads("few", few)


@pytest.fixture(scope="module")
def data(heads):
    return failure.data(heads, GAPS)


@pytest.fixture(scope="module")
def read(heads):
    with jax.enable_x64(True):
        params = failure_lengths.wide(heads.checkpoint.params)
        cases = failure_lengths.cases_of(params, GAPS)
        return cases, failure_lengths.reading(params, cases)


@pytest.mark.parametrize("difference", [-2.0, 0.0, 0.3, 3.4, 9.0, 40.0])
@pytest.mark.parametrize("n", [2, 3, 17, 300, 5000])
def test_closed_forms_are_those_of_the_row(difference, n):
    row = np.full(n, -0.7)
    row[0] += difference
    closed, laid_out = failure_lengths.two_item_stats(row[0], -0.7, n), sharpmax.row_stats(row)
    for name in ("max", "sum", "moment", "min", "count", "entropy", "lse"):
        np.testing.assert_allclose(getattr(closed, name), getattr(laid_out, name), rtol=1e-9, atol=1e-12)
    for mechanism in failure.MECHANISMS.values():
        weights = sharpmax.softmax(row, beta=np.asarray(mechanism.policy(laid_out)))
        found = failure_lengths.coefficient(mechanism.policy, row[0], -0.7, n)
        np.testing.assert_allclose(found, weights[0], rtol=1e-9)


def test_lengths_find_the_first_the_return_and_the_last():
    grid = failure_lengths.number_grid()

    def holds(n: np.ndarray) -> np.ndarray:
        n = np.broadcast_to(n, (4, n.shape[1]))
        back = (n[:1] < 101) | ((n[:1] >= 3007) & (n[:1] < 10**7 + 3))
        return np.concatenate([back, n[1:2] < 0, n[2:3] > 0, n[3:] < 2**40 + 1])

    found = failure_lengths.lengths(holds(grid[None]), grid, holds)
    inf = math.inf
    assert found.first.tolist() == [101, 2, inf, 2**40 + 1]
    assert found.again.tolist() == [3007, inf, inf, inf]
    assert found.last.tolist() == [10**7 + 3, 2, inf, 2**40 + 1]


def test_softmax_passes_the_machine_epsilon_where_the_theory_says():
    difference = np.array([0.4, 3.36, 7.0])
    cases = len(difference)
    always = failure_lengths.Reading(np.zeros(cases, bool), np.full((cases, 1), 0.5), np.ones(cases, bool))
    found = failure_lengths.failures(sharpmax.Constant(1.0), difference, np.zeros(cases), always)
    for dtype, epsilon in failure_lengths.EPSILONS.items():
        for d, n in zip(difference, found.epsilon[dtype], strict=True):
            assert n == dispersion_length(d, epsilon).attained
            assert n <= failure_length(d, dtype)
    for d, n in zip(difference, found.errs.first, strict=True):
        assert n == math.floor(1 + math.exp(d)) + 1  # the coefficient is 1/2 at n - 1 = exp(d)


@pytest.mark.parametrize("mechanism", ["softmax", "adaptive", "adaptive_held"])
def test_the_model_errs_where_the_closed_form_says(heads, read, mechanism):
    """The float32 network on sets that are laid out, right before and wrong after the n that was found."""
    cases, found = read
    policy = failure.MECHANISMS[mechanism].policy
    errs = failure_lengths.failures(policy, cases.e_a.reshape(-1), cases.e_b.reshape(-1), found).errs
    first = errs.first.reshape(SEEDS, len(GAPS), -1)
    pairs, gap, most = failure_lengths.class_pairs(), 1, 4096

    @jax.jit
    def answer(params, priority, category, n):
        zero = jnp.zeros(1, jnp.int32)
        batch = Batch(
            priority[None], category[None], jnp.full((1, 1), failure_lengths.QUERY), zero, zero, jnp.arange(most) < n
        )
        return jnp.argmax(forward(params, batch, policy)[0][0])

    asked = 0
    for seed, pair in [(0, 0), (0, 41), (1, 17), (1, 88)]:
        a, b = pairs[pair]
        params = jax.tree.map(lambda x, seed=seed: x[seed], heads.checkpoint.params)
        priority = np.full(most, failure_lengths.TOP - GAPS[gap], np.float32)
        category = np.full(most, b, np.int32)
        priority[0], category[0] = failure_lengths.TOP, a
        n = first[seed, gap, pair]
        if n < most / 1.1:
            asked += 1
            assert answer(params, priority, category, math.floor(n / 1.1)) == a
            assert answer(params, priority, category, math.ceil(n * 1.1)) == b
    assert asked


def test_heads_read_a_above_one_coefficient(heads, read):
    cases, found = read
    assert found.plain.all()
    assert found.says_b.all()
    below, above = found.flips[:, 0] - 1e-9, found.flips[:, 0] + 1e-9
    assert not found.right(below[:, None]).any()
    assert found.right(above[:, None]).all()
    params = jax.tree.map(lambda x: np.asarray(x[0], np.float64), heads.checkpoint.params)
    for case in (0, 100):
        for alpha, expected in ((below[case], cases.class_b[case]), (above[case], cases.class_a[case])):
            attended = alpha * cases.h_a[0, case] + (1 - alpha) * cases.h_b[0, case]
            assert plain_answer(params, attended) == expected


def plain_answer(params, attended: np.ndarray) -> int:
    """Equations 13 and 14 in NumPy, the tanh form of GELU that JAX has by default."""
    layer = params["MultiHeadDotProductAttention_0"]
    z = attended @ layer["value"]["kernel"][:, 0] + layer["value"]["bias"][0]
    z = z @ layer["out"]["kernel"][0] + layer["out"]["bias"]
    z = z @ params["Dense_4"]["kernel"] + params["Dense_4"]["bias"]
    z = z / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return int(np.argmax(z @ params["Dense_5"]["kernel"] + params["Dense_5"]["bias"]))


def test_changes_of_mind_are_followed():
    """A head that is wrong, right, wrong and right again as the coefficient grows errs twice as n grows."""
    twice = failure_lengths.Reading(np.array([False]), np.array([[0.1, 0.3, 0.6]]), np.array([True]))
    alpha = np.array([[0.05, 0.1, 0.2, 0.3, 0.5, 0.6, 1.0]])
    assert twice.right(alpha).tolist() == [[False, True, True, False, False, True, True]]
    assert not twice.plain[0]
    errs = failure_lengths.failures(sharpmax.Constant(1.0), np.array([5.0]), np.array([0.0]), twice).errs
    lengths_at = [math.floor(1 + math.exp(5) * (1 / share - 1)) + 1 for share in (0.6, 0.3, 0.1)]
    assert [errs.first[0], errs.again[0], errs.last[0]] == lengths_at


def test_what_each_mechanism_does(data, read):
    cases, _ = read
    rows, every = data["mechanisms"], SEEDS * data["class_pairs"]
    for g in range(len(GAPS)):
        firsts = [rows[name]["errs_from"][g]["median"] for name in ("softmax", "adaptive_held", "constant_4")]
        assert firsts == sorted(firsts)
        assert firsts[0] < firsts[-1]
        assert rows["hard"]["not_up_to_largest_n"][g] + rows["hard"]["at_two"][g] == every
        assert rows["hard"]["at_two"][g] == data["b_has_the_larger_logit"][g]
    assert rows["adaptive"]["errs_from"][0] == rows["softmax"]["errs_from"][0]  # switched off where it would matter
    assert rows["adaptive"]["errs_from"][1]["median"] > 3 * rows["softmax"]["errs_from"][1]["median"]
    log_n = failure.MECHANISMS["log_n"].policy
    kept = failure_lengths.coefficient(log_n, cases.e_a, cases.e_b, 1e100) > 0.5
    np.testing.assert_array_equal(kept, cases.e_a - cases.e_b > math.log(16))  # the odds are n^(d / log 16 - 1)
    assert 0 < kept.sum() < kept.size
    assert data["at_epsilon"]["float32"]["same_class_as_b_alone"] == data["reading"]["cases"] == every * len(GAPS)


def test_the_caption_counts(heads, data, read):
    """Beside softmax, by the first n of every case; words that data can contradict are not there."""
    cases, found = read
    e_a, e_b = cases.e_a.reshape(-1), cases.e_b.reshape(-1)
    softmax = failure_lengths.failures(sharpmax.Constant(1.0), e_a, e_b, found).errs.first
    constant = failure_lengths.failures(sharpmax.Constant(4.0), e_a, e_b, found).errs.first
    later, same, earlier = ((constant > softmax).sum(), (constant == softmax).sum(), (constant < softmax).sum())
    assert later + same + earlier == data["reading"]["cases"]
    words = f"constant beta = 4: later in {later:,} cases, the same in {same:,}, earlier in {earlier:,} and beyond"
    assert words in data["caption"]
    assert data["mechanisms"]["constant_4"]["beside_softmax"]["beyond"] == 0
    assert "only later" not in data["caption"]
    assert f"In {found.plain.sum():,} of {len(softmax):,} cases" in data["caption"]
    assert "(protocol few, 100,000 steps)" in data["caption"]
    assert failure.beside(np.array([2.0, 5, 7, np.inf]), np.array([3.0, 5, 6, np.inf])) == {
        "earlier": 1,
        "same": 1,
        "later": 1,
        "beyond": 1,
    }


def test_cases_that_are_not_plain_are_told(heads, data, read, monkeypatch):
    _, found = read
    at_zero, flips = (
        found.at_zero.copy(),
        np.concatenate([found.flips[:, :1], np.full_like(found.flips[:, :1], np.inf)], 1),
    )
    at_zero[0], flips[0] = True, (0.999, np.inf)  # the other way round
    flips[1] = np.inf  # no change
    flips[2] = (0.001, 0.998)  # twice
    changed = failure_lengths.Reading(at_zero, flips, found.says_b)
    monkeypatch.setattr(failure, "reading", lambda *_: changed)
    told = failure.data(heads, GAPS)
    assert told["reading"]["errs_below"]["high"] < 0.9
    assert told["reading"]["plain"] == data["reading"]["cases"] - 3
    words = "does not change (1), changes more than once (1), changes the other way round (1)."
    assert f"In the others its answer {words}" in told["caption"]
    mostly = failure_lengths.Reading(at_zero, np.where(np.arange(len(flips))[:, None] % 2, flips, np.inf), found.says_b)
    monkeypatch.setattr(failure, "reading", lambda *_: mostly)
    with pytest.raises(InputError, match="for most pairs at every gap"):
        failure.data(heads, GAPS)


def test_the_example_and_remark_b3(data):
    example = data["example"]
    n, d = np.array(example["n"]), example["difference"]
    np.testing.assert_allclose(example["coefficient"]["softmax"], 1 / (1 + (n - 1) * math.exp(-d)), rtol=1e-4)
    slow = np.array(example["log_decay"]["coefficient"])
    odds = slow / (1 - slow)
    np.testing.assert_allclose(odds * (n - 1), math.exp(d) * np.log(n), rtol=1e-4)
    large = n > 1e8
    np.testing.assert_allclose((slow * n / np.log(n))[large], math.exp(d), rtol=1e-4)
    assert example["log_decay"]["errs_from"] > example["errs_from"]["softmax"]
    for dtype in failure_lengths.EPSILONS:
        passes = example["log_decay"]["epsilon"][dtype]
        assert passes > example["epsilon"]["softmax"][dtype]
        odds_then = math.exp(d) * math.log(passes) / (passes - 1)
        assert odds_then == pytest.approx(MACHINE_EPSILON[dtype] / (1 - MACHINE_EPSILON[dtype]), rel=1e-3)


def test_remark_b2_against_tokens_written_out():
    generator = np.random.default_rng((0, 0))
    layers = failure_order.random_layers(
        generator, failure_order.LAYERS, failure_order.FEATURES, failure_order.HEADS, failure_order.GAIN
    )
    a, b = generator.standard_normal((2, failure_order.FEATURES))
    found = failure_order._of_stack(np.random.default_rng((0, 0)))
    n, betas = 32, [1.0] * failure_order.LAYERS
    at, alone = failure_order.SIZES.index(n), np.repeat(b[None], n, axis=0)
    first, last = alone.copy(), alone.copy()
    first[0], last[-1] = a, a
    arrangements = [
        ("bert", first, False, False),
        ("bert_residual", first, False, True),
        ("gpt_last", last, True, False),
        ("gpt_last_residual", last, True, True),
        ("gpt_first", first, True, False),
    ]
    for name, tokens, causal, residual in arrangements:
        output = partial(token_by_token, layers, residual=residual, betas=betas, causal=causal)
        ours, reference = (output(tokens=x)[-1][0][-1] for x in (tokens, alone))
        expected = np.linalg.norm(ours - reference) / np.linalg.norm(reference)
        assert found[name][at] == pytest.approx(expected, rel=1e-6)


def test_rates_of_remark_b2(data):
    rows = data["order"]["arrangements"]

    def slope(name: str, low: int, high: int) -> float:
        n, values = rows[name]["n"], rows[name]["median"]
        i, j = n.index(low), n.index(high)
        return math.log(values[j] / values[i]) / math.log(n[j] / n[i])

    assert slope("bert", 2**16, 2**26) == pytest.approx(-1, abs=0.01)
    assert slope("bert_residual", 2**16, 2**26) == pytest.approx(-1, abs=0.01)
    assert slope("gpt_last", 2**10, 2**14) == pytest.approx(-2, abs=0.02)
    assert slope("gpt_last_residual", 2**16, 2**26) == pytest.approx(0, abs=0.01)
    expected = math.log(math.log(256) / math.log(64)) / math.log(4) - 1
    assert slope("gpt_first", 64, 256) == pytest.approx(expected, abs=0.1)


def test_files(heads, tmp_path):
    folder = tmp_path / "few heads"
    heads.checkpoint.save(folder)
    paths = failure.run(tmp_path / "out", checkpoint=folder)
    assert [path.name for path in paths] == ["failure.png", "failure.pdf", "failure.json"]  # trained as the paper's
    record = json.loads(paths[-1].read_text())
    assert record["seeds"] == list(heads.checkpoint.seeds)
    assert "2 trained heads" in record["caption"]
    assert not [s for s in strings(record) if s.startswith("/")]
    assert np.shape(record["mechanisms"]["softmax"]["errs_from_by_seed"]) == (len(failure_lengths.GAPS), SEEDS)


def test_heads_that_cannot_be_used(heads, tmp_path):
    with pytest.raises(InputError, match="no checkpoint"):
        failure.run(tmp_path / "out", checkpoint=tmp_path)
    nothing_learnt = State(np.zeros_like(heads.checkpoint.state.theta), None, None, None)
    dataclasses.replace(heads.checkpoint, state=nothing_learnt).save(tmp_path / "zeros")
    with pytest.raises(InputError, match="train them for more steps"):
        failure.run(tmp_path / "out", checkpoint=tmp_path / "zeros")
    assert not (tmp_path / "out").exists()
