"""The tasks beside max retrieval, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from sharpmax.tasks.max_retrieval.data import QUERIES, SIGNS, Stream, sample, sample_sets, signs, stream_key
from sharpmax.tasks.max_retrieval.protocol import Protocol

KEY = stream_key(3, Stream.EVALUATION)


@pytest.mark.parametrize("size", [None, 2, 5])
def test_second_asks_for_the_second_of_the_same_sets(size: int | None) -> None:
    given = None if size is None else jnp.int32(size)
    batch, largest = sample(KEY, 60, 8, given, "second"), sample(KEY, 60, 8, given)
    np.testing.assert_array_equal(batch.priority, largest.priority)
    order = np.argsort(np.asarray(batch.priority)[:, :size], axis=1)
    np.testing.assert_array_equal(batch.target, order[:, -2])
    np.testing.assert_array_equal(largest.target, order[:, -1])
    np.testing.assert_array_equal(batch.label, np.asarray(batch.category)[np.arange(60), order[:, -2]])


@pytest.mark.parametrize("size", [None, 3])
def test_recall_asks_for_the_class_of_keys_that_are_there(size: int | None) -> None:
    batch = sample(KEY, 400, 6, None if size is None else jnp.int32(size), "recall")
    keys, category, target = (np.asarray(a) for a in (batch.priority, batch.category, batch.target))
    assert batch.query.shape == target.shape == batch.label.shape == (400, QUERIES)
    assert keys.max() < 2**SIGNS
    np.testing.assert_array_equal(batch.query, np.take_along_axis(keys, target, axis=1))
    np.testing.assert_array_equal(batch.label, np.take_along_axis(category, target, axis=1))
    counts = np.bincount(target.ravel(), minlength=6)
    assert np.all(counts[6 if size is None else size :] == 0)
    assert stats.chisquare(counts[:size]).pvalue > 1e-3
    for set_keys, asked, label, classes in zip(
        keys, np.asarray(batch.query), np.asarray(batch.label), category, strict=True
    ):
        for query, answer in zip(asked, label, strict=True):
            assert answer in classes[set_keys == query]


def test_keys_are_random_signs_and_seldom_equal() -> None:
    keys = np.asarray(sample(KEY, 8, 4096, task="recall").priority)
    found = np.asarray(signs(jnp.asarray(keys)))
    assert set(np.unique(found)) == {-1.0, 1.0}
    expected = 2.0 * ((keys[..., None] >> np.arange(SIGNS, dtype=np.uint32)) & 1) - 1
    np.testing.assert_array_equal(found, expected)
    assert np.all(np.abs(found.mean(axis=(0, 1))) < 5 / np.sqrt(keys.size))
    shared = [4096 - len(np.unique(row)) for row in keys]
    assert 0 <= np.sum(shared) < 25  # about 4096 ** 2 / 2 ** 25 = 0.5 pairs a set


def test_sets_of_recall_do_not_depend_on_how_many_are_sampled_together() -> None:
    whole, part = sample(KEY, 9, 6, task="recall"), sample_sets(KEY, jnp.arange(4, 9), 6, task="recall")
    for a, b in zip(whole[:-1], part[:-1], strict=True):
        np.testing.assert_array_equal(a[4:], b)


def test_what_a_task_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 items for the second largest"):
        Protocol(task="second", sizes=(1, 4))
    with pytest.raises(ValueError, match="items of recall do not have"):
        Protocol(task="recall", focus=1.0)
    with pytest.raises(ValueError, match="task to be one of max, second, recall, got 'third'"):
        Protocol(task="third")  # pyright: ignore[reportArgumentType]
