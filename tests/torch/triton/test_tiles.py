"""Which tiles calls get, and what they take of Hopper's shared memory, by compiling kernels without a GPU."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
import torch

pytest.importorskip("triton")

from sharpmax.torch.installed import triton_version
from sharpmax.torch.triton import tiles as tiles_module
from tests.torch.triton.compiled import LAUNCHES, printed

LIMIT = 232_448
"""Bytes that a program may have on Hopper."""
CALLS = """
import json

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


@pytest.mark.parametrize("kernel", get_args(tiles_module.Kernel))
def test_tiles_under_a_mask_and_of_a_bounded_band(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles_module, "_large_memory", lambda _: True)
    for width in (16, 64, 65, 128, 129, 256):

        def found(band: bool, mask_bytes: int, width: int = width) -> Any:
            device = torch.device("cpu")
            return tiles_module.tiles_for(kernel, width, torch.bfloat16, device, banded=band, mask_bytes=mask_bytes)

        limit = 64 if width <= 64 else 128 if width <= 128 else 256
        assert (found(False, 0) != found(True, 0)) == ((kernel, limit) in tiles_module.LARGE_BANDED)
        assert (found(False, 0) != found(False, 1)) == ((kernel, limit) in tiles_module.LARGE_MASKED)
        assert (found(False, 2) != found(False, 4)) == ((kernel, limit) in tiles_module.LARGE_MASKED_WIDE)
        assert all(found(True, size) == found(False, size) for size in (1, 2, 4))
