"""Rows next to a jump of the policy, by the kernels for Hopper: on one side of it in all that is made of them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from sharpmax.core.policies import lowered
from sharpmax.torch.geometry import Geometry
from sharpmax.torch.triton import prefill
from tests.torch.threshold_cases import KEYS, check, rows
from tests.torch.triton import decode_hopper_cases
from tests.torch.triton.gradient_cases import by_kernels
from tests.torch.triton.hopper_cases import DEVICE, ON_HOPPER
from tests.torch.triton.oracle import Case, Inputs

TYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_attention_with_gradients(dtype: torch.dtype, hopper_kernels: list[str]) -> None:
    given = rows(dtype, columns=64)
    q, k, v, g = (x.to(DEVICE) for x in given[:4])
    form, geometry = lowered(given.policy), Geometry(1.0)
    assert form is not None
    (top, *_), beta, _ = prefill.row_stats_and_scaled_query(q, k, geometry, form, scaled_query=False, config="hopper")
    out, _ = prefill.attend(q, k, v, beta, geometry, row_max=top, config="hopper")
    case = Case("jump", batch=len(q), queries=1, keys=KEYS, width=64, value_width=64, geometry=geometry)
    nothing = torch.zeros_like(beta)
    gradients = by_kernels(Inputs(q, k, v, g, nothing, nothing, {}, case), form)
    check(given, {"beta": beta, "output": out, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))})
    assert ON_HOPPER or set(hopper_kernels) >= {"hopper_stats_kernel", "hopper_query_kernel", "hopper_key_kernel"}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.usefixtures("hopper_kernels")
def test_caches(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = decode_hopper_cases.seen_launches(monkeypatch)
    given = rows(dtype, columns=64)
    query, key, value = (x.to(DEVICE) for x in given[:3])
    result = decode_hopper_cases.run((query, key, value), policy=given.policy, scale=1.0)
    check(given, {"beta": result.beta, "output": result.output})
    assert len(launches) == 1
