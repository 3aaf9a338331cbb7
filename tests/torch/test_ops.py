"""The custom operators: what torch.library promises of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sharpmax.torch import ops
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
        return q, k, None, None, *starts, *geometry, with_min, "streaming"
    q, k, _ = tensors(dtype)
    return q, k, *masks(kind, dtype), None, None, *geometry, with_min, "streaming"


def attend_arguments(
    kind: str, geometry: Geometry, dropout: float, dtype: torch.dtype = torch.float32
) -> tuple[Any, ...]:
    seed = torch.tensor(7) if dropout else None
    starts: Any = (None, None)
    if kind == "packed":
        (q, k, v), starts = packed(dtype)
    else:
        q, k, v = tensors(dtype)
    beta = (1 + torch.rand(q.shape[:-1], dtype=dtype)).requires_grad_()
    row_max = torch.zeros(q.shape[:-1], dtype=dtype)
    return q, k, v, beta, row_max, *masks(kind, dtype), *starts, seed, *geometry, dropout, "streaming"


@pytest.mark.parametrize("kind", ["plain", "bias", "lengths", "packed"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_opcheck_of_row_stats_streaming(kind: str, geometry: str) -> None:
    arguments = stats_arguments(kind, GEOMETRIES[geometry], geometry == "full")
    torch.library.opcheck(ops.row_stats, arguments)


@pytest.mark.parametrize("kind", ["plain", "bias", "lengths", "packed"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_opcheck_of_attend_streaming(kind: str, geometry: str) -> None:
    torch.library.opcheck(ops.attend, attend_arguments(kind, GEOMETRIES[geometry], 0.2 if geometry == "full" else 0.0))


@pytest.mark.parametrize("kind", ["plain", "bias", "lengths", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck_of_the_backward_operators_streaming(kind: str, dtype: torch.dtype) -> None:
    geometry = GEOMETRIES["causal_softcap"]
    bare = [x.detach() if isinstance(x, Tensor) else x for x in stats_arguments(kind, geometry, False, dtype)]
    top, total, moment, *_ = ops.row_stats(*bare)
    need_mask = kind == "bias"
    arguments = (*bare[:6], top, torch.randn_like(total), torch.randn_like(moment), *geometry, need_mask, "streaming")
    torch.library.opcheck(ops.row_stats_backward, arguments)
    bare = [x.detach() if isinstance(x, Tensor) else x for x in attend_arguments(kind, geometry, 0.0, dtype)]
    bare[3] = bare[3].float()
    out, lse = ops.attend(*bare)
    results = (out, lse, torch.randn_like(out))
    for need_beta in (False, True):
        arguments = (*bare[:10], *results, *geometry, 0.0, need_beta, need_mask, "streaming")
        torch.library.opcheck(ops.attend_backward, arguments)


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
    assert torch.autograd.gradcheck(shifted, leaves, atol=1e-5)
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

    assert torch.autograd.gradcheck(output, leaves, atol=1e-5)


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
