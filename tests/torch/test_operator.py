"""Operators called directly: where nothing looks, with the same gradients; everything that looks sees the operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sharpmax.torch.operator import Operator, operator

called: list[str] = []
"""The ways that calls of :data:`doubled` went."""


@operator("sharpmax_tests::doubled")
def doubled(x: Tensor, factors: list[float], other: Tensor | None) -> tuple[Tensor, Tensor]:
    """``x`` times factors, and a number that has no gradient."""
    called.append("function")
    return x * sum(factors) + (0.0 if other is None else other), x.detach().sum(-1)


@doubled.register_fake
def _(x: Tensor, factors: list[float], other: Tensor | None) -> tuple[Tensor, Tensor]:
    del factors, other
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.factor = sum(inputs[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, _: Any) -> Any:
    if grad is None:
        return None, None, None
    return scaled(grad, ctx.factor), None, grad if ctx.needs_input_grad[2] else None


@operator("sharpmax_tests::scaled")
def scaled(grad: Tensor, factor: float) -> Tensor:
    """The gradient, by way of memory, which not every kind of tensor has."""
    return torch.from_numpy(grad.numpy() * factor).to(grad.dtype)


@scaled.register_fake
def _(grad: Tensor, factor: float) -> Tensor:
    del factor
    return grad.new_empty(grad.shape)


@scaled.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], grad: Tensor, factor: float) -> Any:
    del info
    return scaled(grad, factor), in_dims[0]


doubled.register_autograd(_gradients, setup_context=_keep)


@pytest.fixture(autouse=True)
def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The ways that calls go: the function, and before it the operator where that is called."""
    called.clear()
    opaque = doubled.opaque
    monkeypatch.setattr(doubled, "opaque", lambda *a, **b: (called.append("operator"), opaque(*a, **b))[1])
    yield called
    called.clear()


class Calls(TorchFunctionMode):
    """Notes the names of functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Watching(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_plain_calls_go_directly(ways: list[str]) -> None:
    x = torch.randn(3, 4)
    with torch.no_grad():
        doubled(x.clone().requires_grad_(), [1.0, 1.0], None)
    doubled(torch.nn.Parameter(x, requires_grad=False), [2.0], x)
    assert ways == ["function", "function"]


def test_gradients_are_those_of_the_operator(ways: list[str]) -> None:
    x, other = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    weight = torch.randn(3, 4)
    direct = torch.autograd.grad(doubled(x, [1.5, 2.0], other)[0], (x, other), weight)
    assert ways == ["function"]
    with Watching():
        watched = doubled(x, [1.5, 2.0], other)[0]
    assert ways == ["function", "operator", "function"]
    for a, b in zip(direct, torch.autograd.grad(watched, (x, other), weight), strict=True):
        assert torch.equal(a, b)
    value, total = doubled(x, [1.0], None)
    assert value.requires_grad
    assert not total.requires_grad


def test_a_mode_sees_the_operator(ways: list[str]) -> None:
    with Watching() as watching:
        doubled(torch.randn(2, 2), [1.0], None)
    assert ways[0] == "operator"
    assert "sharpmax_tests.doubled.default" in watching.seen


def test_modes_of_functions_and_profilers_see_the_operator(ways: list[str]) -> None:
    with Calls() as calls:
        doubled(torch.randn(2, 2), [1.0], None)
    assert any("doubled" in name for name in calls.seen)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        doubled(torch.randn(2, 2), [1.0], None)
    assert "sharpmax_tests::doubled" in [event.key for event in profile.key_averages()]
    assert ways == ["operator", "function"] * 2


def test_numbers_may_be_named(ways: list[str]) -> None:
    x = torch.randn(2, 2)
    assert torch.equal(doubled(x, factors=[2.0], other=None)[0], 2 * x)
    assert ways == ["operator", "function"]


def test_negatives_are_resolved(ways: list[str]) -> None:
    """Memory holds the opposite of what such a tensor is."""
    negative = torch.imag(torch.randn(3, 4, dtype=torch.complex64).conj())
    assert negative.is_neg()
    got, _ = doubled(negative, [2.0], None)
    torch.testing.assert_close(got, 2 * negative.clone())
    assert ways[0] == "operator"


def test_what_was_saved_may_not_be_changed() -> None:
    x = torch.randn(2, 2, requires_grad=True)
    y = x * 1.0
    z = squared(y)
    y.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@operator("sharpmax_tests::squared")
def squared(x: Tensor) -> Tensor:
    """``x**2``, whose gradient needs ``x``."""
    return x * x


squared.register_autograd(
    lambda ctx, grad: 2 * ctx.saved_tensors[0] * grad,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_fake_tensors_reach_no_function(ways: list[str]) -> None:
    with FakeTensorMode() as mode:
        made = torch.empty(2, 3)
        assert doubled(made, [1.0], None)[0].shape == (2, 3)
    assert doubled(mode.from_tensor(torch.empty(5, 3)), [1.0], None)[1].shape == (5,)
    assert doubled(torch.empty(4, 3, device="meta"), [1.0], None)[0].is_meta
    assert ways == ["operator"] * 3


def test_transforms_see_the_operator(ways: list[str]) -> None:
    given = torch.randn(3, 2)
    assert torch.equal(torch.func.vmap(lambda x: doubled(x, [1.0], None)[0])(given), given)
    assert ways[0] == "operator"
    x = torch.randn(3, requires_grad=True)
    y, _ = doubled(x, [2.0], None)
    jacobian = torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)[0]
    assert torch.equal(jacobian, 2 * torch.eye(3))


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_a_trace_holds_the_operator(ways: list[str], pre_dispatch: bool) -> None:
    graph = make_fx(lambda x: doubled(x, [3.0], None)[0], pre_dispatch=pre_dispatch)(torch.randn(2, 2))
    assert any("doubled" in str(node.target) for node in graph.graph.nodes)
    assert "operator" in ways


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_records_the_operator(ways: list[str]) -> None:
    traced: Any = torch.jit.trace(lambda x: doubled(x, [3.0], None)[0], torch.ones(2, 2), check_trace=False)
    assert "sharpmax_tests::doubled" in str(traced.graph)
    assert ways[0] == "operator"


def test_compiled_code_calls_the_operator() -> None:
    """Without a break of the graph, forward and backward."""
    x = torch.randn(3, 4, requires_grad=True)
    compiled = torch.compile(lambda x: doubled(x, [1.0, 1.0], None)[0].sum(), fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(x), x)[0], torch.full((3, 4), 2.0))


def test_without_a_backward_the_operator_says_so() -> None:
    bare = Operator("sharpmax_tests::bare", _bare)
    assert torch.equal(bare(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(RuntimeError, match="autograd"):
        bare(torch.ones(2, requires_grad=True)).sum().backward()


def _bare(x: Tensor) -> Tensor:
    return x + x
