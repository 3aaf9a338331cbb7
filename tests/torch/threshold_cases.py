"""Rows at, just below and just above the point where a policy jumps, and what is right there."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sharpmax
from tests.torch import oracle
from tests.torch.attention_cases import TOLERANCE

LOGITS = (2.0, 1.5, 0.5, 0.25, -1.0, -3.0)
KEYS = len(LOGITS)
AT, NEAR = 4, 2
"""How many rows are at the jump, with their keys in other orders, and how many on either side of it."""


class Rows(NamedTuple):
    """Queries with keys of their own, ``[rows, 1, 1 or keys, columns]``, for a scale of 1."""

    query: Tensor
    key: Tensor
    value: Tensor
    cotangent: Tensor
    threshold: float
    """The entropy of those at the jump, in float64."""

    @property
    def policy(self) -> Any:
        return jumping(self.threshold)

    @property
    def rounding(self) -> float:
        """How far an entropy may be from that of float64."""
        return TOLERANCE[torch.float64 if self.query.dtype == torch.float64 else torch.float32]


def jumping(threshold: float) -> sharpmax.EntropyPolynomial:
    """Beta is 1 up to the threshold, and above it at once about 2."""
    return sharpmax.EntropyPolynomial((0.5, 1.5), threshold=threshold, floor=0.0)


@functools.cache
def rows(dtype: torch.dtype, columns: int = 16) -> Rows:
    g = torch.Generator().manual_seed(0)
    steps = torch.tensor([0] * AT + [n + 1 for n in range(NEAR)] + [-n - 1 for n in range(NEAR)])
    spacing = max(torch.finfo(dtype).eps, 2.0**-12)
    logits = torch.stack([torch.tensor(LOGITS, dtype=torch.float64)[torch.randperm(KEYS, generator=g)] for _ in steps])
    logits *= 1 + steps[:, None] * spacing
    query, key = torch.zeros(len(steps), 1, 1, columns), torch.zeros(len(steps), 1, KEYS, columns, dtype=torch.float64)
    query[..., 0], key[:, 0, :, 0] = 1.0, logits
    value = torch.randn(key.shape, generator=g)
    cotangent = torch.randn(query.shape, generator=g)
    query, key, value, cotangent = (x.to(dtype) for x in (query, key, value, cotangent))
    found = oracle.attention(query, key, value, policy=sharpmax.Constant(1), scale=1.0).entropy
    return Rows(query, key, value, cotangent, float(found[0]))


def on_sides(given: Rows, value: int, slope: int) -> dict[str, Tensor]:
    """All that there is of rows in float64, where those at the jump are below it (-1) or above it (1)."""
    betas, slopes = (jumping(given.threshold - side * given.rounding) for side in (value, slope))

    def policy(stats: Any) -> Tensor:
        beta: Any = slopes(stats)
        return beta + (betas(stats) - beta).detach()

    leaves = [x.detach().double().clone().requires_grad_() for x in (given.query, given.key, given.value)]
    truth = oracle.attention(leaves[0], leaves[1], leaves[2], policy=policy, scale=1.0)
    gradients = torch.autograd.grad(truth.output, leaves, given.cotangent.double())
    found = {"beta": truth.beta, "output": truth.output, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    return {name: x.detach() for name, x in found.items()}


def check(given: Rows, found: dict[str, Tensor]) -> None:
    """Every row is on one side of the jump in all that was found of it; only those at the jump may choose.

    Backward, kernels compute the entropy anew: there, rows at the jump may have the slope of either side.
    """
    truths = {sides: on_sides(given, *sides) for sides in ((-1, -1), (-1, 1), (1, -1), (1, 1))}
    below, above = (truths[side, side]["beta"].flatten() for side in (-1, 1))
    at = (above - below).abs() > 0.5
    assert at.tolist() == [True] * AT + [False] * 2 * NEAR
    assert (below == 1.0).tolist() == [True] * (AT + NEAR) + [False] * NEAR
    fits = {sides: fitting(found, truth, TOLERANCE[given.query.dtype]) for sides, truth in truths.items()}
    is_below, is_above = (fits[side, -1] | fits[side, 1] for side in (-1, 1))
    assert (is_below | is_above).all(), f"on neither side: {(~(is_below | is_above)).nonzero().flatten().tolist()}"
    assert torch.equal(is_below & is_above, ~at)


def fitting(found: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float) -> Tensor:
    """Which rows are as they are in truth."""
    fit = torch.ones(AT + 2 * NEAR, dtype=torch.bool)
    for name, x in found.items():
        expected = truth[name].flatten(1)
        error = (x.detach().cpu().double().reshape(expected.shape) - expected).abs().amax(1)
        most = expected.abs().amax(1)
        fit &= error <= (1e-3 * most if name == "beta" else 4 * tolerance * most.clamp_min(1.0))
    return fit
