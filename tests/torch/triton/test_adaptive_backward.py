"""The gradient kernels for Hopper within the operators: which calls they are for, and what they are taken in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

pytest.importorskip("triton")

import sharpmax
from sharpmax.core.policies.base import Lowered
from sharpmax.torch import choice, fused, scaled_dot_product_attention
from sharpmax.torch.geometry import Geometry
from sharpmax.torch.triton import hopper, hopper_backward
from tests.torch.triton.gradient_cases import (
    CAUSAL,
    FULL,
    NARROW,
    WIDE,
    Gradients,
    attended,
    by_kernels,
    errors,
    leaves,
)
from tests.torch.triton.hopper_cases import DEVICE, ON_HOPPER, sized
from tests.torch.triton.oracle import POLICY, Case, inputs

LARGE = Case("large", batch=2, heads=4, key_heads=4, queries=1024, keys=1024, geometry=CAUSAL, **WIDE)
SMALL = Case("small", batch=2, heads=2, key_heads=1, queries=130, keys=130, geometry=CAUSAL, **NARROW)


@pytest.fixture
def taken(hopper_kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Any version of Triton is one that the kernels were run with; what their gradient was taken for is noted."""
    monkeypatch.setattr(hopper, "RUN_WITH", (hopper.triton_version(),))
    monkeypatch.setattr(choice, "triton_refusal", lambda *_: "")
    found: list[torch.Size] = []
    real = fused.kernels().adaptive_backward
    monkeypatch.setattr(
        fused.kernels(), "adaptive_backward", lambda q, *a, **named: (found.append(q.shape), real(q, *a, **named))[1]
    )
    return found


