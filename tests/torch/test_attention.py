"""scaled_dot_product_attention and row_stats: every implementation that runs on a CPU against the oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as stock

import sharpmax
from sharpmax.torch import Learnable, blocks, row_stats, scaled_dot_product_attention
from sharpmax.torch import attention as module
from tests.torch.attention_cases import MASKS, POLICIES, TOLERANCE, close, compare, inputs


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("impl", ["reference", "streaming"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_matches_the_oracle(mask: str, impl: str, dtype: torch.dtype) -> None:
    compare(inputs(dtype), impl, tolerance=TOLERANCE[dtype], **MASKS[mask])


@pytest.mark.parametrize("mask", ["full", "causal_window", "softcap_causal", "lengths", "boolean", "bias_hiding"])
@pytest.mark.parametrize("impl", ["reference", "streaming"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_types_match_the_oracle(mask: str, impl: str, dtype: torch.dtype) -> None:
    compare(inputs(dtype), impl, tolerance=TOLERANCE[dtype], **MASKS[mask])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("value_columns", [6, pytest.param(8, marks=pytest.mark.thorough)])
@pytest.mark.usefixtures("small_blocks")
def test_streaming_over_many_blocks_matches_the_oracle(mask: str, value_columns: int) -> None:
    compare(inputs(value_columns=value_columns), "streaming", **MASKS[mask])


@pytest.mark.parametrize("mask", ["full", "causal", "lengths", "boolean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_stock_matches_the_oracle(mask: str, dtype: torch.dtype) -> None:
    compare(inputs(dtype, value_columns=8), "stock", tolerance=4 * TOLERANCE[dtype], **MASKS[mask])


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
    with torch.no_grad():
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
    with pytest.raises(ValueError, match=r"torch.func.grad, jvp and their like; reference can"):
        torch.func.grad(loss)(q, "streaming")


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_of_dropout_is_for_those_that_serve_it(randomness: str) -> None:
    q, ones = torch.randn(3, 2, 2, 5, 4), torch.ones(2, 2, 5, 4)

    def dropped(x: Tensor, impl: str = "auto") -> Tensor:
        return scaled_dot_product_attention(x, x, ones, dropout_p=0.5, impl=impl)

    found = torch.func.vmap(dropped, randomness=randomness)(q)
    assert 0.0 < float(found.mean()) < 2.0
    assert torch.unique(found).numel() > 5
    with pytest.raises(ValueError, match=r"dropout under torch.func.vmap; reference, stock can"):
        torch.func.vmap(lambda x: dropped(x, "streaming"), randomness=randomness)(q)


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["static", "dynamic"])
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


@pytest.mark.parametrize("impl", ["reference", "streaming"])
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


def test_row_stats_have_no_stock_way() -> None:
    q, k, _ = inputs(torch.float32)
    with pytest.raises(ValueError, match="serve row_stats; reference, streaming, triton can"):
        row_stats(q, k, enable_gqa=True, impl="stock")


def test_blocks_are_small_in_the_tests_that_say_so(small_blocks: blocks.Sizes) -> None:
    q, k, _ = inputs()
    call = blocks.Call(q, k, None, module.ops.Geometry(1.0), None, None)
    spans = list(call.spans())
    assert len(spans) > 1
    assert all(len(list(span.rows())) > 1 and len(rows.keys) > 1 for span in spans for rows in span.rows())
    assert call.sizes == small_blocks
