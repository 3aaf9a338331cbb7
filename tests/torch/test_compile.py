"""``torch.compile`` of calls whose numbers change: what was compiled serves them, or is compiled anew."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch._dynamo.exc
import torch._dynamo.testing
from torch import Tensor
from torch.autograd import forward_ad

import sharpmax
from sharpmax.torch import choice, decode_attention, row_stats, scaled_dot_product_attention, varlen_attention
from sharpmax.torch.checks import checked


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def tensor(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def attend(x: Tensor, **options: Any) -> Any:
    return scaled_dot_product_attention(x, x, x, **options)


def decode(x: Tensor, **options: Any) -> Any:
    lengths = torch.tensor([5, 3])
    return decode_attention(x[:, :, :1].detach(), x.detach(), x.detach(), lengths, **options)


def packed(x: Tensor, **options: Any) -> Any:
    tokens, starts = x[0].transpose(0, 1), torch.tensor([0, 2, 5], dtype=torch.int32)
    return varlen_attention(tokens, tokens, tokens, starts, starts, **options)


@pytest.mark.parametrize("call", [attend, decode, packed])
@pytest.mark.parametrize("option", ["scale", "softcap"])
def test_another_number(call: Callable[..., Any], option: str) -> None:
    x, run = tensor(2, 4, 5, 8), compiled(lambda x, number: call(x, **{option: number}))
    for number in (0.5, 0.7, 0.9):
        torch.testing.assert_close(run(x, number), call(x, **{option: number}))


@pytest.mark.parametrize("function", [sharpmax.adaptive_temperature_softmax, lambda x: attend(x, impl="reference")])
def test_symbolic_sizes_with_gradients(function: Callable[[Tensor], Tensor]) -> None:
    run = compiled(function, dynamic=True)
    for rows in (5, 7):
        x = tensor(2, 4, rows, 8)
        (got,) = torch.autograd.grad(run(x).square().sum(), x)
        (expected,) = torch.autograd.grad(function(x).square().sum(), x)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


MORE = [pytest.param(name, marks=pytest.mark.thorough) for name in ("hard", "sigmoid", "top_k")]


@pytest.mark.parametrize("mechanism", ["sparsemax", "window", *MORE])
def test_mechanisms_with_symbolic_sizes(mechanism: str) -> None:
    run = compiled(lambda x: attend(x, mechanism=mechanism), dynamic=True)
    for rows in (5, 7):
        x = tensor(2, 4, rows, 8)
        torch.testing.assert_close(run(x), attend(x, mechanism=mechanism))


def test_another_policy_of_the_same_kind() -> None:
    x, run = tensor(2, 4, 5, 8), compiled(lambda x, policy: attend(x, policy=policy))
    for top in (2.0, 2.5, 3.0):
        policy = sharpmax.EntropyCurve((0.5, top / 2), (1.0, top))
        torch.testing.assert_close(run(x, policy), attend(x, policy=policy))


def tangent_of_dual(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


DERIVATIVES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "dual numbers": tangent_of_dual,
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).square().sum()))(x),
}
DIFFERENTIATED: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: attend(x, is_causal=True),
    "key lengths": lambda x: attend(x, key_lengths=torch.tensor([3])),
    "entropy": lambda x: row_stats(x, x).entropy,
}


PAIRS = [pair for pair in product(DIFFERENTIATED, DERIVATIVES) if pair != ("key lengths", "vmap of grad")]


@pytest.mark.parametrize(("name", "derivative"), PAIRS)
def test_derivatives_within_what_is_compiled(name: str, derivative: str) -> None:
    """By the implementation that serves them, as outside: other operators would give no tangents, without a word."""
    x, function, differentiate = tensor(1, 2, 5, 8).detach(), DIFFERENTIATED[name], DERIVATIVES[derivative]
    expected = differentiate(function, x)
    assert float(expected.abs().max()) > 1e-3
    torch.testing.assert_close(compiled(lambda x: differentiate(function, x))(x), expected)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="streaming"):
        compiled(lambda x: differentiate(lambda x: attend(x, impl="streaming"), x))(x)


def test_what_was_compiled_outside_of_forward_mode_is_not_taken_within() -> None:
    x, counter = tensor(1, 2, 5, 8).detach(), torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    run = torch.compile(lambda x: attend(x, is_causal=True), fullgraph=True, backend=counter)
    plain = run(x)
    expected = tangent_of_dual(lambda x: attend(x, is_causal=True), x)
    for _ in range(2):
        torch.testing.assert_close(tangent_of_dual(run, x), expected)
        torch.testing.assert_close(run(x), plain)
    assert counter.frame_count == 2


def test_key_lengths_that_are_made_of_a_dynamic_length() -> None:
    def function(x: Tensor) -> Tensor:
        return attend(x, key_lengths=torch.tensor([3, x.shape[2]]), impl="streaming")

    run = compiled(function, dynamic=True)
    for length in (5, 7):
        x = tensor(2, 2, length, 8).detach()
        torch.testing.assert_close(run(x), function(x))


def test_dropout_under_vmap_compiles() -> None:
    x = tensor(3, 2, 5, 8).detach()
    run = compiled(torch.func.vmap(lambda x: attend(x, dropout_p=0.5), randomness="different"))
    assert run(x).shape == x.shape


@pytest.mark.parametrize(("dynamic", "most"), [(True, 1), (None, 3)], ids=["dynamic", "automatic"])
def test_documents_of_other_lengths_and_numbers_compile_nothing(dynamic: bool | None, most: int) -> None:
    """Where sizes become symbols by themselves, tokens and documents each do when they first change."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    def attend(x: Tensor, starts: Tensor) -> Any:
        return varlen_attention(x, x, x, starts, starts, causal=True)

    run = torch.compile(attend, fullgraph=True, backend=counter, dynamic=dynamic)
    compilations = []
    for lengths in ([3, 4], [5, 0], [3, 3, 3], [1, 1, 1, 1, 7], [2, 9], [4, 11, 2]):
        starts = torch.tensor([0, *lengths]).cumsum(0)
        x = tensor(sum(lengths), 2, 8)
        found, expected = run(x, starts), attend(x, starts)
        torch.testing.assert_close(found, expected)
        gradients = (torch.autograd.grad(out.square().sum(), x)[0] for out in (found, expected))
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
        compilations.append(counter.frame_count)
    assert compilations[2:] == [compilations[2]] * 4
    assert compilations[-1] <= most


