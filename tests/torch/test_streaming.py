"""The streaming implementation: memory, work and the paths it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from sharpmax.torch import blocks, stock_on_cpu, streaming
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


@pytest.mark.parametrize(
    ("serves", "geometry", "change"),
    [
        (True, Geometry(0.5), {}),
        (True, Geometry(0.5, right=0), {}),
        (True, Geometry(0.5, right=0, lower_right=True), {}),
        (False, Geometry(0.5, left=3, right=0), {}),
        (False, Geometry(0.5, softcap=2.0), {}),
        (False, Geometry(0.5), {"mask": torch.ones(1, 1, 1, 6, dtype=torch.bool)}),
        (False, Geometry(0.5), {"beta": torch.full((1, 2, 6), torch.inf)}),
        (False, Geometry(0.5), {"dropout_p": 0.1}),
    ],
)
def test_torch_kernel_where_it_does_the_same(serves: bool, geometry: Geometry, change: dict[str, Any]) -> None:
    x = torch.randn(1, 2, 6, 4)
    call = {"beta": torch.ones(1, 2, 6), "mask": None, "key_lengths": None, "dropout_p": 0.0} | change
    assert stock_on_cpu.serves(x, x, x, geometry=geometry, **call) is serves


@pytest.mark.parametrize("causal", [False, True])
def test_torch_kernel_and_own_blocks_agree(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, g = (2 * torch.randn(2, h, 9, 8, dtype=torch.float64) for h in (4, 2, 2, 4))
    beta, geometry = 1 + torch.rand(2, 4, 9, dtype=torch.float64), Geometry(0.5, right=0 if causal else -1)
    results = []
    for own in (False, True):
        if own:
            monkeypatch.setattr(stock_on_cpu, "serves", lambda *a: False)
        out, lse = streaming.attend(q, k, v, beta, geometry)
        gradients = streaming.attend_backward(q, k, v, beta, geometry, out, lse, g, need_beta=True)
        results.append([out, lse, *gradients[:4]])
    for a, b in zip(*results, strict=True):
        assert a is not None
        assert b is not None
        assert torch.allclose(a, b, atol=1e-11)
