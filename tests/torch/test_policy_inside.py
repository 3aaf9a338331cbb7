"""Operators with the policy inside, what needs no statistics, and which implementation serves a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import _cur_sdpa_kernel_backends as current_backends

import sharpmax
from sharpmax.torch import attention as module
from sharpmax.torch import choice, fused, row_stats, scaled_dot_product_attention, stock, varlen_attention
from sharpmax.torch.checks import checked
from tests.torch import oracle
from tests.torch.attention_cases import MASKS, POLICIES, TOLERANCE, close, inputs

INSIDE = {"stock": "sharpened_query", "triton": "adaptive_attention"}
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.mark.parametrize("impl", INSIDE)
@pytest.mark.parametrize(
    "mask", ["causal", "lengths", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("full", "boolean"))]
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_with_the_policy_inside_matches_the_oracle(
    impl: str, mask: str, dtype: torch.dtype, triton_everywhere: list[str]
) -> None:
    if dtype == torch.bfloat16 and not ON_GPU:
        pytest.skip("needs an NVIDIA GPU")
    tensors, tolerance = inputs(dtype, value_columns=8), TOLERANCE[dtype] * (4 if impl == "stock" else 1)
    kw = MASKS[mask]
    on: Any = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in kw.items()}
    given = [x.detach().to(DEVICE).requires_grad_() for x in tensors]
    output = scaled_dot_product_attention(given[0], given[1], given[2], impl=impl, enable_gqa=True, **on)
    assert triton_everywhere == [INSIDE[impl]]
    truth = oracle.attention(tensors[0], tensors[1], tensors[2], policy=sharpmax.PAPER, **kw)
    close(output.cpu(), truth.output, tolerance, "output")
    g = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    expected = torch.autograd.grad(truth.output, tensors, g.double())
    found = torch.autograd.grad(output, given, g.to(DEVICE))
    for name, a, b in zip(("dq", "dk", "dv"), found, expected, strict=True):
        close(a.cpu(), b, 4 * tolerance, name)


@pytest.mark.parametrize("impl", INSIDE)
@pytest.mark.parametrize(
    "policy", ["paper", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("held", "log", "detached", "spread"))]
)
def test_with_the_policy_inside_matches_the_composed_way(impl: str, policy: str, triton_everywhere: list[str]) -> None:
    given = [x.detach().to(DEVICE).requires_grad_() for x in inputs(torch.float32, value_columns=8)]
    call: Any = {"impl": impl, "enable_gqa": True, "is_causal": True, "policy": POLICIES[policy]}
    whole = scaled_dot_product_attention(given[0], given[1], given[2], **call)
    inside = policy not in ("spread", "log")
    assert triton_everywhere == [INSIDE[impl]] * inside
    composed = scaled_dot_product_attention(given[0], given[1], given[2], return_stats=True, **call).output
    assert len(triton_everywhere) == inside
    close(whole, composed, 2e-5, "output")
    g = torch.randn(whole.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    expected = torch.autograd.grad(composed, given, g)
    for name, a, b in zip(("dq", "dk", "dv"), torch.autograd.grad(whole, given, g), expected, strict=True):
        close(a, b, 1e-4, name)


@pytest.mark.parametrize("impl", ["reference", "streaming", "triton"])
@pytest.mark.parametrize(
    "mask", ["causal_window", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("boolean", "full", "lengths"))]
)
@pytest.mark.parametrize("policy", [sharpmax.Constant(1.7), sharpmax.LogLength.relative(4)], ids=["number", "length"])
def test_policies_that_read_no_statistics_pay_for_none(
    impl: str, mask: str, policy: Any, triton_everywhere: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [x.detach().to(DEVICE).requires_grad_() for x in inputs(torch.float32, value_columns=8)]
    on: Any = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in MASKS[mask].items()}
    call: Any = {"impl": impl, "enable_gqa": True, "policy": policy, **on}
    expected = scaled_dot_product_attention(given[0], given[1], given[2], return_stats=True, **call).output
    needed = isinstance(policy, sharpmax.LogLength) and "attn_mask" in on  # a mask is counted with the statistics
    if not needed:
        monkeypatch.setattr(module, "_statistics", lambda *_: pytest.fail("statistics are not needed"))
    found = scaled_dot_product_attention(given[0], given[1], given[2], **call)
    assert len(triton_everywhere) == (needed and impl == "triton")
    close(found, expected.detach(), 1e-6, "output")
    g = torch.ones_like(found)
    gradients = (torch.autograd.grad(x, given, g) for x in (found, expected))
    for name, a, b in zip(("dq", "dk", "dv"), *gradients, strict=True):
        close(a, b, 1e-6, name)


@pytest.mark.parametrize("impl", INSIDE)
def test_compiles_whole_with_the_policy_inside(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if not ON_GPU:
        monkeypatch.setattr(choice, "triton_refusal", lambda *_: "")
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, impl=impl)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    compilations: list[int] = []
    for length in (9, 12):
        q, k, v = (torch.randn(1, h, length, 8, device=DEVICE, requires_grad=True) for h in (2, 1, 1))
        found = torch.autograd.grad(compiled(q, k, v).square().sum(), (q, k, v))
        expected = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, expected, strict=True))
        compilations.append(counter.frame_count)
    assert compilations[0] == compilations[1]
    assert any(INSIDE[impl] in str(node.target) for graph in counter.graphs for node in graph.graph.nodes)


def test_dropout_with_the_policy_inside(triton_everywhere: list[str]) -> None:
    q, k, v = (x.detach().to(DEVICE).requires_grad_() for x in inputs(torch.float32))
    torch.manual_seed(3)
    out = scaled_dot_product_attention(q, k, v, dropout_p=0.3, enable_gqa=True, impl="triton")
    (gradient,) = torch.autograd.grad(out, v, torch.ones_like(out))
    assert triton_everywhere == ["adaptive_attention"]
    assert torch.allclose((gradient * v).sum(), out.sum(), atol=1e-3)  # the output is linear in the values


AUTO: list[tuple[dict[str, Any], int, str]] = [
    ({}, 9, "stock"),
    ({"is_causal": True}, 10, "stock"),
    ({}, 8, "triton"),
    ({"query": torch.zeros(1, 2, 5, 8)}, 9, "triton"),
    ({"query": torch.zeros(1, 2, 5, 300).half()}, 9, "streaming"),
    ({"query": torch.zeros(1, 2, 5, 128).half()}, 10, "stock"),
    ({"query": torch.zeros(1, 2, 5, 192).half()}, 9, "stock"),
    ({"query": torch.zeros(1, 2, 5, 192).half()}, 10, "triton"),
    ({"query": torch.zeros(1, 2, 5, 20).half()}, 9, "triton"),
    ({"key": torch.zeros(1, 2, 1, 8).half()}, 9, "triton"),
    ({"key": torch.zeros(1, 2, 8, 5).half().mT}, 9, "triton"),
    ({}, 12, "triton"),
    ({"is_causal": "lower_right"}, 9, "stock"),
    ({"is_causal": True, "key": torch.zeros(1, 2, 6, 8).half()}, 9, "triton"),
    ({"value": torch.zeros(1, 2, 5, 4).half()}, 9, "triton"),
    ({"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, 9, "triton"),
    ({"key_lengths": torch.tensor([3])}, 9, "triton"),
    ({"window": 3}, 9, "triton"),
    ({"softcap": 3.0}, 9, "triton"),
    ({"policy": sharpmax.Hard()}, 9, "streaming"),
]


@pytest.mark.parametrize(("change", "capability", "expected"), AUTO)
def test_what_auto_takes_on_a_gpu(
    change: dict[str, Any], capability: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "compute_capability", lambda _: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(
        choice, "triton_refusal", lambda x, p: "wide" if x.q.shape[-1] > 256 else "hard" if choice.is_hard(p) else ""
    )
    call: Any = {"attn_mask": None, "key_lengths": None, "is_causal": False, "window": None, "softcap": None} | change
    policy, query = call.pop("policy", sharpmax.PAPER), call.pop("query", torch.zeros(1, 2, 5, 8).half())
    key = call.pop("key", query)
    value = call.pop("value", key)
    made = checked(query, key, value, scale=None, enable_gqa=False, **call)
    assert choice.choose("auto", made, policy, may_round=True) == expected
    assert choice.choose("auto", made, policy) == ("streaming" if expected == "streaming" else "triton")


def test_auto_leaves_cudnn_where_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switched off, or where algorithms are to be deterministic."""
    monkeypatch.setattr(choice, "compute_capability", lambda _: 9)
    monkeypatch.setattr(choice, "triton_refusal", lambda *_: "")
    x = torch.zeros(1, 2, 5, 8).half()
    plain: Any = {"is_causal": False, "scale": None, "window": None, "softcap": None, "enable_gqa": False}
    made = checked(x, x, x, None, None, **plain)

    def chosen() -> str:
        return choice.choose("auto", made, sharpmax.PAPER, may_round=True)

    assert chosen() == "stock"
    with monkeypatch.context() as changed:
        changed.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
        assert chosen() == "triton"
    with monkeypatch.context() as changed:
        changed.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert chosen() == "triton"


