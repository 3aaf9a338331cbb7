"""Checkpoints: what was saved comes back; what is not whole is refused."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from sharpmax.tasks.max_retrieval import checkpoint as module
from sharpmax.tasks.max_retrieval.checkpoint import SIDECAR, Checkpoint, check_same, load_checkpoint
from sharpmax.tasks.max_retrieval.protocol import Protocol
from sharpmax.tasks.max_retrieval.step import IS_KERNEL, State

PROTOCOL = Protocol(steps=10, average=0.9)


def _checkpoint(step: int = 5, seed: int = 0) -> Checkpoint:
    random = np.random.default_rng(seed)
    arrays = [random.normal(size=(2, len(IS_KERNEL))).astype(np.float32) for _ in range(4)]
    history = [{"step": step, "loss": [0.1, 0.2]}]
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
        ({"seeds": [1, 2, 3]}, r"expected .* as float32 \(3, "),
        ({"protocol": {}}, "is not a complete checkpoint"),
    ):
        sidecar.write_text(json.dumps({**content, **change}))
        with pytest.raises(ValueError, match=message):
            load_checkpoint(tmp_path)
    del content["history"]
    sidecar.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="it has no 'history'"):
        load_checkpoint(tmp_path)


def test_another_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"another protocol \(l2 0.0 there and 0.5 here\)"):
        check_same(_checkpoint(), dataclasses.replace(PROTOCOL, l2=0.5), (3, 4), "DIR")
    with pytest.raises(ValueError, match=r"of the seeds \[3, 4\], not \[3\]"):
        check_same(_checkpoint(), PROTOCOL, (3,), "DIR")
