"""The kernels against float64: under Triton's interpreter where there is no GPU, compiled where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime import _allocation

from sharpmax.core.policies.base import Lowered
from sharpmax.core.stats import RowStats
from sharpmax.torch.geometry import Geometry
from sharpmax.torch.triton import Tiles, gradient, prefill
from sharpmax.torch.triton import launch as launch_module
from sharpmax.torch.triton.blocks import kept
from tests.torch.triton.oracle import POLICY, Case, Inputs, attention, inputs, logits, stats

CASES = (
    Case("full"),
    Case("causal", geometry=Geometry(0.25, right=0), queries=48, keys=48),
    Case("grouped, from the end", heads=4, key_heads=2, geometry=Geometry(0.3, right=0, lower_right=True), queries=20),
    Case("more queries than keys", geometry=Geometry(0.25, right=0, lower_right=True), queries=45, keys=20),
    Case("window", heads=2, key_heads=2, geometry=Geometry(0.25, left=9, right=0), strided=True),
    Case("two-sided window, unequal heads", geometry=Geometry(0.2, left=5, right=7), width=24, value_width=40),
    Case("lengths", batch=2, key_heads=1, lengths=(0, 23), geometry=Geometry(0.25, left=30, right=3, lower_right=True)),
    Case("boolean mask", batch=2, heads=1, key_heads=1, mask="boolean", geometry=Geometry(0.25, right=0)),
    Case("boolean mask, scale of 0", mask="boolean", geometry=Geometry(0.0)),
    Case("causal, scale of 0 in float32", geometry=Geometry(1e-46, right=0)),
    Case("bias and softcap", mask="bias", geometry=Geometry(0.25, softcap=4.0)),
    Case("softcap", geometry=Geometry(0.25, softcap=4.0, right=0), keys=64, queries=64),
    Case("negative scale", geometry=Geometry(-0.25, right=0)),
    Case(
        "packed",
        heads=2,
        key_heads=1,
        queries=41,
        keys=41,
        q_offsets=(0, 3, 3, 36, 41),
        k_offsets=(0, 3, 5, 38, 41),
        geometry=Geometry(0.25, right=0),
    ),
)  # fmt: skip
WIDE = (
    Case("128 columns", heads=2, geometry=Geometry(0.1, right=0), width=128, value_width=128),
    Case("256 columns", heads=2, geometry=Geometry(0.1, right=0), width=256, value_width=256),
)
BOUNDED = (POLICY, POLICY._replace(lo=1.5, hi=2.5), Lowered("entropy", (0.3, 1.0)), Lowered("entropy", (2.0,)))
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SMALL = Tiles(32, 16, 4, 1)
BY_ADDRESS = ("window", "packed")
BY_DESCRIPTOR = ("lengths", "packed", "two-sided window, unequal heads")
ON_GPU = torch.cuda.is_available()
IN_PARTS = ("causal",)  # where the parts of the backward are compiled one by one too
GPU_CASES = {torch.bfloat16: CASES[1:-3] + CASES[-1:] + WIDE, torch.float16: CASES[2:3], torch.float32: CASES[2:3]}


INTERPRETED = (
    "causal", "grouped, from the end", "lengths", "boolean mask", "boolean mask, scale of 0",
    "causal, scale of 0 in float32", "bias and softcap", "packed",
)  # fmt: skip
"""What the interpreter, which is slow, runs unless all is asked for."""


def _marks(case: Case, dtype: torch.dtype) -> list[Any]:
    return [] if case.name in INTERPRETED and dtype == torch.float32 else [pytest.mark.thorough]


def combinations() -> list[Any]:
    found = [pytest.param(case, dtype, "cuda", id=f"{case.name}-{dtype}", marks=pytest.mark.gpu)
             for dtype, cases in GPU_CASES.items() for case in cases]  # fmt: skip
    if not ON_GPU:
        for dtype, cases in ((torch.float32, CASES), (torch.float16, CASES[2:3])):
            found += [
                pytest.param(case, dtype, "cpu", id=f"{case.name}-{dtype}-interpreted", marks=_marks(case, dtype))
                for case in cases
            ]
    return found


@pytest.fixture(autouse=True)
def device_there(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not ON_GPU:
        pytest.skip("needs an NVIDIA GPU")


def made(case: Case, dtype: torch.dtype, device: str) -> Inputs:
    wide = {"width": 64, "value_width": 64} if device == "cuda" and case.width == case.value_width == 16 else {}
    return inputs(Case(**{**case.__dict__, **wide}).grown(5) if device == "cuda" else case, dtype, device)


def tiles(given: Inputs) -> Tiles | None:
    """On a GPU what the tables say, in the interpreter small tiles; keys by address here and by descriptor there."""
    name = given.case.name
    if given.q.is_cuda:
        return Tiles(64, 32, 4, 2) if name in BY_ADDRESS else None
    return SMALL._replace(descriptors=name in BY_DESCRIPTOR)


def assert_close(got: Tensor | None, expected: Tensor, tolerance: float, what: str) -> None:
    """The error's norm against that of the expected values; infinities agree in place."""
    assert got is not None, what
    assert got.shape == expected.shape, what
    got = got.double()
    assert not got.isnan().any(), what
    finite = expected.isfinite()
    assert torch.equal(got[~finite], expected[~finite]), what
    error = (got[finite] - expected[finite]).norm() / (expected[finite].norm() + 1e-6)
    assert error <= tolerance, f"{what}: {error:.2e} > {tolerance:.0e}"


