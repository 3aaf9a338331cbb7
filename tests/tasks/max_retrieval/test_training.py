"""Training: it learns, and a run that was killed ends as one that was not."""

import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sharpmax.tasks.max_retrieval import load_checkpoint, train, train_together
from sharpmax.tasks.max_retrieval.checkpoint import SIDECAR, Checkpoint
from sharpmax.tasks.max_retrieval.protocol import Protocol
from sharpmax.tasks.max_retrieval.training import CHUNK, Progress, progress_bar

SMALL = Protocol(steps=12, batch=8, sizes=(3, 4), average=0.9)
SEEDS = (0, 7)

RUN = """
import sys
from sharpmax.tasks.max_retrieval import Protocol, train
train(Protocol.from_dict({protocol}), {seeds}, sys.argv[1], chunk=2, progress=lambda p: print(p.step, flush=True))
"""


def _script(protocol: Protocol) -> str:
    return RUN.format(protocol=protocol.to_dict(), seeds=SEEDS)


def _assert_same(a: Checkpoint, b: Checkpoint) -> None:
    assert (a.step, a.history) == (b.step, b.history)
    for x, y in ((a.state.theta, b.state.theta), (a.state.average, b.state.average)):
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def uninterrupted() -> Checkpoint:
    return train(SMALL, SEEDS, chunk=2)


def test_an_interrupted_run_ends_the_same(tmp_path: Path, uninterrupted: Checkpoint) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(SMALL, SEEDS, tmp_path, chunk=2, progress=interrupt, provenance={"commit": "abc"})
    assert load_checkpoint(tmp_path).step == 6  # what was shown is saved
    resumed = train(SMALL, SEEDS, tmp_path, chunk=5)
    _assert_same(resumed, uninterrupted)
    assert (resumed.chunk, resumed.provenance) == (2, {"commit": "abc"})
    _assert_same(load_checkpoint(tmp_path), uninterrupted)
    again = train(SMALL, SEEDS, tmp_path, provenance={"commit": "other"})
    _assert_same(again, uninterrupted)  # finished: nothing to do
    assert again.provenance == {"commit": "abc"}


def test_a_killed_run_ends_the_same(tmp_path: Path, uninterrupted: Checkpoint) -> None:
    command = [sys.executable, "-c", _script(SMALL), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | _environment()) as process:
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 60
        while not (tmp_path / SIDECAR).exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert load_checkpoint(tmp_path).step < SMALL.steps
    _assert_same(train(SMALL, SEEDS, tmp_path, chunk=2), uninterrupted)


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, uninterrupted: Checkpoint) -> None:
    uninterrupted.save(tmp_path)
    with pytest.raises(ValueError, match="another protocol"):
        train(dataclasses.replace(SMALL, l2=1.0), SEEDS, tmp_path)
    with pytest.raises(ValueError, match="of the seeds"):
        train(SMALL, (0, 1), tmp_path)


def test_history_has_spread_below_bound(uninterrupted: Checkpoint) -> None:
    assert [entry["step"] for entry in uninterrupted.history] == [0, 2, 4, 6, 8, 10, 12]
    for entry in uninterrupted.history:
        assert all(0 < s < b for s, b in zip(entry["spread"], entry["bound"], strict=True))
    assert all(len(entry["loss"]) == len(SEEDS) for entry in uninterrupted.history[1:])


@pytest.mark.thorough
def test_protocols_that_train_together_are_those_that_train_alone(uninterrupted: Checkpoint) -> None:
    other = dataclasses.replace(SMALL, learning_rate=1e-2, average=0.0, schedule="cosine")
    together = train_together([SMALL, other], SEEDS, chunk=2)
    np.testing.assert_allclose(together[0].state.theta, uninterrupted.state.theta, atol=1e-5)
    np.testing.assert_allclose(together[0].state.average, uninterrupted.state.average, atol=1e-5)
    assert together[1].protocol == other
    assert together[1].state.average is None
    assert np.max(np.abs(together[1].state.theta - together[0].state.theta)) > 1e-2


def test_it_learns_in_a_few_hundred_steps() -> None:
    said: list[Progress] = []
    trained = train(
        Protocol(steps=240, batch=32, sizes=(5, 6), schedule="cosine"), SEEDS, chunk=80, progress=said.append
    )
    assert [p.step for p in said] == [0, 80, 160, 240]
    assert said[-1].seconds_left == 0
    assert min(trained.history[-1]["accuracy"]) > 0.85
    assert max(trained.history[-1]["loss"]) < 0.5 * min(trained.history[1]["loss"])
    assert min(trained.history[-1]["spread"]) > max(trained.history[0]["spread"])


