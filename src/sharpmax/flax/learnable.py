"""Policies and mechanisms with parameters, as modules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from ..core.policies import LearnableStructure
from ..jax.mechanisms import Held
from ..mechanisms import Mechanism


class Learnable(linen.Module):
    """A policy or a mechanism with parameters for linen.

    ``Learnable(LearnableTemperature(heads=8))`` maps RowStats to beta, ``Learnable(LearnedEntmax(heads=8))`` logits
    (and which are seen) to weights. The parameters belong to the model's; ``structure`` is saved as JSON.
    """

    structure: LearnableStructure | Mechanism

    @linen.compact
    def __call__(self, x: Any, where: jax.Array | None = None) -> jax.Array:
        """Beta of every row from its RowStats; of a mechanism, the weights of logits."""
        initial = self.structure.parameters()
        parameters = {name: self.param(name, lambda _, v=v: jnp.asarray(v)) for name, v in initial.items()}
        return Held(self.structure, parameters)(x, where)

    @property
    def needs_spread(self) -> bool:
        """Whether it is a policy that reads the spread of a row."""
        return getattr(self.structure, "needs_spread", False)


class LearnableNNX(nnx.Module):
    """The same for nnx."""

    def __init__(self, structure: LearnableStructure | Mechanism) -> None:
        self.structure = structure
        for name, value in structure.parameters().items():
            setattr(self, name, nnx.Param(jnp.asarray(value)))

    def __call__(self, x: Any, where: jax.Array | None = None) -> jax.Array:
        """Beta of every row from its RowStats; of a mechanism, the weights of logits."""
        names = self.structure.initial()
        return Held(self.structure, {name: getattr(self, name)[...] for name in names})(x, where)

    @property
    def needs_spread(self) -> bool:
        """Whether it is a policy that reads the spread of a row."""
        return getattr(self.structure, "needs_spread", False)
