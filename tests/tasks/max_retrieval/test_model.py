"""The folded network against the paper's listing."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharpmax
from benchmarks.listing import Model, features
from sharpmax.tasks.max_retrieval import model
from sharpmax.tasks.max_retrieval.data import Batch, Stream, sample, stream_key

pytestmark = pytest.mark.filterwarnings("ignore:The inputs_kv arg:DeprecationWarning")  # the listing is as printed

KEY = stream_key(1, Stream.INITIAL)
INITIAL = jax.tree.map(np.asarray, jax.jit(model.init)(KEY))
BATCH = sample(stream_key(1, Stream.EVALUATION), 6, 11)


def _params(dtype: type = jnp.float32, scale: float = 1.5) -> model.Params:
    """Parameters of some size, biases included."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda a: jnp.asarray(scale * a + 0.3 * random.normal(size=a.shape), dtype), INITIAL)


def _batch(dtype: type = jnp.float32) -> Batch:
    return BATCH._replace(priority=BATCH.priority.astype(dtype), query=BATCH.query.astype(dtype))


def _loss(scores: jax.Array, label: jax.Array) -> jax.Array:
    return -jnp.mean(jax.nn.log_softmax(scores)[jnp.arange(len(label)), label])


def _both(dtype: type) -> tuple[tuple[jax.Array, model.Params], tuple[jax.Array, model.Params]]:
    params, batch = _params(dtype), _batch(dtype)

    def ours(p: model.Params) -> tuple[jax.Array, jax.Array]:
        scores = model.forward(p, batch)[0]
        return _loss(scores, batch.label), scores

    def printed(p: model.Params) -> tuple[jax.Array, jax.Array]:
        with jax.default_matmul_precision("highest"):
            scores = Model().apply({"params": p}, *features(batch))
        assert isinstance(scores, jax.Array)
        return _loss(scores, batch.label), scores

    results = []
    for function in (ours, printed):
        (_, scores), gradient = jax.jit(jax.value_and_grad(function, has_aux=True))(params)
        results.append((scores, gradient))
    return results[0], results[1]


def _relative(a: jax.Array, b: jax.Array, scale: float) -> float:
    return float(jnp.max(jnp.abs(a - b))) / scale


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [pytest.param("float32", 1e-5, marks=pytest.mark.thorough), ("float64", 1e-12)]
)
def test_the_listing_with_the_same_parameters_gives_the_same(dtype: str, tolerance: float) -> None:
    with jax.enable_x64(dtype == "float64"):
        (scores, gradient), (expected, expected_gradient) = _both(jnp.dtype(dtype).type)
        assert scores.dtype == dtype
        assert jax.tree.structure(gradient) == jax.tree.structure(expected_gradient)
        assert _relative(scores, expected, float(jnp.max(jnp.abs(expected)))) < tolerance
        largest = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(expected_gradient))
        for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
            assert _relative(ours, theirs, largest) < tolerance


def test_parameters_have_the_names_shapes_and_distribution_of_flax() -> None:
    params = INITIAL
    many = jax.jit(jax.vmap(model.init))(jax.random.split(KEY, 64))
    theirs = jax.jit(jax.vmap(lambda key: Model().init(key, *features(BATCH))["params"]))(jax.random.split(KEY, 64))
    assert jax.tree.map(lambda a: (64, *a.shape), params) == jax.tree.map(jnp.shape, theirs)
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.std(a), np.std(b), rtol=0.06)
        np.testing.assert_allclose(np.max(np.abs(a)), np.max(np.abs(b)), rtol=0.15)


def test_key_bias_has_no_gradient_at_all() -> None:
    gradient = jax.jit(jax.grad(lambda p: _loss(model.forward(p, BATCH)[0], BATCH.label)))(_params())
    assert not np.any(np.asarray(gradient[model.ATTENTION]["key"]["bias"]))


def test_logits_are_those_of_equation_11() -> None:
    params = _params()
    layer = params[model.ATTENTION]
    h = model.hidden(params, BATCH.priority, BATCH.category)
    q = model.embed_query(params, BATCH.query) @ layer["query"]["kernel"][:, 0] + layer["query"]["bias"][0]
    k = h @ layer["key"]["kernel"][:, 0] + layer["key"]["bias"][0]
    expected = jnp.einsum("sd,snd->sn", q, k) / math.sqrt(128)
    np.testing.assert_allclose(model.logits(params, BATCH), expected, rtol=1e-4, atol=1e-4)
    folded = model.forward(params, BATCH)[1]
    shift = expected - folded
    np.testing.assert_allclose(shift, shift[:, :1] + jnp.zeros_like(shift), atol=2e-3)


@pytest.mark.parametrize("policy", [sharpmax.Constant(), sharpmax.PAPER])
def test_padding_changes_nothing(policy: sharpmax.Policy) -> None:
    with jax.enable_x64(True):
        params, batch = _params(jnp.float64), _batch(jnp.float64)
        cut = batch._replace(priority=batch.priority[:, :7], category=batch.category[:, :7])
        padded = batch._replace(mask=jnp.arange(11) < 7)

        def loss(p: model.Params, b: Batch) -> jax.Array:
            return jnp.sum(model.forward(p, b, policy)[0] ** 2)

        (a, da), (b, db) = (jax.jit(jax.value_and_grad(loss))(params, x) for x in (cut, padded))
        np.testing.assert_allclose(a, b, rtol=1e-12)
        for x, y in zip(jax.tree.leaves(da), jax.tree.leaves(db), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9 * float(jnp.max(jnp.abs(x))))


def test_policies_act_on_the_weights() -> None:
    params = _params()
    h = jax.jit(model.hidden)(params, BATCH.priority, BATCH.category)
    for policy in (sharpmax.PAPER, sharpmax.Constant(4.0), sharpmax.Hard()):
        scores, e, _ = jax.jit(lambda p, policy=policy: model.forward(p, BATCH, policy))(params)
        weights = sharpmax.adaptive_temperature_softmax(e, policy=policy)
        expected = model.read(params, jnp.einsum("sn,snd->sd", weights, h))
        np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-3)


def test_spread_is_below_the_bound_of_proposition_3_1() -> None:
    params = _params()
    spread, x, y = jax.jit(model.spread_and_vectors)(params, BATCH)
    layer = params[model.ATTENTION]
    bound = model.bound(model.augmented(layer["query"]), model.augmented(layer["key"]), x, y)
    e = jax.jit(model.logits)(params, BATCH)
    np.testing.assert_allclose(spread, e.max(-1) - e.min(-1), rtol=1e-4)
    assert np.all(np.asarray(spread) <= np.asarray(bound))