OWN: dict[str, tuple[dict[str, Any], bool]] = {
    "inference": ({}, True),
    "causal inference": ({"is_causal": True}, True),
    "any policy": ({"policy": lambda stats: 1.0 + stats.entropy}, False),
    "a long polynomial": ({"policy": sharpmax.EntropyPolynomial((0.1,) * 10)}, False),
    "keys that are all the same": ({"expanded": True}, False),
    "inference with statistics": ({"return_stats": True}, True),
    "inference, detached": ({"policy": sharpmax.detached(sharpmax.PAPER)}, True),
    "training": ({"gradient": True}, True),
    "training with statistics": ({"gradient": True, "return_stats": True}, False),
    "training, detached": ({"gradient": True, "policy": sharpmax.detached(sharpmax.PAPER)}, False),
    "training of few keys": ({"gradient": True, "keys": 64}, False),
    "inference of few keys": ({"keys": 64}, True),
    "few queries": ({"queries": 64}, False),
    "betas that need no statistics": ({"policy": sharpmax.LogLength.relative(16)}, False),
    "a number": ({"policy": sharpmax.Constant(2.0)}, False),
    "dropout": ({"dropout_p": 0.1}, False),
    "a mask": ({"attn_mask": torch.ones(512, 512, dtype=torch.bool)}, False),
    "key lengths": ({"key_lengths": torch.full((4,), 300)}, False),
    "a softcap": ({"softcap": 3.0}, False),
    "other columns": ({"width": 32}, False),
}


