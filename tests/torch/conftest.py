"""Blocks of the streaming implementation that small tests reach more than one of; Triton's kernels on a CPU."""

from collections.abc import Iterator

import pytest
import torch

from sharpmax.torch import blocks, choice, fused


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> blocks.Sizes:
    sizes = blocks.Sizes(rows=4, keys=5, logits=45)
    monkeypatch.setattr(blocks, "CPU", sizes)
    return sizes


@pytest.fixture
def triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Triton's kernels serve CPU tensors too, in its interpreter; the operators with a policy inside are noted."""
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        monkeypatch.setattr(choice, "triton_refusal", lambda *_: "")
    called: list[str] = []
    for name in ("sharpened_query", "adaptive_attention"):
        real = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *a, name=name, real=real: (called.append(name), real(*a))[1])
    return called


@pytest.fixture
def small_tiles(triton_everywhere: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The same, where small calls reach several tiles; on a GPU with those that it has."""
    if torch.cuda.is_available():
        yield triton_everywhere
        return
    from sharpmax.torch.triton import Tiles, gradient, launch, prefill

    launches = (prefill._stats_launch, prefill._attend_launch, gradient._query_launch, gradient._key_launch)
    monkeypatch.setattr(launch, "tiles_for", lambda *_, **__: Tiles(16, 16, 4, 1))
    for cached in launches:
        cached.cache_clear()
    yield triton_everywhere
    for cached in launches:
        cached.cache_clear()
