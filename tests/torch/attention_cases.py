"""Calls of attention, policies for them, and the comparison of their results with the oracle."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch._dynamo.testing
import torch.utils.checkpoint
from torch import Tensor

import sharpmax
from sharpmax.torch import Attention, scaled_dot_product_attention
from tests.torch import oracle

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Relative to the largest value; a rounding of the output's type, and for float32 what sums and exp lose."""

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "lower_right": {"is_causal": "lower_right"},
    "window": {"window": 3},
    "causal_window": {"is_causal": "lower_right", "window": 4},
    "left_right": {"window": (2, 1)},
    "softcap": {"softcap": 2.0},
    "softcap_causal": {"softcap": 2.0, "is_causal": True},
    "scale": {"scale": 0.7},
    "lengths": {"key_lengths": torch.tensor([5, 11])},
    "lengths_lower_right": {"key_lengths": torch.tensor([3, 9]), "is_causal": "lower_right", "window": 5},
    "boolean": {"attn_mask": torch.rand(2, 1, 9, 11, generator=torch.Generator().manual_seed(0)) > 0.4},
    "boolean_causal": {"attn_mask": torch.rand(1, 4, 1, 11) > 0.3, "is_causal": True},
    "bias": {"attn_mask": torch.randn(1, 4, 9, 11, generator=torch.Generator().manual_seed(1))},
    "bias_hiding": {
        "attn_mask": torch.tensor([0.0, -math.inf] * 5 + [torch.finfo(torch.float32).min]).view(1, 1, 1, 11)
    },
}


def inputs(
    dtype: torch.dtype = torch.float64, *, seed: int = 0, heads: int = 4, value_columns: int = 6
) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((2, heads, 9, 8), (2, 2, 11, 8), (2, 2, 11, value_columns))
    q, k, v = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    return [x.to(dtype).requires_grad_() for x in (2.5 * q, 2 * k, v)]


def place(impl: str, *tensors: Tensor) -> list[Tensor]:
    """Tensors where ``impl`` runs: Triton's kernels on a GPU if there is one, all else on the CPU."""
    device = "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"
    return [x.detach().to(device).requires_grad_(x.requires_grad) for x in tensors]


def close(got: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    got, expected = (x.detach().double().cpu() for x in (got, expected))
    assert got.shape == expected.shape, what
    assert torch.isfinite(got).all(), what
    error = (got - expected).abs().max().item() if got.numel() else 0.0
    assert error <= tolerance * max(1.0, expected.abs().max().item() if got.numel() else 0.0), f"{what}: {error:.2e}"


def compare(
    tensors: list[Tensor], impl: str, policy: Any = sharpmax.PAPER, tolerance: float = 1e-11, **kw: Any
) -> None:
    """Output, entropy, beta, count and gradients against the oracle.

    A row whose entropy is next to a threshold of the policy may fall on either side of it: beta is held to the policy
    at the implementation's own entropy, and the output to the oracle with the implementation's beta. No row is left
    out.
    """
    q, k, v = tensors
    result = scaled_dot_product_attention(q, k, v, impl=impl, policy=policy, return_stats=True, enable_gqa=True, **kw)
    assert isinstance(result, Attention)
    truth = oracle.attention(q, k, v, policy=policy, beta=result.beta.detach(), **kw)
    close(result.stats.entropy, truth.entropy, max(tolerance, 1e-11), "entropy")
    assert torch.equal(result.stats.count.long(), truth.keys.long())
    own = oracle.attention(q, k, v, policy=policy, **kw)
    away = (own.beta - result.beta).abs() > 1e-3 * own.beta.abs()
    assert (own.entropy - 0.5).abs()[away & (truth.keys > 0)].le(1e-3).all(), "beta differs far from the threshold"
    close(result.output, truth.output, tolerance, "output")
    g = torch.randn(result.output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    g = g.to(result.output.dtype)
    expected = torch.autograd.grad(truth.output, tensors, g.double(), materialize_grads=True)
    found = torch.autograd.grad(result.output, tensors, g, materialize_grads=True)
    for name, a, b in zip(("dq", "dk", "dv"), found, expected, strict=True):
        close(a, b, 4 * tolerance, name)


POLICIES: dict[str, Any] = {
    "paper": sharpmax.PAPER,
    "held": sharpmax.PAPER_HELD,
    "constant": sharpmax.Constant(1.7),
    "uniform": sharpmax.Constant(0.0),
    "log": sharpmax.LogLength(),
    "detached": sharpmax.detached(sharpmax.PAPER),
    "spread": lambda stats: 1 + 0.1 * stats.spread,
    "hard": sharpmax.Hard(),
}
