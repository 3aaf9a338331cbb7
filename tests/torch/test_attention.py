"""scaled_dot_product_attention and row_stats: every implementation that runs on a CPU against the oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.utils.checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import _cur_sdpa_kernel_backends as current_backends
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as stock

import sharpmax
from sharpmax.torch import Attention, Learnable, blocks, fused, row_stats, scaled_dot_product_attention
from sharpmax.torch import attention as module
from sharpmax.torch.checks import checked
from tests.torch import oracle

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Relative to the largest value; a rounding of the output's type, and for float32 what sums and exp lose."""

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "lower_right": {"is_causal": "lower_right"},
    "window": {"window": 3},
    "causal_window": {"is_causal": "lower_right", "window": 4},
    "left_right": {"window": (2, 1)},
    "softcap": {"softcap": 2.0},
    "softcap_causal": {"softcap": 2.0, "is_causal": True},
    "scale": {"scale": 0.7},
    "lengths": {"key_lengths": torch.tensor([5, 11])},
    "lengths_lower_right": {"key_lengths": torch.tensor([3, 9]), "is_causal": "lower_right", "window": 5},
    "boolean": {"attn_mask": torch.rand(2, 1, 9, 11, generator=torch.Generator().manual_seed(0)) > 0.4},
    "boolean_causal": {"attn_mask": torch.rand(1, 4, 1, 11) > 0.3, "is_causal": True},
    "bias": {"attn_mask": torch.randn(1, 4, 9, 11, generator=torch.Generator().manual_seed(1))},
    "bias_hiding": {
        "attn_mask": torch.tensor([0.0, -math.inf] * 5 + [torch.finfo(torch.float32).min]).view(1, 1, 1, 11)
    },
}


def inputs(
    dtype: torch.dtype = torch.float64, *, seed: int = 0, heads: int = 4, value_columns: int = 6
) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((2, heads, 9, 8), (2, 2, 11, 8), (2, 2, 11, value_columns))
    q, k, v = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    return [x.to(dtype).requires_grad_() for x in (2.5 * q, 2 * k, v)]


