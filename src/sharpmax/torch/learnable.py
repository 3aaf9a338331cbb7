"""Policies and mechanisms with parameters, as modules."""

from __future__ import annotations

from typing import Any

import torch

from ..core.policies import LearnableStructure, PerHead
from ..mechanisms import Mechanism, Temperature


class Learnable(torch.nn.Module):
    """A policy or a mechanism with parameters.

    ``Learnable(LearnableTemperature(heads=8))`` maps RowStats to beta, ``Learnable(LearnedEntmax(heads=8))`` logits
    (and which are seen) to weights. The parameters belong to the model and are saved with its ``state_dict``;
    :attr:`structure` is saved as JSON. A mechanism that is softmax with a learned temperature is held as its policy.
    """

    structure: Any

    def __init__(self, structure: LearnableStructure | Mechanism) -> None:
        super().__init__()
        held = structure.policy if isinstance(structure, Temperature) else structure
        if not isinstance(held, LearnableStructure | Mechanism):
            raise TypeError(
                f"expected LearnableTemperature or LearnableLogLength, got {type(held).__name__}; a mechanism is taken "
                "too, unless it is softmax with a policy that has no parameters"
            )
        self.structure = held
        for name, value in held.parameters().items():
            self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(value)))

    @property
    def needs_spread(self) -> bool:
        """Whether it is a policy that reads the spread of a row."""
        return getattr(self.structure, "needs_spread", False)

    @property
    def held(self) -> dict[str, torch.Tensor]:
        """The parameters by name."""
        return {name: getattr(self, name) for name in self.structure.initial()}

    def forward(self, x: Any, where: torch.Tensor | None = None) -> torch.Tensor:
        """Beta of every row from its RowStats; of a mechanism, the weights of logits."""
        if isinstance(self.structure, Mechanism):
            return self.structure(x, where, parameters=self.held)
        return self.structure.beta(x, self.held)

    def extra_repr(self) -> str:
        """The structure, for ``repr``."""
        return repr(self.structure)


def parameters_of(policy: Any) -> tuple[torch.Tensor, ...]:
    """The parameters of a policy that is a module, or of those of its heads that are."""
    if isinstance(policy, PerHead):
        return tuple(x for part in policy.policies for x in parameters_of(part))
    return tuple(policy.parameters()) if isinstance(policy, torch.nn.Module) else ()
