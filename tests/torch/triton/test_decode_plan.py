"""The plan of the decoding kernel for Hopper: its functions, interpreted, against what they should find."""

from __future__ import annotations

import random
import types
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from sharpmax.torch.triton import decode_hopper, decode_plan
from tests import gluon
from tests.gluon.values import Value


@pytest.fixture
def functions() -> Iterator[types.SimpleNamespace]:
    """The functions of the kernel that plan."""
    names = ("_pieces", "planned", "recalled", "place_of", "splits_of")
    with gluon.partition(decode_hopper.WARPS):
        yield types.SimpleNamespace(**{name: gluon.function(getattr(decode_plan, name)) for name in names})


def check_plan(
    functions: types.SimpleNamespace,
    lengths: list[int] | None,
    batch: int,
    heads: int,
    capacity: int,
    left: int,
    most: int,
    splits: int,
) -> None:
    """Every key in sight belongs to one split, splits are as the kernel needs them, and cost as little as can be."""
    keys, queries = decode_hopper.KEYS, 2
    highest = decode_hopper.most_tiles(capacity, queries, left)
    programs, share, limit, most_splits = decode_hopper.bounds(batch * heads, highest, most, splits, 132)
    given = None if lengths is None else gluon.value(torch.tensor(lengths, dtype=torch.int32))
    sizes = tuple(gluon.value(n) for n in (batch * heads, heads, capacity, left))
    size = 1 if given is None else decode_hopper.planned_batch(batch)
    *numbers, counted, begun = functions.planned(
        given, gluon.value(share), sizes, limit, programs, decode_hopper.OVERHEAD, size, most,
        queries, keys,
    )  # fmt: skip
    kept = (types.SimpleNamespace(load=lambda _, x=x: x) for x in (counted, begun))
    plan = functions.recalled((*numbers, *kept), size)
    items, chosen = int(plan[0]), int(plan[1])
    valid = [capacity] * batch if lengths is None else [min(max(n, 0), capacity) for n in lengths]
    oldest = [max(n - queries - left, 0) if left >= 0 else 0 for n in valid]
    tiles = [-(-n // keys) - first // keys for n, first in zip(valid, oldest, strict=True)]

    def number(share: int) -> list[int]:
        return [max(1, -(-n // share)) for n in tiles]

    def cost(share: int) -> float:
        turns = -(-heads * sum(number(share)) // programs)
        work = min(turns * share, -(-heads * sum(tiles) // programs) + share)
        return 2 * work + turns * decode_hopper.OVERHEAD / 2

    fitting = [n for n in range(1, most + 1) if max(number(n)) <= programs and heads * sum(number(n)) <= limit]
    assert chosen in fitting
    assert cost(chosen) == min(cost(n) for n in fitting) or splits > 0
    assert items == heads * sum(number(chosen)) <= limit
    lengths_of_items = [-1] * items
    for b, count in enumerate(number(chosen)):
        assert count <= min(programs, most_splits)
        for head in range(heads):
            pair = gluon.value(b * heads + head)
            start, found = (int(n) for n in functions.splits_of(pair, plan, sizes, queries, keys))
            assert found == count
            at = oldest[b] // keys * keys
            for split in range(count):
                item = gluon.value(start + split)
                place = functions.place_of(item, plan, sizes, queries, keys)
                *found, first, last = (int(n) for n in place)
                assert found == [b, head, valid[b], split, count]
                assert first == at
                assert last > first or valid[b] == 0
                assert lengths_of_items[start + split] == -1
                lengths_of_items[start + split] = max(1, -(-tiles[b] // count))
                at = last
                assert -(-(last - first) // keys) <= lengths_of_items[start + split] <= chosen
            assert at == valid[b]
    assert lengths_of_items == sorted(lengths_of_items, reverse=True)
    assert min(lengths_of_items) >= 0
    for item in (items, items + 1, items + programs, items + 3 * programs):  # beyond all
        *_, first, last = functions.place_of(gluon.value(item), plan, sizes, queries, keys)
        assert first == last


@pytest.mark.parametrize("seed", range(40))
def test_plans(seed: int, functions: types.SimpleNamespace) -> None:
    draw = random.Random(seed)
    batch, heads = draw.choice([1, 2, 3, 7, 31, 33, 64]), draw.choice([1, 2, 8])
    capacity = draw.choice([1, 127, 1920, 4097])
    lengths: list[int] | None = [draw.randint(0, capacity) for _ in range(batch)]
    kind = seed % 5
    if kind == 0:
        lengths = None
    elif kind == 1:
        lengths = [draw.choice([0, 1, 128, capacity, -3, capacity + 1000]) for _ in range(batch)]
    elif kind == 2:
        lengths = [capacity, *[0] * (batch - 1)]
    left = draw.choice([-1, -1, 0, 1, 300, 5000])
    check_plan(
        functions, lengths, batch, heads, capacity, left, draw.choice([7, 15]), draw.choice([0, 0, 0, 1, 5, 132])
    )


@pytest.mark.parametrize("length", [0, 1, 1024, 32768, 131072, 132 * 15 * 128])
def test_plans_of_large_capacity(length: int, functions: types.SimpleNamespace) -> None:
    check_plan(functions, [length], 1, 1, 132 * 15 * 128, -1, 15, 0)
    check_plan(functions, [length, 0, 777], 3, 2, 132 * 15 * 128, 100, 15, 0)


def test_divisions_of_the_plan_are_exact(functions: types.SimpleNamespace) -> None:
    tiles = torch.arange(0, 20000, dtype=torch.int32)
    for share in range(1, 16):
        expected = ((tiles + share - 1) // share).clamp(min=1)
        assert torch.equal(functions._pieces(Value(tiles), share).data, expected)
