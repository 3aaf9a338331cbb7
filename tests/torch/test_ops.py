"""The custom operators: what torch.library promises of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax
from sharpmax.core.policies import Detached, Lowered, lowered
from sharpmax.torch import fused, ops, reference
from sharpmax.torch.geometry import Geometry

GEOMETRIES = {
    "full": Geometry(0.5),
    "causal_softcap": Geometry(0.5, 2.0, right=0),
    "window_lower_right": Geometry(0.5, left=3, right=0, lower_right=True),
}


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4))
    return [(2 * torch.randn(s, generator=g, dtype=torch.float64)).to(dtype).requires_grad_() for s in shapes]


def packed(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    q, k, v = (x[:1].detach().requires_grad_() for x in tensors(dtype))
    return [q, k, v], (torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.tensor([0, 3, 4, 7], dtype=torch.int32))


def masks(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor | None, Tensor | None]:
    if kind == "bias":
        return torch.randn(1, 4, 1, 7, dtype=dtype, requires_grad=True), None
    if kind == "lengths":
        return None, torch.tensor([3, 7], dtype=torch.int32)
    return None, None


def stats_arguments(
    kind: str, geometry: Geometry, with_min: bool, dtype: torch.dtype = torch.float32
) -> tuple[Any, ...]:
    if kind == "packed":
        (q, k, _), starts = packed(dtype)
        return q, k, None, None, *starts, geometry.numbers, with_min, "streaming"
    q, k, _ = tensors(dtype)
    return q, k, *masks(kind, dtype), None, None, geometry.numbers, with_min, "streaming"


def attend_arguments(
    kind: str, geometry: Geometry, dropout: float, dtype: torch.dtype = torch.float32, rounded: bool = False
) -> tuple[Any, ...]:
    seed = torch.tensor(7) if dropout else None
    starts: Any = (None, None)
    if kind == "packed":
        (q, k, v), starts = packed(dtype)
    else:
        q, k, v = tensors(dtype)
    beta = (1 + torch.rand(q.shape[:-1], dtype=dtype)).requires_grad_()
    return q, k, v, beta, None, *masks(kind, dtype), *starts, seed, geometry.numbers, dropout, "streaming", rounded


@pytest.mark.parametrize("kind", ["plain", "bias", "lengths", "packed"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_opcheck_of_row_stats_streaming(kind: str, geometry: str) -> None:
    arguments = stats_arguments(kind, GEOMETRIES[geometry], geometry == "full")
    torch.library.opcheck(ops.row_stats.opaque, arguments)


@pytest.mark.parametrize("kind", ["plain", "bias", "lengths", "packed"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_opcheck_of_attend_streaming(kind: str, geometry: str) -> None:
    torch.library.opcheck(
        ops.attend.opaque, attend_arguments(kind, GEOMETRIES[geometry], 0.2 if geometry == "full" else 0.0)
    )


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("kind", ["plain", "bias", "lengths", "packed"])
def test_two_byte_outputs_are_rounded_where_that_was_asked_for(kind: str, rounded: bool) -> None:
    """Forward; and backward an output of either kind is taken, whichever way it goes."""
    for geometry in (GEOMETRIES["causal_softcap"], GEOMETRIES["full"]):
        arguments = attend_arguments(kind, geometry, 0.0, torch.bfloat16, rounded)
        torch.library.opcheck(ops.attend.opaque, arguments, test_utils=("test_schema", "test_faketensor"))
        q, k, v, beta, *rest = (x.detach() if isinstance(x, Tensor) else x for x in arguments)
        v, beta = torch.randn_like(k), beta.float()  # as wide as queries: torch's kernel for the CPU serves, too
        found, lse = ops.attend(q, k, v, beta, *rest)
        assert found.dtype == (torch.bfloat16 if rounded else torch.float32)
        after = (geometry.numbers, 0.0, True, False, True, "streaming")
        for out in (found, found.bfloat16()):
            gradients = ops.attend_backward(q, k, v, beta, *rest[:6], out, lse, torch.ones_like(found), *after)
            assert [x.dtype for x in gradients[:3]] == [torch.bfloat16] * 3
            assert gradients[3].isfinite().all()


@pytest.mark.parametrize("kind", ["plain", "bias", "lengths", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck_of_the_backward_operators_streaming(kind: str, dtype: torch.dtype) -> None:
    geometry = GEOMETRIES["causal_softcap"]
    bare = [x.detach() if isinstance(x, Tensor) else x for x in stats_arguments(kind, geometry, False, dtype)]
    top, total, moment, *_ = ops.row_stats(*bare)
    need_mask = kind == "bias"
    arguments = (
        *bare[:6],
        top,
        torch.randn_like(total),
        torch.randn_like(moment),
        geometry.numbers,
        need_mask,
        "streaming",
    )
    torch.library.opcheck(ops.row_stats_backward.opaque, arguments)
    bare = [x.detach() if isinstance(x, Tensor) else x for x in attend_arguments(kind, geometry, 0.0, dtype)]
    bare[3] = bare[3].float()
    out, lse = ops.attend(*bare)
    results = (out, lse, torch.randn_like(out))
    for need_beta in (False, True):
        arguments = (*bare[:10], *results, geometry.numbers, 0.0, need_beta, need_mask, True, "streaming")
        torch.library.opcheck(ops.attend_backward.opaque, arguments)


@pytest.mark.parametrize("kind", ["plain", "bias", "lengths", "packed"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.usefixtures("small_blocks")
def test_gradcheck_of_row_stats_streaming(kind: str, geometry: str) -> None:
    arguments = stats_arguments(kind, GEOMETRIES[geometry], False, torch.float64)

    def totals(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        given = iter(leaves)
        _, total, moment, _, _ = ops.row_stats(*(next(given) if _is_leaf(x) else x for x in arguments))
        return total, moment

    def shifted(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        # The maximum carries no gradient: what does not depend on it, the logarithm of the sum and the mean, has one.
        given = iter(leaves)
        top, total, moment, _, _ = ops.row_stats(*(next(given) if _is_leaf(x) else x for x in arguments))
        seen = torch.isfinite(top)
        filled = torch.where(seen, total, 1.0)
        return torch.where(seen, top, 0.0) + filled.log(), torch.where(seen, top, 0.0) + moment / filled

    leaves = [x for x in arguments if _is_leaf(x)]
    assert torch.autograd.gradcheck(shifted, leaves, atol=1e-5, fast_mode=True)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad([x.sum() for x in totals(*leaves)], leaves))


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


@pytest.mark.parametrize("kind", ["plain", "bias", "lengths", "packed"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.usefixtures("small_blocks")
def test_gradcheck_of_attend_streaming(kind: str, geometry: str) -> None:
    arguments = attend_arguments(kind, GEOMETRIES[geometry], 0.0, torch.float64)
    leaves = [x for x in arguments if _is_leaf(x)]

    def output(*leaves: Tensor) -> Tensor:
        given = iter(leaves)
        return ops.attend(*(next(given) if _is_leaf(x) else x for x in arguments))[0]

    assert torch.autograd.gradcheck(output, leaves, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize("kind", ["plain", "lengths"])
def test_batched_cotangents_streaming(kind: str) -> None:
    for arguments, operator in (
        (attend_arguments(kind, GEOMETRIES["causal_softcap"], 0.0, torch.float64), ops.attend),
        (stats_arguments(kind, GEOMETRIES["causal_softcap"], False, torch.float64), ops.row_stats),
    ):
        leaves = [x for x in arguments if _is_leaf(x)]
        output = operator(*arguments)[0 if operator is ops.attend else 1]
        g = torch.randn(3, *output.shape, dtype=torch.float64)
        together = torch.autograd.grad(output, leaves, g, is_grads_batched=True, retain_graph=True)
        alone = [torch.autograd.grad(output, leaves, one, retain_graph=True) for one in g]
        for i, whole in enumerate(together):
            assert torch.allclose(whole, torch.stack([part[i] for part in alone]), atol=1e-12)


def test_unknown_implementation_is_refused() -> None:
    arguments = stats_arguments("plain", GEOMETRIES["full"], False)
    with pytest.raises(ValueError, match="streaming, triton"):
        ops.row_stats(*arguments[:-1], "fast")


# ----------------------------------------------------------------------------------------------------------------
# Operators with a policy inside: Triton's kernels, in its interpreter where there is no GPU
# ----------------------------------------------------------------------------------------------------------------

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
POLICIES: dict[str, Any] = {
    "paper": sharpmax.PAPER,
    "held": sharpmax.EntropyPolynomial(sharpmax.PAPER.coefficients, domain=(0.6, 1.2), beyond="hold_end"),
    "detached": sharpmax.detached(sharpmax.PAPER),
    "length": sharpmax.LogLength(0.7, 0.3),
    "constant": sharpmax.Constant(1.5),
}
KINDS: dict[str, tuple[Geometry, str]] = {
    "full": (Geometry(0.5), "plain"),
    "causal": (Geometry(0.5, right=0), "plain"),
    "softcap_window": (Geometry(0.5, 2.0, left=3, right=0, lower_right=True), "plain"),
    "lengths": (Geometry(0.5), "lengths"),
    "boolean": (Geometry(0.5), "boolean"),
}
EACH_WITH_EACH = [
    pytest.param(policy, kind, marks=() if (i - j) % len(KINDS) < 2 else pytest.mark.gpu)
    for i, policy in enumerate(POLICIES)
    for j, kind in enumerate(KINDS)
]
"""Triton's interpreter is slow: without a GPU, every policy with two kinds of calls."""

