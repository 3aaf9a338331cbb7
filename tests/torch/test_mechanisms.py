"""Every mechanism in attention: against NumPy in float64, streamed against all at once, and what is refused."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import sharpmax
from sharpmax.mechanisms import MECHANISMS, About, Mechanism, Temperature, TopK, Window, find
from sharpmax.torch import (
    Learnable,
    MultiheadAttention,
    blocks,
    decode_attention,
    scaled_dot_product_attention,
    varlen_attention,
)
from sharpmax.torch import mechanisms as module
from tests.doc_tables import ROOT, markdown
from tests.torch.oracle import seen_keys

RNG = np.random.default_rng(3)
BLIND = torch.from_numpy(RNG.random((2, 1, 9, 11)) > 0.5)
BLIND[1, 0, 3] = False  # a query that sees nothing
BIAS = np.where(RNG.random((1, 4, 9, 11)) > 0.3, RNG.normal(size=(1, 4, 9, 11)), -np.inf)
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "lower_right": {"is_causal": "lower_right", "window": 6, "softcap": 3.0},
    "boolean": {"attn_mask": BLIND},
    "bias": {"attn_mask": torch.from_numpy(BIAS)},
    "lengths": {"key_lengths": torch.tensor([5, 11]), "is_causal": "lower_right"},
}  # fmt: skip
CHOSEN: dict[str, Any] = {"window": Window(4), "top_k": TopK(3), "differential": Learnable(find("differential"))}
"""What small cases can tell apart, in the place of the registered."""
FOLDING = [name for name, mechanism in MECHANISMS.items() if mechanism.folds]


@dataclass(frozen=True)
class Toy(Mechanism):
    """Weights ``s^2`` times a learned number for each head; notes which blocks it folds."""

    heads: int | None = 4  # pyright: ignore[reportIncompatibleMethodOverride]
    noted: list[tuple[int, int]] = field(default_factory=list, compare=False)

    about: ClassVar[About] = About("a toy", *("" for _ in About._fields[1:]))  # pyright: ignore[reportArgumentType]
    folds: ClassVar[bool] = True

    def initial(self) -> dict[str, float]:
        return {"slope": 0.7}

    def formula(self, xp: Any, logits: Any, visible: Any, parameters: Any) -> Any:
        return parameters["slope"] * logits**2

    def fold(self, xp: Any, carry: Any, logits: Any, visible: Any, value: Any, count: Any, parameters: Any) -> Any:
        self.noted.append(tuple(logits.shape[-2:]))
        part = xp.matmul(xp.where(visible, self.formula(xp, logits, visible, parameters), 0.0), value)
        return part if carry is None else carry + part

    def finish(self, xp: Any, carry: Any) -> Any:
        return carry


def inputs(maps: int = 1, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Four query heads for two of key, nine queries and eleven keys."""
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 9, 8), (2, 2, 11, 8), (2, 2 // maps, 11, 6))
    return [(1.7 * torch.randn(s, generator=g, dtype=torch.float64)).to(dtype).requires_grad_() for s in shapes]


def attend(*tensors: Any, **given: Any) -> Any:
    return scaled_dot_product_attention(*tensors, **given)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_(x.is_floating_point()) for x in tensors]


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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*FOLDING, "toy"])
def test_streaming_is_the_reference(name: str, case: str, small_blocks: blocks.Sizes) -> None:
    assert small_blocks.keys < 11
    found: list[list[Any]] = []
    for impl in ("reference", "streaming"):
        held = Learnable(Toy() if name == "toy" else find(CHOSEN.get(name, name))).double()
        given, tensors = dict(CASES[case]), inputs()
        if "attn_mask" in given:
            given["attn_mask"] = leaves(given["attn_mask"])[0]
        out = attend(*tensors, mechanism=held, enable_gqa=True, impl=impl, **given)
        (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        tracked = [*tensors, *held.parameters(), *(x for x in given.values() if isinstance(x, Tensor))]
        found.append([out.detach(), *(x.grad for x in tracked)])
    for expected, got in zip(*found, strict=True):
        assert (expected is None) == (got is None)
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def test_dead_blocks_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "CPU", blocks.Sizes(rows=4, keys=4, logits=64))
    toy, q = Toy(heads=None), torch.randn(1, 1, 12, 8)
    attend(q, q, q, mechanism=toy, is_causal=True, impl="streaming")
    assert toy.noted == [(4, 4)] * (1 + 2 + 3)


