"""Every token has a rank, every logit that counts is in one pair, and zigzag gives all ranks the same work."""

from __future__ import annotations

import itertools

import pytest
import torch

from sharpmax.torch.distributed.layout import LAYOUTS, Part, pair_of, pairs, parts, route
from sharpmax.torch.geometry import ALL, Geometry

BANDS = list(itertools.product((ALL, 0, 1, 3, 7), (ALL, 0, 2, 5)))


def seen(geometry: Geometry, queries: int, keys: int) -> torch.Tensor:
    visible = geometry.visible(torch.arange(queries), torch.arange(keys), queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool) if visible is None else visible


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_pairs_of_shards_make_up_the_whole(layout: str, size: int) -> None:
    tokens = 6
    held = [parts(r, size, tokens, layout) for r in range(size)]
    places = [[x for part in of for x in range(part.start, part.stop)] for of in held]
    assert sorted(x for at in places for x in at) == list(range(size * tokens))
    for left, right in BANDS:
        geometry = Geometry(1.0, left=left, right=right)
        whole = torch.zeros(size * tokens, size * tokens, dtype=torch.int32)
        for rank in range(size):
            for offset, found in route(rank, size, tokens, layout, geometry):
                rows, columns = (torch.tensor(places[r]) for r in (rank, (rank - offset) % size))
                for pair in found:
                    i, j = rows[pair.rows], columns[pair.keys]
                    whole[i[:, None], j] += seen(pair.geometry, len(i), len(j)).int()
        assert torch.equal(whole, seen(geometry, *whole.shape).int()), (left, right)


def test_a_pair_without_bounds_has_none() -> None:
    """Where all is seen, the geometry says so: the faster operators serve it."""
    causal = Geometry(1.0, right=0)
    before = pair_of(Part(8, 12, 0), Part(0, 8, 0), causal)
    assert before is not None
    assert not before.geometry.banded
    assert pair_of(Part(0, 8, 0), Part(8, 12, 0), causal) is None
    own = pair_of(Part(8, 12, 4), Part(8, 12, 4), causal)
    assert own is not None
    assert own.geometry == causal
    assert (own.rows, own.keys) == (slice(4, 8), slice(4, 8))


def test_zigzag_gives_all_ranks_the_same_work_at_every_stop() -> None:
    size, tokens, causal = 8, 4, Geometry(1.0, right=0)
    held = [parts(r, size, tokens, "zigzag") for r in range(size)]
    for offset in range(size):
        work = {
            sum(
                int(seen(p.geometry, p.rows.stop - p.rows.start, p.keys.stop - p.keys.start).sum())
                for p in pairs(held[r], held[(r - offset) % size], causal)
            )
            for r in range(size)
        }
        assert len(work) == 1, offset


def test_stops_where_nothing_is_seen_are_left_out() -> None:
    near = Geometry(1.0, left=3, right=0)
    assert [stop.offset for stop in route(0, 8, 4, "contiguous", near)] == [0, 1]
    both = Geometry(1.0, left=3, right=3)
    assert [stop.offset for stop in route(0, 8, 4, "contiguous", both)] == [0, 1, 7]


def test_an_odd_number_of_tokens_has_no_zigzag() -> None:
    with pytest.raises(ValueError, match="expected an even number of tokens on every rank for layout='zigzag', got 3"):
        parts(0, 2, 3, "zigzag")
