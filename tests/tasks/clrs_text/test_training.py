"""Training runs on the CPU: that they learn, go on to the same bits, agree over processes, and refuse what differs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from sharpmax import PAPER
from sharpmax.huggingface import Rule, stored_rules
from sharpmax.huggingface.weights import load
from sharpmax.inputs import InputError
from sharpmax.tasks.clrs_text import checkpoints, generate
from sharpmax.tasks.clrs_text.fine_tuning import Run, train
from sharpmax.tasks.clrs_text.models import SCRATCH_CONFIG
from sharpmax.tasks.clrs_text.preparation import find_samples
from sharpmax.tasks.clrs_text.settings import Settings

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def tiny(tmp_path) -> Settings:
    """Eight steps of a model with 20,000 parameters."""
    config = SCRATCH_CONFIG | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    return Settings(
        model=str(tmp_path / "tiny.json"), policy=PAPER.to_dict(), tokens=8 * 4 * 192, batch=4, micro=2, length=192,
        algorithms=("minimum",), sizes=(4, 5), checkpoint_every=3, log_every=2, precision="float32",
    )  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """Sums on several threads are sums in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def same(first: Path, second: Path) -> bool:
    return (first / "model" / "model.safetensors").read_bytes() == (second / "model" / "model.safetensors").read_bytes()


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def command(settings: Settings, out: Path) -> list[str]:
    path = out.parent / "settings.json"
    path.write_text(json.dumps(settings.to_json() | {"model": settings.model}))
    return ["sharpmax", "clrs-text", "train", "--cpu", "--settings", str(path), "--out", str(out)]


def test_a_small_model_learns_minimum(tmp_path):
    config = SCRATCH_CONFIG | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    (tmp_path / "small.json").write_text(json.dumps(config))
    settings = Settings(
        model=str(tmp_path / "small.json"), policy=PAPER.to_dict(), tokens=100 * 8 * 128, batch=8, micro=8,
        length=128, learning_rate=1e-2, algorithms=("minimum",), sizes=(4,), log_every=10,
    )  # fmt: skip
    result = train(settings, tmp_path / "run", cpu=True)
    assert result is not None
    losses = result["curve"]["loss"]
    assert losses[-1] < losses[0] / 4
    assert result["counts"]["sequences"] == 100 * 8
    assert 0 < result["counts"]["padding"] < result["counts"]["tokens"] == settings.tokens
    assert result["provenance"]["versions"]["torch"]


def test_what_a_run_leaves(tmp_path, tiny):
    out = tmp_path / "run"
    shown: list[int] = []
    result = train(tiny, out, cpu=True, save_dtype="bfloat16", progress=lambda step, *_: shown.append(step))
    assert shown == list(range(1, 9))
    assert json.loads((out / "training.json").read_text()) == result
    assert {path.name for path in out.iterdir()} == {".lock", "log.jsonl", "model", "training.json"}
    assert [line["step"] for line in lines(out)] == [2, 3, 4, 6, 8]
    assert result is not None
    assert result["settings"] == tiny.to_json() | {"model": "tiny.json"}
    assert str(tmp_path) not in json.dumps(result)
    model, tokenizer = load(out / "model", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert stored_rules(model) == (Rule(PAPER),)
    assert tokenizer.eos_token_id == 2
    modified = (out / "training.json").stat().st_mtime_ns
    assert train(tiny, out, cpu=True) == result
    assert (out / "training.json").stat().st_mtime_ns == modified


def test_a_run_that_is_left_again_and_again_ends_with_the_same_bits(tmp_path, tiny, monkeypatch):
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    train(tiny, whole, cpu=True)
    times = 0
    monkeypatch.setenv("SHARPMAX_COMMIT", "first")
    while (result := train(tiny, pieces, cpu=True, minutes=1e-9)) is None:
        monkeypatch.setenv("SHARPMAX_COMMIT", "others")
        times += 1
        assert (pieces / "checkpoint.json").is_file()
        assert not (pieces / "training.json").exists()
    assert times == 4  # at every line of the log but the last
    made = result["provenance"]
    assert [maker["git"]["commit"] for maker in (made, *made["before"])] == ["others", "first"]
    assert "before" not in json.loads((whole / "training.json").read_text())["provenance"]
    assert same(whole, pieces)
    assert [line["loss"] for line in lines(whole)] == [line["loss"] for line in lines(pieces)]


def test_a_run_that_is_killed_ends_with_the_same_bits(tmp_path, tiny):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    longer = replace(tiny, tokens=60 * 4 * 192, checkpoint_every=5)
    train(longer, whole, cpu=True)
    run = subprocess.Popen([sys.executable, "-m", *command(longer, killed)], cwd=ROOT, env=ENVIRONMENT)
    deadline = time.monotonic() + 120
    while not (killed / "log.jsonl").exists() or len(lines(killed)) < 12:
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    step = json.loads((killed / "checkpoint.json").read_text())["step"]
    assert 0 < step < 60
    with (killed / "log.jsonl").open("a") as file:
        file.write('{"step": 6')  # as if it had been killed while it wrote
    train(longer, killed, cpu=True)
    assert same(whole, killed)
    assert [line["step"] for line in lines(whole)] == [line["step"] for line in lines(killed)]


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path, tiny, monkeypatch):
    out = tmp_path / "run"
    assert train(tiny, out, cpu=True, minutes=1e-9) is None
    before = (out / "checkpoint.json").read_text()
    write = checkpoints.write_tensors

    def half(path, tensors):
        if path.name == "optimizer.safetensors":
            raise OSError("no space left")
        write(path, tensors)

    monkeypatch.setattr(checkpoints, "write_tensors", half)
    with pytest.raises(OSError, match="no space left"):
        train(tiny, out, cpu=True)
    monkeypatch.undo()
    assert (out / "checkpoint.json").read_text() == before
    assert {path.name for path in out.iterdir()} == {".lock", "checkpoint.json", "checkpoint-00000002", "log.jsonl"}
    assert train(tiny, out, cpu=True) is not None


