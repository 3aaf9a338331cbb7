"""Calls of attention, policies for them, and the comparison of their results with the oracle."""

from __future__ import annotations

import functools
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
    """Entropy, count, beta, output and gradients against the oracle, for policies that do not jump; no row is left out.

    Beta is the policy's at the implementation's own statistics, and the oracle's within 1e-3. Output and gradients are
    those of the oracle with the implementation's statistics and betas: where the slope of the policy jumps, a row may
    be on either side, but on the same one in all that is made of it. Calls without statistics, which may go another
    way, are held to the same.
    """
    q, k, v = given = place(impl, *tensors)
    options: Any = {n: x.to(q.device) if isinstance(x, Tensor) else x for n, x in kw.items()}
    call = functools.partial(scaled_dot_product_attention, impl=impl, policy=policy, enable_gqa=True, **options)
    result = call(q, k, v, return_stats=True)
    assert isinstance(result, Attention)
    stats = result.stats
    truth = oracle.attention(*tensors, policy=policy, held=oracle.Held(stats, result.beta), **kw)
    of_stats = tolerance if q.dtype == stats.sum.dtype else TOLERANCE[stats.sum.dtype]
    close(stats.entropy, truth.entropy, of_stats, "entropy")
    assert torch.equal(stats.count.long().cpu(), truth.keys.long())
    own = torch.as_tensor(policy(stats), dtype=result.beta.dtype).expand(result.beta.shape)
    torch.testing.assert_close(result.beta, own, rtol=8 * torch.finfo(own.dtype).eps, atol=0.0)
    seen = truth.keys > 0
    torch.testing.assert_close(result.beta.cpu().double()[seen], truth.beta.detach()[seen], rtol=1e-3, atol=0.0)
    g = torch.randn(result.output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(q.dtype)
    expected = torch.autograd.grad(truth.output, tensors, g.double(), materialize_grads=True)
    for output in (result.output, call(q, k, v)):
        close(output, truth.output, tolerance, "output")
        found = torch.autograd.grad(output, given, g.to(q.device), materialize_grads=True)
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
