"""The text, character by character, against what dm-clrs wrote with its real dependencies (make_golden.py)."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sharpmax.tasks.clrs_text import (
    ALGORITHMS,
    CHARACTERS,
    EVALUATION_SIZES,
    TRAINING_SIZES,
    UNTRACED,
    Split,
    evaluation,
    generate_samples,
    training,
    upstream,
)

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))


def golden(algorithm: str) -> list[dict]:
    return [entry for entry in GOLDEN["samples"] if entry["algorithm"] == algorithm]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("traces", [True, False])
def test_every_character_is_upstreams(algorithm, traces):
    entries = [entry for entry in golden(algorithm) if entry["traces"] == traces]
    assert {entry["seed"] for entry in entries} == {0, 81}
    assert {4, 6} <= {entry["size"] for entry in entries}
    for entry in entries:
        made = generate_samples(
            algorithm, entry["size"], entry["seed"], count=len(entry["texts"]), traces=entry["traces"]
        )
        assert [[sample.question, sample.answer] for sample in made] == entry["texts"]
        assert all(("initial_trace" in q) == (traces and algorithm not in UNTRACED) for q, _ in entry["texts"])


def test_the_golden_samples_are_of_the_release_we_run():
    assert GOLDEN["versions"]["dm-clrs"] == upstream.VERSION
    assert "tensorflow" in GOLDEN["versions"]


def test_sizes_and_seeds_are_upstreams():
    for split, name in ((training(), "training"), (evaluation(), "evaluation")):
        expected = GOLDEN[name]
        assert {algorithm: list(sizes) for algorithm, sizes in split.sizes.items()} == expected["sizes"]
        assert (list(split.seeds), split.samples) == (expected["seeds"], expected["samples"])
    assert len(training().pairs) == 215
    assert len(training()) == 2_150_000
    assert tuple(TRAINING_SIZES) == tuple(EVALUATION_SIZES) == ALGORITHMS
    assert len(ALGORITHMS) == 30


def test_all_characters_are_known():
    texts = "".join(text for entry in GOLDEN["samples"] for pair in entry["texts"] for text in pair)
    assert set(texts) <= set(CHARACTERS)
    names = "".join(name for algorithm in ALGORITHMS for name in upstream.load().samplers.specs.SPECS[algorithm])
    assert set(names) - set(CHARACTERS) <= {"D"}  # a matrix that is a hint and not in any text


@pytest.mark.parametrize("algorithm", ["segments_intersect", "bfs", "strongly_connected_components", "kmp_matcher"])
def test_a_sample_does_not_depend_on_how_it_is_reached(algorithm):
    in_order = list(generate_samples(algorithm, 10, 3, count=6))
    assert [sample.index for sample in in_order] == list(range(6))
    for start in (1, 5):
        assert list(generate_samples(algorithm, 10, 3, start=start, count=1)) == [in_order[start]]


def test_segments_intersect_ignores_its_size():
    small, large = (next(generate_samples("segments_intersect", size, 0)) for size in (4, 31))
    assert (small.question, small.answer) == (large.question, large.answer)


ISOLATED = """
import sys, importlib.abc
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "tensorflow", "chex", "absl", "clrs", "torch", "haiku", "transformers"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from sharpmax.tasks.clrs_text import generate_samples
print(next(generate_samples("minimum", 4)).answer.strip())
print(sorted({m.partition(".")[0] for m in sys.modules} & {"jax", "tensorflow", "chex", "absl", "clrs", "torch"}))
"""


def test_numpy_and_attrs_are_enough_and_nothing_is_left_behind():
    result = subprocess.run([sys.executable, "-c", ISOLATED], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    expected = golden("minimum")
    (answer,) = {e["texts"][0][1].strip() for e in expected if e["traces"] and (e["size"], e["seed"]) == (4, 0)}
    assert result.stdout.splitlines() == [answer, "[]"]
    assert result.stderr == ""


def test_jax_stays_what_it_was_and_threads_share_one_generator():
    import jax

    upstream._load.cache_clear()
    before = dict(sys.modules)
    found = []
    threads = [threading.Thread(target=lambda: found.append(upstream.load())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(modules.samplers) for modules in found}) == 1
    assert found[0].samplers.jax is not jax
    assert sys.modules["jax"] is jax
    changed = {name for name in sys.modules if sys.modules[name] is not before.get(name)}
    assert not {name for name in changed if name.partition(".")[0] in ("jax", "clrs", "absl", "chex", "tensorflow")}


def test_what_needs_jax_is_refused():
    with pytest.raises(NotImplementedError, match="needs JAX"):
        upstream.load().samplers.probing.predecessor_to_cyclic_predecessor_and_first([0, 0])


def test_another_release_or_none_is_named(monkeypatch):
    class Other:
        version = "2.0.3"

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Other)
    with pytest.raises(ValueError, match=r"expected dm-clrs 2\.0\.1, .* got 2\.0\.3: pip install"):
        upstream.load()

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'sharpmax\[clrs\]' && pip install --no-deps dm-clrs"):
        upstream.load()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sizes": {"quick_sort": (4,)}}, "expected an algorithm to be one of activity_selector, .* got 'quick_sort'"),
        ({"sizes": {"bfs": (3,)}}, "expected a size to be a whole number from 4 to 256, got 3"),
        ({"sizes": {"bfs": (4.5,)}}, "got 4.5"),
        ({"sizes": {"bfs": ()}}, "at least one algorithm and one size"),
        ({"sizes": {}}, "at least one algorithm"),
        ({"seeds": ()}, "expected seeds to be different"),
        ({"seeds": (1, 1)}, r"got \[1, 1\]"),
        ({"seeds": (-1,)}, "from 0 to 4,294,967,295, got -1"),
        ({"samples": 0}, "at least one sample"),
    ],
)
def test_bad_splits_are_refused(change, says):
    good = {"name": "x", "sizes": {"bfs": (4,)}, "seeds": (0,), "samples": 1}
    Split(**good)
    with pytest.raises(ValueError, match=says):
        Split(**(good | change))


def test_splits_survive_json():
    for split in (training(), evaluation(traces=False), training().only(["bfs", "dfs"], [4, 9], seeds=[5], samples=2)):
        assert Split.from_json(json.loads(json.dumps(split.to_json()))) == split
