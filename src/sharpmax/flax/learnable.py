"""Policies with parameters, as modules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen, nnx

from ..core.policies import LearnableStructure
from ..core.stats import RowStats


class Learnable(linen.Module):
    """A policy with parameters for linen: ``Learnable(LearnableTemperature(heads=8))`` maps RowStats to beta.

    The parameters belong to the model's; ``structure`` is saved as JSON.
    """

    structure: LearnableStructure

    @linen.compact
    def __call__(self, stats: RowStats) -> jax.Array:
        """Beta of every row."""
        initial = self.structure.parameters()
        parameters = {name: self.param(name, lambda _, v=v: jnp.asarray(v)) for name, v in initial.items()}
        return self.structure.beta(stats, parameters)

    @property
    def needs_spread(self) -> bool:
        """Whether the policy reads the spread of a row."""
        return self.structure.needs_spread


class LearnableNNX(nnx.Module):
    """The same for nnx."""

    def __init__(self, structure: LearnableStructure) -> None:
        self.structure = structure
        for name, value in structure.parameters().items():
            setattr(self, name, nnx.Param(jnp.asarray(value)))

    def __call__(self, stats: RowStats) -> jax.Array:
        """Beta of every row."""
        names = self.structure.initial()
        return self.structure.beta(stats, {name: getattr(self, name)[...] for name in names})

    @property
    def needs_spread(self) -> bool:
        """Whether the policy reads the spread of a row."""
        return self.structure.needs_spread