@pytest.mark.parametrize("what", OWN)
def test_where_auto_does_not_round(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for Hopper, with 32 processors: where they have what is asked for, and keep the card at work."""
    pytest.importorskip("triton")
    change, expected = OWN[what]
    call: dict[str, Any] = {"attn_mask": None, "key_lengths": None, "is_causal": False, "window": None, "softcap": None}
    rest: dict[str, Any] = {"policy": sharpmax.PAPER, "dropout_p": 0.0, "return_stats": False, "gradient": False}
    rest |= {"queries": 512, "keys": 512, "width": 64, "expanded": False}
    for name, value in change.items():
        (call if name in call else rest)[name] = value
    q, k, v = (torch.zeros(4, 4, rest[n], rest["width"]).half() for n in ("queries", "keys", "keys"))
    q.requires_grad_(rest["gradient"])
    k = k[:1].expand_as(k) if rest["expanded"] else k
    made = checked(q, k, v, scale=None, enable_gqa=False, **call)
    asked = (made, rest["policy"], rest["dropout_p"], rest["return_stats"])
    assert not choice.own_kernels_pay(*asked)  # no such GPU
    monkeypatch.setattr(choice, "hopper_processors", lambda _: 32)
    assert choice.own_kernels_pay(*asked) is expected
    if rest["gradient"]:
        with torch.no_grad():
            assert choice.own_kernels_pay(*asked)


MAXIMA: dict[str, tuple[dict[str, Any], bool]] = {
    "inside": ({}, True),
    "causal": ({"is_causal": True}, True),
    "lengths": ({"key_lengths": torch.tensor([3, 9])}, True),
    "any policy": ({"policy": lambda stats: 1.0 + stats.entropy}, True),
    "statistics": ({"return_stats": True}, True),
    "a number": ({"policy": sharpmax.Constant(2.0)}, False),
    "the length": ({"policy": sharpmax.LogLength.relative(16)}, False),
}


@pytest.mark.usefixtures("triton_everywhere")
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("what", MAXIMA)
def test_attention_is_handed_the_maxima_of_rows_or_none(
    what: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may trust them: powers relative to anything less would overflow."""
    call, known = MAXIMA[what]
    if packed and what in ("causal", "lengths"):
        pytest.skip("packed documents have neither by these names")
    handed: list[Tensor | None] = []
    real = fused.kernels().attend
    monkeypatch.setattr(
        fused.kernels(), "attend", lambda *a, row_max=None, **k: (handed.append(row_max), real(*a, **k))[1]
    )
    on: Any = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in call.items()}
    generator = torch.Generator().manual_seed(1)
    q, k, v = (5 * torch.randn(2, 2, 9, 16, generator=generator).to(DEVICE) for _ in range(3))
    if packed:
        starts = torch.tensor([0, 9, 18], dtype=torch.int32, device=DEVICE)
        packed_q, packed_k, packed_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        varlen_attention(packed_q, packed_k, packed_v, starts, starts, impl="triton", **on)
    else:
        scaled_dot_product_attention(q, k, v, impl="triton", **on)
    (row_max,) = handed
    assert (row_max is not None) is known or (packed and what == "the length")
    if row_max is not None:
        masks = {n: x for n, x in on.items() if n in ("is_causal", "key_lengths")}
        exact = row_stats(q.double(), k.double(), impl="reference", **masks).max
        exact = exact.transpose(0, 1).flatten(1)[None] if packed else exact
        torch.testing.assert_close(row_max.double(), exact, rtol=1e-4, atol=1e-4)


