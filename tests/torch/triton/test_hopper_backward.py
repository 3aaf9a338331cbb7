"""The gradient kernels for Hopper, against float64 and stock attention; interpreted and compiled where none is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from hypothesis import HealthCheck, Phase, settings
from hypothesis import given as for_all
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as stock

pytest.importorskip("triton")

from sharpmax.core.policies.base import Lowered
from sharpmax.torch import fused
from sharpmax.torch.geometry import ALL, Geometry
from sharpmax.torch.triton import hopper_backward
from tests.torch.triton.compiled import printed
from tests.torch.triton.gradient_cases import (
    CAUSAL,
    DOWN_TO_ZERO,
    FULL,
    NARROW,
    WIDE,
    Gradients,
    by_kernels,
    errors,
    exact,
    in_two_clusters,
    leaves,
    offset,
    sharpened,
)
from tests.torch.triton.hopper_cases import DEVICE, ON_HOPPER, sized
from tests.torch.triton.oracle import POLICY, Case, Inputs, attention, inputs, logits

CASES = (
    Case("whole tiles", batch=2, heads=4, key_heads=4, queries=512, keys=512, geometry=FULL, **WIDE),
    Case("ragged", heads=3, key_heads=3, queries=300, keys=457, geometry=FULL, **WIDE),
    Case("causal", batch=2, heads=4, key_heads=4, queries=1024, keys=1024, geometry=CAUSAL, **WIDE),
    Case("grouped", batch=2, heads=6, key_heads=2, queries=700, keys=700, geometry=CAUSAL, **WIDE),
    Case("grouped, all keys", batch=2, heads=4, key_heads=1, queries=200, keys=333, geometry=FULL, **NARROW),
    Case("few keys", heads=2, key_heads=2, queries=300, keys=20, geometry=CAUSAL, **WIDE),
    Case("few queries", heads=2, key_heads=2, queries=20, keys=300, geometry=CAUSAL, **WIDE),
    Case("narrow", batch=2, heads=3, key_heads=3, queries=600, keys=500, geometry=FULL, **NARROW),
    Case("narrow and causal", batch=2, heads=4, key_heads=2, queries=900, keys=900, geometry=CAUSAL, **NARROW),
    Case("strided", batch=2, heads=4, key_heads=4, queries=230, keys=230, geometry=CAUSAL, strided=True, **WIDE),
    Case("small", heads=4, key_heads=2, queries=200, keys=200, geometry=CAUSAL, **WIDE),
    Case("small and narrow", heads=4, key_heads=2, queries=200, keys=200, geometry=CAUSAL, **NARROW),
    Case("many rounds", batch=4, heads=16, key_heads=16, queries=1300, keys=200, geometry=FULL, **WIDE),
    Case("many causal rounds", batch=2, heads=16, key_heads=16, queries=1300, keys=1300, geometry=CAUSAL, **WIDE),
)
PLAIN = CASES[2]
SMALL = replace(PLAIN, batch=1, heads=2, key_heads=2, queries=330, keys=330)
KERNELS = ["hopper_stats_kernel", "hopper_attend_kernel", "hopper_query_kernel", "hopper_key_kernel"]
TYPES = [torch.bfloat16, torch.float16]


def in_two_pieces(given: Inputs) -> Gradients:
    q, k, v = leaves(given.q, given.k, given.v)
    geometry = given.case.geometry
    scaled = fused.sharpened_query(q, k, None, None, geometry.numbers, fused.policy_numbers(POLICY), False)[0]
    return torch.autograd.grad(cudnn(given, scaled, k, v), (q, k, v), given.do)


def cudnn(given: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Stock attention, by cuDNN where that is."""
    geometry = given.case.geometry
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.FLASH_ATTENTION):
        return stock(q, k, v, is_causal=geometry.banded, scale=geometry.scale, enable_gqa=q.shape[1] != k.shape[1])


def peer_errors(given: Inputs, policy: Lowered = POLICY) -> list[float]:
    """Those of stock attention on ``beta * q``, against the same in float64."""
    scaled = sharpened(given, policy)
    q, k, v = leaves(scaled, given.k, given.v)
    found = torch.autograd.grad(cudnn(given, q, k, v), (q, k, v), given.do)
    q, k, v = leaves(*(x.double() for x in (scaled, given.k, given.v)))
    z, seen = logits(given, q, k)
    out, _ = attention(z, seen, v, torch.ones_like(z[..., 0]))
    return errors(found, torch.autograd.grad(out, (q, k, v), given.do.double()))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", sized(CASES))
