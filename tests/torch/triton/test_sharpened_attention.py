"""Attention with its gradient in one piece: which calls it is for, and, without a GPU that has it, its formulas.

There, the numbers of rows come from Triton's interpreter, and the two other kernels are plain products.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

pytest.importorskip("triton")

import sharpmax
from sharpmax.core.policies.base import Lowered
from sharpmax.torch import choice, fused, scaled_dot_product_attention, stock
from sharpmax.torch.checks import checked
from sharpmax.torch.geometry import Geometry
from sharpmax.torch.triton import hopper_backward
from sharpmax.torch.triton.launch import form_of
from tests.torch.triton.gradient_cases import CAUSAL, FULL, NARROW, Gradients, errors, exact, in_one_piece, leaves
from tests.torch.triton.oracle import POLICY, Case, inputs


def plain_attention(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    z = geometry.scale * q.float() @ k.float().mT.repeat_interleave(q.shape[1] // k.shape[1], 1)
    z = z.masked_fill(hidden(z, geometry), -torch.inf)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (z.softmax(-1) @ v.float()).to(q.dtype), z.logsumexp(-1)


def hidden(z: Tensor, geometry: Geometry) -> Tensor:
    return torch.ones_like(z, dtype=torch.bool).triu(1) if geometry.banded else torch.zeros_like(z, dtype=torch.bool)


def plain_backward(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, lowered: Lowered, **given: Any) -> Gradients:
    """What the kernels compute, in their letters."""
    batch, heads, queries, _ = q.shape
    lines, places = hopper_backward.LINES, torch.arange(hopper_backward.LINES)
    places = places // 16 * 16 + places // 2 % 4 * 4 + places // 8 % 2 * 2 + places % 2
    tensors = hopper_backward._tensors(q, k, v, **given)
    tensors["numbers"].fill_(torch.nan)
    forms = (form_of(tensors[name]) for name in ("q", "k", "out", "d_out"))
    hopper_backward._launches(*forms, geometry, lowered)[0](tensors, q)
    numbers, unit = tensors["numbers"], geometry.scale * math.log2(math.e)
    assert numbers.shape == (batch * heads, -(-queries // lines), hopper_backward.NUMBERS, lines)
    numbers = numbers[..., places].transpose(1, 2).reshape(batch, heads, hopper_backward.NUMBERS, -1)
    assert not numbers[:, :, :7].isnan().any()
    assert (numbers[:, :, 0, queries:] < -1e29).all()  # rows that are not there
    lse, delta, factor, shift, _, entropy, slope = (n[..., None] for n in numbers[..., :queries].unbind(2)[:7])
    group = heads // k.shape[1]
    scaled, do, keys, values = (
        x.float() for x in (given["scaled"], given["grad_out"], *(x.repeat_interleave(group, 1) for x in (k, v)))
    )
    product = scaled @ keys.mT
    product = product.masked_fill(hidden(product, geometry), -1e30)
    x = product * factor + shift
    w, b = torch.exp2(product * unit + lse), torch.exp2(x - entropy) * x
    a = w * (do @ values.mT + delta)
    g = slope * (a @ keys * scaled).sum(-1, keepdim=True)
    dq = geometry.scale * unit / factor * (a @ keys + g * (b @ keys))
    dk = geometry.scale * (a + g * torch.exp2(-entropy) * torch.exp2(x) * x).mT @ scaled
    found = (dq, *(y.unflatten(1, (-1, group)).sum(2) for y in (dk, w.mT @ do)))
    return tuple(y.to(q.dtype) for y in found)


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the kernels themselves run here, or cannot be interpreted")
    monkeypatch.setattr(fused, "cudnn_attention", plain_attention)
    monkeypatch.setattr(fused.kernels(), "sharpened_backward", plain_backward)
    monkeypatch.setattr(choice, "triton_refusal", lambda *_: "")
    monkeypatch.setattr(choice, "hopper_processors", lambda _: 1)
    monkeypatch.setattr(choice, "cudnn_enabled", lambda: True)


SMALL = Case("small", batch=2, heads=4, key_heads=2, queries=130, keys=130, geometry=CAUSAL, **NARROW)


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("offset", [None, 60.0])
@pytest.mark.parametrize("case", [SMALL, replace(SMALL, geometry=FULL, keys=77)], ids=["causal", "full"])
def test_the_formulas_are_those_of_the_gradient(case: Case, offset: float | None) -> None:
    given = inputs(case, torch.float16, "cpu")
    if offset is not None:
        given.q[..., 0], given.k[..., 0] = 1.1, offset / 0.11
    expected = exact(given)
    for name, error in zip(("dq", "dk", "dv"), errors(in_one_piece(given)[0], expected), strict=True):
        assert error < (4e-3 if offset is None else 4e-2), name


@pytest.mark.usefixtures("on_any_device")
def test_the_operators_elsewhere() -> None:
    given = inputs(replace(SMALL, heads=1, key_heads=1, queries=20, keys=20), torch.float16, "cpu")
    q, k, v = leaves(given.q, given.k, given.v)
    rest = (CAUSAL.numbers, fused.policy_numbers(POLICY))
    torch.library.opcheck(fused.sharpened_attention.opaque, (q, k, v, *rest))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fused.sharpened_attention(q, k, v, *rest)[0]

    found = torch.func.vmap(attend)(*(x[:, None] for x in (q, k, v)))[:, 0]
    torch.testing.assert_close(found, attend(q, k, v))
    ours, theirs = (torch.autograd.grad(x, q, given.do)[0] for x in (found, attend(q, k, v)))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("on_any_device")
def test_attention_compiles_with_it_inside() -> None:
    q, k, v = leaves(*(torch.randn(2, 2, 140, 64).half() for _ in range(3)))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(2.0 * q, k, v, is_causal=True, impl="stock")

    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    found, expected = (torch.autograd.grad(f(q, k, v).float().square().sum(), (q, k, v)) for f in (compiled, attend))
    assert any("sharpened_attention" in str(node.target) for graph in counter.graphs for node in graph.graph.nodes)
    assert max(errors(found, expected)) < 1e-3


TAKEN: dict[str, Any] = {"policy": sharpmax.PAPER, "is_causal": True}
NOT_TAKEN: dict[str, dict[str, Any]] = {
    "a mask": {"attn_mask": torch.ones(256, 256, dtype=torch.bool), "is_causal": False},
    "key lengths": {"key_lengths": torch.full((4,), 200), "is_causal": False},
    "values of another width": {"columns": 32},
    "float32": {"dtype": torch.float32},
    "heads of another width": {"width": 96, "columns": 96},
    "few rows": {"batch": 1},
    "no gradient": {"gradient": False},
    "rows apart": {"apart": True},
}


@pytest.mark.parametrize("what", [None, *NOT_TAKEN])
def test_which_calls_it_is_for(what: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "hopper_processors", lambda _: 32)
    monkeypatch.setattr(choice, "cudnn_enabled", lambda: True)
    options = {
        **TAKEN,
        "batch": 4,
        "width": 64,
        "columns": 64,
        "dtype": torch.float16,
        "gradient": True,
        "apart": False,
    }
    options |= {} if what is None else NOT_TAKEN[what]
    shapes = [(options["batch"], 8, 256, n) for n in (options["width"], options["width"], options["columns"])]
    q, k, v = (torch.zeros(shape, dtype=options["dtype"]) for shape in shapes)
    if options["apart"]:
        k = torch.zeros((*k.shape, 2), dtype=k.dtype)[..., 0]
    q.requires_grad_(options["gradient"])
    given = checked(
        q, k, v, options.get("attn_mask"), options.get("key_lengths"), is_causal=options["is_causal"], scale=None,
        window=None, softcap=None, enable_gqa=False,
    )  # fmt: skip
    assert stock.gradient_in_one_piece(given, POLICY) is (what is None)


def test_other_devices_and_versions_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice.hopper_processors(torch.device("cpu")) == 0
    x = torch.zeros(4, 8, 256, 64, dtype=torch.float16)
    assert not choice.sharpened_attention_pays(x, x, x, CAUSAL, POLICY)
    monkeypatch.setattr(choice, "compute_capability", lambda _: 9)
    assert choice.hopper_processors(torch.device("cpu")) == 0
