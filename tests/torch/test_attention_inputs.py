"""Inputs of attention that are bad, odd, or served by some implementations only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as stock

import sharpmax
from sharpmax.torch import Learnable, choice, installed, scaled_dot_product_attention
from sharpmax.torch.checks import checked
from tests.torch import oracle
from tests.torch.attention_cases import MASKS, TOLERANCE, close, compare, inputs, place

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"impl": "fast"}, ValueError, "auto, reference, streaming, triton, stock"),
    ({"impl": "triton"}, ValueError, "reference, streaming, stock can"),
    ({"impl": "stock", "softcap": 1.0}, ValueError, "reference, streaming can"),
    ({"impl": "stock", "window": 3}, ValueError, "window"),
    ({"impl": "stock", "policy": sharpmax.PerHead((sharpmax.Hard(),) * 2)}, ValueError, "hard"),
    ({"policy": 2.0}, TypeError, "callable"),
    ({"policy": lambda stats: torch.ones(7)}, ValueError, "expected the policy to give beta"),
    ({"policy": lambda stats: None}, TypeError, "expected the policy to give numbers, got NoneType"),
    ({"policy": lambda stats: "hot"}, TypeError, "expected the policy to give numbers, got str"),
    ({"policy": lambda stats: stats.sum + 1j}, TypeError, "expected the policy to give numbers, got torch.complex"),
    ({"is_causal": "upper"}, ValueError, "lower_right"),
    ({"window": 0}, ValueError, "window"),
    ({"window": (1, 2, 3)}, ValueError, "window"),
    ({"window": (1, -2)}, ValueError, "in which -1 means all; got"),
    ({"softcap": -1.0}, ValueError, "softcap"),
    ({"softcap": "30"}, ValueError, "expected softcap to be a positive number"),
    ({"scale": "one"}, ValueError, "expected scale to be a finite number"),
    ({"dropout_p": "a"}, ValueError, "dropout_p"),
    ({"scale": math.nan}, ValueError, "scale"),
    (
        {"scale": torch.tensor(0.3, requires_grad=True)},
        TypeError,
        "scale to be a number, got a tensor; to learn a scale",
    ),
    ({"softcap": torch.ones(2)}, TypeError, "expected softcap to be a number, got a tensor"),
    ({"dropout_p": torch.ones(2)}, ValueError, "dropout_p"),
    ({"query": torch.randn(1, 2, 5, 4).to_sparse()}, TypeError, "expected query to be a dense tensor"),
    ({"key_lengths": torch.tensor([[3]])}, ValueError, r"key_lengths of shape \(1,\), .* got \(1, 1\)"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p"),
    ({"attn_mask": torch.ones(3, 3, dtype=torch.bool)}, ValueError, "broadcast"),
    ({"attn_mask": torch.ones(5, 5, dtype=torch.int64)}, TypeError, "boolean"),
    ({"key_lengths": torch.tensor([1, 2, 3])}, ValueError, "key_lengths"),
    ({"key_lengths": torch.tensor([1.0])}, TypeError, "whole numbers"),
    ({"key_lengths": torch.tensor([1], dtype=torch.uint16)}, TypeError, "whole numbers"),
    ({"query": torch.nested.nested_tensor([torch.ones(5, 4)] * 2, layout=torch.jagged)}, TypeError, "nested"),
    ({"key": torch.randn(1, 1, 5, 4), "value": torch.randn(1, 1, 5, 4)}, ValueError, "enable_gqa"),
    ({"key": torch.randn(1, 2, 5, 3)}, ValueError, "columns"),
    ({"value": torch.randn(1, 2, 4, 4)}, ValueError, "same shape but for their last axis"),
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
    monkeypatch.setattr(choice, "compute_capability", lambda _: 9)
    monkeypatch.setattr(choice, "triton_refusal", lambda *_: "")
    call: Any = {"is_causal": True, "window": None, "softcap": None, "enable_gqa": False}
    assert choice.choose("auto", checked(x, x, x, None, None, scale=-1.0, **call), None, may_round=True) == "triton"


@pytest.mark.parametrize("impl", ["reference", "streaming", "triton", "stock"])
@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.thorough), "lower_right"])
def test_key_lengths_beyond_the_keys_mean_all_of_them(impl: str, causal: Any, request: pytest.FixtureRequest) -> None:
    if impl == "triton":
        request.getfixturevalue("triton_everywhere")
    if impl == "stock" and causal:
        pytest.skip("stock does not serve it")
    q, k, v = (x.detach() for x in place(impl, *inputs(torch.float32, value_columns=8)))
    options: dict[str, Any] = {"enable_gqa": True, "is_causal": causal, "impl": impl, "return_stats": True}
    for lengths in ([11 + (1 << 33), -(1 << 33)], [12, -1]):
        found, expected = (
            scaled_dot_product_attention(q, k, v, key_lengths=torch.tensor(n, device=q.device), **options)
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
    q, k, v = tensors = place(impl, *inputs(dtype, value_columns=8))

    def policy(stats: Any) -> Tensor:
        odd = torch.arange(9, device=stats.sum.device) % 2
        return torch.where(odd == 0, math.inf, 1.0).expand(stats.sum.shape)

    out = scaled_dot_product_attention(q, k, v, policy=policy, enable_gqa=True, is_causal=True, impl=impl)
    truth = oracle.attention(q.cpu(), k.cpu(), v.cpu(), policy=sharpmax.Hard(), is_causal=True).output
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


@pytest.mark.filterwarnings("ignore:overflow encountered")  # by the interpreter, in a row of nothing but NaN
@pytest.mark.parametrize("impl", ["reference", "streaming", "triton"])
def test_what_is_no_number_in_a_mask_hides_no_key(impl: str, request: pytest.FixtureRequest) -> None:
    """As in torch, such a row gives no numbers, and others are not touched."""
    if impl == "triton":
        request.getfixturevalue("triton_everywhere")
    mask = torch.randn(9, 11)
    mask[4, 3], mask[6], mask[7, 2] = math.nan, math.nan, -math.inf
    q, k, v, mask = (x.detach() for x in place(impl, *inputs(torch.float32), mask))
    found = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, impl=impl)
    on_cpu = (x.cpu() for x in (q, k, v, mask))
    expected = torch.nn.functional.scaled_dot_product_attention(*on_cpu, enable_gqa=True)
    assert torch.equal(found.isnan().cpu(), expected.isnan())
    assert expected.isnan()[:, :, [4, 6]].all()


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 10**30, (2**31 - 1, 2**31 - 1), (10**30, 0)], ids=str)
@pytest.mark.parametrize("impl", ["reference", "streaming", "triton"])
def test_a_window_may_be_wider_than_any_number(impl: str, window: Any, request: pytest.FixtureRequest) -> None:
    if impl == "triton":
        request.getfixturevalue("triton_everywhere")
    q, k, v = (x.detach() for x in place(impl, *inputs(torch.float32)))
    found = scaled_dot_product_attention(q, k, v, enable_gqa=True, impl=impl, window=window)
    narrower = (100, 0) if isinstance(window, tuple) and window[1] == 0 else 100
    expected = scaled_dot_product_attention(q, k, v, enable_gqa=True, impl="reference", window=narrower)
    close(found, expected, 2e-5, "output")


def test_key_lengths_of_the_batch_axes() -> None:
    """One number for each batch element, whatever their axes; under vmap, and without a batch, one number alone."""
    x, lengths = torch.randn(2, 3, 2, 5, 4), torch.tensor([[1, 2, 3], [4, 5, 0]])
    found = scaled_dot_product_attention(x, x, x, key_lengths=lengths)
    y = x.flatten(0, 1)
    flat = scaled_dot_product_attention(y, y, y, key_lengths=lengths.flatten())
    assert torch.equal(found.flatten(0, 1), flat)
    one = torch.func.vmap(lambda x, n: scaled_dot_product_attention(x, x, x, key_lengths=n))
    torch.testing.assert_close(one(y, lengths.flatten()), flat)


@pytest.mark.parametrize("beta", [-1.0, 1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("what", ["window", "softcap", "attn_mask"])
@pytest.mark.usefixtures("small_blocks")
def test_negative_and_small_betas_by_streaming(what: str, beta: float) -> None:
    """Block by block, as far as powers are numbers; beta's gradient keeps its digits."""
    option: Any = {what: {"window": 4, "softcap": 30.0, "attn_mask": torch.ones(9, 11).tril() > 0}[what]}
    given = [x.detach() for x in inputs(torch.float64)]

    def found(impl: str, dtype: torch.dtype) -> Any:
        q, k, v = (x.to(dtype).requires_grad_() for x in given)
        betas = torch.full(given[0].shape[:3], beta, dtype=dtype).requires_grad_()
        out = scaled_dot_product_attention(q, k, v, policy=lambda _: betas, enable_gqa=True, impl=impl, **option)
        return out, *torch.autograd.grad(out.square().sum() + out.sum(), [q, k, v, betas])

    pairs = zip(found("streaming", torch.float32), found("reference", torch.float64), strict=True)
    for name, (ours, exact) in zip(("out", "dq", "dk", "dv", "dbeta"), pairs, strict=True):
        close(ours.double(), exact, 2e-5, name)


