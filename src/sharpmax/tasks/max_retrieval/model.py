"""The network of Appendix A.3, with the parameters of the paper's Flax listing and less work per item.

There is one query per set, so keys and values need not be made for every item (Equations 11 and 13):

    e_i = <q', K h_i + b_k> = <K^T q', h_i> + <q', b_k>        sum a_i (V h_i + b_v) = V (sum a_i h_i) + b_v

What is left per item is ``psi_x``, one 128 x 128 product. Parameters are a dictionary with the names and shapes of
``flax.linen``'s, and every function here works in the floating-point type of the parameters. What is folded is the same
for every mechanism; one with features, or that reads what items ask of each other, needs keys and pays for them.

In recall, items and queries have keys of 24 signs in the place of a number, and a set has an axis of queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ...core.policies import Constant
from ...core.stats import row_stats
from ...mechanisms import Mechanism
from ...theory import spread_bound
from .attention import Rule, activation_of, left_by_items, policy_of, reads_rows, total_of, weigh
from .data import CLASSES, Batch
from .layers import first_layer, is_key, second_layer, weighted

FEATURES = 128
ATTENTION = "MultiHeadDotProductAttention_0"
MECHANISM = "Mechanism_0"

Params: TypeAlias = dict[str, Any]

PROJECTION = {"kernel": (FEATURES, 1, FEATURES), "bias": (1, FEATURES)}


def dense(inputs: int, outputs: int = FEATURES) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer."""
    return {"kernel": (inputs, outputs), "bias": (outputs,)}


SHAPES: Params = {
    "Dense_0": dense(1 + CLASSES),  # psi_x
    "Dense_1": dense(FEATURES),
    "Dense_2": dense(1),  # psi_q
    "Dense_3": dense(FEATURES),
    ATTENTION: {
        "query": PROJECTION,
        "key": PROJECTION,
        "value": PROJECTION,
        "out": {"kernel": (1, FEATURES, FEATURES), "bias": (FEATURES,)},
    },
    "Dense_4": dense(FEATURES),  # phi
    "Dense_5": dense(FEATURES, CLASSES),
}
"""The shape of every parameter, named as the listing names it."""


def is_shape(value: Any) -> bool:
    """Whether ``value`` is a leaf of :data:`SHAPES`."""
    return isinstance(value, tuple)


TRUNCATED_DEVIATION = 0.87962566103423978
"""The standard deviation of a normal distribution of deviation 1 that is cut off at -2 and 2."""


def init(key: jax.Array, shapes: Params = SHAPES) -> Params:
    """Parameters as ``flax.linen`` draws them: biases of 0, and LeCun-normal kernels.

    Those have variance ``1 / inputs`` and are normal, cut off at -2 and 2 before they are scaled. All kernels are parts
    of one draw, which compiles faster than one each.
    """
    paths, structure = jax.tree.flatten_with_path(shapes, is_leaf=is_shape)
    total = sum(math.prod(shape) for path, shape in paths if path[-1].key == "kernel")
    normal = jax.random.truncated_normal(key, -2.0, 2.0, (total,), jnp.float32)
    leaves, start = [], 0
    for path, shape in paths:
        if path[-1].key == "bias":
            leaves.append(jnp.zeros(shape, jnp.float32))
            continue
        size = math.prod(shape)
        inputs = shape[1] if path[-2].key == "out" else shape[0]
        scale = 1 / (math.sqrt(inputs) * TRUNCATED_DEVIATION)
        leaves.append(scale * normal[start : start + size].reshape(shape))
        start += size
    return jax.tree.unflatten(structure, leaves)


def hidden(params: Params, priority: jax.Array, category: jax.Array, precision: Any = "highest") -> jax.Array:
    """``h_i = psi_x(x_i)`` of Equation 9, ``[..., n, 128]``."""
    first, second = params["Dense_0"], params["Dense_1"]
    x = jax.nn.gelu(first_layer(first["kernel"], first["bias"], priority.reshape(-1), category.reshape(-1)))
    h = jax.nn.gelu(second_layer(x, second["kernel"], precision) + second["bias"])
    return h.reshape(*priority.shape, FEATURES)


