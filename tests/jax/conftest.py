"""Blocks of the streaming implementation that small tests reach more than one of; float64."""

from collections.abc import Iterator

import jax
import pytest

from sharpmax.jax import blocks


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