TWICE = """
import atexit, os, shutil, sys
from pathlib import Path
from sharpmax.tasks.clrs_text.training_command import train_command

def last():
    print("threads:", *{name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")})

atexit.register(last)
folder = Path(sys.argv[1])
given = {"settings": folder / "settings.json", "cpu": True}
for line in train_command(folder / "together", minutes=1e-9, **given):
    print(line)
if os.environ["RANK"] == "0":
    shutil.copytree(folder / "together", folder / "stopped")
for line in train_command(folder / "together", **given):
    print(line)
"""
"""A run that is left and goes on, in processes that stay: starting them takes longer than all else."""


def test_two_processes_agree_with_one(tmp_path, tiny):
    alone, together = tmp_path / "alone", tmp_path / "together"
    train(replace(tiny, workers=2), alone, cpu=True)  # worker and process number i have the same samples
    (tmp_path / "settings.json").write_text(json.dumps(tiny.to_json() | {"model": tiny.model}))
    (tmp_path / "script.py").write_text(TWICE)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launch, str(tmp_path / "script.py"), str(tmp_path)], cwd=ROOT, env=ENVIRONMENT, capture_output=True,
        text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("time is up") == 1
    assert done.stdout.count("8 steps") == 1
    assert done.stdout.count("threads:") == 2
    assert "gloo" not in done.stdout  # a thread of a group that wants the interpreter while it ends aborts the process
    with pytest.raises(ValueError, match=r"expected 2 processes, as .* began with, got 1"):
        train(tiny, tmp_path / "stopped", cpu=True)
    for name, tensor in weights(together).items():
        torch.testing.assert_close(tensor, weights(alone)[name], rtol=1e-4, atol=1e-6)
    one, two = (json.loads((out / "training.json").read_text()) for out in (alone, together))
    assert (one["processes"], two["processes"]) == (1, 2)
    assert one["counts"] == two["counts"]


def test_stored_samples_are_those_that_would_be_made(tmp_path, tiny):
    split = find_samples(tiny).source.split
    generate(tmp_path / "data", split=replace(split, samples=200), processes=1)
    stored = replace(tiny, data=str(tmp_path / "data"), algorithms=None, sizes=None)
    result = train(stored, tmp_path / "stored", cpu=True)
    train(tiny, tmp_path / "made", cpu=True)
    assert same(tmp_path / "stored", tmp_path / "made")
    assert result is not None
    assert result["settings"]["data"] == "data"
    with pytest.raises(ValueError, match=r"expected samples without traces, got .*, which has them with"):
        train(replace(stored, traces=False), tmp_path / "untraced", cpu=True)
    with pytest.raises(ValueError, match="a folder has its own"):
        train(replace(stored, sizes=(4,)), tmp_path / "sizes", cpu=True)


