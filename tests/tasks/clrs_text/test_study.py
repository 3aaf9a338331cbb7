"""studies/clrs_text.py: what it hands to the commands, and that it ends with them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax import PAPER, PAPER_HELD
from sharpmax.huggingface import stored_rules
from sharpmax.huggingface.weights import load
from sharpmax.tasks.clrs_text import CharacterTokenizer, Encoder, evaluation, generate_samples
from sharpmax.tasks.clrs_text.models import find_model, save_model
from studies import clrs_text as study

ROOT = Path(__file__).parents[3]
TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "tokenizer": "characters",
}  # fmt: skip


@pytest.mark.thorough
def test_from_training_to_the_figure(tmp_path):
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    words = [
        "--out", str(tmp_path / "out"), "--model", str(tmp_path / "tiny.json"), "--tokens", "20000", "--samples", "2",
        "--lengths", "64,128", "--training", "--algorithms minimum --length 128 --batch 8",
        "--evaluation", "--algorithms minimum --sizes 4-6",
    ]  # fmt: skip
    study.main(words)
    found = json.loads((tmp_path / "out/fig8.json").read_text())
    assert list(found["algorithms"]) == ["minimum"]
    assert found["training_differs"] == []
    for policy in ("none", "paper"):
        diagnosis = json.loads((tmp_path / f"out/heads/{policy}/diagnosis.json").read_text())
        assert diagnosis["model"]["name"] == policy
        assert [entry["length"] for entry in diagnosis["lengths"]] == [64, 128]
    began = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("out/runs/*/training.json"))]
    study.main(words)  # asks and trains nothing again
    assert began == [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("out/runs/*/training.json"))]


def test_every_stage_gives_its_commands(tmp_path, monkeypatch):
    said: list[list[str]] = []
    monkeypatch.setattr(study, "alone", lambda *words: said.append([str(word) for word in words]))
    monkeypatch.setattr(study, "together", lambda out, programs, files: said.extend(w[3:] for w in programs.values()))
    monkeypatch.setattr(study, "trained", lambda asked: {name: asked.out / "runs" / name for name in asked.policies})
    monkeypatch.setattr(study, "long_samples", lambda model, tokens: [f"{model.rpartition('/')[2]}\n{tokens}"])
    monkeypatch.setattr(study.torch.cuda, "is_available", lambda: False)
    kept: list[tuple[Any, str]] = []
    monkeypatch.setattr(study, "find_model", lambda model, *, policy: (torch.nn.Linear(1, 1), policy))
    monkeypatch.setattr(study, "save_model", lambda net, policy, tensors, to, dtype: kept.append((policy, to.name)))
    PAPER_HELD.save(tmp_path / "mine.json")
    words = ["--out", str(tmp_path), "--policies", f"none,paper,{tmp_path / 'mine.json'}", "--lengths", "8,16"]
    study.main(words)
    told = [" ".join(words).replace(str(tmp_path), "DIR") for words in said]
    assert [line.split()[0] for line in told] == ["clrs-text"] * 6 + ["reproduce"] + ["diagnose"] * 6
    assert told[2].startswith(
        "clrs-text train --model smollm2-135m-instruct --policy DIR/mine.json --out DIR/runs/mine --tokens 100663296 "
    )
    assert told[4] == (
        "clrs-text evaluate --model DIR/runs/paper --out DIR/evaluations/paper --samples 25 --seeds 3,14"
    )
    assert told[6] == (
        "reproduce fig8 --baseline DIR/evaluations/none --adaptive DIR/evaluations/paper --also DIR/evaluations/mine "
        "--out DIR"
    )
    assert told[10].startswith("diagnose smollm2-135m-instruct --prompts DIR/prompts_16.jsonl --lengths 8,16 ")
    assert [line.split()[1] for line in told[11:]] == ["DIR/starts/paper", "DIR/starts/mine"]
    assert kept == [(PAPER, "paper"), (PAPER_HELD, "mine")]
    assert (tmp_path / "prompts_16.jsonl").read_text() == '"model\\n16"\n'


def test_before_training_the_model_is_there_as_it_is_and_with_each_policy(tmp_path):
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    network, tokenizer = find_model(str(tmp_path / "tiny.json"))
    save_model(network, tokenizer, network.state_dict(), tmp_path / "tiny", "float32")
    models = study.at_start(study.arguments(["--out", str(tmp_path), "--model", str(tmp_path / "tiny")]))
    assert list(models) == ["start", "start_paper"]
    sharpened, _ = load(str(models["start_paper"]))
    rules = stored_rules(sharpened)
    assert rules is not None
    assert [rule.policy for rule in rules] == [PAPER]
    for name, tensor in sharpened.state_dict().items():
        assert torch.equal(tensor, network.state_dict()[name])


def test_long_samples_are_the_longest_that_fit(monkeypatch):
    few = evaluation().only(["minimum", "bfs"])
    monkeypatch.setattr(study, "evaluation", lambda: few)
    encoder = Encoder(CharacterTokenizer())
    texts = study.long_samples("characters", 1_200)
    assert [text.partition(":")[0] for text in texts] == ["bfs"]  # minimum has none of that many characters
    (n,) = (len(ids) for ids in encoder.tokenizer(texts)["input_ids"])
    assert 1_200 <= n < 2_048
    sizes = [s for s in few.sizes["bfs"] if len(encoder([next(generate_samples("bfs", s, 3))])[0].ids) <= 2_048]
    assert texts[0].startswith(next(generate_samples("bfs", sizes[-1], 3)).question)


def test_one_that_fails_is_told_when_the_others_are_done(tmp_path):
    programs = {
        "good": [sys.executable, "-c", "import time; time.sleep(1); open('done', 'w').close()"],
        "bad": [sys.executable, "-c", "print('what went wrong'); raise SystemExit(3)"],
    }
    with contextlib.chdir(tmp_path), pytest.raises(SystemExit) as raised:
        study.together(tmp_path, programs, "*")
    assert raised.value.code == f"bad ended with 3: what went wrong (in {tmp_path / 'logs' / 'bad.txt'})"
    assert (tmp_path / "done").exists()


LEFT = """
import signal, sys
from pathlib import Path
from typing import Any
from sharpmax.tasks.clrs_text.models import save_model, find_model
from studies import clrs_text as study