@pytest.mark.thorough
def test_several_devices_share_the_seeds(tmp_path: Path, uninterrupted: Checkpoint) -> None:
    """As many of four devices as divide the seeds; the two seeds of this run are on two."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-c", ON_FOUR + _script(SMALL), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | _environment() | flags)
    np.testing.assert_allclose(load_checkpoint(tmp_path).state.theta, uninterrupted.state.theta, atol=1e-5)


ON_FOUR = """
import jax
from sharpmax.tasks.max_retrieval import training
assert [len(training.devices_for(members)) for members in (1, 2, 6, 7, 8, 10)] == [1, 2, 3, 1, 4, 2]
record = training._record
def checked(histories, step, seeds, metrics, state, *rest):
    assert step == 0 or len(state.theta.sharding.device_set) == 2
    record(histories, step, seeds, metrics, state, *rest)
training._record = checked
"""


@pytest.mark.thorough
def test_a_run_that_diverges_goes_on_and_is_kept(tmp_path: Path) -> None:
    protocols = [dataclasses.replace(SMALL, steps=4, average=0.0, learning_rate=rate) for rate in (1e5, 1e-3)]
    run = train(protocols[0], SEEDS, tmp_path, chunk=2)
    assert np.isnan(run.state.theta).any(axis=1).all()
    loaded = load_checkpoint(tmp_path)
    assert loaded.finished
    assert loaded.history == run.history
    assert loaded.history[-1]["bound"] == loaded.history[-1]["loss"] == [None, None]
    lost, kept = train_together(protocols, SEEDS, chunk=2)
    assert lost.history[-1]["bound"] == [None, None]
    assert all(0 < s < b for s, b in zip(kept.history[-1]["spread"], kept.history[-1]["bound"], strict=True))


@pytest.mark.thorough
def test_chunks_are_short_on_a_cpu_and_the_history_too() -> None:
    run = train(dataclasses.replace(SMALL, steps=50, batch=1), SEEDS, chunk=1)
    assert [entry["step"] for entry in run.history] == [0, *(-(-50 * k // 20) for k in range(1, 21))]
    assert CHUNK["cpu"] <= 250
    assert train(SMALL, SEEDS).chunk == CHUNK["cpu"]


OPTIMISED = """
import sys
from sharpmax.tasks.max_retrieval import Protocol, train
protocol = Protocol.from_dict({protocol})
def stop(progress):
    if progress.step == 6:
        raise KeyboardInterrupt
if sys.argv[2] == "begin":
    train(protocol, {seeds}, sys.argv[1] + "/whole", chunk=3)
    try:
        train(protocol, {seeds}, sys.argv[1] + "/part", chunk=3, progress=stop)
    except KeyboardInterrupt:
        pass
else:
    train(protocol, {seeds}, sys.argv[1] + "/part")
"""


@pytest.mark.thorough
def test_a_resumed_run_ends_the_same_with_all_of_the_compilers_optimisations(tmp_path: Path) -> None:
    script = OPTIMISED.format(protocol=dataclasses.replace(SMALL, steps=9).to_dict(), seeds=SEEDS)
    environment = os.environ | _environment() | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    for part in ("begin", "resume"):
        subprocess.run([sys.executable, "-c", script, str(tmp_path), part], check=True, env=environment)
        assert load_checkpoint(tmp_path / "part").step == {"begin": 6, "resume": 9}[part]
    _assert_same(load_checkpoint(tmp_path / "part"), load_checkpoint(tmp_path / "whole"))


@pytest.mark.parametrize("seeds", [(), (0, 0), (-1,), (2**32,), (0.5,)])
def test_bad_seeds_are_refused(seeds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected seeds to be different whole numbers"):
        train(SMALL, seeds)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk to be at least 1"):
        train(SMALL, SEEDS, chunk=0)
    with pytest.raises(ValueError, match="at least one protocol"):
        train_together([], SEEDS)


def test_the_progress_bar_says_where_training_stands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bar("training") as show:
        show(Progress(50, 100, 0.25, 0.9, 10.0, 5.0))
    said = capsys.readouterr().err
    assert "50/100" in said
    assert "0.2500" in said
    with progress_bar("training") as show:
        show(Progress(0, 100, math.nan, math.nan, 0.0, math.inf))
    said = capsys.readouterr().err
    assert "0/100" in said.replace(" ", "")
    assert "compiling" in said
