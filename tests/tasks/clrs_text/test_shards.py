"""Files of samples: the same however they are made, complete or continued, and what is damaged is named."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sharpmax.tasks.clrs_text import (
    CorruptShardError,
    evaluation,
    generate,
    generate_samples,
    load_manifest,
    training,
    verify,
)
from sharpmax.tasks.clrs_text.shards import read_shard
from tests.processes import members, needs_proc

SMALL = training().only(["minimum", "bfs", "naive_string_matcher"], [4, 6], samples=12)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.gz")}


def read(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in read_shard(folder / name).splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "train"
    generate(folder, split=SMALL, processes=1, shard=5)
    return folder


def test_shards_hold_the_samples_in_order(made):
    manifest = load_manifest(made)
    assert manifest["samples"] == len(SMALL) == 72
    assert [entry["samples"] for entry in manifest["shards"]] == [5, 5, 2] * 6
    found = [row for entry in manifest["shards"] for row in read(made, entry["file"])]
    expected = [s for pair in SMALL.pairs for s in generate_samples(*pair, 0, count=12)]
    assert [(r["algorithm"], r["size"], r["index"]) for r in found] == [
        (s.algorithm, s.size, s.index) for s in expected
    ]
    assert [(r["question"], r["answer"]) for r in found] == [(s.question, s.answer) for s in expected]
    assert manifest["provenance"]["git"] is not None
    assert verify(made) == manifest


def test_shards_go_over_all_seeds(tmp_path):
    split = evaluation().only(["minimum"], [5], seeds=[3, 14], samples=3)
    (entry, other) = generate(tmp_path, split=split, processes=1, shard=4)["shards"]
    rows = read(tmp_path, entry["file"]) + read(tmp_path, other["file"])
    assert [(r["seed"], r["index"]) for r in rows] == [(s, i) for s in (3, 14) for i in range(3)]
    assert rows[4]["question"] == next(generate_samples("minimum", 5, 14, start=1)).question


def test_several_processes_make_the_same_files(made, tmp_path):
    seen = []
    generate(tmp_path, split=SMALL, processes=2, shard=5, progress=lambda done, of: seen.append((done, of)))
    assert files(tmp_path) == files(made)
    assert seen[-1] == (72, 72)
    assert len(seen) == 18


def test_a_run_goes_on_and_keeps_what_is_there(made, tmp_path):
    generate(tmp_path, split=SMALL, processes=1, shard=5)
    kept = sorted(tmp_path.rglob("*.gz"))
    lost = kept[3]
    lost.unlink()
    (tmp_path / "manifest.json").unlink()
    times = {path: path.stat().st_mtime_ns for path in kept if path != lost}
    with pytest.raises(ValueError, match="not complete: generate again"):
        load_manifest(tmp_path)
    generate(tmp_path, split=SMALL, processes=1, shard=5)
    assert files(tmp_path) == files(made)
    assert {path: path.stat().st_mtime_ns for path in times} == times


KILLED = """
import sys
from sharpmax.tasks.clrs_text import generate, training
if __name__ == "__main__":
    generate(sys.argv[1], split=training().only(["minimum"], [4, 6], samples=400), processes=2, shard=10)
