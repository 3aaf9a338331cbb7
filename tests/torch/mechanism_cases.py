"""What the tests of mechanisms in attention share: inputs, cases of masks, and a mechanism that takes notes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sharpmax.mechanisms import MECHANISMS, About, Mechanism, TopK, Window, find
from sharpmax.torch import Learnable, scaled_dot_product_attention

RNG = np.random.default_rng(3)
BLIND = torch.from_numpy(RNG.random((2, 1, 9, 11)) > 0.5)
BLIND[1, 0, 3] = False  # a query that sees nothing
BIAS = np.where(RNG.random((1, 4, 9, 11)) > 0.3, RNG.normal(size=(1, 4, 9, 11)), -np.inf)
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "lower_right": {"is_causal": "lower_right", "window": 6, "softcap": 3.0},
    "boolean": {"attn_mask": BLIND},
    "bias": {"attn_mask": torch.from_numpy(BIAS)},
    "lengths": {"key_lengths": torch.tensor([5, 11]), "is_causal": "lower_right"},
}  # fmt: skip
CHOSEN: dict[str, Any] = {"window": Window(4), "top_k": TopK(3), "differential": Learnable(find("differential"))}
"""What small cases can tell apart, in the place of the registered."""
FOLDING = [name for name, mechanism in MECHANISMS.items() if mechanism.folds]


@dataclass(frozen=True)
class Toy(Mechanism):
    """Weights ``s^2`` times a learned number for each head; notes which blocks it folds."""

    heads: int | None = 4  # pyright: ignore[reportIncompatibleMethodOverride]
    noted: list[tuple[int, int]] = field(default_factory=list, compare=False)

    about: ClassVar[About] = About("a toy", *("" for _ in About._fields[1:]))  # pyright: ignore[reportArgumentType]
    folds: ClassVar[bool] = True

    def initial(self) -> dict[str, float]:
        return {"slope": 0.7}

    def formula(self, xp: Any, logits: Any, visible: Any, parameters: Any) -> Any:
        return parameters["slope"] * logits**2

    def fold(self, xp: Any, carry: Any, logits: Any, visible: Any, value: Any, count: Any, parameters: Any) -> Any:
        self.noted.append(tuple(logits.shape[-2:]))
        part = xp.matmul(xp.where(visible, self.formula(xp, logits, visible, parameters), 0.0), value)
        return part if carry is None else carry + part

    def finish(self, xp: Any, carry: Any) -> Any:
        return carry


def inputs(maps: int = 1, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Four query heads for two of key, nine queries and eleven keys."""
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 9, 8), (2, 2, 11, 8), (2, 2 // maps, 11, 6))
    return [(1.7 * torch.randn(s, generator=g, dtype=torch.float64)).to(dtype).requires_grad_() for s in shapes]


def attend(*tensors: Any, **given: Any) -> Any:
    return scaled_dot_product_attention(*tensors, **given)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_(x.is_floating_point()) for x in tensors]
