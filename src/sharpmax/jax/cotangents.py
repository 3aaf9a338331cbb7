"""What functions with a backward of their own do with arguments and cotangents that may have no derivative."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero


def wanted(x: Any) -> tuple[()] | None:
    """``()`` if the gradient of an argument is asked for, else ``None``: a structure, which no transform traces."""
    return () if x is not None and x.perturbed else None


def values(arguments: Any) -> Any:
    """The arrays of arguments that come with the word whether they have a derivative."""
    return jax.tree.map(lambda x: x.value, arguments, is_leaf=lambda x: hasattr(x, "perturbed"))


def instantiated(x: Any) -> jax.Array:
    """A cotangent as an array, also where it is known to be 0."""
    if not isinstance(x, SymbolicZero):
        return x
    aval: Any = x.aval
    return jnp.zeros(aval.shape, aval.dtype)
