"""The stream of samples: its order is a function of seed and position, whatever the samples come from."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter

import pytest

from sharpmax.tasks.clrs_text import CorruptShardError, Generated, Samples, Stored, generate, training

SPLIT = training().only(["minimum", "binary_search", "segments_intersect"], [4, 5], seeds=[0, 7], samples=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream") / "train"
    generate(folder, split=SPLIT, processes=1, shard=3)
    return folder


def test_stored_and_generated_samples_are_the_same_stream(folder):
    stored, made = Samples(folder, seed=5, epochs=2), Samples(Generated(SPLIT), seed=5, epochs=2)
    assert len(stored) == 2 * len(SPLIT) == 96
    first = list(stored)
    assert first == list(made)
    assert len(first) == 96
    assert next(stored, None) is None
    assert Stored(folder).split == SPLIT
    assert Counter(first[:48]) == Counter(first[48:])  # an epoch has every sample once
    assert len(set(first[:48])) == 48
    assert first[:48] != first[48:]


def test_a_round_has_a_sample_of_every_pair():
    samples = [next(stream) for stream in [Samples(Generated(SPLIT))] for _ in range(18)]
    orders = []
    for start in range(0, 18, 6):
        pairs = [(s.algorithm, s.size) for s in samples[start : start + 6]]
        assert sorted(pairs) == sorted(SPLIT.pairs)
        assert {s.index for s in samples[start : start + 6]} == {start // 6}
        orders.append(pairs)
    assert orders[0] != orders[1] != orders[2]


def test_seeds_give_other_orders_of_the_same_samples():
    one, other = (list(Samples(Generated(SPLIT), seed=seed, epochs=1)) for seed in (0, 1))
    assert one != other
    assert set(one) == set(other)


def test_a_stream_goes_on_from_any_position(folder):
    expected = list(itertools.islice(Samples(folder), 60))
    for position in (0, 1, 25, 47, 55):
        for source in (folder, Generated(SPLIT)):
            stream = Samples(source)
            stream.position = position
            assert list(itertools.islice(stream, 5)) == expected[position : position + 5]
    stream = Samples(folder)
    list(itertools.islice(stream, 10))
    copy = pickle.loads(pickle.dumps(stream))
    assert [next(copy) for _ in range(4)] == expected[10:14]


def test_parts_share_nothing_and_leave_nothing_out(folder):
    whole = list(Samples(folder, epochs=1))
    parts = [Samples(folder, epochs=1, rank=rank, ranks=3) for rank in range(3)]
    assert [len(part) for part in parts] == [16, 16, 16]
    assert [s for trio in zip(*parts, strict=True) for s in trio] == whole
    halves = [list(Samples(folder, epochs=1, rank=1, ranks=2).part(i, 2)) for i in range(2)]
    assert [s for two in zip(*halves, strict=True) for s in two] == whole[1::2]


def test_a_corrupt_shard_is_named_when_it_is_reached(tmp_path):
    generate(tmp_path, split=SPLIT, processes=1, shard=3)
    path = sorted(tmp_path.glob("minimum/4/00001-*"))[0]
    path.write_bytes(path.read_bytes()[:-9])
    stream = Samples(tmp_path)
    first = [next(stream) for _ in range(18)]
    assert len(first) == 18
    with pytest.raises(CorruptShardError, match=path.name):
        list(itertools.islice(stream, 6))


def test_bad_streams_are_refused(folder):
    with pytest.raises(ValueError, match="got 2 of 2"):
        Samples(folder, rank=2, ranks=2)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        Samples(folder, seed=-1)
    with pytest.raises(TypeError, match="without end"):
        len(Samples(folder))