BY_DTYPE = {torch.float32: 3e-5, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def numbers(policy: Any) -> Any:
    form = lowered(policy)
    assert isinstance(form, Lowered)
    return fused.policy_numbers(form), isinstance(policy, Detached)


def policy_call(kind: str, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Geometry, Any]:
    geometry, masked = KINDS[kind]
    leaves = [x.detach()[:1, : x.shape[1] // 2].to(DEVICE).requires_grad_() for x in tensors(dtype)]
    mask = lengths = None
    if masked == "lengths":
        lengths = torch.tensor([3], dtype=torch.int32)
    elif masked == "boolean":
        mask = torch.rand(1, 1, 5, 7, generator=torch.Generator().manual_seed(3)) > 0.3
        mask[0, :, 2] = False
    return leaves, geometry, tuple(None if x is None else x.to(DEVICE) for x in (mask, lengths))


@pytest.fixture(autouse=True)
def device_there(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not ON_GPU:
        pytest.skip("needs an NVIDIA GPU")


def agree(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    assert found.shape == expected.shape, what
    error = (found.double() - expected).norm() / (expected.norm() + 1e-6)
    assert error <= tolerance, f"{what}: {error:.2e}"


@pytest.mark.parametrize(("policy", "kind"), EACH_WITH_EACH)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_with_a_policy_inside_match_the_reference(policy: str, kind: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    leaves, geometry, given = policy_call(kind, dtype)
    rule, tolerance = POLICIES[policy], BY_DTYPE[dtype]
    q, k, v = wide = [x.detach().double().requires_grad_() for x in leaves]
    stats = reference.row_stats(q, k, geometry, mask=given[0], key_lengths=given[1], with_min=False)
    beta = rule(stats)
    scaled = q * beta[..., None]
    out = reference.attend(q, k, v, beta, geometry, mask=given[0], key_lengths=given[1])

    found = fused.sharpened_query(*leaves[:2], *given, geometry.numbers, *numbers(rule))
    assert found[0].dtype == dtype
    assert [x.requires_grad for x in found] == [True] + 4 * [False]
    agree(found[0].detach(), scaled.detach(), tolerance, "scaled query")
    agree(found[4], beta.detach(), 3e-5, "beta")
    g = torch.randn(q.shape, generator=torch.Generator().manual_seed(5)).to(found[0])
    expected = torch.autograd.grad(scaled, (q, k), g.double(), retain_graph=True, materialize_grads=True)
    got = torch.autograd.grad(found[0], leaves[:2], g, materialize_grads=True)
    for name, a, b in zip(("dq", "dk"), got, expected, strict=True):
        agree(a, b, tolerance, f"{name} of the scaled query")

    whole = fused.adaptive_attention(*leaves, *given, None, None, None, geometry.numbers, *numbers(rule), 0.0)
    assert [x.requires_grad for x in whole] == [True] + 5 * [False]
    agree(whole[0].detach(), out.detach(), tolerance, "output")
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(6)).to(whole[0])
    expected = torch.autograd.grad(out, wide, g.double())
    for name, a, b in zip(("dq", "dk", "dv"), torch.autograd.grad(whole[0], leaves, g), expected, strict=True):
        agree(a, b, tolerance, f"{name} of attention")


@pytest.mark.parametrize("policy", ["paper", pytest.param("detached", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", ["causal", pytest.param("boolean", marks=pytest.mark.thorough)])
def test_opcheck_with_a_policy_inside(policy: str, kind: str) -> None:
    pytest.importorskip("triton")
    leaves, geometry, given = policy_call(kind)
    rule = numbers(POLICIES[policy])
    torch.library.opcheck(fused.sharpened_query.opaque, (*leaves[:2], *given, geometry.numbers, *rule))
    torch.library.opcheck(
        fused.adaptive_attention.opaque, (*leaves, *given, None, None, None, geometry.numbers, *rule, 0.0)
    )


@pytest.mark.thorough
def test_opcheck_of_the_backward_with_a_policy_inside() -> None:
    pytest.importorskip("triton")
    leaves, geometry, given = policy_call("lengths")
    q, k, v = (x.detach() for x in leaves)
    rule = numbers(sharpmax.PAPER)
    scaled, top, total, moment, beta = fused.sharpened_query(q, k, *given, geometry.numbers, *rule)
    stats = (q, k, top, total, moment)
    for saved in ((*given, *stats), (None,) * 7):
        torch.library.opcheck(
            fused.sharpened_query_backward.opaque, (scaled, beta, *saved, geometry.numbers, *rule[:-1])
        )
    results = fused.adaptive_attention(q, k, v, *given, None, None, None, geometry.numbers, *rule, 0.0)
    arguments = (q, k, v, *given, None, None, None, *results, torch.ones_like(results[0]), geometry.numbers, *rule, 0.0)
    torch.library.opcheck(fused.adaptive_attention_backward.opaque, arguments)


@pytest.mark.parametrize("policy", ["detached", "length", "constant"])
def test_without_gradient_of_beta_no_kernel_goes_over_the_keys_backward(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from sharpmax.torch import triton

    for name in ("policy_gradient", "beta_gradient"):
        monkeypatch.setattr(triton, name, lambda *a, **k: pytest.fail("beta has no gradient"))
    leaves, geometry, given = policy_call("causal")
    rule = numbers(POLICIES[policy])
    fused.adaptive_attention(*leaves, *given, None, None, None, geometry.numbers, *rule, 0.0)[0].sum().backward()
    monkeypatch.setattr(triton, "backward", lambda *a, **k: pytest.fail("the statistics have no gradient"))
    for x in leaves:
        x.grad = None
    fused.sharpened_query(*leaves[:2], *given, geometry.numbers, *rule)[0].sum().backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is None


@pytest.mark.parametrize("policy", ["paper", "detached"])
def test_batched_cotangents_with_a_policy_inside(policy: str) -> None:
    pytest.importorskip("triton")
    leaves, geometry, given = policy_call("boolean")
    rule = numbers(POLICIES[policy])
    for output, inputs in (
        (fused.sharpened_query(*leaves[:2], *given, geometry.numbers, *rule)[0], leaves[:1]),
        (fused.adaptive_attention(*leaves, *given, None, None, None, geometry.numbers, *rule, 0.0)[0], leaves),
    ):
        g = torch.randn(2, *output.shape, device=DEVICE)
        together = torch.autograd.grad(output, inputs, g, is_grads_batched=True, retain_graph=True)
        alone = [torch.autograd.grad(output, inputs, one, retain_graph=True) for one in g]
        for i, all_of_it in enumerate(together):
            torch.testing.assert_close(all_of_it, torch.stack([part[i] for part in alone]))
