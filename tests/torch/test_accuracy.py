"""Errors in two-byte types against float64, where the policy acts: no more than a known multiple of stock attention's.

The peer is stock attention on ``q~``, which is ``beta * q`` rounded, against float64 attention on that same ``q~``.
Where beta meets the logits in float32 the error is held to twice the peer's, where ``beta * q`` is rounded to four
times, and always to half of that of Figure 4 in the same type, whose gradients are no numbers in float16. All rows
count, those next to the policy's threshold too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as stock_attention

import sharpmax
from benchmarks.figure4 import torch_figure4
from sharpmax.torch import choice, fused, scaled_dot_product_attention

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SHAPE = (3, 16, 2048) if ON_GPU else (1, 2, 512)
OF_CUDNN = choice.widest_of_cudnn(torch.device("cuda")) if ON_GPU else 0
ROUNDS = OF_CUDNN > 0 and choice.hopper_processors(torch.device("cuda")) == 0
"""Whether ``"auto"`` is ``"stock"`` for calls of that size."""
LIMITS = {"streaming": 2.0, "stock": 4.0} | ({"auto": 4.0 if ROUNDS else 2.0, "triton": 2.0} if ON_GPU else {})
LIMITS_OF_SHARP_ROWS = {impl: 6.0 if limit == 4.0 else limit for impl, limit in LIMITS.items()}
Found = tuple[Tensor, ...]


def made(width: int, dtype: torch.dtype, deviation: float, shape: tuple[int, ...] = SHAPE) -> Found:
    """Query, key, value and cotangent; of logits that deviate so much."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn((*shape, width), generator=generator) for _ in range(4))
    factor = math.sqrt(deviation)
    q *= math.sqrt(width) / q.norm(dim=-1, keepdim=True)
    return tuple(x.to(DEVICE, dtype) for x in (factor * q, factor * k, v, g))


def with_gradients(attention: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Found:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, g)


def logits(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    z = q @ k.mT / math.sqrt(q.shape[-1])
    hidden = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).triu(1)
    return z.masked_fill(hidden, torch.finfo(z.dtype).min) if causal else z


def errors(found: Found, expected: Found) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("impl", LIMITS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("width", "dtype"), [(64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16)], ids=str
)
def test_errors_are_those_of_stock_attention(impl: str, causal: bool, width: int, dtype: torch.dtype) -> None:
    """Rows have about 3 nats of entropy: the policy acts on nearly all of them."""
    assert hold_to(LIMITS[impl], made(width, dtype, acted_on(SHAPE)), impl, causal) > 0.9


@pytest.fixture
def portable(triton_everywhere: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The portable kernels, on Hopper too, where those for it are only taken with versions of Triton that are known."""
    from sharpmax.torch.triton import hopper
    from tests.torch.triton.hopper_cases import forget_launches

    monkeypatch.setattr(hopper, "RUN_WITH", ())
    for module, name in ((hopper, "stats_launch"), (hopper, "attend_launch"), (fused.kernels(), "adaptive_backward")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("a kernel for Hopper ran"))
    forget_launches()
    yield triton_everywhere
    forget_launches()


PORTABLE: list[Any] = [(64, torch.float16), (128, torch.float16)]
if ON_GPU:  # Triton's interpreter gets products of bfloat16 wrong
    PORTABLE += [(width, torch.bfloat16) for width in (64, 80, 128, 256)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("width", "dtype"), PORTABLE, ids=str)
def test_errors_of_the_portable_kernels_are_too(
    causal: bool, width: int, dtype: torch.dtype, portable: list[str]
) -> None:
    shape = SHAPE if ON_GPU else (1, 1, 256)
    assert hold_to(2.0, made(width, dtype, acted_on(shape), shape), "triton", causal) > 0.9
    assert portable == ["adaptive_attention"]


@pytest.mark.parametrize("impl", LIMITS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_errors_of_sharp_rows_are_too(impl: str, causal: bool) -> None:
    """Rows of about one nat, where the policy is steep: what rounds the output must not reach the gradient of beta.

    The gradients of a rounded ``beta * q`` have more of it here.
    """
    given = made(64, torch.bfloat16, 6.0)
    assert 0.3 < hold_to(LIMITS_OF_SHARP_ROWS[impl], given, impl, causal) < 0.9


def acted_on(shape: tuple[int, ...]) -> float:
    """The deviation of logits whose rows have about 3 nats."""
    return math.sqrt(2 * (math.log(shape[2]) - 3.0))


def hold_to(limit: float, given: Found, impl: str, causal: bool) -> float:
    """Compare errors with the peer's; the share of rows on which the policy acts."""
    wide = tuple(x.double() for x in given)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sharpmax.adaptive_temperature_softmax(logits(q, k, causal)) @ v

    def literal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch_figure4(logits(q, k, causal)) @ v

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return stock_attention(q, k, v, is_causal=causal)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=causal, impl=impl)

    beta = sharpmax.PAPER(sharpmax.row_stats(logits(wide[0], wide[1], causal)))
    q, k, v, _ = given
    returned = scaled_dot_product_attention(q, k, v, is_causal=causal, impl=impl, return_stats=True)
    assert float((returned.beta / beta - 1).abs().max()) < 1e-3
    rounded = ((beta[..., None] * wide[0]).to(q.dtype), *given[1:])
    peers = errors(with_gradients(plain, *rounded), with_gradients(plain, *(x.double() for x in rounded)))
    expected = with_gradients(exact, *wide)
    of_figure4 = errors(with_gradients(literal, *given), expected)
    found = errors(with_gradients(ours, *given), expected)
    for name, error, peer, other in zip(("output", "dq", "dk", "dv"), found, peers, of_figure4, strict=True):
        assert error <= limit * peer, f"{name}: {error / peer:.2f} times the peer's"
        assert error <= other / 2 or (math.isnan(other) and q.dtype == torch.float16), f"{name}: Figure 4 has {other}"
    return float((beta > 1.3).double().mean())
