"""The network of Appendix A.3, with the parameters of the paper's Flax listing and less work per item.

There is one query per set, so keys and values need not be made for every item (Equations 11 and 13):

    e_i = <q', K h_i + b_k> = <K^T q', h_i> + <q', b_k>        sum a_i (V h_i + b_v) = V (sum a_i h_i) + b_v

What is left per item is ``psi_x``, one 128 x 128 product. Parameters are a dictionary with the names and shapes of
``flax.linen``'s, and every function here works in the floating-point type of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ...core.policies import Constant, Policy, needs_spread
from ...core.softmax import softmax
from ...core.stats import row_stats
from ...theory import spread_bound
from .data import CLASSES, Batch

FEATURES = 128
ATTENTION = "MultiHeadDotProductAttention_0"

PARTS = {"cpu": 1, "gpu": 16}
"""Into how many parts the rows of a batch are taken for the gradient of a kernel, by platform. One product of many rows
keeps little of a GPU busy; several and their sum keep more of it."""

Params: TypeAlias = dict[str, Any]

_PROJECTION = {"kernel": (FEATURES, 1, FEATURES), "bias": (1, FEATURES)}


def _dense(inputs: int, outputs: int = FEATURES) -> dict[str, tuple[int, ...]]:
    return {"kernel": (inputs, outputs), "bias": (outputs,)}


SHAPES: Params = {
    "Dense_0": _dense(1 + CLASSES),  # psi_x
    "Dense_1": _dense(FEATURES),
    "Dense_2": _dense(1),  # psi_q
    "Dense_3": _dense(FEATURES),
    ATTENTION: {
        "query": _PROJECTION,
        "key": _PROJECTION,
        "value": _PROJECTION,
        "out": {"kernel": (1, FEATURES, FEATURES), "bias": (FEATURES,)},
    },
    "Dense_4": _dense(FEATURES),  # phi
    "Dense_5": _dense(FEATURES, CLASSES),
}
"""The shape of every parameter, named as the listing names it."""


def is_shape(value: Any) -> bool:
    """Whether ``value`` is a leaf of :data:`SHAPES`."""
    return isinstance(value, tuple)


TRUNCATED_DEVIATION = 0.87962566103423978
"""The standard deviation of a normal distribution of deviation 1 that is cut off at -2 and 2."""


def init(key: jax.Array) -> Params:
    """Parameters as ``flax.linen`` draws them: biases of 0, and LeCun-normal kernels.

    Those have variance ``1 / inputs`` and are normal, cut off at -2 and 2 before they are scaled. All kernels are parts
    of one draw, which compiles faster than one each.
    """
    paths, structure = jax.tree.flatten_with_path(SHAPES, is_leaf=is_shape)
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
    x = jax.nn.gelu(_first_layer(first["kernel"], first["bias"], priority.reshape(-1), category.reshape(-1)))
    h = jax.nn.gelu(_second_layer(x, second["kernel"], precision) + second["bias"])
    return h.reshape(*priority.shape, FEATURES)


def _parts(rows: int) -> int:
    return math.gcd(rows, PARTS.get(jax.default_backend(), 1))


@jax.custom_vjp
def _first_layer(kernel: jax.Array, bias: jax.Array, priority: jax.Array, category: jax.Array) -> jax.Array:
    """``(rho || onehot(kappa)) W + b`` of items in a row, the one-hot as a gather of rows of W."""
    priority = priority.astype(kernel.dtype)
    rows = (kernel[1:] + bias).at[category].get(mode="promise_in_bounds")
    return priority[..., None] * kernel[0] + rows


def _first_layer_forward(
    kernel: jax.Array, bias: jax.Array, priority: jax.Array, category: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _first_layer(kernel, bias, priority, category), (priority, category)


def _first_layer_backward(
    saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    """One small product in place of a scatter, which is slow on an accelerator and adds in no fixed order."""
    priority, category = saved
    rows = jnp.arange(CLASSES)[:, None]
    onehot = (category == rows).astype(gradient.dtype)
    features = jnp.concatenate([priority.astype(gradient.dtype)[None], onehot])
    parts = _parts(len(priority))
    inputs, outputs = features.reshape(1 + CLASSES, parts, -1), gradient.reshape(parts, -1, FEATURES)
    d_kernel = jnp.einsum("fpr,pre->pfe", inputs, outputs, precision="highest").sum(axis=0)
    return d_kernel, jnp.sum(d_kernel[1:], axis=0), None, None


_first_layer.defvjp(_first_layer_forward, _first_layer_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _second_layer(x: jax.Array, kernel: jax.Array, precision: Any) -> jax.Array:
    """``x W`` of items in a row."""
    return jnp.matmul(x, kernel, precision=precision)


def _second_layer_forward(
    x: jax.Array, kernel: jax.Array, precision: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _second_layer(x, kernel, precision), (x, kernel)


def _second_layer_backward(
    precision: Any, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    parts = _parts(len(x))
    inputs, outputs = (a.reshape(parts, -1, FEATURES) for a in (x, gradient))
    d_kernel = jnp.einsum("prd,pre->pde", inputs, outputs, precision=precision).sum(axis=0)
    return jnp.matmul(gradient, kernel.T, precision=precision), d_kernel


_second_layer.defvjp(_second_layer_forward, _second_layer_backward)


def embed_query(params: Params, query: jax.Array, precision: Any = "highest") -> jax.Array:
    """``psi_q(q)`` of Equation 10, ``[..., 128]``: the second layer has no activation in the listing."""
    first, second = params["Dense_2"], params["Dense_3"]
    query = query.astype(first["kernel"].dtype)
    x = jax.nn.gelu(query * first["kernel"][0] + first["bias"])
    return jnp.matmul(x, second["kernel"], precision=precision) + second["bias"]


def folded_query(params: Params, query: jax.Array, precision: Any = "highest") -> tuple[jax.Array, jax.Array]:
    """``K^T q'`` ``[..., 128]`` and ``<q', b_k>`` ``[...]``, with ``q' = (Q q + b_q) / sqrt(128)``."""
    layer = params[ATTENTION]
    q = jnp.matmul(embed_query(params, query, precision), layer["query"]["kernel"][:, 0], precision=precision)
    q = (q + layer["query"]["bias"][0]) / math.sqrt(FEATURES)
    folded = jnp.matmul(q, layer["key"]["kernel"][:, 0].T, precision=precision)
    return folded, jnp.matmul(q, layer["key"]["bias"][0], precision=precision)


