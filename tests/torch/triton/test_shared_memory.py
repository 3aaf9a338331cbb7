"""What tiles take of a Hopper processor's shared memory, full and causal, by compiling kernels without a GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("triton")

from sharpmax.torch.installed import triton_version
from tests.torch.triton.compiled import LAUNCHES, printed

LIMIT = 232_448
"""Bytes that a program may have on Hopper."""
CALLS = """
import json

class Beside(Exception): pass

def show(compiled):
    print(json.dumps([compiled.metadata.name, compiled.metadata.shared]), flush=True)

def run(width, mask, geometry):
    q, k, v = (torch.empty(1, 1, 256, width, dtype=torch.bfloat16, device="meta") for _ in range(3))
    rows = torch.empty(1, 1, 256, device="meta")
    if mask is not None:
        mask = torch.empty(256, 256, dtype=getattr(torch, mask), device="meta")
    given = {"out": q, "lse": rows, "grad_out": q, "row_max": rows, "mask": mask}
    prefill.row_stats(q, k, geometry, mask=mask, with_min=True)
    prefill.attend(q, k, v, rows, geometry, mask=mask)
    gradient.beta_gradient(q, k, v, rows, geometry, **given)
    stats = {"row_max": rows, "grad_sum": rows, "grad_moment": rows, "mask": mask}
    gradient.backward(q, k, v, rows, geometry, **given | stats, delta=rows)
    gradient.backward(q, k, None, None, geometry, **stats)

run(WIDTH, MASK, Geometry(0.1))
run(WIDTH, MASK, Geometry(0.1, softcap=3.0, right=0))
"""
KERNELS = ["stats_kernel", "attend_kernel", "query_kernel", "query_kernel", "key_kernel", "query_kernel", "key_kernel"]


WIDEST = ((256, None), (256, "float64"))
"""Heads and masks that take most; the others are for a thorough run."""
CASES = [
    pytest.param(width, mask, marks=[] if (width, mask) in WIDEST else [pytest.mark.thorough])
    for width in (64, 128, 256)
    for mask in (None, "bool", "bfloat16", "float32", "float64")
]


@pytest.mark.parametrize(("width", "mask"), CASES)
def test_tiles_fit(width: int, mask: str | None) -> None:
    code = (LAUNCHES + CALLS).replace("WIDTH", str(width)).replace("MASK", repr(mask))
    found: list[Any] = [json.loads(line) for line in printed(code).splitlines()]
    assert [name for name, _ in found] == 2 * KERNELS
    assert all(0 < size <= LIMIT for _, size in found), (triton_version(), found)