def test_cudnn_is_asked_for_first_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "compute_capability", lambda _: 9)
    device = torch.device("cpu")
    before = current_backends(with_priority=True)
    with stock.backends(device):
        assert current_backends(with_priority=True)[0] == SDPBackend.CUDNN_ATTENTION
    assert current_backends(with_priority=True) == before
    one, other = stock.backends(device), stock.backends(device)  # of two threads, the first of which is done first
    one.__enter__()
    other.__enter__()
    one.__exit__()
    other.__exit__()
    assert current_backends(with_priority=True) == before
    with sdpa_kernel(SDPBackend.MATH), stock.backends(device):
        assert current_backends() == [SDPBackend.MATH]
    monkeypatch.setattr(choice, "compute_capability", lambda _: 8)
    with stock.backends(device):
        assert current_backends(with_priority=True) == before


def test_without_gradient_of_beta_the_statistics_have_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    streaming = module.ops.streaming
    real = streaming.attend_backward
    monkeypatch.setattr(streaming, "row_stats_backward", lambda *a, **k: pytest.fail("statistics went backward"))
    monkeypatch.setattr(streaming, "attend_backward", lambda *a, **k: (called.append(k["need_beta"]), real(*a, **k))[1])
    q, k, v = inputs()
    for policy in (sharpmax.detached(sharpmax.PAPER), sharpmax.LogLength(), sharpmax.Constant(2.0)):
        scaled_dot_product_attention(q, k, v, enable_gqa=True, policy=policy, impl="streaming").sum().backward()
    assert len(called) >= 3  # once more for keys without what they have in common
    assert not any(called)


def test_auto_takes_streaming_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = module._attend
    monkeypatch.setattr(module, "_attend", lambda *a: (seen.append(a[3]), real(*a))[1])
    x = torch.randn(2, 3, 4)
    scaled_dot_product_attention(x, x, x)
    assert seen == ["streaming"]
