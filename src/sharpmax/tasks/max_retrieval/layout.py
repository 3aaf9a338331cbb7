"""The parameters of a head: which there are for a task and a mechanism, and where each lies in one flat vector."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...mechanisms import Mechanism
from .data import SIGNS, Task
from .model import MECHANISM, PROJECTION, SHAPES, Params, dense, init, is_shape

LEARNED = "learned"
"""Under what name the numbers lie that a mechanism learns."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Shapes of the parameters in the order in which they lie in the flat vector.

    Attributes:
      shapes: by name, the shape of every parameter.
      start: by name, what each of the mechanism's own numbers starts from.
      names: the names of all parameters, with ``/`` between those of nested ones.
      is_kernel: which entries of the flat vector belong to kernels.
      is_own: which only heads of this mechanism have.
      is_learned: which of those are its numbers, and no projection; L2 leaves them alone.
    """

    shapes: Params
    start: dict[str, np.ndarray]
    names: dict[str, tuple[int, ...]] = field(init=False)
    is_kernel: np.ndarray = field(init=False)
    is_own: np.ndarray = field(init=False)
    is_learned: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        paths = jax.tree.flatten_with_path(self.shapes, is_leaf=is_shape)[0]
        sizes = [math.prod(shape) for _, shape in paths]
        found = {
            "names": {"/".join(key.key for key in path): shape for path, shape in paths},
            "is_kernel": np.repeat([path[-1].key == "kernel" for path, _ in paths], sizes),
            "is_own": np.repeat([path[0].key == MECHANISM for path, _ in paths], sizes),
            "is_learned": np.repeat([path[-2].key == LEARNED for path, _ in paths], sizes),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def init(self, key: jax.Array) -> Params:
        """Parameters to start from. Those that heads of other mechanisms have too are the same in all of them."""
        params = init(key, {name: shape for name, shape in self.shapes.items() if name != MECHANISM})
        if MECHANISM in self.shapes:
            maps = {name: shape for name, shape in self.shapes[MECHANISM].items() if name != LEARNED}
            own = init(jax.random.fold_in(key, 1), maps) if maps else {}
            learned = {name: jnp.asarray(value, jnp.float32) for name, value in self.start.items()}
            params[MECHANISM] = {**own, **({LEARNED: learned} if learned else {})}
        return params

    def ravel(self, params: Params) -> jax.Array:
        """Parameters ``[..., *shape]`` as one vector ``[..., D]``."""
        leaves = jax.tree.leaves(params)
        return jnp.concatenate(
            [
                a.reshape(*a.shape[: a.ndim - len(shape)], -1)
                for a, shape in zip(leaves, self.names.values(), strict=True)
            ],
            axis=-1,
        )

    def unravel(self, theta: Any) -> Params:
        """The inverse of :meth:`ravel`, for JAX and NumPy arrays."""
        leaves, start = [], 0
        for shape in self.names.values():
            size = math.prod(shape)
            leaves.append(theta[..., start : start + size].reshape((*theta.shape[:-1], *shape)))
            start += size
        return jax.tree.unflatten(jax.tree.structure(self.shapes, is_leaf=is_shape), leaves)


@cache
def layout(task: Task = "max", mechanism: Mechanism | None = None) -> Layout:
    """The parameters of a head for ``task`` with ``mechanism`` (``None``: softmax with a policy, without any more)."""
    shapes: Params = dict(SHAPES)
    if task == "recall":
        items, query = (shapes[name]["kernel"][0] - 1 + SIGNS for name in ("Dense_0", "Dense_2"))
        shapes |= {"Dense_0": dense(items), "Dense_2": dense(query)}
    if mechanism is None:
        return Layout(shapes, {})
    start = mechanism.parameters()
    own: Params = {f"map_{i}": {"query": PROJECTION, "key": PROJECTION} for i in range(1, mechanism.maps)}
    if start:
        own[LEARNED] = {name: value.shape for name, value in start.items()}
    return Layout({**shapes, MECHANISM: own} if own else shapes, start)