@pytest.mark.parametrize("impl", ["auto", "reference", "streaming", "stock"])
def test_tensors_without_memory_give_shapes(impl: str) -> None:
    x = torch.empty(1, 2, 5, 4, device="meta")
    made = scaled_dot_product_attention(x, x, x, impl=impl, return_stats=True)
    assert {made.output.device.type, made.beta.device.type} == {"meta"}
    assert (made.output.shape, made.beta.shape) == (x.shape, x.shape[:-1])


@pytest.mark.parametrize("impl", ["auto", "reference", "streaming"])
def test_values_without_columns(impl: str) -> None:
    x = torch.randn(1, 2, 5, 4)
    assert scaled_dot_product_attention(x, x, x[..., :0], impl=impl).shape == (1, 2, 5, 0)
    with pytest.raises(ValueError, match="values without columns; reference, streaming can"):
        scaled_dot_product_attention(x, x, x[..., :0], impl="stock")


def test_auto_knows_what_triton_does_not_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "HAS_TRITON", True)
    device = type("Device", (), {"type": "cuda"})()
    x = torch.randn(1, 2, 5, 4)
    call: Any = {"is_causal": True, "window": None, "softcap": None, "enable_gqa": False, "scale": None}
    made = checked(x, x, x[..., :0], None, None, **call)

    class OnGpu:
        def __getattr__(self, name: str) -> Any:
            return device if name == "device" else getattr(x, name)

    gpu: Any = OnGpu()
    old = "a call with a Triton older than 3.4 (pip install 'triton>=3.4')"
    for capability, triton, words in (
        (8, (3, 4), "values without columns"), (7, (3, 10), "GPUs before Ampere"), (9, (3, 3), old),
    ):  # fmt: skip
        monkeypatch.setattr(choice, "compute_capability", lambda _, found=capability: found)
        monkeypatch.setattr(installed, "triton_version", lambda found=triton: found)
        assert choice.triton_refusal(made._replace(q=gpu), None) == words


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
        with pytest.raises(TypeError, match="of one type, got float64, float32, float32"):
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


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
def test_key_lengths_of_few_bits_beside_many_keys(dtype: torch.dtype) -> None:
    x = torch.randn(2, 1, 300, 4, generator=torch.Generator().manual_seed(0))
    got = scaled_dot_product_attention(x, x, x, key_lengths=torch.tensor([100, 120], dtype=dtype))
    for i, length in enumerate((100, 120)):
        keys = x[i : i + 1, :, :length]
        torch.testing.assert_close(got[i : i + 1], scaled_dot_product_attention(x[i : i + 1], keys, keys))


def test_half_precision_keeps_a_sharpened_query_within_its_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 64, 8, generator=generator).half() for _ in range(2))
    q[..., 0], k[..., 0] = 3e4, 0
    assert scaled_dot_product_attention(q, k, k, impl="stock").isfinite().all()
