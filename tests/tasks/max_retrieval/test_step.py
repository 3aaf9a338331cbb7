"""The compiled step against optax, and what the protocol does to a batch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sharpmax.tasks.max_retrieval import model, step
from sharpmax.tasks.max_retrieval.data import Stream, sample, stream_key
from sharpmax.tasks.max_retrieval.layout import layout
from sharpmax.tasks.max_retrieval.probe import probe
from sharpmax.tasks.max_retrieval.protocol import Protocol, numbers
from sharpmax.tasks.max_retrieval.step import Fixed, State

BASE = Protocol(steps=8, batch=16, sizes=(2, 6))
RUN = step.compiled_steps("cpu")
PLAIN = layout()
SEED = jnp.uint32(4)
KERNELS = jax.tree.map_with_path(lambda path, _: path[-1].key == "kernel", model.SHAPES, is_leaf=model.is_shape)


def test_flat_vectors_hold_the_parameters() -> None:
    params = jax.jit(model.init)(stream_key(0, Stream.INITIAL))
    flat = PLAIN.ravel(params)
    assert flat.shape == PLAIN.is_kernel.shape
    jax.tree.map(np.testing.assert_array_equal, PLAIN.unravel(flat), params)
    assert int(PLAIN.is_kernel.sum()) == sum(
        a.size for a, k in zip(jax.tree.leaves(params), jax.tree.leaves(KERNELS), strict=True) if k
    )


def _optimiser(protocol: Protocol) -> optax.GradientTransformation:
    """The same protocol in optax's words."""
    mask = KERNELS if protocol.l2_on == "kernels" else None
    adam = optax.scale_by_adam(protocol.b1, protocol.b2, protocol.epsilon)
    clip = optax.identity() if protocol.clip is None else optax.clip_by_global_norm(protocol.clip)
    if protocol.l2_kind == "decoupled":
        chain = (clip, adam, optax.add_decayed_weights(protocol.l2, mask))
    else:
        factor = {"sum": 2, "half": 1}[protocol.l2_kind]
        chain = (optax.add_decayed_weights(factor * protocol.l2, mask), clip, adam)
    return optax.chain(*chain, optax.scale_by_learning_rate(optax.cosine_decay_schedule(1e-3, protocol.steps)))


@pytest.mark.parametrize(
    "change",
    [
        {"l2": 1e-2, "clip": 0.5},
        {"l2": 0.1, "l2_kind": "decoupled", "l2_on": "kernels", "clip": 0.5},
    ],
)
def test_a_few_steps_are_those_of_optax(change: dict[str, Any]) -> None:
    protocol = dataclasses.replace(BASE, schedule="cosine", **change)
    fixed = Fixed.of([protocol])
    values = jax.tree.map(jnp.asarray, numbers(protocol))
    start = step.initial_state(SEED[None], fixed)
    stacked = jax.tree.map(lambda a: a[None], values)
    ours, _ = RUN(start, SEED[None], stacked, jnp.int32(0), fixed=fixed, length=4)

    key, optimiser = stream_key(SEED, Stream.TRAINING), _optimiser(protocol)
    params = PLAIN.unravel(start.theta[0])
    optimiser_state = jax.jit(optimiser.init)(params)

    @jax.jit
    def reference(params: Any, optimiser_state: Any, t: jax.Array) -> tuple[Any, Any]:
        batch = step._batch(key, values, fixed, t)

        def loss(params: Any) -> jax.Array:
            scores = model.forward(params, batch)[0]
            return optax.softmax_cross_entropy_with_integer_labels(scores, batch.label).mean()

        updates, optimiser_state = optimiser.update(jax.grad(loss)(params), optimiser_state, params)
        return optax.apply_updates(params, updates), optimiser_state

    for t in range(4):
        params, optimiser_state = reference(params, optimiser_state, jnp.int32(t))
    moved = float(jnp.max(jnp.abs(ours.theta[0] - start.theta[0])))
    np.testing.assert_allclose(ours.theta[0], PLAIN.ravel(params), atol=2e-3 * moved)


def _sizes(protocol: Protocol, steps: int = 400) -> np.ndarray:
    fixed, key = Fixed.of([protocol]), stream_key(SEED, Stream.TRAINING)
    batches = jax.jit(jax.vmap(lambda t: jnp.sum(jnp.asarray(step._batch(key, numbers(protocol), fixed, t).mask))))
    return np.asarray(batches(jnp.arange(steps)))


def test_sizes_are_uniform_and_the_largest_gains_with_emphasis() -> None:
    protocol = Protocol(batch=1, steps=400)
    plain, late = _sizes(protocol), _sizes(dataclasses.replace(protocol, emphasis=1.0))
    assert set(plain) == set(range(5, 17))
    assert 9.5 < plain.mean() < 11.5
    assert late[:100].mean() < 13
    assert (late[-100:] == 16).mean() > 0.8


def test_focus_draws_priorities_together_and_keeps_their_order() -> None:
    protocol = Protocol(batch=64, steps=10)
    focused = dataclasses.replace(protocol, focus=4.0)
    key = stream_key(SEED, Stream.TRAINING)
    plain, narrow = (step._batch(key, numbers(p), Fixed.of([p]), jnp.int32(9)) for p in (protocol, focused))
    np.testing.assert_array_equal(plain.label, narrow.label)
    np.testing.assert_array_equal(np.argmax(plain.priority, -1), np.argmax(narrow.priority, -1))
    ranges = np.ptp(narrow.priority, axis=-1) / np.ptp(plain.priority, axis=-1)
    assert np.all((ranges > np.exp(-4.0) - 1e-3) & (ranges < 1))


@pytest.mark.thorough
def test_one_by_one_and_side_by_side_agree() -> None:
    """Of a run that is long enough for each size to have its own padding."""
    protocol = dataclasses.replace(BASE, steps=step.MANY_STEPS, average=0.9, attention_loss=0.1, anneal=(1.0, 2.0))
    fixed = Fixed.of([protocol])
    seeds = jnp.arange(2, dtype=jnp.uint32)
    values = jax.tree.map(lambda a: jnp.stack([jnp.asarray(a)] * 2), numbers(protocol))
    states: list[State] = []
    for one_by_one in (False, True):
        start = step.initial_state(seeds, fixed)
        state, metrics = RUN(start, seeds, values, jnp.int32(0), fixed=fixed, length=4, one_by_one=one_by_one)
        assert all(m.shape == (2,) for m in metrics)
        states.append(state)
    for a, b in zip(*states, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_protocols_that_cannot_train_together_are_refused() -> None:
    with pytest.raises(ValueError, match="must have one steps"):
        Fixed.of([BASE, dataclasses.replace(BASE, steps=9)])


def test_the_probe_is_the_mean_over_its_sets() -> None:
    seeds = jnp.asarray([4, 9], jnp.uint32)
    theta = 2 * step.initial_state(seeds, Fixed.of([BASE])).theta
    spread, bound = probe(theta, seeds, items=5, precision="highest")
    for i, seed in enumerate((4, 9)):
        batch = sample(stream_key(seed, Stream.PROBE), 128, 5)
        params = PLAIN.unravel(theta[i])
        spreads, x, y = jax.jit(model.spread_and_vectors)(params, batch)
        layer = params[model.ATTENTION]
        bounds = model.bound(model.augmented(layer["query"]), model.augmented(layer["key"]), x, y)
        np.testing.assert_allclose((spread[i], bound[i]), (spreads.mean(), bounds.mean()), rtol=1e-4)
