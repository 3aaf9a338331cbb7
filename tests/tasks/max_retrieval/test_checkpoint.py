"""Checkpoints: what was saved comes back; what is not whole is refused."""

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from sharpmax.tasks.max_retrieval import checkpoint as module
from sharpmax.tasks.max_retrieval.checkpoint import SIDECAR, Checkpoint, check_same, load_checkpoint
from sharpmax.tasks.max_retrieval.layout import layout
from sharpmax.tasks.max_retrieval.protocol import Protocol
from sharpmax.tasks.max_retrieval.step import State

PROTOCOL = Protocol(steps=10, average=0.9)


def _checkpoint(step: int = 5, seed: int = 0) -> Checkpoint:
    random = np.random.default_rng(seed)
    arrays = [random.normal(size=(2, len(layout().is_kernel))).astype(np.float32) for _ in range(4)]
    start = {"step": 0, "spread": [0.5, 0.5], "bound": [2.0, 3.0]}
    history = [start, {**start, "step": step, "loss": [0.1, None], "accuracy": [0.7, 0.8]}]
    return Checkpoint(PROTOCOL, (3, 4), step, 5, State(*arrays), history, 1.5, {"commit": "abc"})


def test_round_trip(tmp_path: Path) -> None:
    saved = _checkpoint()
    saved.save(tmp_path)
    loaded = load_checkpoint(tmp_path)
    for name in ("protocol", "seeds", "step", "chunk", "history", "seconds", "provenance"):
        assert getattr(loaded, name) == getattr(saved, name)
    for a, b in zip(saved.state, loaded.state, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(loaded.params["Dense_0"]["bias"].reshape(-1)[:3], saved.state.average[0, :3])


def test_tensors_have_the_names_of_the_listing(tmp_path: Path) -> None:
    _checkpoint().save(tmp_path)
    tensors = safetensors.numpy.load_file(tmp_path / json.loads((tmp_path / SIDECAR).read_text())["tensors"])
    assert tensors["params/MultiHeadDotProductAttention_0/query/kernel"].shape == (2, 128, 1, 128)
    assert {name.partition("/")[0] for name in tensors} == {"params", "average", "adam_m", "adam_v"}


def test_a_finished_run_keeps_no_moments(tmp_path: Path) -> None:
    _checkpoint(step=10).save(tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert loaded.finished
    assert loaded.state.m is None
    assert loaded.state.v is None


def test_only_the_last_tensors_stay(tmp_path: Path) -> None:
    for seed in range(3):
        _checkpoint(seed=seed).save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_only_files_of_a_checkpoint_are_removed(tmp_path: Path) -> None:
    others = ["checkpoint-best.safetensors", "checkpoint-0123456789abcdef.safetensors.bak", ".checkpoint.json"]
    left = [
        "checkpoint-0123456789abcdef.safetensors",
        ".checkpoint-0123456789abcdef.safetensors.ab_12xyz",
        ".checkpoint.json.ab_12xyz",
    ]
    for name in (*others, *left):
        (tmp_path / name).write_text("")
    _checkpoint().save(tmp_path)
    here = {path.name for path in tmp_path.iterdir()}
    assert here == {*others, SIDECAR, json.loads((tmp_path / SIDECAR).read_text())["tensors"]}


@pytest.mark.parametrize("fails_at", ["write_bytes", "write_text"])
def test_a_save_that_stops_half_way_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    _checkpoint(step=5).save(tmp_path)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, fails_at, stop)
    with pytest.raises(KeyboardInterrupt):
        _checkpoint(step=6, seed=1).save(tmp_path)
    assert load_checkpoint(tmp_path).step == 5


def test_corrupt_truncated_and_missing_tensors_are_refused(tmp_path: Path) -> None:
    _checkpoint().save(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[:-4] + b"\x00\x01\x02\x03")
    with pytest.raises(ValueError, match="is corrupt: its SHA-256"):
        load_checkpoint(tmp_path)
    path.write_bytes(content[:1000])
    with pytest.raises(ValueError, match="is corrupt: its SHA-256"):
        load_checkpoint(tmp_path)
    few = safetensors.numpy.save({"params/Dense_0/bias": np.zeros((1, 128), np.float32)})
    path.write_bytes(few)
    sidecar = tmp_path / SIDECAR
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "sha256": hashlib.sha256(few).hexdigest()}))
    with pytest.raises(ValueError, match=r"expected .* to hold params/Dense_0/bias as float32 \(2, "):
        load_checkpoint(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="tensors are missing"):
        load_checkpoint(tmp_path)


