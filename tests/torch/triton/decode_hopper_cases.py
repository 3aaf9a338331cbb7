"""What tests of the decoding kernel for Hopper share: inputs, calls of the kernel, and how they are seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax
from sharpmax.torch.checks import geometry_of
from sharpmax.torch.decode import Attention, _Cache, _triton_attention
from sharpmax.torch.triton import decode_hopper
from tests.torch.decode_cases import inputs, lengths_of
from tests.torch.triton.hopper_cases import DEVICE

WIDE: dict[str, Any] = {"dim": 128, "value_dim": 128}
NARROW: dict[str, Any] = {"dim": 64, "value_dim": 64}


def seen_launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many splits each launch of the kernel was asked for; calls of any size take it."""
    asked = []
    launch = decode_hopper.decode

    def counted(*arguments: Any) -> None:
        asked.append(arguments[9])
        launch(*arguments)

    monkeypatch.setattr(decode_hopper, "decode", counted)
    monkeypatch.setattr(decode_hopper, "LEAST_TILES", 0)
    return asked


def made(dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    return inputs(**({"capacity": 700} | NARROW | sizes), dtype=dtype, device=DEVICE)


def run(
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: list[int] | Tensor | None = None,
    *,
    splits: int = 0,
    policy: Any = sharpmax.PAPER,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    table: Tensor | None = None,
) -> Attention:
    query, key, value = tensors
    valid = lengths_of(lengths, DEVICE) if isinstance(lengths, list) else lengths
    geometry = geometry_of(query, "lower_right", scale, window, softcap)
    result = _triton_attention(query, _Cache(key, value, table, valid), geometry, policy, True, splits)
    assert isinstance(result, Attention)
    return result
