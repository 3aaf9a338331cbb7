"""The two layers that every item goes through, with backward passes that suit an accelerator."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .data import CLASSES, signs

PARTS = {"cpu": 1, "gpu": 16}
"""Into how many parts the rows of a batch are taken for the gradient of a kernel, by platform. One product of many rows
keeps little of a GPU busy; several and their sum keep more of it."""


def _parts(rows: int) -> int:
    return math.gcd(rows, PARTS.get(jax.default_backend(), 1))


@jax.custom_vjp
def first_layer(kernel: jax.Array, bias: jax.Array, priority: jax.Array, category: jax.Array) -> jax.Array:
    """``(rho || onehot(kappa)) W + b`` of items in a row, the one-hot as a gather of rows of W."""
    numbers = len(kernel) - CLASSES
    rows = (kernel[numbers:] + bias).at[category].get(mode="promise_in_bounds")
    return weighted(priority, kernel[:numbers]) + rows


def is_key(number: jax.Array) -> bool:
    """Whether ``number`` is keys of recall."""
    return jnp.issubdtype(number.dtype, jnp.unsignedinteger)


def weighted(number: jax.Array, kernel: jax.Array) -> jax.Array:
    """A number, or the signs of a key, ``[...]`` times the rows of ``kernel`` for it."""
    if is_key(number):
        return jnp.matmul(signs(number, kernel.dtype), kernel, precision="highest")
    return number.astype(kernel.dtype)[..., None] * kernel[0]


def _first_layer_forward(
    kernel: jax.Array, bias: jax.Array, priority: jax.Array, category: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return first_layer(kernel, bias, priority, category), (priority, category)


def _first_layer_backward(
    saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    """One small product in place of a scatter, which is slow on an accelerator and adds in no fixed order."""
    priority, category = saved
    rows = jnp.arange(CLASSES)[:, None]
    onehot = (category == rows).astype(gradient.dtype)
    key = is_key(priority)
    numbers = signs(priority, gradient.dtype).T if key else priority.astype(gradient.dtype)[None]
    features = jnp.concatenate([numbers, onehot])
    parts = _parts(len(priority))
    inputs, outputs = features.reshape(len(features), parts, -1), gradient.reshape(parts, -1, gradient.shape[-1])
    d_kernel = jnp.einsum("fpr,pre->pfe", inputs, outputs, precision="highest").sum(axis=0)
    return d_kernel, jnp.sum(d_kernel[len(numbers) :], axis=0), None, None


first_layer.defvjp(_first_layer_forward, _first_layer_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def second_layer(x: jax.Array, kernel: jax.Array, precision: Any) -> jax.Array:
    """``x W`` of items in a row."""
    return jnp.matmul(x, kernel, precision=precision)


def _second_layer_forward(
    x: jax.Array, kernel: jax.Array, precision: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return second_layer(x, kernel, precision), (x, kernel)


def _second_layer_backward(
    precision: Any, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    parts = _parts(len(x))
    inputs, outputs = (a.reshape(parts, -1, a.shape[-1]) for a in (x, gradient))
    d_kernel = jnp.einsum("prd,pre->pde", inputs, outputs, precision=precision).sum(axis=0)
    return jnp.matmul(gradient, kernel.T, precision=precision), d_kernel


second_layer.defvjp(_second_layer_forward, _second_layer_backward)