def close(got: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    got, expected = got.detach().double(), expected.detach().double()
    assert got.shape == expected.shape, what
    assert torch.isfinite(got).all(), what
    error = (got - expected).abs().max().item() if got.numel() else 0.0
    assert error <= tolerance * max(1.0, expected.abs().max().item() if got.numel() else 0.0), f"{what}: {error:.2e}"


def compare(
    tensors: list[Tensor], impl: str, policy: Any = sharpmax.PAPER, tolerance: float = 1e-11, **kw: Any
) -> None:
    """Output, entropy, beta, count and gradients against the oracle.

    A row whose entropy is next to a threshold of the policy may fall on either side of it: beta is held to the policy
    at the implementation's own entropy, and the output to the oracle with the implementation's beta. No row is left
    out.
    """
    q, k, v = tensors
    result = scaled_dot_product_attention(q, k, v, impl=impl, policy=policy, return_stats=True, enable_gqa=True, **kw)
    assert isinstance(result, Attention)
    truth = oracle.attention(q, k, v, policy=policy, beta=result.beta.detach(), **kw)
    close(result.stats.entropy, truth.entropy, max(tolerance, 1e-11), "entropy")
    assert torch.equal(result.stats.count.long(), truth.keys.long())
    own = oracle.attention(q, k, v, policy=policy, **kw)
    away = (own.beta - result.beta).abs() > 1e-3 * own.beta.abs()
    assert (own.entropy - 0.5).abs()[away & (truth.keys > 0)].le(1e-3).all(), "beta differs far from the threshold"
    close(result.output, truth.output, tolerance, "output")
    g = torch.randn(result.output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    g = g.to(result.output.dtype)
    expected = torch.autograd.grad(truth.output, tensors, g.double(), materialize_grads=True)
    found = torch.autograd.grad(result.output, tensors, g, materialize_grads=True)
    for name, a, b in zip(("dq", "dk", "dv"), found, expected, strict=True):
        close(a, b, 4 * tolerance, name)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("impl", ["reference", "streaming"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_matches_the_oracle(mask: str, impl: str, dtype: torch.dtype) -> None:
    compare(inputs(dtype), impl, tolerance=TOLERANCE[dtype], **MASKS[mask])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("value_columns", [6, 8])
@pytest.mark.usefixtures("small_blocks")
def test_streaming_over_many_blocks_matches_the_oracle(mask: str, value_columns: int) -> None:
    compare(inputs(value_columns=value_columns), "streaming", **MASKS[mask])


@pytest.mark.parametrize("mask", ["full", "causal", "lengths", "boolean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_stock_matches_the_oracle(mask: str, dtype: torch.dtype) -> None:
    compare(inputs(dtype, value_columns=8), "stock", tolerance=4 * TOLERANCE[dtype], **MASKS[mask])


POLICIES: dict[str, Any] = {
    "paper": sharpmax.PAPER,
    "held": sharpmax.PAPER_HELD,
    "constant": sharpmax.Constant(1.7),
    "uniform": sharpmax.Constant(0.0),
    "log": sharpmax.LogLength(),
    "detached": sharpmax.detached(sharpmax.PAPER),
    "spread": lambda stats: 1 + 0.1 * stats.spread,
    "hard": sharpmax.Hard(),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("impl", ["reference", "streaming"])
@pytest.mark.parametrize("small", [False, True], ids=["", "small_blocks"])
def test_policies(policy: str, impl: str, small: bool, request: pytest.FixtureRequest) -> None:
    if small:
        request.getfixturevalue("small_blocks")
    compare(inputs(), impl, POLICIES[policy])
    compare(inputs(value_columns=8), impl, POLICIES[policy], is_causal=True, softcap=3.0)


@pytest.mark.parametrize("impl", ["reference", "streaming"])
def test_per_head_and_learnable(impl: str) -> None:
    each = (sharpmax.PAPER, sharpmax.Hard(), sharpmax.Constant(2.0), sharpmax.LogLength())
    q, k, v = inputs()
    together = scaled_dot_product_attention(q, k, v, enable_gqa=True, policy=sharpmax.PerHead(each), impl=impl)
    for h, policy in enumerate(each):
        alone = scaled_dot_product_attention(
            q[:, h : h + 1], k[:, h // 2 : h // 2 + 1], v[:, h // 2 : h // 2 + 1], policy=policy, impl=impl
        )
        assert torch.allclose(together[:, h : h + 1], alone, atol=1e-12)
    learnable = Learnable(sharpmax.LearnableTemperature(heads=4)).double()
    scaled_dot_product_attention(q, k, v, enable_gqa=True, policy=learnable, impl=impl).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in learnable.parameters())


@pytest.mark.parametrize("impl", ["reference", "streaming"])
@pytest.mark.parametrize("mask", ["full", "causal_window", "softcap_causal", "bias", "lengths"])
@pytest.mark.usefixtures("small_blocks")
def test_gradcheck_of_the_whole(impl: str, mask: str) -> None:
    q, k, v = inputs(value_columns=3)
    kw = dict(MASKS[mask])
    bias = kw.pop("attn_mask", None)
    tensors = [q, k, v] if bias is None else [q, k, v, bias.double().requires_grad_()]

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return scaled_dot_product_attention(q, k, v, bias, enable_gqa=True, impl=impl, **kw)

    assert torch.autograd.gradcheck(attend, tensors, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize("shape", [(1, 1, 1, 11), (2, 4, 9, 11), (9, 1), (4, 9, 11)], ids=str)
@pytest.mark.parametrize("policy", ["paper", "detached"])
@pytest.mark.usefixtures("small_blocks")
def test_gradient_of_a_bias_streaming(shape: tuple[int, ...], policy: str) -> None:
    q, k, v = inputs()
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    found = {}
    for impl in ("reference", "streaming"):
        out = scaled_dot_product_attention(q, k, v, bias, enable_gqa=True, policy=POLICIES[policy], impl=impl)
        found[impl] = torch.autograd.grad(out.square().sum(), bias)[0]
    close(found["streaming"], found["reference"], 1e-11, "bias")


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    queries, keys = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    heads = kv_heads * group
    columns, value_columns = draw(st.sampled_from([(1, 1), (4, 4), (3, 5)]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    shapes = (
        (batch, heads, queries, columns),
        (batch, kv_heads, keys, columns),
        (batch, kv_heads, keys, value_columns),
    )
    tensors = [2 * torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
    kw: dict[str, Any] = {
        "is_causal": draw(st.sampled_from([False, True, "lower_right"])),
        "window": draw(st.sampled_from([None, 1, 3, (0, 0), (2, -1), (-1, 1)])),
        "softcap": draw(st.sampled_from([None, 1.5])),
        "key_lengths": draw(st.sampled_from([None, torch.randint(0, keys + 1, (batch,), generator=g)])),
    }
    shape = tuple(draw(st.sampled_from([1, n])) for n in (batch, heads, queries, keys))
    kind = draw(st.sampled_from(["none", "boolean", "bias"]))
    if kind == "boolean":
        kw["attn_mask"] = torch.rand(shape, generator=g) > 0.4
    elif kind == "bias":
        kw["attn_mask"] = torch.randn(shape, generator=g, dtype=torch.float64)
    return {"tensors": [x.requires_grad_() for x in tensors], **kw}


@pytest.mark.parametrize("impl", ["reference", "streaming"])
@given(call=calls())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("small_blocks")
def test_any_call_matches_the_oracle(impl: str, call: dict[str, Any]) -> None:
    compare(call.pop("tensors"), impl, **call)


@pytest.mark.parametrize("impl", ["reference", "streaming", "stock"])
@pytest.mark.parametrize("causal", [False, True])
def test_constant_one_is_torch_attention(impl: str, causal: bool) -> None:
    q, k, v = inputs(torch.float32, value_columns=8)
    expected = stock(q, k, v, is_causal=causal, enable_gqa=True)
    found = scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True, policy=sharpmax.Constant(1), impl=impl
    )
    close(found, expected, 2e-6, impl)


ADVERSARIAL = ["all_masked", "offset_up", "offset_down", "huge", "equal", "nan_padding"]


@pytest.mark.parametrize("kind", ADVERSARIAL)
@pytest.mark.parametrize("impl", ["reference", "streaming"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_adversarial_inputs(kind: str, impl: str, dtype: torch.dtype) -> None:
    q, k, v = (x.detach() for x in inputs(dtype))
    kw: dict[str, Any] = {}
    offset = 1.0
    if kind == "all_masked":
        bias = torch.zeros(1, 1, 9, 11, dtype=dtype)
        bias[..., 4, :], bias[..., 5, :] = -math.inf, torch.finfo(dtype).min
        kw["attn_mask"] = bias
    elif kind.startswith("offset"):
        offset = 1e4
        kw["attn_mask"] = torch.full((1, 1, 1, 1), offset if kind == "offset_up" else -offset, dtype=dtype)
    elif kind == "huge":
        offset = 1e4
        k[:, :, 3] *= offset
    elif kind == "equal":
        k[:] = k[:, :, :1]
    else:
        kw["key_lengths"] = torch.tensor([4, 7])
        for x in (k, v):
            x[0, :, 4:], x[1, :, 7:] = math.nan, math.inf
    tensors = [x.requires_grad_() for x in (q, k, v)]
    compare(tensors, impl, tolerance=TOLERANCE[dtype] * (offset if dtype == torch.float32 else 1e3) ** 0.5, **kw)


@pytest.mark.parametrize("impl", ["reference", "streaming", "stock"])
def test_rows_without_keys_are_zero(impl: str) -> None:
    q, k, v = inputs(value_columns=8)
    mask = torch.ones(2, 1, 9, 11, dtype=torch.bool)
    mask[:, :, 2] = False
    out = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, impl=impl)
    assert (out[:, :, 2] == 0).all()
    out.sum().backward()
    assert q.grad is not None
    assert (q.grad[:, :, 2] == 0).all()
    assert all(x.grad is not None and torch.isfinite(x.grad).all() for x in (q, k, v))


@pytest.mark.parametrize("impl", ["reference", "streaming", "stock"])
@pytest.mark.parametrize("shape", [(2, 0, 4), (0, 5, 4), (0, 3, 5, 4), (3, 0, 5, 4)], ids=str)
def test_empty_tensors(impl: str, shape: tuple[int, ...]) -> None:
    q = torch.randn(shape, requires_grad=True)
    out = scaled_dot_product_attention(q, q, q, impl=impl)
    assert out.shape == q.shape
    out.sum().backward()
    no_keys = scaled_dot_product_attention(torch.randn(2, 3, 4), torch.empty(2, 0, 4), torch.empty(2, 0, 6), impl=impl)
    assert torch.equal(no_keys, torch.zeros(2, 3, 6))


@pytest.mark.parametrize("impl", ["reference", "streaming", "stock"])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 2, 3)], ids=str)
def test_any_number_of_axes(impl: str, leading: tuple[int, ...]) -> None:
    q, k, v = (2 * torch.randn(*leading, n, 4, dtype=torch.float64) for n in (5, 7, 7))
    mask = torch.rand(*leading, 5, 7) > 0.3
    result = scaled_dot_product_attention(q, k, v, mask, impl=impl, return_stats=True)
    z = (q @ k.mT / 2).masked_fill(~mask, -math.inf)
    expected = sharpmax.adaptive_temperature_softmax(z) @ v
    assert torch.allclose(result.output, expected, atol=1e-12)
    assert result.beta.shape == result.stats.entropy.shape == (*leading, 5)


def test_non_contiguous_streaming() -> None:
    q, k, v = (torch.randn(2, 4, n, 6, dtype=torch.float64).transpose(2, 3).contiguous().mT for n in (9, 11, 11))
    whole = [x.contiguous() for x in (q, k, v)]
    for cap in (None, 2.0):
        a = scaled_dot_product_attention(q, k, v, impl="streaming", softcap=cap)
        b = scaled_dot_product_attention(whole[0], whole[1], whole[2], impl="streaming", softcap=cap)
        assert torch.allclose(a, b, atol=1e-13)


@pytest.mark.parametrize("impl", ["reference", "streaming", "stock"])
def test_dropout_keeps_the_mean_and_repeats_in_backward(impl: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    kept = scaled_dot_product_attention(q, k, v, impl=impl)
    mean = sum(scaled_dot_product_attention(q, k, v, dropout_p=0.3, impl=impl) for _ in range(300)) / 300
    assert (mean - kept).abs().mean() < 0.05

    def seeded(v: Tensor) -> Tensor:
        torch.manual_seed(3)
        return scaled_dot_product_attention(q, k, v, dropout_p=0.3, impl=impl)

    out = seeded(v)
    (gradient,) = torch.autograd.grad(out, v, torch.ones_like(out))
    assert torch.allclose((gradient * v).sum(), out.sum(), atol=1e-9)  # the output is linear in the values


@pytest.mark.usefixtures("small_blocks")
def test_gradcheck_of_dropout_streaming() -> None:
    def seeded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(3)
        return scaled_dot_product_attention(q, k, v, dropout_p=0.4, enable_gqa=True, impl="streaming")

    assert torch.autograd.gradcheck(seeded, inputs(), atol=1e-5, fast_mode=True)


def test_autocast_casts_like_stock() -> None:
    q, k, v = inputs(torch.float32, value_columns=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for impl in ("reference", "streaming", "stock"):
            out = scaled_dot_product_attention(q, k, v, enable_gqa=True, impl=impl)
            assert out.dtype == stock(q, k, v, enable_gqa=True).dtype == torch.bfloat16
            low: Any = {"query": q.bfloat16(), "key": k.bfloat16(), "value": v.bfloat16()}
            with torch.autocast("cpu", enabled=False):
                plain = scaled_dot_product_attention(**low, enable_gqa=True, impl=impl)
            assert torch.equal(out, plain), impl


def test_activation_checkpointing_streaming() -> None:
    tensors = inputs()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, enable_gqa=True, impl="streaming", dropout_p=0.1)

    torch.manual_seed(0)
    plain = torch.autograd.grad(attend(*tensors).sum(), tensors)
    torch.manual_seed(0)
    out = torch.utils.checkpoint.checkpoint(attend, *tensors, use_reentrant=False)
    assert isinstance(out, Tensor)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out.sum(), tensors), plain, strict=True))


def test_vmap_streaming() -> None:
    q, k, v = (torch.randn(3, 2, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(1, 1, 5, 5) > 0.3

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, mask, impl="streaming")

    for in_dims in ((0, 0, 0), (0, None, None)):
        keys = (k, v) if in_dims[1] == 0 else (k[0], v[0])
        mapped = torch.func.vmap(attend, in_dims)(q, *keys)
        looped = torch.stack([attend(q[i], *(x[i] if in_dims[1] == 0 else x for x in keys)) for i in range(3)])
        assert torch.allclose(mapped, looped, atol=1e-13)


def test_torch_func_grad() -> None:
    q, k, v = (x.detach() for x in inputs())

    def loss(q: Tensor, impl: str = "auto") -> Tensor:
        return scaled_dot_product_attention(q, k, v, enable_gqa=True, impl=impl).square().sum()

    leaf = q.clone().requires_grad_()
    expected = torch.autograd.grad(loss(leaf, "streaming"), leaf)[0]
    assert torch.allclose(torch.func.grad(loss)(q), expected, atol=1e-10)
    with pytest.raises(ValueError, match=r"torch.func.grad; reference can"):
        torch.func.grad(loss)(q, "streaming")


def test_vmap_of_dropout_is_refused() -> None:
    q = torch.randn(3, 2, 2, 5, 4)
    with pytest.raises(ValueError, match="vmap"):
        torch.func.vmap(lambda x: scaled_dot_product_attention(x, x, x, dropout_p=0.5), randomness="same")(q)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiles_whole_forward_and_backward_streaming(dynamic: bool) -> None:
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic or None, backend=counter)
    compilations: list[int] = []
    for length in (9, 12, 16, 20):
        q, k, v = (torch.randn(3, h, length, 6, requires_grad=True) for h in (4, 2, 2))
        found = torch.autograd.grad(compiled(q, k, v).square().sum(), (q, k, v))
        expected = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
        compilations.append(counter.frame_count)
    assert compilations[1] == compilations[-1]  # the second length may make lengths symbols; others compile nothing
    assert not dynamic or compilations[0] == compilations[-1]


@pytest.fixture
def triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Triton's kernels serve CPU tensors too, in its interpreter; the operators with a policy inside are noted."""
    pytest.importorskip("triton")
    if not ON_GPU:
        monkeypatch.setattr(module, "_triton_refusal", lambda *_: "")
    called: list[str] = []
    for name in ("sharpened_query", "adaptive_attention"):
        real = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *a, name=name, real=real: (called.append(name), real(*a))[1])
    return called


INSIDE = {"stock": "sharpened_query", "triton": "adaptive_attention"}
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.mark.parametrize("impl", INSIDE)
@pytest.mark.parametrize("mask", ["full", "causal", "lengths", "boolean"])
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
@pytest.mark.parametrize("policy", ["paper", "held", "log", "detached", "spread"])
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
@pytest.mark.parametrize("mask", MASKS)
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
        monkeypatch.setattr(module, "_triton_refusal", lambda *_: "")
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
    monkeypatch.setattr(module, "_compute_capability", lambda _: capability)
    monkeypatch.setattr(
        module, "_triton_refusal", lambda x, p: "wide" if x.q.shape[-1] > 256 else "hard" if module.is_hard(p) else ""
    )
    call: Any = {"attn_mask": None, "key_lengths": None, "is_causal": False, "window": None, "softcap": None} | change
    policy, query = call.pop("policy", sharpmax.PAPER), call.pop("query", torch.zeros(1, 2, 5, 8).half())
    key = call.pop("key", query)
    value = call.pop("value", key)
    made = checked(query, key, value, scale=None, enable_gqa=False, **call)
    assert module.choose("auto", made, policy, may_round=True) == expected
    assert module.choose("auto", made, policy) == ("streaming" if expected == "streaming" else "triton")


def test_cudnn_is_asked_for_first_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_compute_capability", lambda _: 9)
    device = torch.device("cpu")
    before = current_backends(with_priority=True)
    with module._backends(device):
        assert current_backends(with_priority=True)[0] == SDPBackend.CUDNN_ATTENTION
    assert current_backends(with_priority=True) == before
    with sdpa_kernel(SDPBackend.MATH), module._backends(device):
        assert current_backends() == [SDPBackend.MATH]
    monkeypatch.setattr(module, "_compute_capability", lambda _: 8)
    with module._backends(device):
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
    assert called == [False] * 3


def test_auto_takes_streaming_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = module._attend
    monkeypatch.setattr(module, "_attend", lambda *a: (seen.append(a[3]), real(*a))[1])
    x = torch.randn(2, 3, 4)
    scaled_dot_product_attention(x, x, x)
    assert seen == ["streaming"]


@pytest.mark.parametrize("impl", ["reference", "streaming", "stock"])
@pytest.mark.parametrize("with_min", [False, True])
def test_row_stats(impl: str, with_min: bool) -> None:
    q, k, _ = inputs(torch.float32)
    stats = row_stats(q, k, is_causal=True, enable_gqa=True, with_min=with_min, impl=impl)
    z = q.unflatten(1, (2, 2)) @ k.unsqueeze(2).mT * 8**-0.5
    where = torch.ones(9, 11, dtype=torch.bool).tril()
    expected = sharpmax.row_stats(z.flatten(1, 2), where=where)
    assert torch.allclose(stats.entropy, expected.entropy, atol=1e-5)
    assert torch.equal(stats.count, expected.count)
    assert (stats.min is None) == (not with_min)
    if with_min:
        assert torch.allclose(stats.spread, expected.spread, atol=1e-4)
    (found,) = torch.autograd.grad(stats.entropy.sum() + stats.lse.sum(), q, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected.entropy.sum() + expected.lse.sum(), q)
    close(found, wanted, 2e-5, "dq")


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"impl": "fast"}, ValueError, "auto, reference, streaming, triton, stock"),
    ({"impl": "triton"}, ValueError, "reference, streaming, stock can"),
    ({"impl": "stock", "softcap": 1.0}, ValueError, "reference, streaming can"),
    ({"impl": "stock", "window": 3}, ValueError, "window"),
    ({"impl": "stock", "policy": sharpmax.PerHead((sharpmax.Hard(),) * 2)}, ValueError, "hard"),
    ({"policy": 2.0}, TypeError, "callable"),
    ({"policy": lambda stats: torch.ones(7)}, ValueError, "expected the policy to give beta"),
    ({"is_causal": "upper"}, ValueError, "lower_right"),
    ({"window": 0}, ValueError, "window"),
    ({"window": (1, 2, 3)}, ValueError, "window"),
    ({"softcap": -1.0}, ValueError, "softcap"),
    ({"scale": math.nan}, ValueError, "scale"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p"),
    ({"attn_mask": torch.ones(3, 3, dtype=torch.bool)}, ValueError, "broadcast"),
    ({"attn_mask": torch.ones(5, 5, dtype=torch.int64)}, TypeError, "boolean"),
    ({"key_lengths": torch.tensor([1, 2, 3])}, ValueError, "key_lengths"),
    ({"key_lengths": torch.tensor([1.0])}, TypeError, "whole numbers"),
    ({"key": torch.randn(1, 1, 5, 4), "value": torch.randn(1, 1, 5, 4)}, ValueError, "enable_gqa"),
    ({"key": torch.randn(1, 2, 5, 3)}, ValueError, "columns"),
    ({"value": torch.randn(1, 2, 4, 4)}, ValueError, "alike"),
    ({"key": torch.randn(1, 2, 5, 4).double()}, TypeError, "one type"),
    ({"query": torch.ones(1, 2, 5, 4, dtype=torch.int64)}, TypeError, "float32"),
    ({"query": [1.0]}, TypeError, "torch tensor"),
    ({"value": None}, TypeError, "expected value to be a torch tensor, got NoneType"),
    ({"key_lengths": torch.empty(1, dtype=torch.int32, device="meta")}, ValueError, "query's device cpu"),
    ({"window": np.int64(0)}, ValueError, "window"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD, ids=[f"{'-'.join(c)}: {words}" for c, _, words in BAD])
def test_bad_input_is_refused_in_one_sentence(change: dict[str, Any], error: type[Exception], words: str) -> None:
    x = torch.randn(1, 2, 5, 4)
    call: Any = {"query": x, "key": x, "value": x} | change
    with pytest.raises(error, match=words) as caught:
        scaled_dot_product_attention(**call)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("impl", ["reference", "streaming"])
@pytest.mark.parametrize("keys", [9, 11])
def test_causal_bias_is_causality(impl: str, keys: int) -> None:
    q, k, v = (x.detach() for x in inputs())
    k, v = k[:, :, :keys], v[:, :, :keys]
    pairs: Any = ((causal_upper_left(9, keys), True), (causal_lower_right(9, keys), "lower_right"))
    for bias, causal in pairs:
        found = scaled_dot_product_attention(q, k, v, bias, enable_gqa=True, impl=impl)
        compared = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, impl=impl)
        assert torch.equal(found, compared)


class Own(Tensor):
    """A tensor that answers torch's functions itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_masks_that_cannot_be_read_are_refused() -> None:
    x = torch.randn(1, 2, 5, 4)
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (causal_upper_left(5, 5), {"is_causal": True}, "got both"),
        (causal_upper_left(4, 5), {}, "5 queries and 5 keys"),
        (torch.zeros(5, 5).to_sparse(), {}, "plain tensor"),
        (torch.zeros(5, 5).as_subclass(Own), {}, "plain tensor, got Own"),
        (torch.zeros(5, 5, device="meta"), {}, "attn_mask on the query's device cpu, got it on meta"),
    ]
    for mask, kw, words in refused:
        with pytest.raises((TypeError, ValueError), match=words):
            scaled_dot_product_attention(x, x, x, mask, **kw)
    shorter: Any = {"key": x[:, :, :4], "value": x[:, :, :4], "key_lengths": torch.tensor([3])}
    with pytest.raises(ValueError, match="is_causal='lower_right'"), pytest.warns(UserWarning, match="NaNs"):
        scaled_dot_product_attention(x, attn_mask=causal_lower_right(5, 4), **shorter)
    plain = torch.nn.Parameter(torch.zeros(5, 5))
    close(scaled_dot_product_attention(x, x, x, plain), scaled_dot_product_attention(x, x, x), 1e-6, "parameter")


@pytest.mark.parametrize("impl", ["reference", "streaming"])
@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("mask", ["causal", "boolean"])
def test_a_scale_that_is_not_positive(impl: str, scale: float, mask: str) -> None:
    compare(inputs(value_columns=8), impl, scale=scale, **MASKS[mask])


def test_stock_refuses_a_scale_that_is_not_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 2, 5, 8).half()
    with pytest.raises(ValueError, match="not positive; reference, streaming can"):
        scaled_dot_product_attention(x, x, x, scale=0.0, impl="stock")
    monkeypatch.setattr(module, "_compute_capability", lambda _: 9)
    monkeypatch.setattr(module, "_triton_refusal", lambda *_: "")
    call: Any = {"is_causal": True, "window": None, "softcap": None, "enable_gqa": False}
    assert module.choose("auto", checked(x, x, x, None, None, scale=-1.0, **call), None, may_round=True) == "triton"


@pytest.mark.parametrize("impl", ["reference", "streaming", "triton", "stock"])
@pytest.mark.parametrize("causal", [False, "lower_right"])
def test_key_lengths_beyond_the_keys_mean_all_of_them(impl: str, causal: Any, request: pytest.FixtureRequest) -> None:
    if impl == "triton":
        request.getfixturevalue("triton_everywhere")
    if impl == "stock" and causal:
        pytest.skip("stock does not serve it")
    q, k, v = (x.detach() for x in inputs(torch.float32, value_columns=8))
    for lengths in ([11 + (1 << 33), -(1 << 33)], [12, -1]):
        found, expected = (
            scaled_dot_product_attention(
                q, k, v, enable_gqa=True, is_causal=causal, impl=impl, key_lengths=torch.tensor(n), return_stats=True
            )
            for n in (lengths, [11, 0])
        )
        assert torch.equal(found.output, expected.output)
        assert torch.equal(found.stats.count, expected.stats.count)


class _Calls(torch.nn.Module):
    def __init__(self, policy: Learnable) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, enable_gqa=True, policy=self.policy)


def test_forward_mode() -> None:
    q, k, v = (x.detach() for x in inputs())
    tangent = torch.randn_like(q)

    def attend(q: Tensor, **kw: Any) -> Tensor:
        return scaled_dot_product_attention(q, k, v, enable_gqa=True, is_causal=True, **kw)

    expected = (attend(q + 1e-6 * tangent) - attend(q - 1e-6 * tangent)) / 2e-6
    learnable = Learnable(sharpmax.LearnableTemperature(heads=4)).double()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, tangent)
        found = forward_ad.unpack_dual(attend(dual)).tangent
        assert found is not None
        close(found, expected, 1e-6, "tangent")
        for impl in ("streaming", "stock"):
            with pytest.raises(ValueError, match="forward mode; reference can"):
                attend(dual, impl=impl)
        assert torch.equal(attend(q), attend(q, impl="streaming"))
        (name, parameter), *_ = learnable.named_parameters()
        moved = {name: forward_ad.make_dual(parameter.detach(), torch.ones_like(parameter))}
        out = torch.func.functional_call(_Calls(learnable), {f"policy.{name}": moved[name]}, (q, k, v))
        assert forward_ad.unpack_dual(out).tangent is not None
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    close(compiled(q), attend(q), 1e-12, "compiled")


@pytest.mark.parametrize("impl", ["reference", "streaming", "triton", "stock"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_infinite_beta_of_some_rows(impl: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    if impl == "triton":
        request.getfixturevalue("triton_everywhere")
    tensors = [x.detach().requires_grad_() for x in inputs(dtype, value_columns=8)]
    q, k, v = tensors

    def policy(stats: Any) -> Tensor:
        return torch.where(torch.arange(9) % 2 == 0, math.inf, 1.0).expand(stats.sum.shape)

    out = scaled_dot_product_attention(q, k, v, policy=policy, enable_gqa=True, is_causal=True, impl=impl)
    truth = oracle.attention(q, k, v, policy=sharpmax.Hard(), is_causal=True).output
    close(out[:, :, ::2], truth[:, :, ::2], 10 * TOLERANCE[dtype], "hard rows")
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().sum(), tensors))


@pytest.mark.parametrize("lowest", [-math.inf, -1e200, torch.finfo(torch.float32).min])
def test_a_wider_mask_is_read_alike(lowest: float) -> None:
    q, k, v = (x.detach() for x in inputs(torch.float32))
    mask = torch.randn(1, 1, 9, 11, dtype=torch.float64)
    mask[..., 3], mask[:, :, 4] = lowest, lowest
    results = [
        scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, impl=impl, return_stats=True)
        for impl in ("reference", "streaming")
    ]
    for result in results:
        assert result.output.dtype == result.beta.dtype == result.stats.max.dtype == torch.float32
        assert (result.stats.count[:, :, 4] == 0).all()
    close(results[1].output, results[0].output, 2e-5, "output")
    assert torch.equal(results[0].stats.count, results[1].stats.count)
    hidden = scaled_dot_product_attention(q, k, v, mask > -1e30, enable_gqa=True, return_stats=True)
    assert torch.equal(results[0].stats.count, hidden.stats.count)


@pytest.mark.parametrize("impl", ["auto", "reference", "streaming"])
def test_values_without_columns(impl: str) -> None:
    x = torch.randn(1, 2, 5, 4)
    assert scaled_dot_product_attention(x, x, x[..., :0], impl=impl).shape == (1, 2, 5, 0)
    with pytest.raises(ValueError, match="values without columns; reference, streaming can"):
        scaled_dot_product_attention(x, x, x[..., :0], impl="stock")


def test_auto_knows_that_triton_takes_no_values_without_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HAS_TRITON", True)
    device = type("Device", (), {"type": "cuda"})()
    x = torch.randn(1, 2, 5, 4)
    call: Any = {"is_causal": True, "window": None, "softcap": None, "enable_gqa": False, "scale": None}
    made = checked(x, x, x[..., :0], None, None, **call)

    class OnGpu:
        def __getattr__(self, name: str) -> Any:
            return device if name == "device" else getattr(x, name)

    gpu: Any = OnGpu()
    assert module._triton_refusal(made._replace(q=gpu), None) == "values without columns"


def test_second_derivative_is_refused_in_one_sentence() -> None:
    q, k, v = inputs()
    out = scaled_dot_product_attention(q, k, v, enable_gqa=True, impl="streaming")
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="impl='reference'"):
        gradient.sum().backward()
    out = scaled_dot_product_attention(q, k, v, enable_gqa=True, impl="reference")
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    gradient.sum().backward()
    assert q.grad is not None


def test_mixed_types_under_autocast_are_those_of_torch() -> None:
    x = torch.randn(1, 2, 5, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = scaled_dot_product_attention(x, x.half(), x.bfloat16())
        assert found.dtype == stock(x, x.half(), x.bfloat16()).dtype
        with pytest.raises(RuntimeError):
            stock(x.double(), x, x)
        with pytest.raises(TypeError, match="of one type, got float32, float64"):
            scaled_dot_product_attention(x.double(), x, x)
        assert scaled_dot_product_attention(x.double(), x.double(), x.double()).dtype == torch.float64


def test_numbers_of_numpy() -> None:
    x = torch.randn(1, 2, 5, 4)
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"window": np.int64(3)}, {"window": 3}),
        ({"window": (np.int32(2), np.int8(-1))}, {"window": (2, -1)}),
        ({"is_causal": np.bool_(True)}, {"is_causal": True}),
    ]
    for given_kw, plain in pairs:
        assert torch.equal(
            scaled_dot_product_attention(x, x, x, **given_kw), scaled_dot_product_attention(x, x, x, **plain)
        )


def test_blocks_are_small_in_the_tests_that_say_so(small_blocks: blocks.Sizes) -> None:
    q, k, _ = inputs()
    call = blocks.Call(q, k, None, module.ops.Geometry(1.0), None, None)
    spans = list(call.spans())
    assert len(spans) > 1
    assert all(len(list(span.rows())) > 1 and len(rows.keys) > 1 for span in spans for rows in span.rows())
    assert call.sizes == small_blocks
