"""Policies with parameters, as modules."""

from __future__ import annotations

import torch

from ..core.policies import LearnableStructure
from ..core.stats import RowStats


class Learnable(torch.nn.Module):
    """A policy with parameters: ``Learnable(LearnableTemperature(heads=8))`` maps RowStats to beta.

    The parameters belong to the model and are saved with its ``state_dict``; :attr:`structure` is saved as JSON.
    """

    def __init__(self, structure: LearnableStructure) -> None:
        super().__init__()
        if not isinstance(structure, LearnableStructure):
            raise TypeError(f"expected LearnableTemperature or LearnableLogLength, got {type(structure).__name__}")
        self.structure = structure
        for name, value in structure.parameters().items():
            self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(value)))

    @property
    def needs_spread(self) -> bool:
        """Whether the policy reads the spread of a row."""
        return self.structure.needs_spread

    def forward(self, stats: RowStats) -> torch.Tensor:
        """Beta of every row."""
        return self.structure.beta(stats, {name: getattr(self, name) for name in self.structure.initial()})

    def extra_repr(self) -> str:
        """The structure, for ``repr``."""
        return repr(self.structure)
