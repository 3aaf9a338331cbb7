"""The streaming implementation: memory, work and the paths it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpmax.torch import blocks, ops, stock_on_cpu, streaming
from sharpmax.torch.geometry import Geometry

PEAK = """
import json, sys, torch, sharpmax, sharpmax.torch as st
from pathlib import Path
torch.set_num_threads(1)
length, kw = int(sys.argv[1]), json.loads(sys.argv[2])
kw["window"] = tuple(kw["window"]) if "window" in kw else None
def resident(field):
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024
def step(n):
    q, k, v = (torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3))
    st.scaled_dot_product_attention(q, k, v, impl="streaming", **kw).sum().backward()
step(300)
before = resident("VmRSS")
step(length)
print(resident("VmHWM") - before)
"""


def peak(length: int, **kw: Any) -> int:
    command = [sys.executable, "-c", PEAK, str(length), json.dumps(kw)]
    return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kw", [{}, {"softcap": 5.0, "window": [64, 0]}], ids=["torch_kernel", "own_blocks"])
def test_memory_of_a_training_step_grows_with_length_streaming(kw: dict[str, Any]) -> None:
    length = 4096
    assert peak(length, **kw) < 0.5 * 4 * length**2  # a quarter of what logits and weights alone would take


def test_keys_out_of_the_band_are_never_multiplied_streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "CPU", blocks.Sizes(8, 8, 64))
    work: list[int] = []
    real = blocks.product
    monkeypatch.setattr(blocks, "product", lambda a, b, out: (work.append(out.numel()), real(a, b, out))[1])
    q = torch.randn(1, 1, 64, 4)
    streaming.row_stats(q, q, Geometry(1.0))
    full = sum(work)
    work.clear()
    streaming.row_stats(q, q, Geometry(1.0, left=7, right=0))
    assert full == 64 * 64
    assert sum(work) <= 64 * (8 + 7 + 8)


BOOLEAN = torch.rand(2, 4, 9, 11, generator=torch.Generator().manual_seed(0)) > 0.4
BOOLEAN[1, :, 3] = False
CALLS: dict[str, tuple[Geometry, dict[str, Any]]] = {
    "full": (Geometry(0.5), {}),
    "causal": (Geometry(0.5, right=0), {}),
    "from the end": (Geometry(0.5, right=0, lower_right=True), {}),
    "window": (Geometry(0.5, left=3, right=2), {}),
    "lengths": (Geometry(0.5), {"key_lengths": torch.tensor([11, 4])}),
    "lengths, causal": (Geometry(0.5, right=0), {"key_lengths": torch.tensor([0, 7])}),
    "lengths, from the end": (Geometry(0.5, left=2, right=0, lower_right=True), {"key_lengths": torch.tensor([3, 10])}),
    "boolean": (Geometry(0.5), {"mask": BOOLEAN}),
    "boolean, of one head": (Geometry(0.5, right=1), {"mask": BOOLEAN[:1, 1:2]}),
    "boolean, of one row": (Geometry(0.5), {"mask": BOOLEAN[:, :1, :1]}),
    "boolean, of one key": (Geometry(0.5), {"mask": BOOLEAN[..., 2:3]}),
    "boolean, with lengths": (Geometry(0.5), {"mask": BOOLEAN[:, :1], "key_lengths": torch.tensor([5, 11])}),
    "numbers": (Geometry(0.5), {"mask": torch.randn(BOOLEAN.shape).double().masked_fill(~BOOLEAN, -torch.inf)}),
    "numbers, causal": (Geometry(0.5, right=0), {"mask": torch.randn(1, 1, 1, 11)}),
}
"""For 9 queries of 4 heads and 11 keys of 2, of two batch elements."""


@pytest.mark.parametrize("beta", ["any", "small", "negative"])
@pytest.mark.parametrize("name", CALLS)
def test_torch_kernel_and_own_blocks_agree(name: str, beta: str, monkeypatch: pytest.MonkeyPatch) -> None:
    geometry, hiding = CALLS[name]
    q, k, v, g = (2 * torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in ((4, 9), (2, 11), (2, 11), (4, 9)))
    of_rows = {"any": 1.0, "small": 1e-9, "negative": -0.5}[beta] * (1 + torch.rand(2, 4, 9, dtype=torch.float64))
    numbers = "mask" in hiding and hiding["mask"].dtype != torch.bool
    ran: list[str] = []
    for step in ("attend", "backward"):
        real = getattr(stock_on_cpu, step)
        monkeypatch.setattr(stock_on_cpu, step, lambda *a, r=real, s=step: (ran.append(s), r(*a))[1])
    monkeypatch.setattr(stock_on_cpu, "ROWS", 4)
    monkeypatch.setattr(stock_on_cpu, "MASK", 70)
    results = []
    for own in (False, True):
        if own:
            monkeypatch.setattr(stock_on_cpu, "serves", lambda *a, **_: False)
        out, lse = streaming.attend(q, k, v, of_rows, geometry, **hiding)
        gradients = streaming.attend_backward(q, k, v, of_rows, geometry, out, lse, g, need_beta=not numbers, **hiding)
        results.append([out, lse, *gradients[: 3 if numbers else 4]])
    assert ran == ["attend", "backward"]
    for a, b in zip(*results, strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_the_gradient_of_numbers_and_of_beta_beside_them_comes_from_own_blocks() -> None:
    geometry, hiding = CALLS["numbers"]
    q, k, v = (torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in ((4, 9), (2, 11), (2, 11)))
    beta = torch.rand(2, 4, 9, dtype=torch.float64, requires_grad=True)
    mask = hiding["mask"].clone().requires_grad_()

    def attend(beta: Tensor, mask: Tensor) -> Tensor:
        return ops.attend(q, k, v, beta, None, mask, None, None, None, None, geometry.numbers, 0.0, "streaming", False)[
            0
        ]

    assert torch.autograd.gradcheck(lambda b: attend(b, mask.detach()), beta)
    bounded = torch.where(BOOLEAN, mask.detach(), -torch.inf)
    shift = torch.zeros(1, 4, 9, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: attend(beta.detach(), bounded + s.mul(k[0, 0, :, 0])), shift)


@pytest.mark.parametrize(
    ("serves", "geometry", "change"),
    [
        (True, Geometry(0.5), {}),
        (True, Geometry(0.5, left=3, right=0), {"mask": torch.ones(1, 1, 6, 6, dtype=torch.bool)}),
        (False, Geometry(0.5, softcap=2.0), {}),
        (False, Geometry(-0.5), {}),
        (True, Geometry(0.5), {"mask": torch.ones(1, 1, 1, 6, dtype=torch.bool), "of_numbers": True}),
        (True, Geometry(0.5), {"mask": torch.ones(1, 1, 1, 6)}),
        (False, Geometry(0.5), {"mask": torch.ones(1, 1, 1, 6), "of_numbers": True}),
        (False, Geometry(0.5), {"beta": torch.full((1, 2, 6), torch.inf)}),
        (False, Geometry(0.5), {"dropout_p": 0.1}),
    ],
)
def test_torch_kernel_where_it_does_the_same(serves: bool, geometry: Geometry, change: dict[str, Any]) -> None:
    x = torch.randn(1, 2, 6, 4)
    call = {"beta": torch.ones(1, 2, 6), "mask": None, "dropout_p": 0.0} | change
    assert stock_on_cpu.serves(x, x, x, geometry=geometry, **call) is serves


@pytest.mark.parametrize("hidden", [torch.nan, torch.inf])
def test_keys_that_a_mask_hides_may_be_anything(hidden: float) -> None:
    q, k, v = torch.randn(3, 1, 1, 6, 8)
    mask = torch.arange(6) != 2
    expected = streaming.attend(q, k, v, torch.ones(1, 1, 6), Geometry(0.5), mask=mask.view(1, 1, 1, 6))
    k[:, :, 2] = hidden
    found = streaming.attend(q, k, v, torch.ones(1, 1, 6), Geometry(0.5), mask=mask.view(1, 1, 1, 6))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    stats = streaming.row_stats(q, k, Geometry(0.5), mask=mask.view(1, 1, 1, 6), with_min=True)
    assert all(x is not None and bool(x.isfinite().all()) for x in stats)
