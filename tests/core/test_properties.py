"""What holds for any logits, on NumPy, torch and JAX.

Shapes come from small pools, so that JAX and torch.compile compile few of them; Hypothesis chooses the numbers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpmax import (
    PAPER,
    PAPER_HELD,
    Constant,
    Hard,
    LogLength,
    RowStats,
    adaptive_temperature_softmax,
    detached,
    row_stats,
    softmax,
)
from sharpmax.core.policies import EntropyCurve
from tests.arrays import LIBRARIES, make, numbers

SHAPE = (4, 12)
COUNT = SHAPE[1]
SHARPENING = (PAPER, PAPER_HELD, Constant(1.0), Constant(3.0), LogLength.yarn(4), detached(PAPER_HELD))
POLICIES = (*SHARPENING, LogLength(0.4, 0.1), Hard(), EntropyCurve((0.6, 2.0), (1.0, 1.8)))

on_every_library = pytest.mark.parametrize("library", LIBRARIES)
properties = settings(deadline=None, derandomize=True, max_examples=30, database=None)
few = settings(properties, max_examples=12)


@st.composite
def rows(draw: st.DrawFn, shape: tuple[int, ...] = SHAPE, masked: bool = True) -> np.ndarray:
    """float32 logits of several scales and offsets, with ties, and some of them -inf."""
    size = int(np.prod(shape))
    levels = draw(st.lists(st.integers(-512, 512), min_size=size, max_size=size))
    scale = draw(st.sampled_from([1e-3, 0.25, 1.0, 4.0, 30.0]))
    offset = draw(st.sampled_from([0.0, 3.0, -1000.0, 1e4]))
    x = (np.array(levels, np.float64) / 128 * scale + offset).astype(np.float32).reshape(shape)
    if masked:
        hidden = draw(st.lists(st.integers(0, size - 1), max_size=size // 3))
        x.reshape(-1)[hidden] = -np.inf
        if draw(st.booleans()):
            x[0] = -np.inf
    return x


def close(a: Any, b: Any, tolerance: float = 2e-5) -> None:
    """Equal up to float32 rounding; the offsets and scales above cost a digit or two."""
    np.testing.assert_allclose(numbers(a), numbers(b), rtol=tolerance, atol=tolerance)


def same_stats(a: RowStats, b: RowStats, size: float) -> None:
    """Equal statistics; ``size`` is the magnitude of the logits, of which lse and mean round a part."""
    for name in ("max", "min", "count"):
        np.testing.assert_array_equal(numbers(getattr(a, name)), numbers(getattr(b, name)), name)
    for name in ("sum", "moment", "entropy"):
        close(getattr(a, name), getattr(b, name))
    for name in ("lse", "mean", "spread"):
        np.testing.assert_allclose(numbers(getattr(a, name)), numbers(getattr(b, name)), 1e-5, 1e-5 + 3e-7 * size)


def size_of(x: np.ndarray) -> float:
    """The largest magnitude among the logits that are not masked."""
    return float(np.max(np.abs(x), where=np.isfinite(x), initial=0.0))


@on_every_library
@given(x=rows(), policy=st.sampled_from(POLICIES))
@properties
def test_rows_sum_to_one_or_to_zero_if_masked(library: str, x: np.ndarray, policy: Any) -> None:
    weights = numbers(adaptive_temperature_softmax(make(library, x), policy=policy))
    assert (weights >= 0).all()
    assert (weights[np.isinf(x)] == 0).all()
    close(weights.sum(-1), np.isfinite(x).any(-1))


@on_every_library
@given(x=rows(), policy=st.sampled_from(SHARPENING))
@properties
def test_entropy_never_rises_where_beta_is_at_least_one(library: str, x: np.ndarray, policy: Any) -> None:
    logits = make(library, x)
    stats = row_stats(logits)
    beta = numbers(policy(stats))
    assert (beta >= 1).all()
    weights = numbers(adaptive_temperature_softmax(logits, policy=policy))
    entropy = -np.sum(weights * np.log(np.where(weights > 0, weights, 1.0)), axis=-1)
    assert (entropy <= numbers(stats.entropy) + 2e-5).all()


@on_every_library
@given(x=rows(), order=st.permutations(range(COUNT)), policy=st.sampled_from(POLICIES))
@properties
def test_permuting_logits_permutes_weights(library: str, x: np.ndarray, order: list[int], policy: Any) -> None:
    straight = numbers(adaptive_temperature_softmax(make(library, x), policy=policy))
    permuted = numbers(adaptive_temperature_softmax(make(library, x[:, order]), policy=policy))
    # The entropy changes in its last digits with the order of a sum, and beta times a spread of hundreds with it.
    close(permuted, straight[:, order], 1e-4)


@on_every_library
@given(x=rows(), shift=st.integers(-64, 64), policy=st.sampled_from(POLICIES))
@properties
def test_a_shift_of_all_logits_changes_nothing(library: str, x: np.ndarray, shift: int, policy: Any) -> None:
    x = np.where(np.isfinite(x), np.round(np.clip(x, -2000, 2000) * 64) / 64, -np.inf).astype(np.float32)  # exact sums
    straight, shifted = make(library, x), make(library, x + np.float32(shift))
    close(adaptive_temperature_softmax(shifted, policy=policy), adaptive_temperature_softmax(straight, policy=policy))
    close(row_stats(shifted).entropy, row_stats(straight).entropy)


@on_every_library
@given(x=rows())
@properties
def test_beta_one_is_softmax(library: str, x: np.ndarray) -> None:
    logits = make(library, x)
    finite = np.where(np.isfinite(x).any(-1, keepdims=True), x, 0.0).astype(np.float64)
    e = np.exp(finite - finite.max(-1, keepdims=True))
    expected = np.where(np.isfinite(x), e / e.sum(-1, keepdims=True), 0.0)
    close(softmax(logits), expected)
    close(adaptive_temperature_softmax(logits, policy=Constant(1.0)), expected)
    close(softmax(logits, beta=make(library, np.ones(SHAPE[0]))), expected)


@given(x=rows(), policy=st.sampled_from(POLICIES), keep=st.lists(st.booleans(), min_size=COUNT, max_size=COUNT))
@properties
def test_the_three_libraries_agree(x: np.ndarray, policy: Any, keep: list[bool]) -> None:
    where = np.array(keep)
    logits = {library: make(library, x) for library in LIBRARIES}
    masks = {library: make(library, where, "bool") for library in LIBRARIES}
    stats = {library: row_stats(logits[library], where=masks[library]) for library in LIBRARIES}
    weights = {
        library: adaptive_temperature_softmax(logits[library], where=masks[library], policy=policy)
        for library in LIBRARIES
    }
    for library in ("torch", "jax"):
        same_stats(stats[library], stats["numpy"], size_of(x))
        close(weights[library], weights["numpy"], 1e-4)


@cache
def _jitted(policy: Any) -> Any:
    return jax.jit(lambda x: (row_stats(x), adaptive_temperature_softmax(x, policy=policy)))


@given(x=rows(), policy=st.sampled_from(POLICIES))
@properties
def test_jit_is_eager(x: np.ndarray, policy: Any) -> None:
    logits = make("jax", x)
    stats, weights = _jitted(policy)(logits)
    same_stats(stats, row_stats(logits), size_of(x))
    close(weights, adaptive_temperature_softmax(logits, policy=policy), 1e-4)


@on_every_library
@given(data=st.data())
@properties
def test_merging_any_split_in_any_order_gives_the_rows_statistics(library: str, data: st.DataObject) -> None:
    x = data.draw(rows())
    part_of = np.array(data.draw(st.lists(st.integers(0, 3), min_size=COUNT, max_size=COUNT)))
    order = data.draw(st.permutations(range(4)))
    whole = row_stats(make(library, x))
    # Parts are masks of the same row, so that they all have one shape; some of them are empty.
    parts = [row_stats(make(library, x), where=make(library, part_of == k, "bool")) for k in order]
    left = parts[0].merge(parts[1]).merge(parts[2]).merge(parts[3])
    same_stats(left, whole, size_of(x))
    same_stats(parts[0].merge(parts[1].merge(parts[2].merge(parts[3]))), whole, size_of(x))


@on_every_library
@pytest.mark.parametrize("cut", [0, 5, COUNT])
@given(x=rows())
@few
def test_merging_two_slices_gives_the_rows_statistics(library: str, cut: int, x: np.ndarray) -> None:
    logits = make(library, x)
    merged = row_stats(logits[:, :cut]).merge(row_stats(logits[:, cut:]))
    same_stats(merged, row_stats(logits), size_of(x))


@on_every_library
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((3, 4, 5), 0),
        ((2, 3, 2, 4), -2),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (((3, 4, 5), 1), ((3, 4, 5), -3), ((6,), 0), ((4, 6), 0))
        ),
    ],
)
@given(data=st.data())
@few
def test_any_axis_is_the_last_axis_after_a_move(
    library: str, shape: tuple[int, ...], axis: int, data: st.DataObject
) -> None:
    x = data.draw(rows(shape))
    moved = np.ascontiguousarray(np.moveaxis(x, axis, -1))
    there, last = make(library, x), make(library, moved)
    same_stats(row_stats(there, axis), row_stats(last), size_of(x))
    weights = numbers(adaptive_temperature_softmax(there, axis))
    close(np.moveaxis(weights, axis, -1), adaptive_temperature_softmax(last), 1e-4)


@given(x=rows((3, 4, 5)))
@few
def test_several_axes_are_one_flat_axis(x: np.ndarray) -> None:
    flat = x.transpose(1, 0, 2).reshape(4, 15)
    for library in LIBRARIES:
        same_stats(row_stats(make(library, x), (0, 2)), row_stats(make(library, flat)), size_of(x))
        weights = numbers(adaptive_temperature_softmax(make(library, x), (0, 2)))
        close(weights.transpose(1, 0, 2).reshape(4, 15), adaptive_temperature_softmax(make(library, flat)), 1e-4)


# ----------------------------------------------------------------------------------------------------------------
# RowStats inside JAX's transformations and torch.compile
# ----------------------------------------------------------------------------------------------------------------


@cache
def _jax_transformed() -> Any:
    def scanned(x: Any) -> RowStats:
        """The statistics of every row of ``x``, merged from slices of 3 logits by a scan."""
        slices = jnp.moveaxis(x.reshape(SHAPE[0], COUNT // 3, 3), 1, 0)
        empty = row_stats(x[:, :0])
        return jax.lax.scan(lambda carry, part: (carry.merge(row_stats(part)), None), empty, slices)[0]

    def gradients(function: Any) -> Any:
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.cos(function(x).entropy))))

    return jax.jit(scanned), jax.jit(jax.vmap(row_stats)), gradients(scanned), gradients(row_stats)


@given(x=rows())
@properties
def test_row_stats_go_through_scan_vmap_and_grad(x: np.ndarray) -> None:
    scanned, mapped, scanned_gradient, gradient = _jax_transformed()
    logits = make("jax", x)
    expected = row_stats(logits)
    same_stats(scanned(logits), expected, size_of(x))
    same_stats(mapped(logits), expected, size_of(x))
    close(scanned_gradient(logits), gradient(logits))
    assert jax.tree.structure(expected).num_leaves == len(expected)


@cache
def _compiled_merge() -> Any:
    def merge(a: RowStats, b: RowStats) -> tuple[RowStats, torch.Tensor]:
        merged = a.merge(b)
        return merged, merged.entropy

    return torch.compile(merge, fullgraph=True, dynamic=False)


@given(x=rows(), y=rows())
@properties
def test_merge_compiles_whole_in_torch(x: np.ndarray, y: np.ndarray) -> None:
    a, b = row_stats(make("torch", x)), row_stats(make("torch", y))
    merged, entropy = _compiled_merge()(a, b)
    same_stats(merged, a.merge(b), max(size_of(x), size_of(y)))
    close(entropy, a.merge(b).entropy)
