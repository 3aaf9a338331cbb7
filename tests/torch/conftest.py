"""Blocks of the streaming implementation that small tests reach more than one of."""

import pytest

from sharpmax.torch import blocks


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> blocks.Sizes:
    sizes = blocks.Sizes(rows=4, keys=5, logits=45)
    monkeypatch.setattr(blocks, "CPU", sizes)
    return sizes
