"""The materialised implementation against Figure 4 and the core."""

from __future__ import annotations

import torch

import sharpmax
from benchmarks.figure4 import torch_figure4
from sharpmax.torch import reference
from sharpmax.torch.geometry import Geometry


def test_reference_is_figure_4() -> None:
    q, k, v = (2 * torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (9, 11, 11))
    geometry = Geometry(0.5)
    beta = sharpmax.PAPER(reference.row_stats(q, k, geometry))
    assert (beta > 1).any()
    expected = torch_figure4(0.5 * q @ k.mT) @ v
    assert torch.allclose(reference.attend(q, k, v, beta, geometry), expected, atol=1e-6)


def test_logits_are_softcapped_before_the_bias() -> None:
    q, k = (5 * torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (3, 5))
    bias = torch.randn(3, 5, dtype=torch.float64)
    z, seen = reference.logits(q, k, Geometry(0.5, 2.0), mask=bias[None, None])
    assert torch.allclose(z, 2.0 * torch.tanh(0.25 * q @ k.mT) + bias)
    assert seen is not None
    assert seen.all()


def test_grouped_heads_share_keys() -> None:
    q, k = torch.randn(2, 6, 3, 4), torch.randn(2, 2, 5, 4)
    z, _ = reference.logits(q, k, Geometry(1.0))
    assert torch.allclose(z, q @ k.repeat_interleave(3, 1).mT, atol=1e-5)
