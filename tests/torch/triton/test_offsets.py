"""Statistics far from zero, and at a scale of zero: interpreted where there is no GPU, compiled where there is one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from sharpmax.core.stats import RowStats
from sharpmax.torch.geometry import Geometry
from sharpmax.torch.triton import Tiles, gradient, prefill

DEVICE = pytest.param("cuda", marks=pytest.mark.gpu) if torch.cuda.is_available() else "cpu"
SMALL = Tiles(16, 16, 4, 1)


@pytest.mark.parametrize("device", [DEVICE])
@pytest.mark.parametrize("offset", [0.0, 100.0, -1e4, 131072.0])
def test_entropy_and_its_gradient_do_not_feel_an_offset(offset: float, device: str) -> None:
    """The logits are 40 multiples of 1/64, which float32 has beside any of these offsets."""
    torch.manual_seed(0)
    logits = (offset + torch.randint(-256, 256, (40,)) / 64).to(device)
    q = torch.zeros(1, 1, 1, 16, device=device)
    k = torch.zeros(1, 1, 40, 16, device=device)
    q[..., 0], k[..., 0] = 1.0, logits
    exact = logits.double().requires_grad_()
    p = exact.softmax(0)
    entropy = -(p * p.log()).sum()
    (expected,) = torch.autograd.grad(entropy, exact)

    geometry = Geometry(1.0)
    found = prefill.row_stats(q, k, geometry, config=SMALL)
    stats = RowStats(*found)
    top, total, moment = found[:3]
    torch.testing.assert_close(stats.entropy.double()[0, 0, 0], entropy, rtol=3e-6, atol=0.0)
    torch.testing.assert_close(stats.lse.double()[0, 0, 0], exact.logsumexp(0), rtol=5e-7, atol=1e-6)
    gradients = gradient.backward(
        q, k, None, None, geometry, row_max=top, grad_sum=1 / total + moment / total**2, grad_moment=-1 / total,
        config=(SMALL, SMALL),
    )  # fmt: skip
    assert gradients[1] is not None
    torch.testing.assert_close(gradients[1][0, 0, :, 0].double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device", [DEVICE])
def test_a_scale_of_zero_makes_all_logits_equal(device: str) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 1, 40, 16, device=device)
    lengths = torch.tensor([0, 23], device=device)
    got = prefill.row_stats(q, k, Geometry(0.0), key_lengths=lengths, with_min=True, config=SMALL)
    for value, full, empty in zip(got, (0.0, 23.0, 0.0, 0.0, 23), (-torch.inf, 0.0, 0.0, torch.inf, 0), strict=True):
        assert value is not None
        assert torch.equal(value[:, 0], torch.tensor([[empty], [full]]).to(value).expand(2, 40))
