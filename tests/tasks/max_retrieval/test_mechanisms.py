"""The network with every mechanism, against one in NumPy and float64 that folds nothing."""

import dataclasses
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharpmax
from sharpmax.mechanisms import MECHANISMS, Mechanism, Selective, Sparsemax, Temperature, TopK, Window
from sharpmax.tasks.max_retrieval import evaluate, model
from sharpmax.tasks.max_retrieval.attention import needs_training, simplest
from sharpmax.tasks.max_retrieval.data import SIGNS, Stream, sample, stream_key
from sharpmax.tasks.max_retrieval.layout import LEARNED, Layout, layout
from sharpmax.tasks.max_retrieval.protocol import Protocol, numbers
from sharpmax.tasks.max_retrieval.step import _by_kind

SETS, ITEMS, THERE = 3, 9, 7
KNOWN: dict[str, Mechanism] = {
    **MECHANISMS,
    "window": Window(size=3),
    "top_k": TopK(k=2),
    "selective": Selective(first_stays=False),
    "selective_first": Selective(),
}
LEARN = [name for name in MECHANISMS if needs_training(MECHANISMS[name])]


@cache
def _head(task: Any, name: str) -> tuple[Layout, np.ndarray]:
    """Parameters in float64 that no mechanism can be told from another with by chance: large logits, learned values."""
    mechanism = KNOWN[name]
    own = layout(task, mechanism)
    theta = np.asarray(own.ravel(own.init(stream_key(1, Stream.INITIAL))), np.float64)
    drawn = np.random.default_rng(2).normal(size=theta.shape)
    theta = np.where(own.is_kernel, 1.6 * theta, theta + 0.3 * drawn)
    return own, theta


def _batch(task: Any) -> Any:
    return sample(stream_key(5, Stream.PROBE), SETS, ITEMS, jnp.int32(THERE), task)


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _softmax(s: np.ndarray) -> np.ndarray:
    e = np.exp(s - s.max())
    return e / e.sum()


def _dense(layer: Any, x: np.ndarray) -> np.ndarray:
    return x @ layer["kernel"].reshape(x.shape[-1], -1) + layer["bias"].reshape(-1)


def _features(task: str, batch: Any, i: int) -> tuple[np.ndarray, np.ndarray]:
    """Items ``[7, features]`` and queries ``[queries, features]`` of a set, laid out."""
    onehot = np.eye(10)[np.asarray(batch.category[i, :THERE])]
    if task != "recall":
        return np.concatenate([np.asarray(batch.priority[i, :THERE], np.float64)[:, None], onehot], 1), np.asarray(
            batch.query[i], np.float64
        )[None]

    def bits(keys: Any) -> np.ndarray:
        return np.array([[1.0 if int(key) >> b & 1 else -1.0 for b in range(SIGNS)] for key in np.asarray(keys)])

    return np.concatenate([bits(batch.priority[i, :THERE]), onehot], 1), bits(batch.query[i])


