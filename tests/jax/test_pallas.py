"""The kernels for GPUs: in Pallas' interpreter on any machine, lowered for CUDA from it, and run on a GPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

from sharpmax.jax.geometry import Geometry, Masks
from sharpmax.jax.pallas import tiles
from sharpmax.jax.pallas.tiles import Tiles
from tests.jax.attention_cases import quick
from tests.jax.pallas_cases import CASES, MARKS, check_statistics, on_gpu

pytestmark = MARKS


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("interpreted")
def test_statistics_match_the_oracle(case: str) -> None:
    dtype, tolerance = (jnp.bfloat16, 2e-2) if case == "causal" else (jnp.float32, 1e-4)
    check_statistics(*CASES[case], dtype, tolerance, quick)


@given(
    lengths=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    cut=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    band=st.tuples(st.sampled_from([-1, 0, 3, 20, 90]), st.sampled_from([-1, 0, 3, 20, 90])),
)
@settings(max_examples=60, deadline=None)
def test_blocks_out_of_sight_are_never_computed(lengths: Any, cut: Any, band: Any) -> None:
    """Of every block of rows and of keys: what is walked over is what is seen, and unmasked what is seen whole."""
    from sharpmax.jax.pallas.blocks import Call, key_range, row_range

    (queries, keys), (left, right) = (min(a, b) for a, b in zip(lengths, cut, strict=True)), band
    call = Call(lengths[0], lengths[1], 1, 16, Geometry(1.0, 0.0, left, right), Tiles(16, 8, 4, 2), True, True)
    distance = np.arange(keys) - np.arange(queries)[:, None]
    seen = np.zeros((80, 80), bool)
    seen[:queries, :keys] = (left < 0) | (distance >= -left)
    seen[:queries, :keys] &= (right < 0) | (distance <= right)
    for first, matrix, size, ranges in (
        *((i, seen[i : i + 16], 8, key_range) for i in range(0, lengths[0], 16)),
        *((i, seen[:, i : i + 8].T, 16, row_range) for i in range(0, lengths[1], 8)),
    ):
        low, a, b, high = (int(x) for x in ranges(first, queries, keys, call))
        blocks = matrix.reshape(len(matrix), -1, size)
        some = [n for n in range(blocks.shape[1]) if blocks[:, n].any()]
        assert (low <= a <= b <= high) or low == high
        assert list(range(low, high)) == some
        rows = matrix.any(1) if ranges is key_range else np.full(len(matrix), True)
        assert all(blocks[rows, n].all() for n in range(a, b))
        whole = [n for n in some if blocks[:, n].all()]
        assert set(whole) <= set(range(a, b))


@contextlib.contextmanager
def compiling_for_hopper() -> Iterator[None]:
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=device)):
        yield


LOWERED: dict[str, tuple[Geometry, tuple[int, int], bool, bool]] = {
    "whole tiles": (Geometry(0.1), (4096, 4096), False, False),
    "all, in float64 mode": (Geometry(0.1, 5.0, 300, 0), (1000, 900), True, True),
    "no whole tiles": (Geometry(0.1), (1000, 900), False, False),
    "lengths": (Geometry(0.1), (1024, 1024), True, False),
    "causal lengths": (Geometry(0.1, right=0), (1024, 1024), True, False),
}
"""Geometry, queries and keys, whether they have lengths, and whether JAX is in float64 mode."""
LOWERINGS = [
    *itertools.product(list(LOWERED)[:2], (64, 128, 256), ("bfloat16", "float32")),
    *itertools.product(list(LOWERED)[2:], (64,), ("bfloat16",)),
]
"""The first two cases with every tile that there is, the others with one."""


@pytest.mark.parametrize(("case", "columns", "dtype"), LOWERINGS)
def test_every_kernel_lowers_for_a_gpu(case: str, columns: int, dtype: str) -> None:
    """From any machine, with the tiles that a GPU gets: what Triton has no operation for is noticed here."""
    from sharpmax.jax.pallas import launch

    geometry, (queries, keys), with_lengths, wide = LOWERED[case]
    lengths: Any = jax.ShapeDtypeStruct((2,), jnp.int32)
    masks = Masks(None, lengths if wide else None, lengths) if with_lengths else Masks()
    plan = tiles.plan(columns, jnp.dtype(dtype), geometry.banded)
    q, k = (jax.ShapeDtypeStruct((2, n, heads, columns), dtype) for n, heads in ((queries, 8), (keys, 2)))
    row = jax.ShapeDtypeStruct((2, 8, queries), jnp.float32)

    def every(q: Any, k: Any, masks: Any, *by_row: Any) -> Any:
        given = (q, k, masks, by_row, geometry, plan)
        forward = launch.statistics(q, k, masks, geometry, True, plan)
        return forward, launch.query_gradient(*given), launch.key_gradient(*given)

    with jax.enable_x64(wide), compiling_for_hopper():
        text = jax.jit(every).trace(q, k, masks, row, row, row).lower(lowering_platforms=("cuda",)).as_text()
    assert all(name in text for name in ("stats_kernel", "query_kernel", "key_kernel"))


LARGER: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "full": ((1, 256, 384, 2, 2, 128), {}),
    "causal": ((1, 300, 270, 4, 2, 64), {"is_causal": True}),
    "all": (
        (2, 300, 270, 2, 1, 80),
        {
            "local_window_size": (150, 40),
            "softcap": 3.0,
            "query_seq_lengths": np.array([300, 130]),
            "key_value_seq_lengths": np.array([20, 270]),
        },
    ),
    "wide heads": ((1, 200, 200, 1, 1, 256), {"is_causal": True}),
}


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float16", 5e-3), ("float32", 2e-4)])
@pytest.mark.parametrize("case", LARGER)
def test_statistics_on_a_gpu(case: str, dtype: str, tolerance: float) -> None:
    check_statistics(*LARGER[case], jnp.dtype(dtype), tolerance, jax.jit)
