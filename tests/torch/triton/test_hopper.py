"""The statistics kernel for Hopper, against float64 and the portable kernel; interpreted and compiled where none is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import given as for_all
from hypothesis import strategies as st

pytest.importorskip("triton")

from sharpmax.core.policies.base import Lowered
from sharpmax.torch import scaled_dot_product_attention
from sharpmax.torch.geometry import Geometry
from sharpmax.torch.triton import Tiles, hopper, prefill
from sharpmax.torch.triton.launch import Form, Masks, form_of, shared_numbers
from tests.torch.triton.compiled import printed
from tests.torch.triton.hopper_cases import (
    CASES,
    CAUSAL,
    DEVICE,
    NARROW,
    ON_HOPPER,
    PORTABLE_TYPES,
    WIDE,
    forget_launches,
    random_cases,
    sized,
)
from tests.torch.triton.oracle import POLICY, Case, inputs, logits, stats

PLAIN = Case("plain", queries=300, keys=300, geometry=CAUSAL, **WIDE)


@pytest.mark.parametrize("dtype", PORTABLE_TYPES, ids=str)
@pytest.mark.parametrize("case", sized(CASES))
def test_it_gives_what_float64_and_the_portable_kernel_give(
    case: Case, dtype: torch.dtype, hopper_kernels: list[str]
) -> None:
    given = inputs(case, dtype, DEVICE)
    got, beta, scaled = prefill.row_stats_and_scaled_query(given.q, given.k, case.geometry, POLICY, config="hopper")
    portable, portable_beta, _ = prefill.row_stats_and_scaled_query(
        given.q, given.k, case.geometry, POLICY, config=Tiles(64, 64, 4, 2)
    )
    z, seen = logits(given, given.q.double(), given.k.double())
    exact = stats(z, seen)
    assert torch.equal(got[4], exact.count)
    assert torch.equal(got[0].isinf(), exact.count == 0)
    filled = exact.count > 0
    expected_entropy = exact.sum.log() - exact.moment / exact.sum
    for what, ours, theirs, expected in (
        ("max", got[0], portable[0], exact.max),
        ("sum", got[1], portable[1], exact.sum),
        ("entropy", got[1].log() - got[2] / got[1], portable[1].log() - portable[2] / portable[1], expected_entropy),
    ):
        error, peer = (float((x - expected).abs()[filled].max()) for x in (ours, theirs))
        assert error <= 4 * peer + 1e-5, what
    assert torch.equal(got[1][~filled], torch.zeros_like(got[1][~filled]))
    assert torch.equal(got[2][~filled], torch.zeros_like(got[2][~filled]))
    assert float((beta / portable_beta - 1).abs().max()) < 1e-3
    assert scaled is not None
    assert torch.equal(scaled, (given.q.float() * beta[..., None]).to(dtype))
    assert hopper_kernels == ([] if ON_HOPPER else ["hopper_stats_kernel"])


@pytest.mark.usefixtures("hopper_kernels")
def test_the_order_of_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections of a few of all sequences, the last one narrower."""
    batch, heads, length, section = (4, 16, 1300, 5) if ON_HOPPER else (1, 5, 300, 2)
    sizes = {"queries": length, "keys": length, **NARROW}
    case = Case("sections", batch=batch, heads=heads, key_heads=heads, geometry=CAUSAL, **sizes)
    given = inputs(case, torch.bfloat16, DEVICE)
    whole = prefill.row_stats(given.q, given.k, CAUSAL, config="hopper")
    monkeypatch.setattr(hopper, "SECTION", section * length * 64 * 2)
    forget_launches()
    parts = prefill.row_stats(given.q, given.k, CAUSAL, config="hopper")
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True) if a is not None and b is not None)


