"""The band of keys that a query sees."""

from __future__ import annotations

import pytest
import torch

from sharpmax.torch.geometry import ALL, Geometry, visible_counts

BANDS = [(ALL, ALL), (ALL, 0), (2, 0), (2, 2), (0, 0), (ALL, 1), (3, ALL)]


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("lower_right", [False, True])
@pytest.mark.parametrize("lengths", [None, (4, 7, 0)], ids=str)
def test_visible_is_its_definition_and_counts_agree(
    band: tuple[int, int], lower_right: bool, lengths: tuple[int, ...] | None
) -> None:
    queries, keys = 6, 7
    geometry = Geometry(1.0, 0.0, *band, lower_right)
    rows, columns = torch.arange(queries), torch.arange(keys)
    given = keys if lengths is None else torch.tensor(lengths).view(-1, 1, 1)
    seen = geometry.visible(rows, columns, queries, given)
    expected = torch.zeros(len(lengths or (keys,)), queries, keys, dtype=torch.bool)
    for b, length in enumerate(lengths or (keys,)):
        for i in range(queries):
            position = i + (length - queries if lower_right else 0)
            for j in range(length):
                left, right = band
                expected[b, i, j] = (left == ALL or j >= position - left) and (right == ALL or j <= position + right)
    if seen is None:
        assert expected.all()
    else:
        assert torch.equal(seen.expand(expected.shape), expected)
    per_row = keys if lengths is None else torch.tensor(lengths).view(-1, 1)
    counts = visible_counts(geometry, rows, queries, per_row)
    assert counts.dtype == torch.int32
    assert torch.equal(counts.expand(expected.shape[:2]).long(), expected.sum(-1))


def test_banded() -> None:
    assert not Geometry(1.0).banded
    assert Geometry(1.0, right=0).banded
    assert Geometry(1.0, left=4).banded