class Sizes(TorchDispatchMode):
    """Notes how many numbers the largest tensor that any operation makes has memory for."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("name", FOLDING)
def test_streaming_never_holds_all_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "CPU", blocks.Sizes(rows=32, keys=50, logits=2000))
    largest = {}
    for impl in ("streaming", "reference"):
        q, k, v = leaves(*(torch.randn(1, 1, length, 2) for length in (200, 230, 230)))
        with Sizes() as sizes:
            out = attend(q, k, v, mechanism=name, impl=impl)
            out.sum().backward()
        largest[impl] = sizes.largest
    assert largest["reference"] >= 200 * 230
    assert largest["streaming"] <= 32 * 230  # a block of queries and all keys


def test_auto_streams_what_folds_where_there_are_many_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    q, toy = torch.randn(1, 4, 6, 8), Toy()
    attend(q, q, q, mechanism=toy)
    assert toy.noted == []
    monkeypatch.setattr(module, "AT_ONCE", 4 * 6 * 6 - 1)
    many = attend(q, q, q, mechanism=toy)
    assert toy.noted == [(6, 6)]
    torch.testing.assert_close(many, attend(q, q, q, mechanism=toy, impl="reference"))
    attend(q, q, q, mechanism=toy, dropout_p=0.5)
    torch.func.vmap(lambda x: attend(x, x, x, mechanism=toy))(q.unsqueeze(1).expand(1, 9, 4, 6, 8))
    assert toy.noted == [(6, 6)]  # dropout and torch.func are served by the reference


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


def test_multihead() -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, 5, 16), torch.rand(2 * 4, 5, 5) > 0.6
    for name in ("sigmoid", "differential", "learned"):
        maps = find(name).maps
        layer = MultiheadAttention(16, 4, batch_first=True, mechanism=name)
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, heads in zip(layer._projected(x, x, x), (4 * maps, 4 * maps, 4), strict=True)
        )
        shown = ~mask.view(2, 4, 5, 5).repeat_interleave(maps, dim=1)
        out = attend(q, k, v, shown, mechanism=find(name))
        expected = layer.out_proj(out.transpose(1, 2).flatten(-2))
        got = layer(x, x, x, attn_mask=mask)[0]
        torch.testing.assert_close(got, expected)
        learned = {n: p for n, p in layer.named_parameters() if n.startswith("mechanism")}
        assert len(learned) == len(find(name).initial())
        got.square().sum().backward()
        assert all(p.grad is not None and bool(p.grad) for p in learned.values())
    with pytest.raises(ValueError, match="columns can be split in 2, got 3 columns"):
        MultiheadAttention(12, 4, mechanism="differential")
    with pytest.raises(ValueError, match="expected a mechanism or a policy, got both"):
        MultiheadAttention(16, 4, mechanism="sigmoid", policy=sharpmax.Constant(2.0))


def test_learned_parameters_are_held_by_the_module() -> None:
    held = Learnable(find("differential"))
    assert list(held.state_dict()) == ["lambda"]
    logits = torch.randn(4, 3, 5)
    torch.testing.assert_close(held(logits).detach(), find("differential")(logits))
    with torch.no_grad():
        held.get_parameter("lambda").fill_(0.0)
    torch.testing.assert_close(held(logits).detach(), torch.softmax(logits[::2], -1))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a name that there is not": ({"mechanism": "sharpmin"}, "expected a mechanism to be one of softmax, .*'sharpmin'"),
    "no mechanism": ({"mechanism": sharpmax.PAPER}, "expected a mechanism or the name of one, got EntropyPolynomial"),
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


def streams(mechanism: Mechanism) -> str:
    if mechanism.policy is not None or isinstance(mechanism, Window):
        return "as policies"
    return "by chunks" if mechanism.folds else "no"


def switches(mechanism: Mechanism) -> str:
    """What ``sharpen`` says, see tests/huggingface/test_mechanisms.py."""
    if mechanism.initial() or mechanism.activation is not None:
        return "no"
    return "whole sequences" if mechanism.reads == "rows" else "yes"


def tables() -> list[str]:
    """The tables of docs/mechanisms.md."""
    yes = {True: "yes", False: "no"}
    short = [
        [f"`{name}`", m.about.title, m.about.paper, f"`{_cell(m.about.equation)}`", streams(m), switches(m),
         yes[m.inference], yes[m.about.disperses]]
        for name, m in MECHANISMS.items()
    ]  # fmt: skip
    long = [[f"`{name}`", m.about.training, _cell(m.about.theorem)] for name, m in MECHANISMS.items()]
    head = ["", "", "paper", "weights `a` of logits `s`, a row of `n`", "streams", "Hugging Face", "after training",
            "disperses"]  # fmt: skip
    return [markdown(head, short), markdown(["", "what training needs", "Theorem 2.2"], long)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def page() -> str:
    return (ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8")


def test_the_tables_of_the_page_are_what_mechanisms_say() -> None:
    for table in tables():
        assert table in page(), f"docs/mechanisms.md should have\n{table}"


def test_the_new_mechanism_of_the_page(tmp_path: Path) -> None:
    (code,) = re.findall(r"```py\n(.*?)```", page(), re.DOTALL)
    assert code.count("\n") < 80
    (tmp_path / "rectified.py").write_text(code, encoding="utf-8")
    spec: Any = importlib.util.spec_from_file_location("rectified", tmp_path / "rectified.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    rectified = found.Rectified(power=2.0)
    weights = rectified(np.array([[3.0, 1.0, -2.0], [-1.0, -1.0, -1.0]]))
    np.testing.assert_allclose(weights, [[0.9, 0.1, 0.0], [0.0, 0.0, 0.0]])
    q, k, v = inputs()
    outs = [attend(q, k, v, mechanism=rectified, enable_gqa=True, impl=impl) for impl in ("reference", "streaming")]
    torch.testing.assert_close(*outs)