def test_foreign_and_broken_sidecars_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint"):
        load_checkpoint(tmp_path)
    _checkpoint().save(tmp_path)
    sidecar = tmp_path / SIDECAR
    content = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps(content)[:200])
    with pytest.raises(ValueError, match="is not a checkpoint"):
        load_checkpoint(tmp_path)
    for change, message in (
        ({"schema": "other/1"}, "to have the schema"),
        ({"step": "many"}, "is not a complete checkpoint"),
        ({"seeds": [1, 2, 3]}, "in history to be 3 numbers"),
        ({"protocol": {}}, "is not a complete checkpoint"),
    ):
        sidecar.write_text(json.dumps({**content, **change}))
        with pytest.raises(ValueError, match=message):
            load_checkpoint(tmp_path)
    del content["history"]
    sidecar.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="it has no 'history'"):
        load_checkpoint(tmp_path)


ENTRY = _checkpoint().history[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": math.inf}, "step to be a whole number"),
        ({"step": 5.0}, "step to be a whole number"),
        ({"step": -1}, "step to be a whole number of at least 0"),
        ({"step": 11}, "step to be at most 10, got 11"),
        ({"step": 10}, "history to end with step 10, got 5"),
        ({"chunk": 0}, "chunk to be a whole number of at least 1"),
        ({"seeds": [-1, 4]}, "seeds to be different whole numbers"),
        ({"seeds": [3, 2**40]}, "seeds to be different whole numbers"),
        ({"seeds": [3, 3]}, "seeds to be different whole numbers"),
        ({"seeds": 2}, "is not a complete checkpoint"),
        ({"seconds": math.nan}, "seconds to be a finite number"),
        ({"provenance": 3}, "is not a complete checkpoint"),
        ({"tensors": "../other.safetensors"}, "tensors to be called"),
        ({"tensors": 3}, "is not a complete checkpoint"),
        ({"history": []}, "history to be one or more objects"),
        ({"history": [1, 2]}, "history to be one or more objects"),
        ({"history": 5}, "history to be one or more objects"),
        ({"history": [{**ENTRY, "spread": None}]}, "spread of step 5 in history to be 2 numbers"),
        ({"history": [{**ENTRY, "loss": [0.1]}]}, "loss of step 5 in history to be 2 numbers"),
        ({"history": [{**ENTRY, "bound": ["a", 1]}]}, "bound of step 5 in history to be a finite number"),
        ({"history": [{**ENTRY, "bound": [math.nan, 1]}]}, "bound of step 5 in history to be a finite number"),
        ({"history": [ENTRY, ENTRY]}, "a step of history to be a whole number of at least 6"),
        ({"history": [{**ENTRY, "step": 7}]}, "a step of history to be at most 5"),
    ],
)
def test_edited_sidecars_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    _checkpoint().save(tmp_path)
    sidecar = tmp_path / SIDECAR
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), **change}))
    with pytest.raises(ValueError, match=message) as raised:
        load_checkpoint(tmp_path)
    assert "\n" not in str(raised.value)


def test_another_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"another protocol \(l2 0.0 there and 0.5 here\)"):
        check_same(_checkpoint(), dataclasses.replace(PROTOCOL, l2=0.5), (3, 4), "DIR")
    with pytest.raises(ValueError, match=r"of the seeds \[3, 4\], not \[3\]"):
        check_same(_checkpoint(), PROTOCOL, (3,), "DIR")