def assert_all_close(got: Sequence[Tensor | None], expected: Sequence[Tensor], tolerance: float, what: str) -> None:
    for name, a, b in zip(("dq", "dk", "dv", "dbeta"), got, expected, strict=False):
        assert_close(a, b, tolerance, f"{name} {what}")


def assert_stats_close(got: tuple[Tensor | None, ...], expected: RowStats, tolerance: float) -> None:
    for name, value in zip(RowStats._fields, got, strict=True):
        if name != "count":
            assert_close(value, getattr(expected, name), tolerance, name)
    assert torch.equal(got[4], expected.count)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("case", "dtype", "device"), combinations())
def test_forward_and_backward(case: Case, dtype: torch.dtype, device: str) -> None:
    given = made(case, dtype, device)
    geometry, options, tile = given.case.geometry, given.options, tiles(given)
    tolerance = TOLERANCES[dtype]
    q, k, v = (x.detach().double().nan_to_num().requires_grad_() for x in (given.q, given.k, given.v))
    z, seen = logits(given, q, k)
    expected = stats(z, seen)
    beta64 = POLICY(expected).detach().requires_grad_()
    out64, lse64 = attention(z, seen, v, beta64)

    with_min = prefill.row_stats(given.q, given.k, geometry, with_min=True, config=tile, **options)
    got, beta, scaled = prefill.row_stats_and_scaled_query(given.q, given.k, geometry, POLICY, config=tile, **options)
    assert got[3] is None
    for found in (with_min, (*got[:3], with_min[3], got[4])):
        assert_stats_close(found, expected, 3e-5)
    assert_close(beta, beta64, 3e-5, "beta")
    assert_close(scaled, given.q.double() * beta[..., None], TOLERANCES[dtype], "scaled query")
    assert beta.dtype == torch.float32
    assert scaled is not None
    assert scaled.dtype == dtype

    rows = beta64.detach().float()
    out, lse = prefill.attend(given.q, given.k, given.v, rows, geometry, config=tile, **options)
    assert out.dtype == dtype
    assert_close(lse, lse64, 3e-5, "lse")
    assert_close(out, out64, tolerance, "out")

    of_attention = {"out": out, "lse": lse, "grad_out": given.do}
    of_stats = {"grad_sum": given.d_sum, "grad_moment": given.d_moment}
    same: dict[str, Any] = {"row_max": got[0], "config": (tile, tile), **options}
    cotangents = (given.d_sum.double(), given.d_moment.double())
    stats64 = torch.autograd.grad((expected.sum, expected.moment), (q, k), cotangents, retain_graph=True)
    attend64 = torch.autograd.grad(out64, (q, k, v, beta64), given.do.double())
    both64 = (attend64[0] + stats64[0], attend64[1] + stats64[1], *attend64[2:])
    found = gradient.backward(
        given.q, given.k, given.v, rows, geometry, **of_attention, **of_stats, **same, need_beta=True
    )
    assert_all_close(found, both64, tolerance, "of both")
    if given.q.is_cuda and case.name not in IN_PARTS:
        return

    found = gradient.backward(given.q, given.k, given.v, rows, geometry, **of_attention, **same, need_beta=True)
    assert_all_close(found, attend64, tolerance, "of attention")
    found = gradient.backward(given.q, given.k, None, None, geometry, **of_stats, **same)
    assert found[2:] == (None, None)
    assert_all_close(found[:2], stats64, tolerance, "of statistics")
    alone, delta = gradient.beta_gradient(
        given.q, given.k, given.v, rows, geometry, **of_attention, row_max=got[0], config=tile, **options
    )
    assert_close(alone, attend64[3], tolerance, "dbeta alone")
    assert_close(delta, (given.do.double() * out64).sum(-1), tolerance, "delta")
    found = gradient.backward(
        given.q, given.k, given.v, rows, geometry, **of_attention, **of_stats, **same, delta=delta
    )
    assert_all_close(found[:3], both64, tolerance, "of both, after dbeta")


