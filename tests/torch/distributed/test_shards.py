"""The arithmetic on pairs of shards, rank after rank in one process: on a GPU, with the kernels as compiled for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax
from sharpmax.torch import Attention, scaled_dot_product_attention
from sharpmax.torch.distributed import attention as module
from sharpmax.torch.distributed.group import Member
from sharpmax.torch.distributed.layout import parts
from tests.torch.distributed.cases import Shape, whole

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
SIZE = 4
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 26},
    "left and right": {"window": (7, 25)},
    "softcap": {"is_causal": True, "softcap": 3.0, "policy": sharpmax.detached(sharpmax.PAPER_HELD)},
    "length": {"is_causal": True, "policy": sharpmax.LogLength()},
}
PLACES = [
    pytest.param("cpu", torch.float64, 1e-11, id="cpu"),
    pytest.param("cuda", torch.float32, 2e-4, id="cuda-float32", marks=GPU),
    pytest.param("cuda", torch.bfloat16, 5e-2, id="cuda-bfloat16", marks=GPU),
]


class InOneProcess:
    """The ranks of a group one after the other: what would travel is at hand, and gradients are added up here."""

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self.shards = (keys, values)
        self.gradients = [[torch.zeros_like(x, dtype=torch.float64) for x in kind] for kind in self.shards]
        self.rank = 0

    def member(self, group: Any) -> Member:
        return Member(group, self.rank, SIZE)

    def tour(self, member: Member, tensors: tuple[Tensor, ...], offsets: tuple[int, ...], keep: int) -> Any:
        assert keep == 0
        for offset in offsets:
            yield tuple(kind[(member.rank - offset) % SIZE] for kind in self.shards[: len(tensors)])

    def homeward(self, member: Member, offsets: tuple[int, ...]) -> Any:
        return _Gradients(self, member.rank, list(offsets))


class _Gradients:
    def __init__(self, all_ranks: InOneProcess, rank: int, offsets: list[int]) -> None:
        self.all_ranks, self.rank, self.offsets, self.own = all_ranks, rank, offsets, ()

    def add(self, gradients: tuple[Tensor, ...]) -> None:
        source = (self.rank - self.offsets.pop(0)) % SIZE
        self.own = self.own or gradients
        for kind, x in zip(self.all_ranks.gradients, gradients, strict=False):
            kind[source] += x

    def home(self) -> tuple[Tensor, ...]:
        return self.own


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("device", "dtype", "tolerance"), PLACES)
def test_shards_one_after_the_other(
    device: str, dtype: torch.dtype, tolerance: float, call: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"policy": sharpmax.PAPER_HELD} | CALLS[call]
    own = 72 if device == "cuda" else 24
    shape = Shape(batch=1, heads=4, key_heads=2, tokens=SIZE * own, columns=64, value_columns=32)
    q, k, v, g_out = (x.to(device) for x in whole(shape, dtype))
    places = [
        torch.cat([torch.arange(p.start, p.stop, device=device) for p in parts(r, SIZE, own, layout)])
        for r in range(SIZE)
    ]
    ranks = InOneProcess([k[:, :, at] for at in places], [v[:, :, at] for at in places])
    monkeypatch.setattr(module, "member_of", ranks.member)
    monkeypatch.setattr(module, "check_device", lambda *_: None)
    monkeypatch.setattr(module, "tour", ranks.tour)
    monkeypatch.setattr(module, "Homeward", ranks.homeward)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = scaled_dot_product_attention(
        wide[0], wide[1], wide[2], impl="reference", enable_gqa=True, return_stats=True, **given
    )
    assert isinstance(expected, Attention)
    dq, dk, dv = torch.autograd.grad(expected.output, wide, g_out.double())
    for rank, at in enumerate(places):
        ranks.rank = rank
        mine = [x[:, :, at].clone().requires_grad_() for x in (q, k, v)]
        found = module.ring_attention(*mine, layout=layout, check=False, return_stats=True, **given)
        (gradient,) = torch.autograd.grad(found.output, mine[:1], g_out[:, :, at])
        close(found.output, expected.output[:, :, at], tolerance, "output")
        close(found.beta, expected.beta[:, :, at], tolerance, "beta")
        close(gradient, dq[:, :, at], 2 * tolerance, "dq")
    for name, kind, truth in zip(("dk", "dv"), ranks.gradients, (dk, dv), strict=True):
        for at, x in zip(places, kind, strict=True):
            close(x, truth[:, :, at], 2 * tolerance, name)


def close(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    error = (found.double() - expected).abs().max().item()
    assert error <= tolerance * max(1.0, expected.abs().max().item()), f"{what}: {error:.2e}"