def _weights(name: str, params: Any, h: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Weights of the items ``h`` for the query ``y``, item by item."""
    layer, own = params[model.ATTENTION], params.get(model.MECHANISM, {})
    learned = own.get(LEARNED, {})
    q, k = _dense(layer["query"], y), _dense(layer["key"], h)
    s = k @ q / math.sqrt(128)
    if name == "differential":
        second = _dense(own["map_1"]["key"], h) @ _dense(own["map_1"]["query"], y) / math.sqrt(128)
        return _softmax(s) - learned["lambda"] * _softmax(second)
    if name == "linear_elu":
        q, k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k))
        return (k @ q) / (k @ q).sum()
    if name == "linear":
        return s
    if name == "sigmoid":
        return 1 / (1 + np.exp(-s + math.log(len(s))))
    if name == "relu_squared":
        return np.maximum(s, 0) ** 2 / len(s)
    if name == "stick_breaking":  # the first item is nearest to the query
        left, found = 1.0, []
        for each in 1 / (1 + np.exp(-s)):
            found.append(left * each)
            left *= 1 - each
        return np.array(found)
    if name == "window":
        return np.concatenate([_softmax(s[:3]), np.zeros(len(s) - 3)])
    if name == "threshold_relative":
        gate = 1 / (1 + np.exp(-learned["gate"]))
        kept = s > 0
        distance = np.cumsum(kept)
        scaled = np.where(kept, np.exp(s - s.max()) * gate**distance, 0.0)
        return scaled / max(scaled.sum(), 1e-300)
    if name.startswith("selective"):
        asked = _dense(layer["query"], h)
        gone = np.zeros(len(s))
        for i in range(len(s)):
            for j in range(0 if name == "selective" else 1, i):
                gone[j] += max(asked[i] @ k[j] / math.sqrt(128), 0.0)
        return _softmax(s - gone)
    if name == "step":
        return _softmax(s)
    return np.asarray(KNOWN[name](s[None, None], parameters={n: np.asarray(v) for n, v in learned.items()}))[0, 0]


def _expected(task: str, name: str) -> np.ndarray:
    own, theta = _head(task, name)
    params, batch, scores = own.unravel(theta), _batch(task), []
    for i in range(SETS):
        items, queries = _features(task, batch, i)
        h = _gelu(_dense(params["Dense_1"], _gelu(_dense(params["Dense_0"], items))))
        value = _dense(params[model.ATTENTION]["value"], h)
        for query in queries:
            y = _dense(params["Dense_3"], _gelu(_dense(params["Dense_2"], query)))
            z = _weights(name, params, h, y) @ value
            out = params[model.ATTENTION]["out"]
            x = _dense(params["Dense_4"], z @ out["kernel"][0] + out["bias"])
            scores.append(_dense(params["Dense_5"], (x > 0).astype(float) if name == "step" else _gelu(x)))
    return np.array(scores)


def _scores(task: Any, name: str) -> Callable[[jax.Array, Any], jax.Array]:
    own, rule = _head(task, name)[0], simplest(KNOWN[name])
    return lambda theta, batch: model.forward(own.unravel(theta), batch, rule)[0].reshape(-1, 10)


@pytest.mark.parametrize(
    ("task", "names"),
    [("max", tuple(KNOWN)), ("recall", ("softmax", "linear_elu", "differential", "selective", "stick_breaking"))],
)
def test_the_network_is_the_one_that_folds_nothing(task: Any, names: tuple[str, ...]) -> None:
    """Sets of seven items, padded to nine: what is masked changes nothing, whatever the order means."""
    with jax.enable_x64(True):
        batch, thetas = _batch(task), {name: jnp.asarray(_head(task, name)[1]) for name in names}
        found = jax.jit(lambda thetas: {name: _scores(task, name)(theta, batch) for name, theta in thetas.items()})(
            thetas
        )
        for name in names:
            expected = _expected(task, name)
            tolerance = 1e-9 * np.abs(expected).max()
            np.testing.assert_allclose(found[name], expected, rtol=1e-9, atol=tolerance, err_msg=name)
    distinct = {np.asarray(a).tobytes() for a in found.values()}
    assert len(distinct) >= len(names) - 3  # adaptive, held or not, and log n / log 16 do nothing to so few items


def test_derivatives_by_what_is_learned_are_those_of_differences() -> None:
    """Along one direction through all parameters that only heads of a mechanism have."""
    with jax.enable_x64(True):
        batch, step = _batch("max"), 1e-6
        params = {name: _head("max", name)[0].unravel(jnp.asarray(_head("max", name)[1])) for name in LEARN}

        def loss(name: str, t: jax.Array) -> jax.Array:
            moved = jax.tree.map(
                lambda a: a + t * jnp.cos(jnp.arange(a.size)).reshape(a.shape), params[name][model.MECHANISM]
            )
            return jnp.sum(jnp.sin(model.forward({**params[name], model.MECHANISM: moved}, batch, KNOWN[name])[0]))

        @jax.jit
        def slopes(t: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
            return {name: jax.jvp(lambda t, name=name: loss(name, t), (t,), (jnp.ones_like(t),)) for name in LEARN}

        here, above, below = (slopes(jnp.asarray(k * step)) for k in (0.0, 1.0, -1.0))
        for name in LEARN:
            slope = float(here[name][1])
            assert slope == pytest.approx(float(above[name][0] - below[name][0]) / (2 * step), rel=1e-4, abs=1e-6), name
            assert slope != 0, name


def test_heads_share_what_they_start_from_and_l2_leaves_learned_numbers_alone() -> None:
    key = stream_key(0, Stream.INITIAL)
    plain, own = layout("recall"), layout("recall", MECHANISMS["differential"])
    assert plain.names.items() <= own.names.items()
    assert len(own.is_kernel) == len(plain.is_kernel) + 2 * (128 * 128 + 128) + 1
    a, b = plain.init(key), own.init(key)
    jax.tree.map(np.testing.assert_array_equal, a, {name: b[name] for name in a})
    start = b[model.MECHANISM]
    assert float(start[LEARNED]["lambda"]) == pytest.approx(0.2)
    assert np.any(start["map_1"]["query"]["kernel"] != b[model.ATTENTION]["query"]["kernel"])
    strength = np.asarray(_by_kind(own, 2.0, 3.0))
    assert set(strength[own.is_kernel]) == {2.0}
    assert set(strength[own.is_learned]) == {0.0}
    assert set(strength[~own.is_kernel & ~own.is_learned]) == {3.0}
    assert layout("max", Sparsemax()).names == layout("max").names


def test_heads_without_what_a_mechanism_learns_are_refused() -> None:
    params = jax.tree.map(lambda a: a[None], layout().unravel(_head("max", "softmax")[1]))
    with pytest.raises(ValueError, match="own has parameters that heads learn with it"):
        evaluate(params, (0,), (5,), 6, {"own": MECHANISMS["differential"]})


MANY = {name: KNOWN[name] for name in ("softmax", "window", "linear", "selective", "step", "linear_elu")}


def test_evaluation_in_chunks_is_the_same_and_coefficients_are_shares() -> None:
    """Five items at a time, but those of a set together where a mechanism reads what they ask of each other."""
    own = layout()
    params = jax.tree.map(lambda a: jnp.asarray(a)[None], own.unravel(_head("max", "softmax")[1].astype(np.float32)))
    rows = {name: m for name, m in MANY.items() if name != "selective"}
    whole = evaluate(params, (3,), (9,), 8, MANY)
    bounded = evaluate(params, (3,), (9,), 8, rows, memory=5 << 10)
    for name in rows:
        np.testing.assert_array_equal(whole.rows[name].accuracy, bounded.rows[name].accuracy)
        np.testing.assert_allclose(whole.rows[name].entropy, bounded.rows[name].entropy, rtol=1e-4, atol=1e-5)
    head = jax.tree.map(lambda a: a[0], params)
    batch = sample(jax.random.fold_in(stream_key(3, Stream.EVALUATION), 9), 8, 9)

    @jax.jit
    def plain(head: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        scores = {name: model.forward(head, batch, simplest(m))[0] for name, m in MANY.items()}
        return model.logits(head, batch), scores

    logits, scores = plain(head, batch)
    weights = np.abs(np.asarray(logits, np.float64))
    shares = weights / weights.sum(axis=1, keepdims=True)
    assert whole.rows["linear"].largest[0, 0] == pytest.approx(shares.max(1).mean(), rel=1e-4)
    assert whole.rows["linear"].entropy[0, 0] == pytest.approx(-(shares * np.log(shares)).sum(1).mean(), rel=1e-4)
    for name in MANY:
        right = np.argmax(scores[name], -1) == batch.label
        assert whole.rows[name].accuracy[0, 0] == pytest.approx(np.mean(right)), name


def test_items_in_many_blocks_leave_what_they_leave_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from sharpmax.tasks.max_retrieval import attention

    q, k = (jnp.asarray(np.random.default_rng(i).normal(size=(2, 11, 4)), jnp.float32) for i in range(2))
    mask = jnp.arange(11) < 9
    whole = attention.left_by_items(KNOWN["selective"], q, k, mask, "highest")
    for rows, spans in ((3, 2), (2, 4)):  # of 11: the last block, or the last span, is not full
        monkeypatch.setattr(attention, "ROWS", rows)
        monkeypatch.setattr(attention, "SPANS", spans)
        parts = attention.left_by_items(KNOWN["selective"], q, k, mask, "highest")
        np.testing.assert_allclose(parts, whole, atol=1e-5)
    positive = np.maximum(np.einsum("sid,sjd->sij", q, k), 0)
    expected = [
        [sum(positive[s, i, j] for i in range(j + 1, 9)) if j < 9 else 0.0 for j in range(11)] for s in range(2)
    ]
    np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=1e-4)


def test_protocols_with_mechanisms_are_saved_and_simplified() -> None:
    protocol = Protocol(task="recall", mechanism=MECHANISMS["differential"], attention_loss=0.5)
    assert Protocol.from_dict(protocol.to_dict()) == protocol
    assert protocol.rule == MECHANISMS["differential"]
    plain = Protocol(mechanism=Temperature(sharpmax.PAPER))
    assert (plain.mechanism, plain.policy) == (None, sharpmax.PAPER)
    assert plain == Protocol(policy=sharpmax.PAPER)
    old = {k: v for k, v in Protocol().to_dict().items() if k not in ("task", "mechanism")}
    assert Protocol.from_dict(old) == Protocol()
    assert numbers(protocol).attention_loss == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mechanism": "sparsemax"}, "expected mechanism to be one of sharpmax.mechanisms, got 'sparsemax'"),
        ({"mechanism": Sparsemax(), "policy": sharpmax.PAPER}, "a policy or a mechanism, got both"),
        ({"mechanism": Sparsemax(), "anneal": (1.0, 2.0)}, "anneal changes beta, which sparsemax does not have"),
        ({"mechanism": dataclasses.replace(MECHANISMS["differential"], heads=2)}, "a mechanism for one head"),  # pyright: ignore
    ],
)
def test_mechanisms_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Protocol(**change)