"""


@needs_proc
def test_a_run_that_was_killed_goes_on(tmp_path):
    script, out = tmp_path / "killed.py", tmp_path / "out"
    script.write_text(KILLED)
    with subprocess.Popen([sys.executable, script, out], start_new_session=True, stderr=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 60
        while len(files(out)) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(run.pid, signal.SIGKILL)
    before = set(files(out))
    assert 3 <= len(before) < 80
    deadline = time.monotonic() + 20
    while (alive := members(run.pid)) and time.monotonic() < deadline:  # workers end with their parent
        time.sleep(0.1)
    assert not alive
    split = training().only(["minimum"], [4, 6], samples=400)
    manifest = generate(out, split=split, processes=1, shard=10)
    assert before <= {entry["file"] for entry in manifest["shards"]}
    assert verify(out)["samples"] == 800


@pytest.mark.parametrize("damage", ["byte", "cut", "other"])
def test_a_corrupt_shard_is_named(tmp_path, damage):
    generate(tmp_path, split=SMALL.only(["minimum"]), processes=1, shard=5)
    path = sorted(tmp_path.rglob("*.gz"))[1]
    content = path.read_bytes()
    if damage == "byte":
        path.write_bytes(content[:60] + bytes([content[60] ^ 1]) + content[61:])
    elif damage == "cut":
        path.write_bytes(content[:-20])
    else:
        path.write_bytes(gzip.compress(gzip.decompress(content).replace(b"0.5", b"0.6")))
    for attempt in (
        lambda: verify(tmp_path),
        lambda: generate(tmp_path, split=SMALL.only(["minimum"]), processes=1, shard=5),
    ):
        with pytest.raises(
            CorruptShardError, match=f"the shard .*{path.name} is corrupt.*delete it and generate again"
        ):
            attempt()
    path.unlink()
    with pytest.raises(CorruptShardError, match="is missing: generate again"):
        verify(tmp_path)
    generate(tmp_path, split=SMALL.only(["minimum"]), processes=1, shard=5)
    assert path.read_bytes() == content
    verify(tmp_path)


def test_another_set_in_the_folder_is_refused(made):
    before = files(made)
    with pytest.raises(ValueError, match=r"holds another set of samples \(samples differ\): give another folder"):
        generate(made, split=SMALL.only(samples=13), processes=1, shard=5)
    with pytest.raises(ValueError, match=r"\(shard differ\)"):
        generate(made, split=SMALL, processes=1, shard=6)
    assert files(made) == before
    with pytest.raises(ValueError, match="expected a folder that `sharpmax clrs-text generate` made, got 'nowhere'"):
        load_manifest("nowhere")


def test_a_damaged_manifest_is_named(tmp_path):
    generate(tmp_path, split=SMALL.only(["minimum"], [4]), processes=1)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json is damaged: delete it"):
        verify(tmp_path)


def test_what_repeats_is_counted(tmp_path):
    split = training().only(["naive_string_matcher", "segments_intersect"], [4, 5], samples=100)
    manifest = generate(tmp_path / "train", split=split, processes=1)
    for algorithm, row in manifest["algorithms"].items():
        everything = []
        for size in (4, 5):
            questions = [s.question for s in generate_samples(algorithm, size, 0, count=100)]
            assert row["sizes"][str(size)]["distinct"] == len(set(questions))
            everything += questions
        assert row["distinct"] == len(set(everything))
    assert manifest["algorithms"]["naive_string_matcher"]["sizes"]["4"]["distinct"] < 100
    assert manifest["algorithms"]["segments_intersect"]["distinct"] == 100  # of 200: its samples ignore the size
    assert manifest["against"] is None

    asked = evaluation().only(["naive_string_matcher", "bfs"], [4], seeds=[3], samples=50)
    against = generate(tmp_path / "evaluation", split=asked, processes=1, against=tmp_path / "train")
    trained = {s.question for s in generate_samples("naive_string_matcher", 4, 0, count=100)}
    expected = sum(s.question in trained for s in generate_samples("naive_string_matcher", 4, 3, count=50))
    assert against["against"] == {"training": "train", "seen": expected}
    assert 0 < expected < 50
    assert against["algorithms"]["bfs"]["sizes"]["4"]["seen"] == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"split": "test"}, "expected a split to be one of train, evaluation, got 'test'"),
        ({"algorithms": ["bogosort"]}, "got 'bogosort'"),
        ({"sizes": [2]}, "got 2"),
        ({"processes": 0}, "expected at least one process, got 0"),
        ({"shard": 0}, "expected at least one sample in a shard, got 0"),
        ({"against": "nowhere"}, "got 'nowhere'"),
    ],
)
def test_bad_arguments_leave_nothing(tmp_path, options, says):
    with pytest.raises(ValueError, match=says):
        generate(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
