"""What tests of the gradient in one piece share: how it is asked for, and what it should be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sharpmax.core.policies.base import Lowered
from sharpmax.torch import fused
from sharpmax.torch.geometry import Geometry
from tests.torch.triton.oracle import POLICY, Inputs, attention, logits, stats

CAUSAL = Geometry(0.1, right=0)
FULL = Geometry(0.1)
WIDE: dict[str, Any] = {"width": 128, "value_width": 128}
NARROW: dict[str, Any] = {"width": 64, "value_width": 64}
Gradients = tuple[Tensor, ...]


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


def in_one_piece(given: Inputs, policy: Lowered = POLICY) -> tuple[Gradients, Tensor]:
    """The gradients, and ``beta * q``."""
    q, k, v = leaves(given.q, given.k, given.v)
    found = fused.sharpened_attention(q, k, v, given.case.geometry.numbers, fused.policy_numbers(policy))
    return torch.autograd.grad(found[0], (q, k, v), given.do), found[2]


def exact(given: Inputs, policy: Lowered = POLICY) -> Gradients:
    q, k, v = leaves(*(x.double() for x in (given.q, given.k, given.v)))
    z, seen = logits(given, q, k)
    beta: Any = policy(stats(z, seen))
    return torch.autograd.grad(attention(z, seen, v, beta)[0], (q, k, v), given.do.double())


def errors(found: Gradients, expected: Gradients) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