def test_errors_are_about_those_of_stock_attention_and_bits_always_the_same(
    case: Case, dtype: torch.dtype, hopper_kernels: list[str]
) -> None:
    given = inputs(case, dtype, DEVICE)
    found = by_kernels(given)
    assert all(torch.equal(a, b) for a, b in zip(found, by_kernels(given), strict=True))
    for name, error, peer in zip(("dq", "dk", "dv"), errors(found, exact(given)), peer_errors(given), strict=True):
        assert error <= 2 * peer, name
    assert hopper_kernels == ([] if ON_HOPPER else 2 * KERNELS)


@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("case", sized([PLAIN, SMALL, CASES[4], CASES[8]]))
def test_beta_may_be_0(case: Case) -> None:
    given = inputs(case, torch.bfloat16, DEVICE)
    for name, error in zip(
        ("dq", "dk", "dv"), errors(by_kernels(given, DOWN_TO_ZERO), exact(given, DOWN_TO_ZERO)), strict=True
    ):
        assert error < 1e-2, name


@pytest.mark.usefixtures("hopper_kernels")
def test_one_key() -> None:
    """Its weight is 1, whatever the query."""
    case = Case("one key", heads=2, key_heads=1, queries=300, keys=1, geometry=FULL, **WIDE)
    given = inputs(case, torch.bfloat16, DEVICE)
    dq, dk, dv = by_kernels(given)
    for found in (dq, dk):
        assert float(found.abs().max()) < 0.1
    expected = given.do.double().sum((1, 2), keepdim=True)
    assert float((dv - expected).norm() / expected.norm()) < 6e-3


@pytest.mark.usefixtures("hopper_kernels")
@settings(
    max_examples=40 if ON_HOPPER else 8, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture], phases=(Phase.generate,),
)  # fmt: skip
@for_all(
    queries=st.integers(1, 500 if ON_HOPPER else 200),
    keys=st.integers(2, 500 if ON_HOPPER else 200),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (37, 37)] if ON_HOPPER else [(1, 1), (3, 1)]),
    right=st.sampled_from([ALL, 0]),
    scale=st.sampled_from([1e-3, 0.1]),
    width=st.sampled_from([64, 128]),
    dtype=st.sampled_from(TYPES if ON_HOPPER else [torch.float16]),  # bfloat16 is wrong in Triton's interpreter
)
def test_random_calls_err_as_in_two_pieces(
    queries: int, keys: int, heads: tuple[int, int], right: int, scale: float, width: int, dtype: Any
) -> None:
    case = Case(
        "random", heads=heads[0], key_heads=heads[1], queries=queries, keys=keys, width=width, value_width=width,
        geometry=Geometry(scale, right=right),
    )  # fmt: skip
    given = inputs(case, dtype, DEVICE)
    for name, ours, theirs, expected in zip(
        ("dq", "dk", "dv"), by_kernels(given), in_two_pieces(given), exact(given), strict=True
    ):
        error, peer = (float((x.double() - expected).norm()) for x in (ours, theirs))
        assert error <= 2 * peer + 1e-2 * float(expected.norm()) + 1e-4 * expected.numel() ** 0.5, name


