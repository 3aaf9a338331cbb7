"""RowStats: values, gradients, merging, masks, and what JAX and torch do with it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import sharpmax
from sharpmax.core.arrays import LOWEST, mask_threshold
from tests.arrays import LIBRARIES, gradient, make, numbers

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(3, 4, 17)) * 3


def entropy64(x: np.ndarray, axis: int = -1) -> np.ndarray:
    p = np.exp(x - x.max(axis=axis, keepdims=True))
    p /= p.sum(axis=axis, keepdims=True)
    return -np.sum(p * np.log(p), axis=axis)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("axis", [-1, 0, 1, (0, 2), None])
def test_values_along_any_axis(library: str, axis: int | tuple[int, ...] | None) -> None:
    stats = sharpmax.row_stats(make(library, ROWS), axis)
    x = ROWS.astype(np.float32).astype(np.float64)
    lse = np.log(np.sum(np.exp(x), axis=axis))
    p = np.exp(x - np.expand_dims(lse, axis) if axis is not None else x - lse)
    np.testing.assert_allclose(numbers(stats.max), x.max(axis=axis), rtol=1e-6)
    np.testing.assert_allclose(numbers(stats.lse), lse, rtol=1e-6)
    np.testing.assert_allclose(numbers(stats.mean), np.sum(p * x, axis=axis), rtol=1e-5)
    np.testing.assert_allclose(numbers(stats.entropy), -np.sum(p * np.log(p), axis=axis), rtol=1e-5)
    np.testing.assert_allclose(numbers(stats.spread), x.max(axis=axis) - x.min(axis=axis), rtol=1e-6)
    assert np.all(numbers(stats.count) == x.size / np.asarray(x.max(axis=axis)).size)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("given", "held"), [("float16", "float32"), ("bfloat16", "float32"), ("float64", "float64")])
def test_statistics_are_held_in_at_least_float32(library: str, given: str, held: str) -> None:
    with jax.enable_x64(given == "float64"):
        stats = sharpmax.row_stats(make(library, ROWS, given))
        fields: list[Any] = [stats.max, stats.sum, stats.moment, stats.min]
        assert {str(f.dtype).rpartition(".")[2] for f in fields} == {held}
        assert str(stats.count.dtype).rpartition(".")[2] == "int32"


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_an_offset_costs_no_digits(library: str, offset: float) -> None:
    x = (ROWS + offset).astype(np.float32)
    np.testing.assert_allclose(
        numbers(sharpmax.row_stats(make(library, x)).entropy), entropy64(x.astype(np.float64)), rtol=2e-6
    )


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)])
def test_rows_without_logits_and_no_rows(library: str, shape: tuple[int, int]) -> None:
    stats = sharpmax.row_stats(make(library, np.zeros(shape)))
    assert numbers(stats.entropy).tolist() == [0.0] * shape[0]
    assert numbers(stats.spread).tolist() == [0.0] * shape[0]
    assert numbers(stats.count).tolist() == [0] * shape[0]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("how", ["where", "-inf", "lowest", "half of lowest"])
def test_masked_logits_are_in_no_statistic(library: str, dtype: str, how: str) -> None:
    kept = np.array([[0.5, -2.0, 1.0, 3.0]])
    lowest = {"float16": -65504.0, "bfloat16": -3.3895313892515355e38, "float32": -3.4028234663852886e38}[dtype]
    value = {"where": 100.0, "-inf": -np.inf, "lowest": lowest, "half of lowest": lowest / 2}[how]
    x = make(library, np.concatenate([kept, np.full((1, 3), value)], axis=1), dtype)
    where = None if how != "where" else make(library, [[True] * 4 + [False] * 3], "bool")
    masked, plain = sharpmax.row_stats(x, where=where), sharpmax.row_stats(make(library, kept, dtype))
    for got, expected in zip(masked, plain, strict=True):
        np.testing.assert_array_equal(numbers(got), numbers(expected))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_fully_masked_row_is_the_identity_of_merge(library: str) -> None:
    row = sharpmax.row_stats(make(library, ROWS[0]))
    empty = sharpmax.row_stats(make(library, np.full((4, 3), -np.inf)))
    assert numbers(empty.entropy).tolist() == [0.0] * 4
    assert numbers(empty.lse).tolist() == numbers(empty.mean).tolist() == [-np.inf] * 4
    for merged in (row.merge(empty), empty.merge(row)):
        for got, expected in zip(merged, row, strict=True):
            np.testing.assert_array_equal(numbers(got), numbers(expected))
    assert numbers(empty.merge(empty).entropy).tolist() == [0.0] * 4


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_parts_further_apart_than_the_type_reaches_merge(library: str) -> None:
    high, low = (sharpmax.row_stats(make(library, [value])) for value in (3e38, -1.6e38))
    for merged in (high.merge(low), low.merge(high)):
        assert (float(merged.sum), float(merged.moment), int(merged.count)) == (1.0, 0.0, 2)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_gradients_of_lse_mean_and_entropy(library: str) -> None:
    x = ROWS[0, 0]
    p = np.exp(x - np.log(np.sum(np.exp(x))))
    mean = np.sum(p * x)
    with jax.enable_x64(True):
        row = make(library, x, "float64")
        for name, expected in {
            "lse": p,
            "mean": p * (1 + x - mean),
            "entropy": -p * (x - mean),
            "max": 0 * p,
            "min": 0 * p,
            "spread": 0 * p,
        }.items():
            if library == "torch" and name in ("max", "min", "spread"):
                assert not getattr(sharpmax.row_stats(row.clone().requires_grad_()), name).requires_grad
                continue
            got = gradient(library, lambda r, name=name: getattr(sharpmax.row_stats(r), name), row)
            np.testing.assert_allclose(got, expected, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_gradient_flows_through_a_merge(library: str) -> None:
    with jax.enable_x64(True):
        row = make(library, ROWS[0, 0], "float64")
        parts = gradient(library, lambda r: sharpmax.row_stats(r[:5]).merge(sharpmax.row_stats(r[5:])).entropy, row)
        whole = gradient(library, lambda r: sharpmax.row_stats(r).entropy, row)
    np.testing.assert_allclose(parts, whole, atol=1e-12)


def test_row_stats_is_a_pytree_for_jit_vmap_and_scan() -> None:
    x = jnp.asarray(ROWS[0], jnp.float32)
    assert len(jax.tree.leaves(sharpmax.row_stats(x))) == 5
    assert len(jax.tree.leaves(sharpmax.row_stats(x, with_min=False))) == 4
    blocks = x[:, :16].reshape(4, 4, 4).swapaxes(0, 1)

    @jax.jit
    def streamed(blocks: jax.Array) -> jax.Array:
        start = sharpmax.row_stats(jnp.full((4, 1), -jnp.inf))
        merged, _ = jax.lax.scan(lambda stats, block: (stats.merge(sharpmax.row_stats(block)), None), start, blocks)
        return merged.entropy

    whole = sharpmax.row_stats(x[:, :16]).entropy
    np.testing.assert_allclose(streamed(blocks), whole, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(lambda row: sharpmax.row_stats(row).entropy)(x[:, :16]), whole, rtol=1e-6)


def test_torch_compiles_statistics_and_merge_in_one_graph() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def merged(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return sharpmax.row_stats(a).merge(sharpmax.row_stats(b)).entropy

    x = torch.tensor(ROWS[0])
    torch.testing.assert_close(merged(x[:, :6], x[:, 6:]), sharpmax.row_stats(x).entropy)


def test_the_spread_needs_the_minimum() -> None:
    stats = sharpmax.row_stats(ROWS, with_min=False)
    assert stats.min is None
    assert stats.merge(stats).min is None
    with pytest.raises(ValueError, match="with_min=True"):
        _ = stats.spread


def test_large_arrays_are_worked_on_in_blocks_with_the_same_result() -> None:
    x = RNG.normal(size=(700, 513)).astype(np.float32)
    whole, tensor = sharpmax.row_stats(x), sharpmax.row_stats(torch.tensor(x))
    for field, other, rows in zip(
        whole, tensor, zip(*(sharpmax.row_stats(row) for row in x), strict=True), strict=True
    ):
        np.testing.assert_array_equal(numbers(field), numbers(np.asarray(rows)))
        np.testing.assert_allclose(numbers(other), numbers(field), rtol=1e-5)


@pytest.mark.parametrize("name", LOWEST)
def test_what_is_masked_begins_at_half_of_the_lowest_number(name: str) -> None:
    kind = np.float64 if name == "float64" else np.float32
    half = kind(LOWEST[name] / 2)
    assert half < mask_threshold(name) == np.nextafter(half, kind(0))