def item_logits(folded: jax.Array, h: jax.Array, precision: Any = "highest") -> jax.Array:
    """Equation 11 without the constant ``<q', b_k>``, which no softmax sees: ``[..., n]``."""
    return jnp.einsum("...d,...nd->...n", folded, h, precision=precision)


def logits(params: Params, batch: Batch, precision: Any = "highest") -> jax.Array:
    """The attention logits ``e_i`` of Equation 11, ``[sets, n]``."""
    folded, constant = folded_query(params, batch.query, precision)
    h = hidden(params, batch.priority, batch.category, precision)
    return item_logits(folded, h, precision) + constant[..., None]


def read(params: Params, attended: jax.Array, precision: Any = "highest") -> jax.Array:
    """Class scores ``phi(V z + b_v)`` of the attended vector ``z = sum a_i h_i`` (Equations 13 and 14)."""
    value, out = params[ATTENTION]["value"], params[ATTENTION]["out"]
    z = jnp.matmul(attended, value["kernel"][:, 0], precision=precision) + value["bias"][0]
    z = jnp.matmul(z, out["kernel"][0], precision=precision) + out["bias"]
    z = jax.nn.gelu(jnp.matmul(z, params["Dense_4"]["kernel"], precision=precision) + params["Dense_4"]["bias"])
    return jnp.matmul(z, params["Dense_5"]["kernel"], precision=precision) + params["Dense_5"]["bias"]


def row_beta(policy: Policy, e: jax.Array, mask: jax.Array | None = None) -> jax.Array | float:
    """The inverse temperature that ``policy`` gives every row of ``e``; a number where it is one."""
    if isinstance(policy, Constant):
        return policy.beta
    return policy(row_stats(e, where=mask, with_min=needs_spread(policy)))


def forward(
    params: Params,
    batch: Batch,
    policy: Policy = Constant(),  # noqa: B008  (frozen)
    precision: Any = "highest",
    beta: Callable[[jax.Array | float], jax.Array | float] = lambda beta: beta,
) -> tuple[jax.Array, jax.Array, jax.Array | float]:
    """Class scores ``[sets, 10]``, logits ``[sets, n]`` up to a constant, and the beta they were multiplied by.

    ``beta`` maps what the policy says to what is used: training may anneal it.
    """
    h = hidden(params, batch.priority, batch.category, precision)
    e = item_logits(folded_query(params, batch.query, precision)[0], h, precision)
    used = beta(row_beta(policy, e, batch.mask))
    weights = softmax(e, where=batch.mask, beta=used)
    attended = jnp.einsum("...n,...nd->...d", weights, h, precision=precision)
    return read(params, attended, precision), e, used


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
