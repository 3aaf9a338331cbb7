"""The evaluation engine against a plain one, and the paired t-test."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import sharpmax
from sharpmax.tasks.max_retrieval import evaluation, model, paired_p_values
from sharpmax.tasks.max_retrieval.data import Stream, sample, stream_key
from sharpmax.tasks.max_retrieval.evaluation import evaluate, sample_logits
from sharpmax.tasks.max_retrieval.plan import VECTOR_BYTES, make_plan

SEEDS = (5, 2**31 + 1)
SETS, SIZES = 24, (4, 9)
EACH = (sharpmax.Constant(2.0), sharpmax.Constant(3.0))
POLICIES = {
    "softmax": sharpmax.Constant(),
    "paper": sharpmax.PAPER,
    "each": EACH,
    "hard": sharpmax.Hard(),
    "length": sharpmax.LogLength.relative(5),
}


@cache
def heads() -> model.Params:
    """Heads that are neither always right nor always wrong."""
    draw = jax.jit(jax.vmap(lambda seed: model.init(stream_key(seed, Stream.INITIAL))))
    return jax.tree.map(lambda a: 3 * a, draw(jnp.asarray(SEEDS, jnp.uint32)))


@pytest.fixture(scope="module")
def measured() -> evaluation.Evaluation:
    return evaluate(heads(), SEEDS, SIZES, SETS, POLICIES)


@jax.jit
def _plain(head: model.Params, batch: model.Batch) -> tuple[jax.Array, jax.Array]:
    return model.hidden(head, batch.priority, batch.category), model.logits(head, batch)


def test_it_is_the_plain_evaluation(measured: evaluation.Evaluation) -> None:
    assert (measured.sizes, measured.seeds, measured.sets) == (SIZES, SEEDS, SETS)
    for j, seed in enumerate(SEEDS):
        head = jax.tree.map(lambda a, j=j: a[j], heads())
        for i, n in enumerate(SIZES):
            batch = sample(jax.random.fold_in(stream_key(seed, Stream.EVALUATION), n), SETS, n)
            h, e = _plain(head, batch)
            found = np.argmax(e, -1) == np.argmax(batch.priority, -1)
            assert measured.ceiling[i, j] == pytest.approx(found.mean())
            for name, policy in POLICIES.items():
                own = policy[j] if isinstance(policy, tuple) else policy
                w = sharpmax.adaptive_temperature_softmax(e, policy=own)
                scores = model.read(head, jnp.einsum("sn,snd->sd", w, h))
                row, weights = measured.rows[name], np.asarray(w, np.float64)
                assert row.accuracy[i, j] == pytest.approx(np.mean(np.argmax(scores, -1) == batch.label))
                assert row.entropy[i, j] == pytest.approx(stats.entropy(weights, axis=-1).mean(), rel=1e-3, abs=1e-6)
                assert row.largest[i, j] == pytest.approx(weights.max(-1).mean(), rel=1e-4)


@pytest.mark.parametrize("memory", [5 << 10, 30 << 10])
def test_memory_changes_nothing(measured: evaluation.Evaluation, memory: int) -> None:
    """Items in chunks of five, the last one padded; and a few sets of one head at a time."""
    bounded = evaluate(heads(), SEEDS, SIZES[1:], SETS, POLICIES, memory=memory)
    np.testing.assert_array_equal(bounded.ceiling[0], measured.ceiling[1])
    for name, row in bounded.rows.items():
        np.testing.assert_array_equal(row.accuracy[0], measured.rows[name].accuracy[1])
        np.testing.assert_allclose(row.entropy[0], measured.rows[name].entropy[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("members", "sets", "n", "items", "expected"),
    [
        (10, 2048, 16, 10 * 2048 * 16, (10, 2048, 16)),
        (10, 100, 16, 10 * 30 * 16, (10, 25, 16)),  # 4 groups of 25
        (10, 2048, 1000, 7999, (5, 1, 1000)),
        (10, 2048, 1000, 999, (1, 1, 999)),
    ],
)
def test_the_plan_fits_in_memory(members: int, sets: int, n: int, items: int, expected: tuple[int, int, int]) -> None:
    plan = make_plan(members, sets, n, (), "max", items * VECTOR_BYTES)
    assert plan == expected
    assert plan.members * plan.sets * min(plan.items, n) <= items


def test_streams_have_other_sets() -> None:
    head = jax.tree.map(lambda a: a[0], heads())
    a, target = sample_logits(head, SEEDS[0], 6, 5, stream=Stream.VALIDATION)
    b, _ = sample_logits(head, SEEDS[0], 6, 5, stream=Stream.EVALUATION)
    chunked, _ = sample_logits(head, SEEDS[0], 6, 5, stream=Stream.VALIDATION, memory=4 << 10)
    assert a.shape == (5, 6)
    assert target.shape == (5,)
    assert np.all(a != b)
    np.testing.assert_allclose(a, chunked, rtol=1e-5, atol=1e-5)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="expected parameters of 3 heads"):
        evaluate(heads(), (0, 1, 2), SIZES, SETS, {"hard": sharpmax.Hard()})
    with pytest.raises(ValueError, match="expected each to be a policy, or a sequence of 2"):
        evaluate(heads(), SEEDS, SIZES, SETS, {"each": [sharpmax.PAPER] * 3})
    with pytest.raises(ValueError, match="at least one set"):
        evaluate(heads(), SEEDS, SIZES, 0, POLICIES)


def test_paired_t_test_on_known_data() -> None:
    """Student's own data: hours of sleep gained with two drugs (t = 4.0621 with 9 degrees of freedom, p = 0.002833)."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    assert paired_p_values([second, first], [first, second]) == pytest.approx([0.002833, 0.002833], rel=1e-3)


def test_p_values_where_the_t_test_has_none() -> None:
    row = [[0.5, 0.75, 1.0]]
    assert paired_p_values(row, row) == [1.0]
    assert paired_p_values([[0.25, 0.5, 0.75]], row) == [0.0]
    assert paired_p_values([[0.25]], [[0.5]]) == [None]
    assert paired_p_values([[0.25, 0.5]], [[0.5, 0.75]]) == [None]
    with pytest.raises(ValueError, match="two tables"):
        paired_p_values(row, [0.5, 0.75, 1.0])