def embed_query(params: Params, query: jax.Array, precision: Any = "highest") -> jax.Array:
    """``psi_q(q)`` of Equation 10, ``[..., 128]``: the second layer has no activation in the listing."""
    first, second = params["Dense_2"], params["Dense_3"]
    number = query if is_key(query) else query[..., 0]
    x = jax.nn.gelu(weighted(number, first["kernel"]) + first["bias"])
    return jnp.matmul(x, second["kernel"], precision=precision) + second["bias"]


def folded_query(
    params: Params, query: jax.Array, precision: Any = "highest", map_: int = 0
) -> tuple[jax.Array, jax.Array]:
    """``K^T q'`` ``[..., 128]`` and ``<q', b_k>`` ``[...]``, with ``q' = (Q q + b_q) / sqrt(128)``.

    ``map_`` says which of several maps of logits the projections are those of.
    """
    layer = params[MECHANISM][f"map_{map_}"] if map_ else params[ATTENTION]
    q = projected(layer["query"], embed_query(params, query, precision), precision) / math.sqrt(FEATURES)
    folded = jnp.matmul(q, layer["key"]["kernel"][:, 0].T, precision=precision)
    return folded, jnp.matmul(q, layer["key"]["bias"][0], precision=precision)


def projected(layer: Params, x: jax.Array, precision: Any) -> jax.Array:
    """Queries, or keys, of vectors ``[..., 128]``."""
    return jnp.matmul(x, layer["kernel"][:, 0], precision=precision) + layer["bias"][0]


def item_logits(folded: jax.Array, h: jax.Array, precision: Any = "highest") -> jax.Array:
    """Equation 11 without the constant ``<q', b_k>``, which no softmax sees: ``[..., n]``."""
    queries = "q" * (folded.ndim == h.ndim)
    return jnp.einsum(f"...{queries}d,...nd->...{queries}n", folded, h, precision=precision)


def scorer(
    params: Params, query: jax.Array, rule: Rule, precision: Any = "highest"
) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    """What gives the logits of items from their vectors ``[..., n, 128]``: an array ``[..., n]`` for each map.

    Those of a softmax are without the constant ``<q', b_k>``; other mechanisms see it.
    """
    if policy_of(rule) is not None:
        folded = folded_query(params, query, precision)[0]
        return lambda h: (item_logits(folded, h, precision),)
    assert isinstance(rule, Mechanism)
    if (features := rule.features) is not None:
        layer = params[ATTENTION]
        q = features(jnp, projected(layer["query"], embed_query(params, query, precision), precision))
        return lambda h: (item_logits(q, features(jnp, projected(layer["key"], h, precision)), precision),)
    maps = [folded_query(params, query, precision, i) for i in range(rule.maps)]
    return lambda h: tuple(item_logits(folded, h, precision) + constant[..., None] for folded, constant in maps)


def past(params: Params, h: jax.Array, mask: jax.Array | None, rule: Rule, precision: Any) -> jax.Array | None:
    """What the items of a set leave behind for its queries, ``[sets, n]``, where ``rule`` reads that."""
    if not reads_rows(rule):
        return None
    layer = params[ATTENTION]
    q = projected(layer["query"], h, precision) / math.sqrt(FEATURES)
    return left_by_items(rule, q, projected(layer["key"], h, precision), mask, precision)


def learned(params: Params) -> dict[str, jax.Array]:
    """The numbers that the head's mechanism learned, by name."""
    return params.get(MECHANISM, {}).get("learned", {})


