"""The interpreter of Gluon: what a kernel with a pipeline gives, and that faults in it are noticed."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sharpmax.torch.triton import hopper
from sharpmax.torch.triton.hopper_kernel import advance, barriers, load_tile, store_tile, synchronize
from tests.gluon import HazardError, run
from tests.gluon.language import LANGUAGE
from tests.gluon.values import Value

ROWS = gl.constexpr(64)
STAGES = gl.constexpr(2)


@gluon.jit
def _load(what):
    x_desc, y_desc, x_tile, y_tiles, x_full, full, free, count = what
    mbarrier.expect(x_full.index(0), x_desc.block_type.nbytes)
    load_tile(x_desc, [0, 0, 0, 0], x_full.index(0), x_tile)
    stage = 0
    phase = 1
    for i in range(count):
        mbarrier.wait(free.index(stage), phase)
        mbarrier.expect(full.index(stage), y_desc.block_type.nbytes)
        load_tile(y_desc, [0, 0, i * ROWS, 0], full.index(stage), y_tiles.index(stage))
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _compute(what, FAULT: gl.constexpr):
    out_desc, sums, x_tile, y_tiles, x_full, full, free, count = what
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    zero = gl.zeros([ROWS, ROWS], gl.float32, layout=layout)
    total = zero
    mbarrier.wait(x_full.index(0), 0)
    stage = 0
    phase = 0
    for _ in range(count):
        if FAULT != "nobody waits for a tile":
            mbarrier.wait(full.index(stage), phase)
        total = warpgroup_mma(x_tile, y_tiles.index(stage).permute([1, 0]), total, is_async=True)
        if FAULT == "a tile is given back early":
            mbarrier.arrive(free.index(stage), count=1)
        if FAULT != "nobody waits for a product":
            total = warpgroup_mma_wait(0, deps=(total,))
        synchronize()
        if FAULT != "a tile is given back early" and FAULT != "no tile is given back":  # noqa: PLR1714
            mbarrier.arrive(free.index(stage), count=2 if FAULT == "a tile is given back twice" else 1)
        stage, phase = advance(stage, phase, STAGES)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    gl.store(sums + row + (1 if FAULT == "a number is stored beside a tensor" else 0), gl.sum(total, 1))
    x_tile.store(total.to(x_tile.dtype))
    if FAULT != "there is no fence":
        fence_async_shared()
    store_tile(out_desc, [0, 0, 0, 0], x_tile)
    if FAULT == "a tile is written while it is copied":
        x_tile.store(zero.to(x_tile.dtype))
        fence_async_shared()
    if FAULT != "nobody waits for a copy":
        tma.store_wait(0)


@gluon.jit
def pipeline(x_desc, y_desc, out_desc, sums, count, FAULT: gl.constexpr):
    """``x y^T`` added up over blocks of ``y``."""
    dtype: gl.constexpr = x_desc.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_tile = gl.allocate_shared_memory(dtype, [ROWS, ROWS], shared)
    y_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, ROWS], shared)
    x_full = barriers(1, 1)
    full = barriers(STAGES, 1)
    free = barriers(STAGES, 1)
    fence_async_shared()
    synchronize()
    gl.warp_specialize([
        (_compute, ((out_desc, sums, x_tile, y_tiles, x_full, full, free, count), FAULT)),
        (_load, ((x_desc, y_desc, x_tile, y_tiles, x_full, full, free, count),)),
    ], [1], [24])  # fmt: skip


def result(fault: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Output, sums and what they should be."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1, 1, rows, 64, generator=generator).half() for rows in (64, 5 * 64))
    out, sums = torch.full_like(x, torch.nan), torch.full((64,), torch.nan)
    tiles = [hopper.descriptor(t, 64) for t in (x, y, out)]
    run(pipeline, 1, *tiles, sums, 5, fault, seed=seed)
    return out[0, 0].float(), sums, x[0, 0].float() @ y[0, 0].float().unflatten(0, (5, 64)).sum(0).T


@pytest.mark.parametrize("seed", range(5))
def test_a_pipeline_in_any_order(seed: int) -> None:
    out, sums, expected = result("", seed)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(sums, expected.sum(1), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("nobody waits for a tile", "more arrivals|wait for each other|still to come|^$"),
        ("nobody waits for a product", "has not been waited for"),
        ("nobody waits for a copy", "has not waited for"),
        ("a tile is given back early", None),
        ("a tile is given back twice", "more arrivals"),
        ("a tile is written while it is copied", None),
        ("no tile is given back", "2 partitions wait for each other"),
        ("there is no fence", "before a fence"),
        ("a number is stored beside a tensor", "place 64 is read or written, of 64"),
    ],
)
def test_faults_are_noticed(fault: str, sentence: str | None) -> None:
    """By a sentence in any order of things, or as a wrong result in some."""
    noticed: list[str | None] = []
    for seed in range(10):
        try:
            out, _, expected = result(fault, seed)
        except HazardError as error:
            noticed.append(str(error))
        else:
            noticed += [] if torch.allclose(out, expected, rtol=1e-3, atol=1e-3) else [None]
    assert len(noticed) >= (10 if sentence else 3)
    assert all(re.search(sentence, said or "") if sentence else said is None for said in noticed)


def test_extremes_are_of_what_is_a_number_if_anything_is() -> None:
    x = Value(torch.tensor([[torch.nan, torch.nan], [torch.nan, 2.0], [-torch.inf, 1.0]]))
    for found, expected in (
        (LANGUAGE.max(x, 1), [torch.nan, 2.0, 1.0]),
        (LANGUAGE.min(x, 1), [torch.nan, 2.0, -torch.inf]),
    ):
        torch.testing.assert_close(found.data, torch.tensor(expected), equal_nan=True)