@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("case", sized([PLAIN, SMALL]))
def test_where_the_policy_is_flat_beta_is_a_constant(case: Case) -> None:
    """Nothing comes back through the statistics: the gradients are those of attention with that beta."""
    given = inputs(case, torch.bfloat16, DEVICE)
    found = by_kernels(given, Lowered("entropy", (0.3, 0.1), floor=2.0))
    q, k, v = leaves(2.0 * given.q, given.k, given.v)
    dq, dk, dv = torch.autograd.grad(cudnn(given, q, k, v), (q, k, v), given.do)
    for a, b in zip(found, (2.0 * dq.double(), dk.double(), dv.double()), strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 6e-3


@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("nats", [30.0, 300.0, -300.0])
@pytest.mark.parametrize("case", sized([replace(PLAIN, geometry=FULL), replace(SMALL, geometry=FULL)]))
def test_what_keys_have_in_common_is_not_felt(case: Case, nats: float) -> None:
    """Logits that all are so far away from others; in the column that they have in common, dq is 0 but for rounding."""
    given = offset(inputs(case, torch.bfloat16, DEVICE), nats)
    expected, found = ((dq[..., 1:], *rest) for dq, *rest in (exact(given), by_kernels(given)))
    for name, error in zip(("dq", "dk", "dv"), errors(found, expected), strict=True):
        assert error < 6e-3, name


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("nats", [30.0, 300.0, -300.0])
def test_what_keys_have_in_common_is_felt_no_more_than_in_two_pieces(nats: float) -> None:
    """There, the statistics' gradient has a kernel of its own. In the common column one factor is rounded, here two."""
    given = offset(inputs(replace(PLAIN, geometry=FULL), torch.bfloat16, DEVICE), nats)
    ours, theirs = by_kernels(given), in_two_pieces(given)
    assert float(ours[0][..., 0].norm()) <= 2 * float(theirs[0][..., 0].norm())
    expected, ours, theirs = ((dq[..., 1:], *rest) for dq, *rest in (exact(given), ours, theirs))
    for name, a, b in zip(("dq", "dk", "dv"), errors(ours, expected), errors(theirs, expected), strict=True):
        assert a <= 1.05 * b, name


@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("case", sized([replace(PLAIN, geometry=FULL), replace(SMALL, geometry=FULL)]))
def test_keys_in_two_clusters(case: Case) -> None:
    given = in_two_clusters(inputs(case, torch.bfloat16, DEVICE), 30.0)
    for name, error, peer in zip(
        ("dq", "dk", "dv"), errors(by_kernels(given), exact(given)), peer_errors(given), strict=True
    ):
        assert error <= 2 * peer, name


REFUSED: list[tuple[str, Geometry, tuple[int, ...], tuple[int, ...]]] = [
    ("calls without a softcap and with a positive scale", Geometry(0.1, softcap=3.0), (20, 64), (20, 64)),
    ("calls without a softcap and with a positive scale", Geometry(-0.1), (20, 64), (20, 64)),
    ("calls that see all keys, or those up to a row's own number", Geometry(0.1, left=3), (20, 64), (20, 64)),
    ("calls that see all keys, or those up to a row's own number", Geometry(0.1, right=3), (20, 64), (20, 64)),
    (
        "calls that see all keys, or those up to a row's own number",
        Geometry(0.1, right=0, lower_right=True), (20, 64), (30, 64),
    ),
    ("heads of 64 or 128 columns in a two-byte type", FULL, (20, 32), (20, 32)),
    ("tensors that are not empty", FULL, (20, 64), (0, 64)),
    ("", FULL, (20, 64), (1, 64)),
    ("", Geometry(0.1, right=0, lower_right=True), (20, 64), (20, 64)),
    ("", CAUSAL, (20, 128), (30, 128)),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "geometry", "queries", "keys"), REFUSED, ids=str)
def test_what_it_does_not_serve_it_refuses(
    sentence: str, geometry: Geometry, queries: tuple[int, ...], keys: tuple[int, ...]
) -> None:
    q, k = (torch.zeros(2, 4, *shape, dtype=torch.float16) for shape in (queries, keys))
    assert hopper_backward.refusal(q, k, k, geometry, POLICY) == sentence
    if not sentence:
        assert hopper_backward.refusal(q, k, k[..., :16], geometry, POLICY) == "values as wide as queries"
        assert hopper_backward.refusal(q, k, k, geometry, POLICY._replace(floor=0.0)) == ""
        for policy in (Lowered("log_count", (1.0, 0.0)), Lowered("entropy", (2.0,)), POLICY._replace(floor=-1.0)):
            assert "policies of the entropy" in hopper_backward.refusal(q, k, k, geometry, policy)


def test_with_very_many_keys_float16_has_no_room() -> None:
    """``2^x x`` of the worst row: one key with a share of 11 percent, and all others alike."""
    for keys, refused in ((65_536, False), (65_537, True)):
        k = torch.empty(1, 1, keys, 64, dtype=torch.float16, device="meta")
        assert ("float16" in hopper_backward.refusal(k, k, k, FULL, POLICY)) is refused
        k = k.bfloat16()
        assert hopper_backward.refusal(k, k, k, FULL, POLICY) == ""
    share = torch.linspace(1e-4, 1.0 - 1e-4, 9999, dtype=torch.float64)
    rest = (1.0 - share) / (hopper_backward.HALF_KEYS - 1)
    x = share.log2() - share * share.log2() - (1.0 - share) * rest.log2()
    assert float((x.exp2() * x).max()) < torch.finfo(torch.float16).max / 1.5