@pytest.mark.usefixtures("hopper_kernels")
@settings(
    max_examples=60 if ON_HOPPER else 10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@for_all(case=random_cases(), dtype=st.sampled_from(PORTABLE_TYPES))
def test_random_calls_are_those_of_the_portable_kernel(case: Case, dtype: torch.dtype) -> None:
    made = inputs(case, dtype, DEVICE)
    ours, beta, scaled = prefill.row_stats_and_scaled_query(made.q, made.k, case.geometry, POLICY, config="hopper")
    theirs, expected, _ = prefill.row_stats_and_scaled_query(
        made.q, made.k, case.geometry, POLICY, config=Tiles(64, 64, 4, 2)
    )
    assert torch.equal(ours[4], theirs[4])
    assert torch.equal(ours[0].isinf(), theirs[0].isinf())
    for name, a, b in (("max", ours[0], theirs[0]), ("sum", ours[1], theirs[1]), ("moment", ours[2], theirs[2])):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(beta, expected, rtol=1e-3, atol=0.0)
    assert scaled is not None
    assert torch.equal(scaled, (made.q.float() * beta[..., None]).to(dtype))


@pytest.mark.usefixtures("hopper_kernels")
def test_the_statistics_come_without_a_policy_and_without_the_scaled_query() -> None:
    given = inputs(PLAIN, torch.bfloat16, DEVICE)
    whole, beta, _ = prefill.row_stats_and_scaled_query(given.q, given.k, CAUSAL, POLICY, config="hopper")
    alone = prefill.row_stats(given.q, given.k, CAUSAL, config="hopper")
    without, again, nothing = prefill.row_stats_and_scaled_query(
        given.q, given.k, CAUSAL, POLICY, scaled_query=False, config="hopper"
    )
    assert nothing is None
    assert torch.equal(beta, again)
    for a, b, c in zip(whole, alone, without, strict=True):
        assert (a is None and b is None and c is None) or (torch.equal(a, b) and torch.equal(a, c))  # type: ignore


@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_equal_and_huge_logits(offset: float) -> None:
    """A common offset of every logit, and one logit far above the others."""
    q = torch.zeros(1, 2, 512, 128, device=DEVICE, dtype=torch.bfloat16)
    k = torch.zeros(1, 2, 512, 128, device=DEVICE, dtype=torch.bfloat16)
    q[..., 0], k[..., 0] = 1.0, offset
    k[:, 1, 7, 0] = offset + 1e4
    (top, total, moment, _, _), beta, scaled = prefill.row_stats_and_scaled_query(
        q, k, Geometry(1.0), POLICY, config="hopper"
    )
    torch.testing.assert_close(top[0, 0], torch.full_like(top[0, 0], float(k[0, 0, 0, 0])))
    torch.testing.assert_close(total[0, 0], torch.full_like(total[0, 0], 512.0), rtol=1e-3, atol=0.0)
    torch.testing.assert_close(total[0, 1], torch.ones_like(total[0, 1]), rtol=1e-3, atol=0.0)
    assert float((moment / total).abs().max()) < 1e-3
    assert beta.isfinite().all()
    assert scaled is not None
    assert scaled.isfinite().all()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
def test_attention_takes_it_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention on inputs that fill the card, forward and backward, against the same with the portable kernel."""
    monkeypatch.setattr(hopper, "RUN_WITH", (hopper.triton_version(),))
    taken: list[int] = []
    real = hopper.stats_launch
    monkeypatch.setattr(hopper, "stats_launch", lambda *a: (taken.append(1), real(*a))[1])
    given = [torch.randn(2, 66, 1024, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]

    def run() -> Any:
        q, k, v = given
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return (out.detach(), *torch.autograd.grad(out.float().square().sum(), given))

    ours = run()
    assert taken == [1]
    monkeypatch.setattr(hopper, "pays", lambda *_: False)
    forget_launches()
    portable = run()
    assert taken == [1]
    for a, b in zip(ours, portable, strict=True):
        assert float((a.float() - b.float()).norm() / b.float().norm()) < 2e-3


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
def test_in_a_cuda_graph() -> None:
    given = inputs(CASES[2], torch.bfloat16, "cuda")
    prefill.row_stats(given.q, given.k, CAUSAL, config="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = prefill.row_stats(given.q, given.k, CAUSAL, config="hopper")
    given.q.copy_(given.q.flip(2))
    graph.replay()
    expected = prefill.row_stats(given.q, given.k, CAUSAL, config="hopper")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True) if a is not None and b is not None)


REFUSED: list[tuple[str, Case, dict[str, Any]]] = [
    ("policies of the entropy alone", PLAIN, {"lowered": Lowered("log_count", (1.0, 0.0))}),
    ("calls without key lengths", replace(PLAIN, lengths=(20,)), {}),
    ("calls without a window", replace(PLAIN, geometry=Geometry(0.1, left=5, right=0)), {}),
    ("calls without a mask", replace(PLAIN, mask="boolean"), {}),
    ("calls without a softcap or a scale that is not positive", replace(PLAIN, geometry=Geometry(-0.1)), {}),
    ("calls without a softcap or a scale that is not positive", replace(PLAIN, geometry=Geometry(1e-46)), {}),
    ("calls without packed documents", replace(PLAIN, q_offsets=(0, 300), k_offsets=(0, 300)), {}),
    ("heads of 64 or 128 columns in a two-byte type", replace(PLAIN, width=32), {}),
    ("tensors that are not empty", replace(PLAIN, queries=0), {}),
]


@pytest.mark.parametrize(("sentence", "case", "options"), REFUSED, ids=[sentence for sentence, _, _ in REFUSED])
def test_what_it_does_not_serve_it_refuses(sentence: str, case: Case, options: dict[str, Any]) -> None:
    given = inputs(case, torch.float16, "cpu")
    options = {"lowered": POLICY, **options}
    with pytest.raises(ValueError, match=f"^the statistics kernel for Hopper serves {sentence}$"):
        prefill.row_stats_and_scaled_query(given.q, given.k, case.geometry, **given.options, **options, config="hopper")


def test_it_gives_no_minimum() -> None:
    given = inputs(PLAIN, torch.float16, "cpu")
    with pytest.raises(ValueError, match=r"^the statistics kernel for Hopper serves no minimum$"):
        prefill.row_stats(given.q, given.k, CAUSAL, with_min=True, config="hopper")


@pytest.mark.skipif(ON_HOPPER, reason="served here")
def test_it_wants_a_hopper_gpu() -> None:
    given = inputs(PLAIN, torch.float16, "cpu")
    with pytest.raises(ValueError, match=r"serves tensors on a Hopper GPU$"):
        prefill.row_stats(given.q, given.k, CAUSAL, config="hopper")


def test_strides_that_the_copy_engine_takes() -> None:
    whole = torch.zeros(2, 64, 4, 128, dtype=torch.float16)
    shared = shared_numbers(form_of(whole), form_of(whole), None, CAUSAL, Masks().form)

    def refused(x: torch.Tensor) -> bool:
        return "contiguous" in hopper.refusal(form_of(x), form_of(x), shared, False, False)

    assert not refused(whole)
    assert not refused(whole.transpose(1, 2))
    assert not refused(whole[:1].as_strided((1, 4, 64, 128), (3, 128, 512, 1)))  # one batch element: any stride
    assert refused(whole[:, :, :1].expand(2, 64, 4, 128))
    assert refused(torch.zeros(2, 4, 128, 64, dtype=torch.float16).mT)
    assert refused(torch.zeros(2, 4, 64, 129, dtype=torch.float16)[..., 1:])
    assert refused(torch.zeros(2, 4, 64, 130, dtype=torch.float16)[..., :128])


@pytest.mark.parametrize(
    ("shape", "causal", "expected"),
    [
        ((4, 16, 4096, 64), False, True),
        ((4, 16, 4096, 64), True, True),
        ((1, 9, 8192, 64), False, False),  # 288 blocks on 132 processors: a third round for a few
        ((1, 9, 8192, 64), True, True),  # long blocks go with short ones
        ((1, 9, 4096, 64), True, False),
        ((1, 16, 1024, 64), False, False),
    ],
)
def test_it_pays_with_rows_for_all_of_the_card(
    shape: tuple[int, ...], causal: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "processors", lambda _: 132)
    monkeypatch.setattr(hopper, "is_hopper", lambda _: True)
    monkeypatch.setattr(hopper, "RUN_WITH", (hopper.triton_version(),))
    q = Form(shape, (1,) * 4, torch.float16, torch.device("cuda"), True)
    assert hopper.pays(q, causal, hopper.ROWS) is expected
    monkeypatch.setattr(hopper, "RUN_WITH", ())
    assert not hopper.pays(q, causal, hopper.ROWS)


COMPILE = """
import torch, triton
from triton._utils import canonicalize_dtype
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from sharpmax.torch.triton import hopper, hopper_kernel

def type_of(name, q, k):
    if name.endswith("_desc"):
        made = k if name == "k_desc" else q
        return f"tensordesc<{canonicalize_dtype(made.base.dtype)}{made.block_shape},{made.layout!r}>"
    if name.startswith("out_"):
        return "*i32" if name == "out_count" else "*fp32"
    return "i32" if name in hopper_kernel.WHOLE_NUMBERS else "constexpr" if name.isupper() else "fp32"

for width, dtype, causal in ((128, torch.bfloat16, True),):
    x = torch.zeros(1, 1, 256, width, dtype=dtype)
    q, k = hopper.descriptor(x, hopper_kernel.LINES.value), hopper.descriptor(x, hopper_kernel.KEYS.value)
    kernel = hopper_kernel.hopper_stats_kernel
    signature = {name: type_of(name, q, k) for name in kernel.arg_names}
    flags = {"CAUSAL": causal, "EDGES": causal, "POLICY": True, "SCALED_QUERY": True}
    source = GluonASTSource(kernel, signature, {"STAGES": hopper.STAGES[width], **flags})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert ".target sm_90a" in compiled.asm["ptx"] and "wgmma.mma_async" in compiled.asm["ptx"]
    print("shared memory", compiled.metadata.shared)
"""


def test_it_compiles_for_hopper_without_a_gpu() -> None:
    pytest.importorskip("triton.experimental.gluon._runtime")
    sizes = [int(line.split()[-1]) for line in printed(COMPILE).splitlines() if line.startswith("shared memory")]
    assert len(sizes) == 1
    assert max(sizes) <= 227 * 1024  # what a program may have