@pytest.mark.parametrize("gradient", [False, True], ids=["inference", "training"])
def test_what_auto_takes_on_a_hopper_gpu_is_compiled_once_each(gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its choice depends on lengths; each goes where it goes without a compiler. Tensors are without memory."""
    pytest.importorskip("triton")
    from sharpmax.torch.triton import hopper_backward

    monkeypatch.setattr(choice, "compute_capability", lambda _: 9)
    monkeypatch.setattr(choice, "triton_refusal", lambda *_: "")
    for module, name in ((choice, "hopper_processors"), (hopper_backward, "known_processors")):
        monkeypatch.setattr(module, name, lambda _: 132)
    ran: list[str] = []
    graphs = 0

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        names = " ".join(str(node.target) for node in graph.graph.nodes)
        return lambda *inputs: (ran.append("triton" if "adaptive_attention" in names else "stock"), graph(*inputs))[1]

    torch._dynamo.reset()
    run = torch.compile(lambda x: attend(x, is_causal=True), fullgraph=True, backend=backend, dynamic=True)
    expected = []
    for length in (2048, 130, 2304, 200, 3000, 4097, 8000):
        x = torch.empty(4, 16, length, 128, dtype=torch.bfloat16, device="meta", requires_grad=gradient)
        made = checked(x, x, x, None, None, is_causal=True, scale=None, window=None, softcap=None, enable_gqa=False)
        own = choice.own_kernels_pay(made, sharpmax.PAPER, 0.0, False)
        expected.append(choice.choose("auto", made, sharpmax.PAPER, may_round=not own))
        assert run(x).shape == x.shape
    assert set(expected) == {"triton", "stock"}
    assert ran == expected
    assert graphs == 2
