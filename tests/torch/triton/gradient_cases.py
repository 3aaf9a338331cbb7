"""What tests of the gradient kernels for Hopper share: how they are asked for, and what they should give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sharpmax.core.policies.base import Lowered
from sharpmax.torch import fused
from sharpmax.torch.geometry import Geometry
from sharpmax.torch.triton import hopper
from tests.torch.triton.oracle import POLICY, Inputs, attention, logits, stats

CAUSAL = Geometry(0.1, right=0)
FULL = Geometry(0.1)
WIDE: dict[str, Any] = {"width": 128, "value_width": 128}
NARROW: dict[str, Any] = {"width": 64, "value_width": 64}
DOWN_TO_ZERO = Lowered("entropy", (-1.0, 4.0), floor=0.0)
"""Beta is 4 in the first rows with causality, and 0 in those that spread over 55 keys or more."""
Gradients = tuple[Tensor, ...]


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


def attended(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, policy: Lowered = POLICY) -> Tensor:
    """The output, from the operator."""
    rest = (geometry.numbers, fused.policy_numbers(policy), False, 0.0)
    return fused.adaptive_attention(q, k, v, *(None,) * 5, *rest)[0]


def by_kernels(given: Inputs, policy: Lowered = POLICY) -> Gradients:
    """The gradients from the kernels for Hopper, whether or not they would be taken for a call of that size."""
    q, k, v, geometry, kernels = given.q, given.k, given.v, given.case.geometry, fused.kernels()
    config = "hopper" if all(hopper.regular(x.shape, x.stride()) for x in (q, k, v)) else None
    (top, total, moment, _, _), beta, _ = kernels.row_stats_and_scaled_query(
        q, k, geometry, policy, scaled_query=False, config=config
    )
    out, lse = kernels.attend(q, k, v, beta, geometry, row_max=top, config=config)
    return kernels.adaptive_backward(
        q, k, v, beta, geometry, policy, out=out, lse=lse, grad_out=given.do, row_max=top, row_sum=total,
        row_moment=moment,
    )  # fmt: skip


def exact(given: Inputs, policy: Lowered = POLICY) -> Gradients:
    q, k, v = leaves(*(x.double() for x in (given.q, given.k, given.v)))
    z, seen = logits(given, q, k)
    beta: Any = policy(stats(z, seen))
    return torch.autograd.grad(attention(z, seen, v, beta)[0], (q, k, v), given.do.double())


def sharpened(given: Inputs, policy: Lowered = POLICY) -> Tensor:
    """``beta * q``, rounded."""
    q, k = given.q.double(), given.k.double()
    beta: Any = policy(stats(*logits(given, q, k)))
    return (beta[..., None] * q).to(given.q.dtype)


def offset(given: Inputs, nats: float) -> Inputs:
    """Logits that all are so far away from what they were, in steps that two-byte numbers have."""
    given.q[..., 0] = 1.1
    given.k[..., 0] = nats / 0.11
    return given


def in_two_clusters(given: Inputs, nats: float) -> Inputs:
    """Every other key so far below the others that nobody attends to it."""
    offset(given, nats).k[:, :, 1::2, 0] *= -1.0
    return given


def errors(found: Gradients, expected: Gradients) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