@pytest.fixture
def always_taken(taken: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    monkeypatch.setattr(hopper_backward, "pays", lambda *_: True)
    monkeypatch.setattr(hopper, "pays", lambda *_: True)
    return taken


@pytest.mark.usefixtures("hopper_kernels")
def test_rows_of_beta_0_attend_to_what_they_see_alone() -> None:
    """Their weights are all the same: dv is a mean of cotangents, and nothing comes back from what they do not see."""
    given = inputs(SMALL, torch.float16, DEVICE)
    given.do[:, :, :100] = 0.0
    _, dk, dv = by_kernels(given, Lowered("entropy", (0.1, -4.0), floor=0.0))
    assert not dk.any()
    weights = 1.0 / torch.arange(1.0, 131.0, device=DEVICE)[100:, None].expand(-1, 130).tril(100)
    weights = torch.where(weights.isinf(), 0.0, weights)
    expected = (weights.mT @ given.do[:, :, 100:].float()).sum(1, keepdim=True)
    torch.testing.assert_close(dv.float(), expected, atol=1e-3, rtol=2e-3)


@pytest.mark.parametrize("case", sized([LARGE, SMALL]))
def test_rows_and_cotangents_that_begin_anywhere(case: Case, always_taken: list[torch.Size]) -> None:
    given = inputs(case, torch.bfloat16, DEVICE)
    q, k, v = leaves(given.q, given.k, given.v)
    out = attended(q, k, v, CAUSAL)
    within = torch.empty(given.do.numel() + 1, dtype=given.do.dtype, device=DEVICE)[1:].view_as(given.do)
    repeated = given.do[..., :1, :1].expand_as(given.do)
    for cotangent in (within.copy_(given.do), given.do.mT.contiguous().mT, repeated):
        found = torch.autograd.grad(out, (q, k, v), cotangent, retain_graph=True)
        expected = torch.autograd.grad(out, (q, k, v), cotangent.contiguous().clone(), retain_graph=True)
        assert max(errors(found, expected)) < 1e-3
    assert len(always_taken) == 6


def test_the_operators_are_whole(always_taken: list[torch.Size]) -> None:
    given = inputs(replace(SMALL, batch=1), torch.bfloat16, DEVICE)
    q, k, v = leaves(given.q, given.k, given.v)
    rest = (*(None,) * 5, CAUSAL.numbers, fused.policy_numbers(POLICY), False, 0.0)
    torch.library.opcheck(fused.adaptive_attention.opaque, (q, k, v, *rest))
    assert always_taken


def run(function: Any, given: list[Tensor], **options: Any) -> Gradients:
    """The output and its gradients."""
    out = function(*given, **options)
    return (out.detach(), *torch.autograd.grad(out.float().square().sum(), given))


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return scaled_dot_product_attention(2.0 * q, k, v, is_causal=True, impl="triton", **options)


def test_attention_takes_it_whole_and_compiled_but_not_with_a_detached_policy(always_taken: list[torch.Size]) -> None:
    given = leaves(*torch.randn(3, 2, 2, 140, 64, device=DEVICE, dtype=torch.float16))
    ours = run(attend, given)
    assert len(always_taken) == 1
    run(attend, given, policy=sharpmax.detached(sharpmax.PAPER))
    assert len(always_taken) == 1
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = run(torch.compile(attend, fullgraph=True, backend=counter), given)
    assert any("adaptive_attention" in str(node.target) for graph in counter.graphs for node in graph.graph.nodes)
    assert len(always_taken) == 2
    assert max(errors(compiled, ours)) < 6e-3


@pytest.mark.parametrize("shape", [(2, 66, 1024, 64) if ON_HOPPER else (1, 6, 128, 64)], ids=str)
def test_attention_takes_it_where_it_pays(
    shape: tuple[int, ...], taken: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On inputs that fill the card; the portable kernels give the same."""
    given = leaves(*torch.randn(3, *shape, device=DEVICE, dtype=torch.float16))
    ours = run(attend, given)
    assert len(taken) == 1
    fewer = leaves(*(x[:, :1] for x in given))
    run(attend, fewer)
    assert len(taken) == 1
    monkeypatch.setattr(hopper_backward, "known_processors", lambda _: 0)
    portable = run(attend, given)
    assert len(taken) == 1
    assert max(errors(portable, ours)) < 6e-3


def test_mapped_over(always_taken: list[torch.Size]) -> None:
    q, k, v = torch.randn(3, 3, 2, 4, 50, 64, device=DEVICE, dtype=torch.bfloat16)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attended(q, k, v, CAUSAL)

    q.requires_grad_()
    found = torch.func.vmap(attend)(q, k, v)
    expected = torch.stack([attend(*one) for one in zip(q, k, v, strict=True)])
    torch.testing.assert_close(found, expected)
    (ours,), (theirs,) = (torch.autograd.grad(x, q, torch.ones_like(x)) for x in (found, expected))
    torch.testing.assert_close(ours, theirs)
    assert len(always_taken) == 4


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
def test_in_a_cuda_graph() -> None:
    given = inputs(LARGE, torch.bfloat16, "cuda")
    by_kernels(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = by_kernels(given)
    given.do.copy_(given.do.flip(2))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, by_kernels(given), strict=True))


OTHER_WAYS: dict[str, dict[str, Any]] = {
    "a detached policy": {"detached": True},
    "a policy without a gradient": {"policy": Lowered("log_count", (0.2, 1.0))},
    "dropout": {"dropout_p": 0.1, "seed": torch.tensor(3)},
    "key lengths": {"key_lengths": torch.tensor([20, 11])},
    "a mask": {"mask": torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()},
    "packed documents": {"starts": torch.tensor([0, 7, 20]), "batch": 1},
}


@pytest.mark.parametrize("what", OTHER_WAYS)
def test_what_goes_the_portable_way(what: str, always_taken: list[torch.Size]) -> None:
    options: dict[str, Any] = {"batch": 2, "policy": POLICY, "detached": False, "dropout_p": 0.0} | OTHER_WAYS[what]
    q, k, v = leaves(*torch.randn(3, options["batch"], 1, 20, 64, device=DEVICE, dtype=torch.float16))
    hiding: list[Any] = [options.get(name) for name in ("mask", "key_lengths", "starts", "starts", "seed")]
    hiding = [x if x is None else x.to(DEVICE) for x in hiding]
    policy = fused.policy_numbers(options["policy"])
    rest = (FULL.numbers, policy, options["detached"], options["dropout_p"])
    out = fused.adaptive_attention(q, k, v, *hiding, *rest)[0]
    assert all(bool(x.isfinite().all()) for x in torch.autograd.grad(out.float().square().sum(), (q, k, v)))
    assert always_taken == []


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
        monkeypatch.setattr(hopper, "triton_version", lambda version=version: version)
        assert choice.hopper_processors(torch.device("cpu")) == expected