def test_it_takes_tensors_wherever_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vmap over queries alone has them: one memory for all."""
    placed: list[dict[str, Tensor]] = []
    monkeypatch.setattr(hopper_backward, "_launches", lambda *_: [lambda given, _: placed.append(given)])
    q = torch.randn(3, 2, 20, 64).half()
    k = torch.randn(1, 2, 20, 64).half().expand(3, -1, -1, -1)
    rows = {name: torch.ones(3, 2, 20) for name in ("beta", "lse", "row_max", "row_sum", "row_moment")}
    apart = q.mT.contiguous().mT
    found = hopper_backward.adaptive_backward(apart, k, k, geometry=CAUSAL, lowered=POLICY, out=q, grad_out=q, **rows)
    assert [x.shape for x in found] == [q.shape, k.shape, k.shape]
    for name, given in (("q", q), ("k", k)):
        assert torch.equal(placed[0][name], given)
        assert placed[0][name].is_contiguous()
    negative = POLICY._replace(floor=-1.0)
    with pytest.raises(ValueError, match="policies of the entropy"):
        hopper_backward.adaptive_backward(q, k, k, geometry=CAUSAL, lowered=negative, out=q, grad_out=q, **rows)


@pytest.mark.parametrize(
    ("shape", "key_heads", "causal", "expected"),
    [
        ((4, 16, 4096, 64), 16, False, True),
        ((4, 16, 4096, 64), 16, True, True),
        ((4, 16, 4096, 64), 1, True, False),  # 128 blocks of keys on 132 processors
        ((1, 9, 4096, 64), 9, False, False),  # 288 blocks: a third round for a few
        ((1, 16, 1024, 64), 16, True, False),
    ],
)
def test_it_pays_with_blocks_for_all_of_the_card(
    shape: tuple[int, ...], key_heads: int, causal: bool, expected: bool
) -> None:
    q = torch.empty(shape, device="meta")
    assert hopper_backward.pays(q, q[:, :key_heads], causal, 132) is expected


COMPILE = """
import torch, triton
from triton._utils import canonicalize_dtype
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from sharpmax.torch.triton import hopper, hopper_backward, hopper_key_kernel, hopper_query_kernel
from sharpmax.torch.triton.launch import form_of

def type_of(name, module, made, flags):
    if name == "n_desc":
        made = hopper.descriptor(torch.zeros(1, 4, hopper_backward.NUMBERS, 64), hopper_backward.NUMBERS)
    if name.endswith("_desc"):
        return f"tensordesc<{canonicalize_dtype(made.base.dtype)}{made.block_shape},{made.layout!r}>"
    if name in flags:
        return "constexpr"
    return "*fp32" if name == "numbers" else "i32" if name in module.WHOLE_NUMBERS else "fp32"

for width, dtype, causal in ((128, torch.bfloat16, True), (64, torch.float16, False)):
    made = hopper.descriptor(torch.zeros(1, 1, 256, width, dtype=dtype), hopper_backward.LINES)
    flags = {"STAGES": hopper_backward.STAGES[width], "CAUSAL": causal}
    edges = {"EDGES": causal, "HALVES": hopper_backward.HALVES[width]}
    for module, kernel, flags in (
        (hopper_query_kernel, hopper_query_kernel.hopper_query_kernel, flags | edges),
        (hopper_key_kernel, hopper_key_kernel.hopper_key_kernel, flags),
    ):
        signature = {name: type_of(name, module, made, flags) for name in kernel.arg_names}
        source = GluonASTSource(kernel, signature, flags)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        print("kernel", compiled.metadata.shared, compiled.asm["ptx"].count("wgmma.mma_async"))
"""


def test_they_compile_for_hopper_without_a_gpu_and_keep_their_products() -> None:
    pytest.importorskip("triton.experimental.gluon._runtime")
    found = [tuple(map(int, line.split()[1:])) for line in printed(COMPILE).splitlines() if line.startswith("kernel")]
    wide, narrow = 2 * (2 * 8 + 2 * 4), 2 * (2 * 4 + 2 * 4)  # two warpgroups, two products of each shape
    assert [products for _, products in found] == [wide, wide, narrow, narrow]
    assert max(shared for shared, _ in found) <= 227 * 1024  # what a program may have
