"""Every mechanism in attention: against NumPy in float64, differentiated, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import sharpmax
from sharpmax.mechanisms import MECHANISMS, Mechanism, Temperature, TopK, find
from sharpmax.torch import Learnable, MultiheadAttention, decode_attention, varlen_attention
from tests.torch.mechanism_cases import CASES, CHOSEN, Toy, attend, inputs, leaves
from tests.torch.oracle import seen_keys


def by_hand(mechanism: Mechanism, q: Any, k: Any, v: Any, *, attn_mask: Any = None, is_causal: Any = False,
            window: Any = None, softcap: float | None = None, key_lengths: Any = None) -> np.ndarray:  # fmt: skip
    """All logits with NumPy in float64, the mechanism's own NumPy weights, and their sums of values."""
    q, k, v = (x.detach().numpy() for x in (q, k, v))
    queries, keys, scale = q.shape[2], k.shape[2], q.shape[3] ** -0.5
    if mechanism.features is not None:
        q, k, scale = mechanism.features(np, q), mechanism.features(np, k), 1.0
    z = np.einsum("bhqd,bhkd->bhqk", q, np.repeat(k, q.shape[1] // k.shape[1], axis=1)) * scale
    z = z if softcap is None else softcap * np.tanh(z / softcap)
    seen = np.zeros(z.shape, bool)
    for b in range(z.shape[0]):
        length = None if key_lengths is None else int(key_lengths[b])
        for i in range(queries):
            at = seen_keys(i, queries, keys, causal=is_causal, window=window, length=length, shown=None)
            seen[b, :, i, at] = True
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen &= attn_mask.numpy()
    elif attn_mask is not None:
        z = z + attn_mask.detach().numpy()
    weights = mechanism(z, seen)
    return weights @ np.repeat(v, weights.shape[1] // v.shape[1], axis=1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_is_what_numpy_says(name: str, case: str) -> None:
    chosen, given = CHOSEN.get(name, name), CASES[case]
    mechanism = find(getattr(chosen, "structure", chosen))
    if mechanism.reads == "rows" and case in ("causal", "lengths"):
        with pytest.raises(ValueError, match=r"has its last query beside the last key: expected as many"):
            attend(*inputs(), mechanism=name, enable_gqa=True, **given)
        return
    tensors = inputs(mechanism.maps)
    impl = "auto" if mechanism.policy is not None else "reference"
    out = attend(*tensors, mechanism=chosen, enable_gqa=True, impl=impl, **given)
    if name == "window":
        given = {**given, "is_causal": given.get("is_causal", "lower_right"), "window": (3, 0)}
        mechanism = find("softmax")
    expected = by_hand(mechanism, *tensors, **given)
    assert out.shape == expected.shape
    assert np.abs(out.detach().numpy() - expected).max() <= 1e-11 * max(1.0, np.abs(expected).max())
    out.sum().backward()
    assert all(bool(x.grad is None or x.grad.isfinite().all()) for x in tensors)
    if case == "boolean":
        assert not out[1, :, 3].any()
        assert tensors[0].grad is not None
        assert not tensors[0].grad[1, :, 3].any()


@pytest.mark.parametrize("name", ["linear_elu", "stick_breaking", "selective", "differential", "asentmax"])
def test_gradients(name: str) -> None:
    held = Learnable(find(name)).double()
    q, k, v = inputs(find(name).maps)
    small = leaves(q[:1, :, :4], k[:1, :, :5], v[:1, :, :5])
    numbers = list(held.parameters())

    def attended(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return attend(q, k, v, mechanism=held, is_causal="lower_right", enable_gqa=True, impl="reference")

    assert gradcheck(attended, (*small, *numbers), fast_mode=True)


def test_narrow_types_and_no_keys() -> None:
    wide = inputs()
    for impl in ("reference", "streaming"):
        exact = attend(*wide, mechanism="sigmoid", enable_gqa=True, impl=impl)
        narrow = [x.detach().to(torch.bfloat16) for x in wide]
        out = attend(*narrow, mechanism="sigmoid", enable_gqa=True, impl=impl)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), exact.detach(), rtol=0.05, atol=0.05)
        q, k, v = (x[..., :n, :] for x, n in zip(wide, (9, 0, 0), strict=True))
        none = attend(q, k, v, mechanism="sigmoid", enable_gqa=True, impl=impl)
        assert none.shape == (2, 4, 9, 6)
        assert not none.any()


def test_a_mechanism_with_a_policy_goes_the_ways_of_policies() -> None:
    q, k, v = inputs()
    given: dict[str, Any] = {"enable_gqa": True, "is_causal": True}
    for impl in ("reference", "streaming", "stock"):
        by_mechanism = attend(q, k, v, mechanism="adaptive_held", impl=impl, **given)
        by_policy = attend(q, k, v, policy=sharpmax.PAPER_HELD, impl=impl, **given)
        assert torch.equal(by_mechanism, by_policy)
    softmax = attend(q, k, v, mechanism="softmax", **given)
    stock = torch.nn.functional.scaled_dot_product_attention(q, k, v, **given)
    torch.testing.assert_close(softmax, stock)
    stats = attend(q, k, v, mechanism="log_n", return_stats=True, **given)
    torch.testing.assert_close(stats.beta[0, 0], MECHANISMS["log_n"].policy(stats.stats)[0, 0])  # pyright: ignore
    learned = Learnable(Temperature(sharpmax.LearnableTemperature(heads=4, init=2.0)))
    assert set(learned.state_dict()) == {"log_beta"}
    sharp = attend(q, k, v, mechanism=learned, **given)
    torch.testing.assert_close(sharp, attend(q, k, v, policy=sharpmax.Constant(2.0), **given))


def test_dropout_is_of_the_weights() -> None:
    q, k, v = (x.detach() for x in inputs())
    torch.manual_seed(0)
    dropped = attend(q, k, v, None, 0.5, enable_gqa=True, mechanism="sigmoid")
    torch.manual_seed(0)
    z = q @ k.repeat_interleave(2, dim=1).mT / 8**0.5
    weights = torch.nn.functional.dropout(find("sigmoid")(z), 0.5)
    torch.testing.assert_close(dropped, weights @ v.repeat_interleave(2, dim=1))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a name that there is not": ({"mechanism": "sharpmin"}, "expected a mechanism to be one of softmax, .*'sharpmin'"),
    "no mechanism": ({"mechanism": sharpmax.PAPER}, "expected a mechanism or the name of one, got EntropyPolynomial; .*"
                     r"Temperature\(policy\)"),
    "a class": ({"mechanism": TopK}, "expected a mechanism or the name of one, got the class TopK"),
    "both": ({"mechanism": "sigmoid", "policy": sharpmax.Constant()}, "expected a mechanism or a policy, got both"),
    "a mechanism as policy": ({"policy": find("sigmoid")}, r"got the mechanism Sigmoid\(\); .* as mechanism="),
    "one that learns": ({"policy": Learnable(find("differential"))}, "got the mechanism Differential"),
    "triton": ({"mechanism": "sigmoid", "impl": "triton"}, "'triton' serves policies, .* reference and streaming can"),
    "stock": ({"mechanism": "selective", "impl": "stock"}, "'stock' serves policies, not selective .* reference can"),
    "another name": ({"mechanism": "sigmoid", "impl": "fast"}, "expected impl to be one of auto, .* got 'fast'"),
    "streaming": ({"mechanism": "selective", "impl": "streaming"}, "selective attention, which needs all logits of a "
                  "row at once; reference can"),
    "dropout": ({"mechanism": "sigmoid", "impl": "streaming", "dropout_p": 0.1}, "with dropout; reference can"),
    "stats": ({"mechanism": "sigmoid", "return_stats": True}, "return_stats serves policies, not sigmoid attention; "),
    "scale": ({"mechanism": "linear_elu", "scale": 0.5}, "expected no scale for linear attention with features"),
    "heads": ({"mechanism": "differential"}, "2 of query and of key for each of value, got shapes"),
    "a band": ({"mechanism": "selective", "window": 3}, "has its last query beside the last key: expected as many"),
    "parameters": ({"mechanism": Toy(heads=3), "impl": "streaming"}, r"expected logits \[..., 3 heads, queries, keys"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    given, sentence = REFUSED[what]
    with pytest.raises((TypeError, ValueError), match=sentence) as error:
        attend(*inputs(), enable_gqa=True, **given)
    assert "\n" not in str(error.value)


def test_other_attention_takes_policies_only() -> None:
    q, starts = torch.randn(1, 2, 3, 8), torch.tensor([0, 3])
    sentence = r"got the mechanism Sigmoid\(\); give it to attention as mechanism="
    sigmoid: Any = find("sigmoid")
    with pytest.raises(TypeError, match=sentence):
        decode_attention(q, q, q, policy=sigmoid)
    packed = q[0].transpose(0, 1)
    with pytest.raises(TypeError, match=sentence):
        varlen_attention(packed, packed, packed, starts, starts, policy=sigmoid)
    with pytest.raises(TypeError, match=sentence):
        MultiheadAttention(16, 4, policy=sigmoid)
