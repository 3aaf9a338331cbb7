"""Every mechanism in JAX attention: against NumPy in float64, differentiated, compiled, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import sharpmax
import sharpmax.flax
from sharpmax.jax import dot_product_attention
from sharpmax.jax import mechanisms as module
from sharpmax.mechanisms import MECHANISMS, Mechanism, Temperature, TopK, Window, find

RNG = np.random.default_rng(4)
MASK = RNG.random((2, 1, 9, 9)) > 0.4
MASK[1, 0, 3] = False  # a query that sees nothing
GIVEN: dict[str, Any] = {
    "is_causal": True,
    "local_window_size": (5, 2),
    "softcap": 3.0,
    "mask": MASK,
    "bias": RNG.normal(size=(1, 4, 9, 9)),
    "key_value_seq_lengths": np.array([5, 9]),
    "query_seq_lengths": np.array([9, 7]),
}
CHOSEN: dict[str, Mechanism] = {"window": Window(4), "top_k": TopK(3)}

NAMES = [
    name for name, mechanism in MECHANISMS.items() if mechanism.policy is None or name in ("adaptive", "ssmax", "step")
]
QUICK: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiling takes longer than running here."""

pytestmark = pytest.mark.usefixtures("wide")


def inputs(maps: int = 1) -> list[np.ndarray]:
    """Four query heads for two of key, ``[B, L, H, D]``."""
    rng = np.random.default_rng(0)
    return [1.7 * rng.normal(size=shape) for shape in ((2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2 // maps, 6))]


def attend(q: Any, k: Any, v: Any, **given: Any) -> Any:
    return dot_product_attention(q, k, v, **given)


def by_hand(mechanism: Mechanism, q: Any, k: Any, v: Any) -> np.ndarray:
    """All logits with NumPy in float64, the mechanism's own NumPy weights, and their sums of values."""
    scale = q.shape[-1] ** -0.5
    if mechanism.features is not None:
        q, k, scale = mechanism.features(np, q), mechanism.features(np, k), 1.0
    z = np.einsum("bthd,bshd->bhts", q, np.repeat(k, q.shape[2] // k.shape[2], axis=2)) * scale
    z = GIVEN["softcap"] * np.tanh(z / GIVEN["softcap"]) + GIVEN["bias"]
    at = np.arange(9)
    back = at[:, None] - at
    seen = MASK & (back >= 0) & (back <= 5) & (at < GIVEN["key_value_seq_lengths"][:, None, None, None])
    seen = np.broadcast_to(seen & (at < GIVEN["query_seq_lengths"][:, None])[:, None, :, None], z.shape)
    weights = mechanism(z, seen)
    return np.einsum("bhts,bshd->bthd", weights, np.repeat(v, weights.shape[1] // v.shape[2], axis=2))


@pytest.mark.parametrize("name", NAMES)
def test_every_mechanism_is_what_numpy_says(name: str) -> None:
    mechanism = CHOSEN.get(name, find(name))
    tensors = inputs(mechanism.maps)
    asked = mechanism if name in CHOSEN else name
    out = jax.jit(lambda q, k, v: attend(q, k, v, mechanism=asked, **GIVEN), compiler_options=QUICK)(*tensors)
    expected = by_hand(mechanism, *tensors)
    assert out.shape == expected.shape
    np.testing.assert_allclose(out, expected, atol=1e-11 * max(1.0, float(np.abs(expected).max())))
    assert not np.asarray(out[1, 3]).any()


@pytest.mark.parametrize("name", ["differential"])
def test_gradients_in_both_modes(name: str) -> None:
    mechanism = find(name)
    start = {k: np.asarray(v, np.float64) for k, v in mechanism.parameters().items()}
    at = (*inputs(mechanism.maps), start)
    rng = np.random.default_rng(5)
    along = jax.tree.map(lambda x: rng.normal(size=x.shape), at)

    def loss(q: Any, k: Any, v: Any, learned: Any) -> Any:
        out = attend(q, k, v, mechanism=module.Held(mechanism, learned), is_causal=True)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape)))

    compiled = jax.jit(loss)
    ahead, behind = (compiled(*jax.tree.map(lambda x, t, h=h: x + h * t, at, along)) for h in (1e-5, -1e-5))
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*at)
    reverse = sum(np.vdot(g, t) for g, t in zip(*map(jax.tree.leaves, (gradients, along)), strict=True))
    forward = jax.jit(lambda at, along: jax.jvp(loss, at, along)[1])(at, along)
    np.testing.assert_allclose([reverse, forward], float(ahead - behind) / 2e-5, rtol=1e-6)


class Layer(linen.Module):
    @linen.compact
    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, mechanism=sharpmax.flax.Learnable(find("differential")))


def test_flax_modules_hold_the_parameters() -> None:
    q, k, v = inputs(2)
    layer = Layer()
    variables = layer.init(jax.random.key(0), q, k, v)
    assert jax.tree.map(jnp.shape, variables) == {"params": {"Learnable_0": {"lambda": ()}}}
    expected = attend(q, k, v, mechanism="differential")
    found: Any = layer.apply(variables, q, k, v)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    gradient: Any = jax.jit(jax.grad(lambda p: jnp.sum(jnp.asarray(layer.apply(p, q, k, v)) ** 2)))(variables)
    assert float(gradient["params"]["Learnable_0"]["lambda"]) != 0
    held = sharpmax.flax.LearnableNNX(find("differential"))
    np.testing.assert_allclose(attend(q, k, v, mechanism=held), expected, atol=1e-12)
    by_nnx = nnx.jit(nnx.grad(lambda m: jnp.sum(attend(q, k, v, mechanism=m) ** 2)))(held)
    np.testing.assert_allclose(by_nnx["lambda"].get_value(), gradient["params"]["Learnable_0"]["lambda"], rtol=1e-6)


def test_learned_temperatures_are_policies() -> None:
    structure = Temperature(sharpmax.LearnableTemperature(heads=4, init=2.0))
    for held in (structure, sharpmax.flax.LearnableNNX(structure), module.Held(structure, structure.parameters())):
        chosen = module.settled(held, sharpmax.PAPER, None, False, *inputs()[:2])
        assert chosen.mechanism is None
        stats = sharpmax.row_stats(jnp.ones((2, 4, 3, 5)))
        np.testing.assert_allclose(chosen.policy(stats), 2.0, rtol=1e-6)


def test_a_copy_of_the_default_policy_is_the_default() -> None:
    chosen = module.settled("sigmoid", copy.deepcopy(sharpmax.PAPER), None, False, *inputs()[:2])
    assert chosen.mechanism == find("sigmoid")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a name": ({"mechanism": "sharpmin"}, "expected a mechanism to be one of softmax, .*'sharpmin'"),
    "both": ({"mechanism": "sigmoid", "policy": sharpmax.Constant()}, "expected a mechanism or a policy, got both"),
    "streaming": ({"mechanism": "sigmoid", "impl": "streaming"}, "'streaming' serves policies, .*; reference can"),
    "stats": ({"mechanism": "sigmoid", "return_stats": True}, "return_stats serves policies, not sigmoid attention"),
    "scale": ({"mechanism": "linear_elu", "scale": 0.5}, "expected no scale for linear attention with features"),
    "heads": ({"mechanism": "differential"}, "expected 2 heads of query and of key for each of value, got shapes"),
    "rows": ({"mechanism": "selective", "is_causal": True, "short": True}, "as many queries as keys, got 4 and"),
    "a band": ({"mechanism": "selective", "local_window_size": 3, "short": True}, "as many queries as keys, got 4 and"),
    "window": ({"mechanism": "window", "short": True}, "as many queries as keys, or is_causal=True, got 4 and 9"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    given, sentence = dict(REFUSED[what][0]), REFUSED[what][1]
    q, k, v = inputs()
    with pytest.raises(ValueError, match=sentence):
        attend(q[:, :4] if given.pop("short", False) else q, k, v, **given)


@pytest.mark.parametrize("window", [(3,), (3, "x"), (3, -1), (2, 3, 4), (), "a"])
def test_a_window_that_is_none_is_refused_beside_a_window(window: Any) -> None:
    x = jnp.ones((1, 6, 1, 4))
    with pytest.raises(ValueError, match="expected local_window_size to be a whole number"):
        dot_product_attention(x, x, x, mechanism="window", local_window_size=window)
