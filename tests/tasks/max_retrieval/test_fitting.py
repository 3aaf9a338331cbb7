"""Appendix F on heads."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharpmax
from sharpmax.tasks.max_retrieval import Checkpoint, Protocol, collect, fitting, model
from sharpmax.tasks.max_retrieval.data import Stream, stream_key
from sharpmax.tasks.max_retrieval.evaluation import sample_logits
from sharpmax.tasks.max_retrieval.fitting import Samples
from sharpmax.tasks.max_retrieval.layout import layout
from sharpmax.tasks.max_retrieval.step import State

SEEDS, SIZES, SETS = (1, 2), (8, 16), 40


@cache
def ordered_heads() -> model.Params:
    """Heads whose logits rise with the priority, up to noise of the category: some optimal temperatures are finite."""
    draw = jax.jit(jax.vmap(lambda seed: model.init(stream_key(seed, Stream.INITIAL))))
    heads = jax.tree.map(np.array, draw(jnp.asarray(SEEDS, jnp.uint32)))
    heads["Dense_0"]["kernel"] = heads["Dense_0"]["kernel"] * np.asarray([8.0] + [0.3] * 10, np.float32)[:, None]
    key = heads[model.ATTENTION]["key"]["kernel"]
    for i, seed in enumerate(SEEDS):
        e, target = sample_logits(jax.tree.map(lambda a, i=i: a[i], heads), seed, 16, 64, stream=Stream.PROBE)
        sign = np.sign(np.mean(e[np.arange(64), target] - e.mean(axis=1)))
        key[i] *= 4 * sign
    return heads


@pytest.fixture(scope="module")
def samples() -> Samples:
    return collect(ordered_heads(), SEEDS, SIZES, SETS)


def test_samples_are_those_of_the_validation_sets(samples: Samples) -> None:
    head = jax.tree.map(lambda a: a[1], ordered_heads())
    e, target = sample_logits(head, SEEDS[1], 8, SETS, stream=Stream.VALIDATION)
    found = sharpmax.optimal_temperatures(e, target)
    chosen = (samples.seed == SEEDS[1]) & (samples.size == 8)
    np.testing.assert_array_equal(samples.entropies[chosen], found.entropies)
    np.testing.assert_array_equal(samples.betas[chosen], found.betas)


def test_counts_add_up(samples: Samples) -> None:
    for n in SIZES:
        counts = samples.counts[n]
        assert counts["total"] == SETS * len(SEEDS)
        kept = int(np.sum(samples.size == n))
        assert kept == counts["total"] - counts["already_largest"] - counts["no_optimum"]


def test_policies_are_fitted_to_the_samples(samples: Samples) -> None:
    pooled = samples.fit(degree=2)
    assert pooled == sharpmax.fit_policy(samples.entropies, samples.betas, 2)
    assert samples.fit_monotone(4) == sharpmax.fit_monotone(samples.entropies, samples.betas, 4)


def test_heads_are_fitted_on_the_sets_of_their_own_task(monkeypatch: pytest.MonkeyPatch) -> None:
    head = jax.tree.map(lambda a: a[1], ordered_heads())
    e, target = sample_logits(head, SEEDS[1], 8, SETS, stream=Stream.VALIDATION, task="second")
    found, asked = sharpmax.optimal_temperatures(e, target), []
    collected = collect(ordered_heads(), SEEDS, (8,), SETS, task="second")
    np.testing.assert_array_equal(collected.betas[collected.seed == SEEDS[1]], found.betas)

    def noted(*_: Any, **options: Any) -> Samples:
        asked.append(options["task"])
        return collected

    monkeypatch.setattr(fitting, "collect", noted)
    layouts = layout("second").ravel(ordered_heads())
    heads = Checkpoint(Protocol(task="second"), SEEDS, 1, 1, State(np.asarray(layouts), None, None, None))
    assert fitting.fit(heads, (8,), SETS).samples is collected
    assert asked == ["second"]