DEVICE = pytest.param("cuda", marks=pytest.mark.gpu) if ON_GPU else "cpu"


@pytest.mark.parametrize("device", [DEVICE])
def test_dropout_is_the_same_forward_and_backward(device: str) -> None:
    given = inputs(Case("dropout", geometry=Geometry(0.25, right=0), value_width=40), torch.float32, device)
    q, k, v = (x.double().requires_grad_() for x in (given.q, given.k, given.v))
    geometry, beta = given.case.geometry, torch.full(given.q.shape[:-1], 1.5, device=device)
    dropped = {"dropout_p": 0.3, "seed": 7}
    eye = torch.eye(40, device=device).expand(1, 1, 40, 40).contiguous()
    z, seen = logits(given, q, k)
    plain, _ = attention(z, seen, eye.double(), beta.double())
    weights, _ = prefill.attend(given.q, given.k, eye, beta, geometry, config=SMALL, **dropped)
    other, _ = prefill.attend(given.q, given.k, eye, beta, geometry, config=Tiles(16, 32, 4, 1), **dropped)
    torch.testing.assert_close(weights, other)
    keep = weights != 0
    assert 0.55 < keep[seen].float().mean() < 0.85
    torch.testing.assert_close(weights, (plain * keep / 0.7).float())

    out64, _ = attention(z, seen, v, beta.double(), keep.double() / 0.7)
    out, lse = prefill.attend(given.q, given.k, given.v, beta, geometry, config=SMALL, **dropped)
    assert_close(out, out64, 2e-5, "out")
    expected = torch.autograd.grad(out64, (q, k, v), given.do.double())
    found = gradient.backward(
        given.q, given.k, given.v, beta, geometry, out=out, lse=lse, grad_out=given.do, config=(SMALL, SMALL), **dropped
    )
    for name, a, b in zip(("dq", "dk", "dv"), found[:3], expected, strict=True):
        assert_close(a, b, 2e-5, name)


@triton.jit
def _kept_kernel(out, first_row, first_key, p, N: tl.constexpr):
    row, key = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    keep = kept(7, 0, first_row + row, first_key + key, p)
    tl.store(out + row * N + key, keep.to(tl.int8))


@pytest.mark.parametrize("device", [DEVICE])
def test_dropout_of_long_sequences_does_not_repeat(device: str) -> None:
    def pattern(row: int, key: int) -> Tensor:
        out = torch.empty(32, 32, dtype=torch.int8, device=device)
        launch: Any = _kept_kernel[(1,)]
        launch(out, row, key, 0.5, N=32)
        return out

    start = pattern(0, 0)
    assert torch.equal(start, pattern(0, 0))
    assert torch.equal(start[16:, 8:], pattern(16, 8)[:16, :24])
    for row, key in ((1 << 16, 0), (1 << 20, 0), (0, 1 << 20), ((1 << 31) - 64, 0)):
        agreement = (start == pattern(row, key)).float().mean().item()
        assert 0.4 < agreement < 0.6


@pytest.mark.parametrize("device", [DEVICE])
def test_dropout_of_everything(device: str) -> None:
    given = inputs(Case("dropout"), torch.float32, device)
    beta, dropped = torch.ones(given.q.shape[:-1], device=device), {"dropout_p": 1.0, "seed": 7}
    out, lse = prefill.attend(given.q, given.k, given.v, beta, given.case.geometry, config=SMALL, **dropped)
    assert (out == 0).all()
    gradients = gradient.backward(
        given.q, given.k, given.v, beta, given.case.geometry, out=out, lse=lse, grad_out=given.do,
        config=(SMALL, SMALL), **dropped,
    )  # fmt: skip
    assert all(g is None or (g == 0).all() for g in gradients)


