"""Which results of the portable kernels a NaN in a key reaches under a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sharpmax.torch.geometry import Geometry
from sharpmax.torch.triton import Tiles, gradient, prefill
from tests.torch.triton.oracle import Case, inputs

DEVICE = pytest.param("cuda", marks=pytest.mark.gpu) if torch.cuda.is_available() else "cpu"
SMALL = Tiles(32, 16, 4, 1)


def mask_of(kind: str, visible: Tensor) -> Tensor:
    """A boolean mask, or one of numbers that hides the same keys."""
    if kind == "boolean":
        return visible
    return torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, -torch.inf)


@pytest.mark.parametrize("device", [DEVICE])
@pytest.mark.parametrize("kind", ["boolean", "bias"])
def test_what_is_no_number_reaches_the_rows_that_see_it_alone(kind: str, device: str) -> None:
    case = Case("numbers", mask="boolean", geometry=Geometry(0.25), queries=40, keys=48)  # whole blocks of keys
    given = inputs(case, torch.float32, device)
    visible = given.options["mask"]
    mask = mask_of(kind, visible)
    k = given.k.clone()
    k[:, :, 21] = torch.nan
    sees = visible[..., 21].expand(given.q.shape[:-1])
    assert sees.any()
    assert not sees.all()
    stats = prefill.row_stats(given.q, k, case.geometry, mask=mask, with_min=True, config=SMALL)
    out, lse = prefill.attend(given.q, k, given.v, torch.ones_like(stats[1]), case.geometry, mask=mask, config=SMALL)
    for values in (stats[1], stats[2], lse, out.sum(-1)):
        assert torch.equal(values.isnan(), sees)


@pytest.mark.parametrize("device", [DEVICE])
@pytest.mark.parametrize("kind", ["boolean", "bias"])
def test_a_key_that_is_no_number_and_hidden_from_all_reaches_nothing_but_dq(kind: str, device: str) -> None:
    case = Case("numbers", mask="boolean", geometry=Geometry(0.25), queries=40, keys=53)
    given = inputs(case, torch.float32, device)
    visible = given.options["mask"].clone()
    hidden = [21, 50]  # in a whole block, and in one at the edge
    visible[..., hidden] = False
    mask = mask_of(kind, visible)

    def found(filled: float) -> tuple[Tensor | None, ...]:
        k = given.k.clone()
        k[:, :, hidden] = filled
        q, v, config = given.q, given.v, (SMALL, SMALL)
        stats = prefill.row_stats(q, k, case.geometry, mask=mask, config=SMALL)
        beta = torch.full_like(stats[1], 1.5)
        out, lse = prefill.attend(q, k, v, beta, case.geometry, mask=mask, config=SMALL)
        both: dict[str, Any] = {
            "out": out, "lse": lse, "grad_out": given.do, "row_max": stats[0], "mask": mask,
        }  # fmt: skip
        dbeta, delta = gradient.beta_gradient(q, k, v, beta, case.geometry, **both, config=SMALL)
        both |= {"grad_sum": dbeta, "grad_moment": dbeta, "delta": delta, "config": config}
        _, dk, dv, _ = gradient.backward(q, k, v, beta, case.geometry, **both)
        return *stats[:3], out, lse, dbeta, dk, dv

    for value, expected in zip(found(torch.nan), found(0.0), strict=True):
        assert value is not None
        assert expected is not None
        assert torch.equal(value, expected)
