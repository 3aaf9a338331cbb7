"""Blocks and tiles that small tests reach more than one of; float64; exact products where a GPU would round."""

from collections.abc import Iterator

import jax
import pytest

from sharpmax.jax import blocks
from sharpmax.jax.pallas import tiles
from sharpmax.jax.pallas.tiles import Plan, Tiles
from tests.jax.attention_cases import set_sizes


@pytest.fixture(autouse=True)
def exact_products(request: pytest.FixtureRequest) -> Iterator[None]:
    """Products of float32 are not rounded on a GPU, except in the tests that are for one: these have tolerances."""
    if request.node.get_closest_marker("gpu"):
        yield
        return
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> blocks.Sizes:
    """No block ends where the tests' queries and keys end."""
    sizes = blocks.Sizes(rows=8, keys=5, together=False)
    set_sizes(monkeypatch, sizes)
    return sizes


@pytest.fixture
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for GPUs run on a CPU, with tiles of which the tests' rows and keys are no multiples."""
    query, key = Tiles(16, 16, 4, 2), Tiles(32, 16, 4, 2)
    monkeypatch.setattr(tiles, "INTERPRETED", Plan(Tiles(16, 32, 4, 2), query, key, interpret=True))