@pytest.mark.parametrize("device", [DEVICE])
@pytest.mark.parametrize("adversary", ["offset", "one huge", "equal", "long tail"])
def test_adversarial_logits(adversary: str, device: str) -> None:
    given = inputs(Case(adversary, key_heads=1, mask="bias"), torch.float32, device)
    bias = torch.zeros(1, 1, 40, 40, device=device)
    if adversary == "offset":
        bias += torch.tensor([1e4, -1e4], device=device).repeat(20)[:, None]
    elif adversary == "one huge":
        bias[..., 3] = 3e4
    elif adversary == "equal":
        given.q.zero_()
    else:
        bias[..., 1:] = -1e30
    given.options["mask"] = bias
    z, seen = logits(given, given.q.double(), given.k.double())
    expected = stats(z, seen)
    q, k, geometry = given.q, given.k, given.case.geometry
    with_min = prefill.row_stats(q, k, geometry, with_min=True, config=SMALL, **given.options)
    got, beta, _ = prefill.row_stats_and_scaled_query(q, k, geometry, POLICY, config=SMALL, **given.options)
    tolerance = 2e-3 if adversary == "offset" else 3e-5  # float32 logits of 1e4 are 1e-3 apart
    for found in (with_min, (*got[:3], with_min[3], got[4])):
        assert_stats_close(found, expected, tolerance)
    out, lse = prefill.attend(given.q, given.k, given.v, beta, given.case.geometry, config=SMALL, **given.options)
    assert_close(out, attention(z, seen, given.v.double(), beta.double())[0], tolerance, "out")
    gradients = gradient.backward(
        given.q, given.k, given.v, beta, given.case.geometry, out=out, lse=lse, grad_out=given.do, row_max=got[0],
        grad_sum=given.d_sum, grad_moment=given.d_moment, need_beta=True, config=(SMALL, SMALL), **given.options,
    )  # fmt: skip
    assert all(g is not None and g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("device", [DEVICE])
def test_policy_of_the_count(device: str) -> None:
    given = inputs(Case("count", geometry=Geometry(0.25, right=0)), torch.float32, device)
    lowered = Lowered("log_count", (0.5, 0.25), lo=1.0, hi=3.0)
    got, beta, scaled = prefill.row_stats_and_scaled_query(
        given.q, given.k, given.case.geometry, lowered, scaled_query=False, config=SMALL
    )
    assert scaled is None
    assert got[3] is None
    torch.testing.assert_close(beta, lowered(RowStats(*got)))


@pytest.mark.parametrize("device", [DEVICE])
def test_gradient_of_a_policy(device: str) -> None:
    given = inputs(Case("policy", heads=2, key_heads=1, strided=True, lengths=(31,)), torch.float32, device)
    got = prefill.row_stats(given.q, given.k, given.case.geometry, config=SMALL, **given.options)
    got[1][0, 0, 3], got[2][0, 0, 3] = 0.0, 0.0  # a row without keys
    total, moment = (x.double().requires_grad_() for x in got[1:3])
    for lowered in BOUNDED:
        beta = lowered(RowStats(got[0], total, moment, None, got[4])) + 0 * (total + moment)
        expected = list(torch.autograd.grad(beta, (total, moment), given.d_sum.double()))
        expected[1][0, 0, 3] = 0.0
        found = gradient.policy_gradient(lowered, got[1], got[2], given.d_sum)
        for name, a, b in zip(("sum", "moment"), found, expected, strict=True):
            assert_close(a, b, 1e-5, name)


@pytest.mark.parametrize("device", [DEVICE])
def test_gradient_of_the_scaled_query_is_that_of_its_steps(device: str) -> None:
    case = Case("policy", batch=2, heads=2, key_heads=1, width=16, value_width=16, strided=True, lengths=(0, 31))
    given = inputs(case, torch.float32, device)
    for lowered in BOUNDED:
        stats, beta, _ = prefill.row_stats_and_scaled_query(
            given.q, given.k, given.case.geometry, lowered, config=SMALL, **given.options
        )
        dbeta = (given.do.double() * given.q.double()).sum(-1).float()
        grad_sum, grad_moment = gradient.policy_gradient(lowered, stats[1], stats[2], dbeta)
        both = {"row_max": stats[0], "config": (SMALL, SMALL), **given.options}
        dq, dk, _, _ = gradient.backward(
            given.q, given.k, None, None, given.case.geometry, grad_sum=grad_sum, grad_moment=grad_moment, **both
        )
        found = gradient.backward(
            given.q, given.k, None, beta, given.case.geometry, grad_scaled=given.do, lowered=lowered, row_sum=stats[1],
            row_moment=stats[2], **both,
        )  # fmt: skip
        assert_close(found[0], dq.double() + beta[..., None].double() * given.do.double(), 1e-5, "dq")
        assert_close(found[1], dk.double(), 1e-5, "dk")


@pytest.mark.parametrize("device", [DEVICE])
@pytest.mark.parametrize("sizes", [(0, 2, 5, 7), (1, 2, 0, 7), (1, 2, 5, 0)])
def test_empty(sizes: tuple[int, int, int, int], device: str) -> None:
    batch, heads, queries, keys = sizes
    q, k = torch.randn(batch, heads, queries, 16, device=device), torch.randn(batch, heads, keys, 16, device=device)
    got = prefill.row_stats(q, k, Geometry(0.25), with_min=True)
    assert (got[1] == 0).all()
    assert (got[0] == -torch.inf).all()
    beta = torch.ones_like(got[1])
    out, lse = prefill.attend(q, k, k, beta, Geometry(0.25))
    assert (out == 0).all()
    gradients = gradient.backward(
        q, k, k, beta, Geometry(0.25), out=out, lse=lse, grad_out=torch.ones_like(out), row_max=got[0], need_beta=True
    )
    assert all(g is not None and (g == 0).all() for g in gradients)


def test_the_allocator_that_triton_had_stays() -> None:
    variable = _allocation._allocator
    before, seen = variable.get(), []
    launch_module.with_scratch(lambda: seen.append(variable.get()))
    assert seen == [launch_module._scratch]
    assert variable.get() is before


def test_repeated_rows_have_no_descriptor() -> None:
    x = torch.randn(1, 2, 8, 16)

    def describable(x: Tensor) -> bool:
        return launch_module._describable(launch_module.form_of(x))

    assert describable(x)
    assert describable(x[:, :1].expand(1, 2, 8, 16))
    assert not describable(x[:, :, :1].expand(1, 2, 8, 16))
    assert not describable(x[..., ::2])
    assert not describable(torch.randn(1, 2, 8, 20)[..., 1:17])  # strides are fine, the beginning is not


def test_refusals() -> None:
    q = torch.randn(1, 2, 5, 16)
    beta, geometry = torch.ones(1, 2, 5), Geometry(0.25)
    with pytest.raises(TypeError, match="float16, bfloat16 or float32"):
        prefill.row_stats(q.double(), q.double(), geometry)
    with pytest.raises(ValueError, match="up to 256 columns"):
        prefill.row_stats(torch.randn(1, 2, 5, 300), torch.randn(1, 2, 5, 300), geometry)
    with pytest.raises(ValueError, match="no gradient of the mask"):
        prefill.row_stats(q, q, geometry, mask=torch.zeros(5, 5, requires_grad=True))
    with pytest.raises(ValueError, match="do not fit together"):
        prefill.row_stats(q, torch.randn(1, 3, 5, 16), geometry)
    with pytest.raises(ValueError, match="needs row_max"):
        gradient.backward(q, q, q, beta, geometry, grad_sum=beta, grad_moment=beta)
    with pytest.raises(ValueError, match="without grad_out"):
        gradient.backward(q, q, None, None, geometry, row_max=beta, grad_sum=beta, grad_scaled=q, lowered=POLICY)
    with pytest.raises(ValueError, match="needs the policy"):
        gradient.backward(q, q, None, beta, geometry, row_max=beta, row_sum=beta, row_moment=beta, grad_scaled=q)
    with pytest.raises(ValueError, match="up to 8 coefficients"):
        prefill.row_stats_and_scaled_query(q, q, geometry, Lowered("entropy", (1.0,) * 9))
    with pytest.raises(ValueError, match="both cu_q and cu_k"):
        prefill.row_stats(q, q, geometry, cu_q=torch.tensor([0, 5]))