def logits(params: Params, batch: Batch, precision: Any = "highest") -> jax.Array:
    """The attention logits ``e_i`` of Equation 11, ``[sets, n]``."""
    folded, constant = folded_query(params, batch.query, precision)
    h = hidden(params, batch.priority, batch.category, precision)
    return item_logits(folded, h, precision) + constant[..., None]


def read(
    params: Params,
    attended: jax.Array,
    precision: Any = "highest",
    activation: Callable[[Any, jax.Array], jax.Array] | None = None,
    total: jax.Array | None = None,
) -> jax.Array:
    """Class scores ``phi(V z + b_v)`` of the attended vector ``z = sum a_i h_i`` (Equations 13 and 14).

    ``activation`` stands in for that of ``phi``; ``total`` is the sum of the weights where that is not 1.
    """
    value, out = params[ATTENTION]["value"], params[ATTENTION]["out"]
    bias = value["bias"][0] if total is None else total[..., None] * value["bias"][0]
    z = jnp.matmul(attended, value["kernel"][:, 0], precision=precision) + bias
    z = jnp.matmul(z, out["kernel"][0], precision=precision) + out["bias"]
    z = jnp.matmul(z, params["Dense_4"]["kernel"], precision=precision) + params["Dense_4"]["bias"]
    z = jax.nn.gelu(z) if activation is None else activation(jnp, z)
    return jnp.matmul(z, params["Dense_5"]["kernel"], precision=precision) + params["Dense_5"]["bias"]


def forward(
    params: Params,
    batch: Batch,
    rule: Rule = Constant(),  # noqa: B008  (frozen)
    precision: Any = "highest",
    beta: Callable[[jax.Array | float], jax.Array | float] = lambda beta: beta,
) -> tuple[jax.Array, jax.Array, jax.Array | float]:
    """Class scores ``[..., 10]``, logits ``[..., n]`` up to a constant, and the beta they were multiplied by.

    ``...`` is ``sets``, in recall ``sets, 4``. Of several maps of logits the first is returned. ``beta`` maps what a
    policy says to what is used: training may anneal it.
    """
    h = hidden(params, batch.priority, batch.category, precision)
    maps = scorer(params, batch.query, rule, precision)(h)
    left = past(params, h, batch.mask, rule, precision)
    weights, used = weigh(rule, maps, batch.mask, learned(params), left, beta)
    attended = contracted(weights, h, precision)
    scores = read(params, attended, precision, activation_of(rule), total_of(rule, weights))
    return scores, maps[0], used


def contracted(weights: jax.Array, h: jax.Array, precision: Any) -> jax.Array:
    """``sum a_i h_i``, ``[..., 128]``."""
    queries = "q" * (weights.ndim == h.ndim)
    return jnp.einsum(f"...{queries}n,...nd->...{queries}d", weights, h, precision=precision)


def augmented(layer: Params) -> Any:
    """A projection with its bias as one matrix ``[..., 128, 129]``, for vectors with a 1 at the end; JAX or NumPy."""
    kernel, bias = layer["kernel"][..., 0, :], layer["bias"]
    xp = jnp if isinstance(kernel, jax.Array) else np
    return xp.swapaxes(xp.concatenate([kernel, bias], axis=-2), -1, -2)


def spread_and_vectors(params: Params, batch: Batch, precision: Any = "highest") -> tuple[jax.Array, ...]:
    """The spread of the logits of every set, its item vectors ``[sets, n, 129]`` and query vector ``[sets, 129]``."""

    def with_one(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)

    h, y = hidden(params, batch.priority, batch.category, precision), embed_query(params, batch.query, precision)
    e = item_logits(folded_query(params, batch.query, precision)[0], h, precision)
    return row_stats(e).spread, with_one(h), with_one(y)


def bound(query: Any, key: Any, x: Any, y: Any) -> Any:
    """Proposition 3.1's bound of the spread, for the listing's projections, which have biases and ``1 / sqrt(128)``."""
    return spread_bound(query, key, x, y, scale=1 / math.sqrt(FEATURES))