signal.signal(signal.SIGTERM, study.leave)
study.torch.cuda.is_available = lambda: False
study.sharpmax = lambda *_: [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(99)"]
study.trained = lambda asked: dict.fromkeys(asked.policies, Path("run"))
study.main(["--out", sys.argv[1], "--stages", "evaluate"])
"""


def children_of(process: int) -> Path:
    return Path(f"/proc/{process}/task/{process}/children")


@pytest.mark.skipif(not children_of(os.getpid()).exists(), reason="looks for processes in /proc")
def test_a_kill_ends_the_programs_of_a_stage(tmp_path):
    running = subprocess.Popen([sys.executable, "-c", LEFT, str(tmp_path)], cwd=ROOT, stdout=subprocess.DEVNULL)
    logs = [tmp_path / "logs" / f"evaluate_{policy}.txt" for policy in ("none", "paper")]
    until = time.monotonic() + 60
    try:
        while not all(log.exists() and log.read_text() for log in logs) and time.monotonic() < until:
            time.sleep(0.1)
        children = children_of(running.pid).read_text().split()
        assert len(children) == 2
    finally:
        running.terminate()
    assert running.wait(60) == 143
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stages", "train,plot"], "expected stages of train, evaluate, figure, diagnose, got 'plot'"),
        (["--policies", "paper,none"], "expected none and one or two other policies, got paper, none"),
        (["--policies", "none"], "expected none and one or two other policies, got none"),
        (["--policies", "none,paper,none"], "expected policies of different names, none of them start..., got none,"),
        (["--samples", "0"], "expected at least one sample and one token, got 0 and 100663296"),
        (["--policies", "none,foo"], "expected the policy to be none, paper, paper-held or a policy file, got 'foo'"),
        (["--seeds", "x"], "expected seeds to be whole numbers or ranges with commas between them, got 'x'"),
        (["--lengths", "x"], "expected lengths to be whole numbers or ranges with commas between them, got 'x'"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, capsys, words, message):
    with pytest.raises(SystemExit):
        study.main(["--out", str(tmp_path), *words])
    assert message in capsys.readouterr().err


FAKE = """#!/bin/sh
if [ "$1" = -d ]; then echo began $CUDA_MPS_PIPE_DIRECTORY >> {log}; else read word; echo $word >> {log}; fi
"""


@pytest.mark.parametrize("works", [True, False])
def test_a_gpu_is_shared_where_that_works(tmp_path, monkeypatch, works):
    log = tmp_path / "log"
    control = tmp_path / study.MPS
    control.write_text(FAKE.format(log=log))
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(study.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(study, "gpu_answers", lambda: works)
    with study.shared_gpu() as options:
        assert options == ["--device", "cuda"]
        assert (study.MPS_FOLDERS[0] in os.environ) == works
        folder = log.read_text().split()[1]
        assert Path(folder).is_dir()
    assert not set(study.MPS_FOLDERS) & set(os.environ)
    assert log.read_text().split() == ["began", folder, "quit"]
    assert not Path(folder).exists()
    monkeypatch.setenv(study.MPS_FOLDERS[0], "mine")  # somebody's own is left alone
    with study.shared_gpu() as options:
        assert options == ["--device", "cuda"]
    assert os.environ[study.MPS_FOLDERS[0]] == "mine"
    assert len(log.read_text().split()) == 3


def test_whether_the_gpu_answers():
    assert study.gpu_answers() == study.torch.cuda.is_available()


def test_each_evaluation_gets_its_part_of_the_memory(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(study, "together", lambda out, programs, files: said.extend(map(" ".join, programs.values())))
    monkeypatch.setattr(study, "trained", lambda asked: dict.fromkeys(asked.policies, tmp_path))
    monkeypatch.setattr(study, "shared_gpu", lambda: contextlib.nullcontext(["--device", "cuda"]))
    study.main(["--out", str(tmp_path), "--stages", "evaluate"])
    assert len(said) == 2
    assert all("--device cuda --memory 0.40" in line for line in said)


def test_evaluation_needs_training(tmp_path):
    with pytest.raises(SystemExit, match=r"^expected a finished training run in .*none: leave --stages out"):
        study.main(["--out", str(tmp_path), "--stages", "evaluate"])
