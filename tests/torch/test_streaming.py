"""The streaming implementation: memory, work and the paths it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax
from sharpmax.torch import blocks, ops, scaled_dot_product_attention, stock_on_cpu, streaming
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


LATE_NAN = torch.tensor([0.0] * 5 + [torch.nan]).view(1, 1, 6, 1).expand(1, 2, 6, 4)


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
        (False, Geometry(0.5), {"q": torch.full((1, 2, 6, 4), torch.nan)}),
        (False, Geometry(0.5), {"k": torch.arange(6.0).div(0.0).view(1, 1, 6, 1).expand(1, 2, 6, 4)}),
        (True, Geometry(0.5), {"k": LATE_NAN, "key_lengths": torch.tensor([5])}),
        (False, Geometry(0.5), {"k": LATE_NAN, "key_lengths": torch.tensor([6])}),
    ],
)
def test_torch_kernel_where_it_does_the_same(serves: bool, geometry: Geometry, change: dict[str, Any]) -> None:
    x = torch.randn(1, 2, 6, 4)
    call = {"q": x, "k": x, "beta": torch.ones(1, 2, 6), "mask": None, "key_lengths": None, "dropout_p": 0.0} | change
    assert stock_on_cpu.serves(v=x, geometry=geometry, **call) is serves


HIDING: dict[str, tuple[dict[str, Any], int, slice]] = {
    "a mask": ({"attn_mask": torch.arange(6) != 2}, 2, slice(0, 4)),
    "numbers": ({"attn_mask": torch.where(torch.arange(6) == 2, -torch.inf, 0.0)}, 2, slice(0, 4)),
    "a window": ({"window": (1, 0)}, 2, slice(0, 2)),
    "causality from the end": ({"is_causal": "lower_right"}, 5, slice(0, 3)),
}
"""What hides a key, which, and from which rows of 4."""


@pytest.mark.parametrize("hidden", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("name", HIDING)
def test_rows_do_not_feel_keys_that_they_do_not_see(name: str, hidden: float) -> None:
    """Which is for own blocks, where torch's kernel makes no number of them."""
    options, place, rows = HIDING[name]
    generator = torch.Generator().manual_seed(0)
    q, g = (3 * torch.randn(1, 2, 4, 8, generator=generator) for _ in range(2))
    k, v = (torch.randn(1, 2, 6, 8, generator=generator) for _ in range(2))

    def run(key: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, key, v)]
        call: dict[str, Any] = {"policy": sharpmax.Constant(2.0), "impl": "streaming"} | options
        out: Any = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], **call)
        hides_from_all = rows.stop == 4
        gradients = torch.autograd.grad(out, leaves, g) if hidden == 3e38 and hides_from_all else ()
        return [out[:, :, rows], *gradients]

    other = k.clone()
    other[:, :, place] = hidden
    for a, b in zip(run(other), run(k), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    if "attn_mask" in options:
        mask = options["attn_mask"].view(1, 1, 1, 6)
        stats = streaming.row_stats(q, other, Geometry(0.5), mask=mask, with_min=True)
        assert all(x is not None and bool(x.isfinite().all()) for x in stats)


@pytest.mark.parametrize("keys", [7, 600])
@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_rows_of_what_is_no_number_are_none(what: float, keys: int) -> None:
    """Where torch's kernel makes 0 of them, if there are few keys."""
    q, k = torch.randn(1, 1, 7, 8), torch.randn(1, 1, keys, 8)
    q[0, 0, 3] = what
    for impl in ("streaming", "reference"):
        output = scaled_dot_product_attention(q, k, k, impl=impl)
        assert output.isnan().all(-1)[0, 0].tolist() == [False] * 3 + [True] + [False] * 3


FAR = (-1e4, 1e4, -1e6, -1e9, -1e30, -1.5e38)


@pytest.mark.parametrize("policy", [sharpmax.PAPER, sharpmax.Constant(3.0)], ids=["paper", "constant"])
@pytest.mark.parametrize("nats", FAR)
def test_logits_that_are_all_far_from_0(nats: float, policy: Any) -> None:
    """Of queries that padding hides by large numbers, say: as exact as elsewhere, and other rows feel nothing."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, 2, 32, 16, generator=generator) for _ in range(4))
    mask = torch.zeros(32, 32)
    mask[:5] = nats
    found = []
    for impl in ("streaming", "reference"):
        q, k, v = leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out: Any = scaled_dot_product_attention(2 * q, k, v, mask, policy=policy, impl=impl)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, g)])
    for a, b in zip(*found, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-5


def test_logits_that_are_infinitely_far_below_others() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 8, 8, generator=generator) for _ in range(2))
    q[0, 0, 1] = 1e20
    k[0, 0, 5] = -1e20
    v = torch.randint(-4, 5, (1, 1, 8, 8), generator=generator).float()  # sums are exact: 1e20 multiplies no rounding
    found = []
    for impl in ("streaming", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], impl=impl, return_stats=True)
        found.append([out.output, out.stats.entropy, out.beta, *torch.autograd.grad(out.output.sum(), leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keys", [3, 40])
@pytest.mark.parametrize(
    ("query", "key", "least", "beta"),
    [(1e5, 1.0, -0.5, 1e34), (1e14, -1e14, 1.0, 1e12)],
    ids=["beta * query", "all logits, below 0"],
)
def test_numbers_that_beta_makes_infinite(query: float, key: float, least: float, beta: float, keys: int) -> None:
    """Of which torch's kernel makes zeros."""
    generator = torch.Generator().manual_seed(0)
    q = query * (1 + torch.rand(1, 1, 4, 8, generator=generator))
    k, v = (
        key * (least + torch.rand(1, 1, keys, 8, generator=generator)),
        torch.randn(1, 1, keys, 8, generator=generator),
    )
    call: dict[str, Any] = {"policy": sharpmax.Constant(beta)}
    found, expected = (scaled_dot_product_attention(q, k, v, impl=impl, **call) for impl in ("streaming", "reference"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert float(expected.abs().max()) > 0.1


def test_what_torch_kernel_cannot_do_exactly_is_for_own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 1, 6, 8) for _ in range(3))
    beta, geometry = torch.full((1, 1, 6), 2.0), Geometry(0.5, left=3, right=0)
    near = streaming.attend(q, k, v, beta, geometry)
    assert stock_on_cpu.exact(near[1])
    far = near[1].clone()
    far[..., 3] = 1100.0
    assert not stock_on_cpu.exact(far)
    assert not stock_on_cpu.exact(far.fill_(torch.nan))
    ran: list[str] = []
    real = streaming._powers  # of a block
    monkeypatch.setattr(streaming, "_powers", lambda *a: (ran.append("block"), real(*a))[1])
    streaming.attend(q, k, v, beta, geometry)
    streaming.attend_backward(q, k, v, beta, geometry, *near, v)
    assert ran == []
    streaming.attend(500 * q, 500 * k, v, beta, geometry)
    assert ran == ["block"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_numbers_that_hide_may_be_added(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of being looked for, where logits are nothing beside them."""
    generator = torch.Generator().manual_seed(0)
    of_logits = torch.float64 if dtype == torch.float64 else torch.float32
    q, k = (torch.randn(1, 2, 9, 8, generator=generator).to(of_logits) for _ in range(2))
    mask = torch.randn(1, 2, 9, 9, generator=generator).to(dtype)
    lowest = torch.finfo(dtype).min
    mask[:, :, :, 1], mask[:, :, :, 2], mask[:, :, :, 3] = -torch.inf, lowest, lowest / 2
    mask[:, :, 4] = -torch.inf
    geometry = Geometry(0.5, right=6)
    g = torch.randn(2, 1, 2, 9, dtype=of_logits, generator=generator)
    found, added = [], []
    real = blocks.Call.hiding_adds
    for adds in (True, False):
        monkeypatch.setattr(
            blocks.Call, "hiding_adds", lambda call, a=adds: (added.append(real(call)), real(call) & a)[1]
        )
        stats = streaming.row_stats(q, k, geometry, mask=mask)
        gradients = streaming.row_stats_backward(q, k, geometry, stats[0], *g, mask=mask, need_mask=True)
        found.append([*stats[:3], stats[4], *gradients])
    assert all(added)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    assert found[0][3][0, 0].tolist() == [7 - 3, 8 - 3, 9 - 3, 9 - 3, 0, 9 - 3, 9 - 3, 9 - 3, 9 - 3]


def test_numbers_that_hide_are_not_added_to_logits_beside_which_they_are_little() -> None:
    q = torch.randn(1, 1, 3, 4)
    mask = torch.zeros(1, 1, 3, 3)
    for query, added, expected in (
        (q, mask, True),
        (1e16 * q, mask, False),
        (torch.nan * q, mask, False),
        (q, mask.double(), False),
        (q, mask.bool(), False),
        (q[:, :, :0], mask[:, :, :0], False),
    ):
        assert blocks.Call(query, 1e16 * q, None, Geometry(1.0), added, None).hiding_adds() is expected
