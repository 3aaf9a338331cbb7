"""The gradient kernels for Hopper without such a GPU: which calls they are for, and their formulas.

The numbers of rows come from Triton's interpreter, and the two other kernels are plain products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

pytest.importorskip("triton")

from sharpmax.core.policies.base import Lowered
from sharpmax.torch import choice, fused, scaled_dot_product_attention
from sharpmax.torch.geometry import Geometry
from sharpmax.torch.triton import hopper, hopper_backward
from sharpmax.torch.triton.launch import form_of
from tests.torch.triton.gradient_cases import (
    CAUSAL,
    DOWN_TO_ZERO,
    FULL,
    NARROW,
    Gradients,
    attended,
    by_kernels,
    errors,
    exact,
    in_two_clusters,
    leaves,
    offset,
)
from tests.torch.triton.oracle import POLICY, Case, Inputs, inputs

Change = Callable[[Inputs, float], Inputs]


def hidden(z: Tensor, geometry: Geometry) -> Tensor:
    return torch.ones_like(z, dtype=torch.bool).triu(1) if geometry.banded else torch.zeros_like(z, dtype=torch.bool)


def plain_backward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, geometry: Geometry, lowered: Lowered, **given: Any
) -> Gradients:
    """What the kernels compute, in their letters; what they round for a product is rounded."""
    batch, heads, queries, _ = q.shape
    lines, places = hopper_backward.LINES, torch.arange(hopper_backward.LINES)
    places = places // 16 * 16 + places // 2 % 4 * 4 + places // 8 % 2 * 2 + places % 2
    tensors = hopper_backward._tensors(q, k, v, beta, **given)
    tensors["numbers"].fill_(torch.nan)
    forms = (form_of(tensors[name]) for name in ("q", "k", "out", "d_out"))
    hopper_backward._launches(*forms, geometry, lowered)[0](tensors, q)
    numbers, unit = tensors["numbers"], geometry.scale * math.log2(math.e)
    assert numbers.shape == (batch * heads, -(-queries // lines), hopper_backward.NUMBERS, lines)
    numbers = numbers[..., places].transpose(1, 2).reshape(batch, heads, hopper_backward.NUMBERS, -1)
    assert not numbers[:, :, :7].isnan().any()
    assert (numbers[:, :, 0, queries:] < -1e29).all()  # rows that are not there
    assert (numbers[:, :, (1, 2, 4, 5, 6), queries:] == 0).all()
    lse, delta, factor, shift, _, slope = (n[..., None] for n in numbers[..., :queries].unbind(2)[:6])
    group = heads // k.shape[1]
    query, do, keys, values = (
        x.float() for x in (q, given["grad_out"], *(x.repeat_interleave(group, 1) for x in (k, v)))
    )
    product = query @ keys.mT
    product = product.masked_fill(hidden(product, geometry), -1e30)
    x = product * unit + shift
    w, b, cotangent = torch.exp2(product * factor + lse), torch.exp2(x) * x, do @ values.mT
    a = rounded(w * (cotangent + delta), q)
    along, across, excess = a @ keys, rounded(b, q) @ keys, a.sum(-1, keepdim=True)
    g = slope * (unit * (along * query).sum(-1, keepdim=True) + shift * excess)
    dq = math.log(2) * (factor * along + g * across)
    both = w * (cotangent * factor + (delta - excess) * factor) + g * b
    dk, dv = math.log(2) * rounded(both, q).mT @ query, rounded(w, q).mT @ do
    found = (dq, *(y.unflatten(1, (-1, group)).sum(2) for y in (dk, dv)))
    return tuple(y.to(q.dtype) for y in found)


def rounded(x: Tensor, like: Tensor) -> Tensor:
    assert x.to(like.dtype).isfinite().all()
    return x.to(like.dtype).float()


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> list[Lowered]:
    """As if this were a Hopper GPU of one processor; the policies are noted whose gradient went through the kernels."""
    if torch.cuda.is_available():
        pytest.skip("the kernels themselves run here, or cannot be interpreted")
    taken: list[Lowered] = []

    def backward(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *rest: Any, **given: Any) -> Gradients:
        taken.append(rest[1])
        return plain_backward(q, k, v, beta, *rest, **given)

    monkeypatch.setattr(fused.kernels(), "adaptive_backward", backward)
    monkeypatch.setattr(hopper_backward, "known_processors", lambda _: 1)
    monkeypatch.setattr(choice, "triton_refusal", lambda *_: "")
    return taken


SMALL = Case("small", heads=4, key_heads=2, queries=130, keys=130, geometry=CAUSAL, **NARROW)
ALL_KEYS = replace(SMALL, geometry=FULL, keys=77)


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("policy", [POLICY, DOWN_TO_ZERO], ids=["paper's", "down to 0"])
@pytest.mark.parametrize("case", [SMALL, ALL_KEYS], ids=["causal", "full"])
def test_the_formulas_are_those_of_the_gradient(case: Case, policy: Lowered) -> None:
    given = inputs(case, torch.float16, "cpu")
    for name, error in zip(("dq", "dk", "dv"), errors(by_kernels(given, policy), exact(given, policy)), strict=True):
        assert error < 1e-3, name


@pytest.mark.usefixtures("on_any_device")
def test_rows_of_beta_0_attend_to_what_they_see_alone() -> None:
    """Their weights are all the same: dv is a mean of cotangents, and nothing comes back from what they do not see."""
    given = inputs(SMALL, torch.float16, "cpu")
    given.do[:, :, :100] = 0.0
    _, dk, dv = by_kernels(given, Lowered("entropy", (0.1, -4.0), floor=0.0))
    assert not dk.any()
    weights = 1.0 / torch.arange(1.0, 131.0)[100:, None].expand(-1, 130).tril(100)
    weights = torch.where(weights.isinf(), 0.0, weights)
    expected = (weights.mT @ given.do[:, :, 100:].float()).unflatten(1, (2, 2)).sum(2)
    torch.testing.assert_close(dv.float(), expected, atol=1e-3, rtol=2e-3)


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize(
    ("change", "nats"),
    [(offset, 60.0), (offset, 1000.0), (offset, -1000.0), (in_two_clusters, 60.0)],
    ids=["above", "far above", "far below", "two clusters"],
)
@pytest.mark.parametrize("case", [SMALL, ALL_KEYS], ids=["causal", "full"])
def test_what_keys_have_in_common_is_not_felt(case: Case, change: Change, nats: float) -> None:
    """In the column that they have in common, dq is 0 but for rounding."""
    given = change(inputs(case, torch.float16, "cpu"), nats)
    found, expected = ((dq[..., 1:], *rest) for dq, *rest in (by_kernels(given), exact(given)))
    for name, error in zip(("dq", "dk", "dv"), errors(found, expected), strict=True):
        assert error < 2e-3, name


def test_the_operators_elsewhere(on_any_device: list[Lowered]) -> None:
    given = inputs(replace(SMALL, batch=2, heads=1, key_heads=1, queries=20, keys=20), torch.float16, "cpu")
    q, k, v = leaves(given.q, given.k, given.v)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attended(q, k, v, CAUSAL)

    found = torch.func.vmap(attend)(*(x[:, None] for x in (q, k, v)))[:, 0]
    torch.testing.assert_close(found, attend(q, k, v))
    ours, theirs = (torch.autograd.grad(x, q, given.do)[0] for x in (found, attend(q, k, v)))
    torch.testing.assert_close(ours, theirs)
    assert on_any_device == [POLICY, POLICY]
    rest = (*(None,) * 5, CAUSAL.numbers, fused.policy_numbers(POLICY), False, 0.0)
    torch.library.opcheck(fused.adaptive_attention.opaque, (q, k, v, *rest))


def test_attention_compiles_with_it_inside(on_any_device: list[Lowered]) -> None:
    q, k, v = leaves(*(torch.randn(2, 2, 140, 64).half() for _ in range(3)))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(2.0 * q, k, v, is_causal=True, impl="triton")

    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    found, expected = (torch.autograd.grad(f(q, k, v).float().square().sum(), (q, k, v)) for f in (compiled, attend))
    assert any("adaptive_attention" in str(node.target) for graph in counter.graphs for node in graph.graph.nodes)
    assert len(on_any_device) == 2
    assert max(errors(found, expected)) < 1e-3


OTHER_WAYS: dict[str, dict[str, Any]] = {
    "a detached policy": {"detached": True},
    "a policy without a gradient": {"policy": Lowered("log_count", (0.2, 1.0))},
    "dropout": {"dropout_p": 0.1, "seed": torch.tensor(3)},
    "key lengths": {"key_lengths": torch.tensor([20, 11])},
    "a mask": {"mask": torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()},
    "packed documents": {"starts": torch.tensor([0, 7, 20]), "batch": 1},
}


@pytest.mark.parametrize("what", OTHER_WAYS)
def test_what_goes_the_portable_way(what: str, on_any_device: list[Lowered]) -> None:
    options: dict[str, Any] = {"batch": 2, "policy": POLICY, "detached": False, "dropout_p": 0.0} | OTHER_WAYS[what]
    q, k, v = leaves(*(torch.randn(options["batch"], 1, 20, 64).half() for _ in range(3)))
    hiding = [options.get(name) for name in ("mask", "key_lengths", "starts", "starts", "seed")]
    policy = fused.policy_numbers(options["policy"])
    rest = (FULL.numbers, policy, options["detached"], options["dropout_p"])
    out = fused.adaptive_attention(q, k, v, *hiding, *rest)[0]
    assert all(bool(x.isfinite().all()) for x in torch.autograd.grad(out.float().square().sum(), (q, k, v)))
    assert on_any_device == []


NOT_TAKEN: dict[str, dict[str, Any]] = {
    "values of another width": {"columns": 32},
    "float32": {"dtype": torch.float32},
    "heads of another width": {"width": 96, "columns": 96},
    "few rows": {"batch": 1},
    "a window": {"geometry": Geometry(0.1, left=3, right=0)},
}


@pytest.mark.parametrize("what", [None, "rows apart", *NOT_TAKEN])
def test_which_calls_it_is_for(what: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_backward, "known_processors", lambda _: 32)
    options = {"batch": 4, "width": 64, "columns": 64, "dtype": torch.float16, "geometry": CAUSAL}
    options |= NOT_TAKEN.get(what or "", {})
    shapes = [(options["batch"], 8, 256, n) for n in (options["width"], options["width"], options["columns"])]
    q, k, v = (torch.zeros(shape, dtype=options["dtype"]) for shape in shapes)
    if what == "rows apart":  # they are copied
        k = torch.zeros((*k.shape, 2), dtype=k.dtype)[..., 0]
    expected = what not in NOT_TAKEN
    assert hopper_backward.taken(q, k, v, options["geometry"], POLICY) is expected
    if expected:
        assert not hopper_backward.taken(q, k, v, CAUSAL, POLICY, dropout_p=0.1)
        assert not hopper_backward.taken(q, k, v, CAUSAL, POLICY, key_lengths=torch.ones(4))


def test_other_devices_and_versions_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice.hopper_processors(torch.device("cpu")) == 0
    x = torch.zeros(4, 8, 256, 64, dtype=torch.float16)
    assert not hopper_backward.taken(x, x, x, CAUSAL, POLICY)
    monkeypatch.setattr(choice, "compute_capability", lambda _: 9)
    assert choice.hopper_processors(torch.device("cpu")) == 0
    monkeypatch.setattr(hopper, "is_hopper", lambda _: True)
    monkeypatch.setattr(hopper, "processors", lambda _: 3)
    for version, expected in (((3, 6), 3), ((3, 5), 0)):
        monkeypatch.setattr(hopper, "version", lambda version=version: version)
        assert choice.hopper_processors(torch.device("cpu")) == expected
