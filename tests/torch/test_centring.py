"""What all keys have in common: weights do not depend on it, and nothing that is rounded of it reaches a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax
from sharpmax.torch import scaled_dot_product_attention
from sharpmax.torch.centring import centred
from sharpmax.torch.geometry import Geometry

LENGTH = 256
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "lengths": {"key_lengths": torch.tensor([200, LENGTH])},
    "window": {"window": 40},
    "mask": {"attn_mask": torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.3},
    "numbers": {"attn_mask": torch.randn(LENGTH, LENGTH, generator=torch.Generator().manual_seed(2))},
    "detached": {"policy": sharpmax.detached(sharpmax.PAPER)},
    "any policy": {"policy": lambda stats: 0.3 + 0.2 * stats.entropy},
}


def tensors(offset: float, columns: int = 24, odd: bool = False) -> list[Tensor]:
    """Query, key, value and cotangent; logits have ``offset`` nats in common, but for those of an ``odd`` key."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, LENGTH, columns), *[(2, 2, LENGTH, columns)] * 2, (2, 4, LENGTH, columns))
    q, k, v, g = (torch.randn(shape, generator=generator) for shape in shapes)
    q[..., 0], k[..., 0] = 1.0, k[..., 0] + offset * columns**0.5
    if odd:
        k[:, :, 3] = 0.0
    return [q, k, v, g]


def errors(given: list[Tensor], call: dict[str, Any], impl: str) -> list[float]:
    """Of the output and the gradients, relative to the largest value of each in float64."""
    found = []
    for name, dtype in ((impl, torch.float32), ("reference", torch.float64)):
        *leaves, g = (x.to(dtype) for x in given)
        for leaf in leaves:
            leaf.requires_grad_()
        q, k, v = leaves
        out: Any = scaled_dot_product_attention(q, k, v, impl=name, enable_gqa=True, **call)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, g)])
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_streaming_is_as_exact_as_the_reference(call: str, odd: bool) -> None:
    """Torch's kernel alone loses most of the gradient of queries, since it rounds logits in two ways."""
    given = tensors(300.0, odd=odd)
    ours, reference = (errors(given, CALLS[call], impl) for impl in ("streaming", "reference"))
    assert max(reference) < 2e-3
    for name, ratio in zip(("output", "dq", "dk", "dv"), map(lambda a, b: a / b, ours, reference), strict=True):
        assert ratio < 4.0, f"{name}: {ratio:.1f} times the reference's"


def test_rows_that_are_far_from_0_keep_what_is_left_of_them() -> None:
    assert max(errors(tensors(2e4), {}, "streaming")) < 1e-2


def test_what_is_taken_out() -> None:
    q, k, _, _ = tensors(300.0)
    geometry, beta, lengths = Geometry(0.5), torch.full((2, 4, LENGTH), 2.0), torch.tensor([200, 0])
    less = centred(q, k, beta, geometry, None)
    assert less is not None
    before, after = (q.double() @ x.double().repeat_interleave(2, 1).mT for x in (k, less.keys))
    torch.testing.assert_close((0.5 * (before - after)).mean(-1), less.shift.double(), rtol=1e-5, atol=1e-4)
    assert float(less.keys.abs().max()) < 10
    garbage = k.clone()
    garbage[0, :, 200:], garbage[1] = torch.nan, torch.inf  # beyond the keys
    shorter = centred(q, garbage, beta, geometry, lengths)
    assert shorter is not None
    assert float(shorter.keys[0, :, :200].abs().max()) < 10
    assert bool(shorter.shift.isfinite().all())
    for other in (
        centred(q / 1000, k, beta, geometry, None),
        centred(q, k - k.mean(2, keepdim=True), beta, geometry, None),
        centred(q, k, beta, geometry._replace(softcap=2.0), None),
        centred(q, k, beta * torch.inf, geometry, None),
        centred(q, k[:, :, :0], beta, geometry, None),
    ):
        assert other is None
