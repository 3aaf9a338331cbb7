"""The cost on paper: by hand for one case, and the tables of the docs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sharpmax
from sharpmax.torch.distributed import Cost, cost
from tests.doc_tables import markdown

PAGE = Path(__file__).parents[3] / "docs/distributed.md"
STOCK = sharpmax.Constant(1.0)
SIZES = ((131_072, 8), (131_072, 64), (262_144, 16), (524_288, 32), (1_048_576, 8), (1_048_576, 64))


def test_by_hand() -> None:
    """4 tokens on each of 3 devices, 1 key head of 2 columns: a shard of keys is 16 bytes, of its gradient 32."""
    found = cost(12, 3, heads=2, key_heads=1, columns=2, is_causal=False)
    assert found.forward_sent == 2 * (16 + 16 + 16)
    assert found.backward_sent == 2 * (16 + 16 + 32 + 32) + 2 * (16 + 32)
    assert found.forward_held == 2 * (16 + 16)
    assert found.backward_held == 2 * (16 + 16) + 4 * (32 + 32)
    assert found.forward_operations == 3 * 2 * (2 * 12 * 12 * 2) // 3
    stock = cost(12, 3, heads=2, key_heads=1, columns=2, is_causal=False, policy=STOCK)
    assert stock.forward_sent == 2 * (16 + 16)
    assert stock.backward_sent == 2 * (16 + 16 + 32 + 32)
    assert stock.forward_operations * 3 == found.forward_operations * 2
    assert cost(12, 1, key_heads=1, columns=2)[:4] == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((12, 5), "expected tokens that 5 devices share evenly, got 12"),
        ((0, 5), "expected tokens to be a whole number of at least 1, got 0"),
        ((12, 2.0), "expected devices to be a whole number of at least 1, got 2.0"),
    ],
)
def test_wrong_numbers_are_refused(given: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        cost(*given)


def test_an_unknown_way_of_communication_is_refused() -> None:
    with pytest.raises(ValueError, match="expected communication to be one of ring, gather, got 'mail'"):
        cost(12, 3, communication="mail")


def kinds(tokens: int, devices: int, **given: Any) -> tuple[Cost, Cost, Cost]:
    """Stock ring attention, ours, and ours with gathered keys."""
    of: dict[str, Any] = {"tokens": tokens, "devices": devices, **given}
    return cost(**of, policy=STOCK), cost(**of), cost(**of, communication="gather")


def sent_table() -> str:
    """KiB that each token's keys, values and gradients are sent, all hops together."""
    lines = []
    for tokens, devices in SIZES:
        found = kinds(tokens, devices)
        cells = [f"{tokens:,}", str(devices)]
        for field in ("forward_sent", "backward_sent"):
            cells += [f"{getattr(x, field) * devices / tokens / 1024:,.0f}" for x in found]
        lines.append(cells)
    names = [f"{way}, {kind}" for way in ("forward", "backward") for kind in ("stock", "ring", "gather")]
    return markdown(["tokens", "devices", *names], lines)


def device_table() -> str:
    """What a device sends forward, holds, and computes for each byte that it sends."""
    lines = []
    for tokens, devices in SIZES:
        stock, ring, gather = kinds(tokens, devices)
        cells = [f"{tokens:,}", str(devices)]
        cells += [f"{x.forward_sent / 2**30:.2f} GiB" for x in (stock, ring, gather)]
        cells += [f"{x.forward_held / 2**20:,.0f} MiB" for x in (ring, gather)]
        cells += [f"{x.backward_held / 2**20:,.0f} MiB" for x in (ring, gather)]
        cells += [f"{x.forward_operations / x.forward_sent:,.0f}" for x in (stock, ring, gather)]
        lines.append(cells)
    head = ["tokens", "devices", *(f"sent, {kind}" for kind in ("stock", "ring", "gather"))]
    head += [f"held {way}, {kind}" for way in ("forward", "backward") for kind in ("ring", "gather")]
    return markdown([*head, *(f"FLOP/byte, {kind}" for kind in ("stock", "ring", "gather"))], lines)


@pytest.mark.parametrize("table", [sent_table, device_table])
def test_the_tables_of_the_docs(table: Any) -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), f"{PAGE.name} should have\n{table()}"