def test_accumulation_does_not_change_the_result(tmp_path, tiny):
    train(tiny, tmp_path / "two", cpu=True)
    train(replace(tiny, micro=4), tmp_path / "one", cpu=True)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-6)


def test_runs_of_one_process_may_differ_in_precision(tmp_path, tiny):
    exact, rounded = (
        train(replace(tiny, precision=precision), tmp_path / precision, cpu=True) for precision in ("float32", "bf16")
    )
    assert exact is not None
    assert rounded is not None
    assert exact["curve"]["loss"] != rounded["curve"]["loss"]
    assert rounded["curve"]["loss"] == pytest.approx(exact["curve"]["loss"], rel=1e-2)
    assert all(tensor.dtype == torch.float32 for tensor in weights(tmp_path / "bf16").values())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"learning_rate": 0.1}, r"holds a run with learning_rate 0\.0003 in place of 0\.1: take another folder"),
        ({"policy": None}, "holds a run with policy .* in place of None"),
        ({"seed": 7, "micro": 4}, "micro 2 in place of 4, seed 0 in place of 7"),
    ],
)
def test_a_run_with_other_settings_is_refused(tmp_path, tiny, change, match):
    out = tmp_path / "run"
    train(tiny, out, cpu=True, minutes=1e-9)
    before = sorted(path.name for path in out.rglob("*"))
    with pytest.raises(ValueError, match=match):
        train(replace(tiny, **change), out, cpu=True)
    assert sorted(path.name for path in out.rglob("*")) == before


def test_a_checkpoint_of_another_model_or_damaged_is_refused(tmp_path, tiny):
    out, config = tmp_path / "run", json.loads(Path(tiny.model).read_text())
    train(tiny, out, cpu=True, minutes=1e-9)
    Path(tiny.model).write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(ValueError, match="of a model with intermediate_size 64 in place of 48"):
        train(tiny, out, cpu=True)
    Path(tiny.model).write_text(json.dumps(config))
    checkpoint = json.loads((out / "checkpoint.json").read_text())
    (out / "checkpoint.json").write_text(json.dumps({k: v for k, v in checkpoint.items() if k != "processes"}))
    with pytest.raises(ValueError, match=r"checkpoint\.json is damaged: expected the fields .*, got no processes"):
        train(tiny, out, cpu=True)
    (out / "checkpoint.json").write_text(json.dumps(checkpoint))
    tensors = out / "checkpoint-00000002" / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"expected .*model.safetensors to be the tensors of a checkpoint"):
        train(tiny, out, cpu=True)
    (out / "checkpoint.json").write_text("{}")
    with pytest.raises(ValueError, match="to have the schema"):
        train(tiny, out, cpu=True)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path, tiny):
    with pytest.raises(InputError, match=r"the loss is no number after step \d, with a learning rate of 9.66e\+17"):
        train(replace(tiny, learning_rate=1e18, warmup=0.0), tmp_path / "run", cpu=True)


def test_a_gradient_that_is_no_number_ends_the_run_and_is_not_saved(tmp_path, tiny, monkeypatch):
    clip, calls = Accelerator.clip_grad_norm_, []

    def broken(self, *arguments):
        calls.append(clip(self, *arguments))
        return calls[-1] * (float("nan") if len(calls) == 5 else 1)  # the first of two steps until a line of the log

    monkeypatch.setattr(Accelerator, "clip_grad_norm_", broken)
    with pytest.raises(InputError, match=r"the gradient is no number after step 6, with a learning rate of .*: try"):
        train(tiny, tmp_path / "run", cpu=True)
    assert json.loads((tmp_path / "run" / "checkpoint.json").read_text())["step"] == 3


def test_a_device_without_memory_is_one_sentence(tmp_path, tiny, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nMany lines.")

    monkeypatch.setattr(Run, "_take_step", full)
    with pytest.raises(InputError, match="no memory for 2 sequences of 192 tokens at a time: try a smaller --micro"):
        train(tiny, tmp_path / "run", cpu=True)
