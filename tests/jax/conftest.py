"""Blocks and tiles that small tests reach more than one of; float64."""

from collections.abc import Iterator

import jax
import pytest

from sharpmax.jax import blocks
from sharpmax.jax.pallas import tiles
from sharpmax.jax.pallas.tiles import Plan, Tiles


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> blocks.Sizes:
    """No block ends where the tests' queries and keys end."""
    sizes = blocks.Sizes(rows=8, keys=5, together=False)
    monkeypatch.setattr(blocks, "CPU", sizes)
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
