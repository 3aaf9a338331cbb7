"""The sampler of Appendix A.2."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from sharpmax.tasks.max_retrieval.data import CLASSES, Stream, sample, sample_sets, stream_key

KEY = stream_key(3, Stream.EVALUATION)


def test_shapes_types_and_the_label() -> None:
    batch = sample(KEY, 7, 5)
    assert (batch.priority.shape, batch.category.shape, batch.query.shape) == ((7, 5), (7, 5), (7, 1))
    assert (batch.priority.dtype, batch.category.dtype, batch.mask) == (jnp.float32, jnp.int32, None)
    best = np.argmax(batch.priority, axis=1)
    np.testing.assert_array_equal(batch.target, best)
    np.testing.assert_array_equal(batch.label, np.asarray(batch.category)[np.arange(7), best])


def test_distributions() -> None:
    batch = sample(KEY, 2000, 16)
    for values in (batch.priority, batch.query):
        assert stats.kstest(np.asarray(values).ravel(), "uniform").pvalue > 1e-3
        assert 0 <= float(values.min()) <= float(values.max()) < 1
    assert stats.chisquare(np.bincount(np.asarray(batch.category).ravel(), minlength=CLASSES)).pvalue > 1e-3
    assert abs(np.corrcoef(np.asarray(batch.priority).ravel(), np.asarray(batch.category).ravel())[0, 1]) < 0.02


def test_priorities_use_the_whole_significand_of_float32() -> None:
    scaled = np.asarray(sample(KEY, 200, 16).priority, np.float64) * 2**24
    np.testing.assert_array_equal(scaled, np.round(scaled))
    assert np.any(scaled % 2 == 1)


def test_sets_do_not_depend_on_how_many_are_sampled_together() -> None:
    whole, part = sample(KEY, 9, 6), sample_sets(KEY, jnp.arange(4, 9), 6)
    for a, b in zip(whole[:-1], part[:-1], strict=True):
        np.testing.assert_array_equal(a[4:], b)


def test_streams_and_seeds_differ_and_repeat() -> None:
    keys = [stream_key(seed, stream) for seed in (0, 1) for stream in Stream]
    first = [float(sample(key, 1, 1).priority[0, 0]) for key in keys]
    assert len(set(first)) == len(first)
    assert first == [float(sample(key, 1, 1).priority[0, 0]) for key in keys]
    compiled = jax.jit(lambda seed: sample(stream_key(seed, Stream.TRAINING), 2, 3).priority)
    np.testing.assert_array_equal(compiled(jnp.uint32(5)), sample(stream_key(5, Stream.TRAINING), 2, 3).priority)


def test_padded_sets_take_their_label_from_the_items_that_are_there() -> None:
    whole, padded = sample(KEY, 200, 8), sample(KEY, 200, 8, jnp.int32(3))
    assert padded.mask is not None
    np.testing.assert_array_equal(padded.mask, np.arange(8) < 3)
    np.testing.assert_array_equal(padded.target, np.argmax(np.asarray(whole.priority)[:, :3], axis=1))
