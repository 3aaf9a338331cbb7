"""studies/clrs_text.py: what it hands to the commands, and that it ends with them."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest

from sharpmax.tasks.clrs_text import CharacterTokenizer, Encoder, evaluation, generate_samples
from studies import clrs_text as study

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
    monkeypatch.setattr(study, "long_samples", lambda model, tokens: [f"{model.rpartition('/')[2]}\n{tokens}"])
    study.main(["--out", str(tmp_path), "--policies", "none,paper,paper-held", "--lengths", "8,16"])
    told = [" ".join(words).replace(str(tmp_path), "DIR") for words in said]
    assert [line.split()[0] for line in told] == ["clrs-text"] * 3 + ["clrs-text"] * 9 + ["diagnose"] * 4 + [
        "reproduce"
    ]
    assert told[1] == (
        "clrs-text train --model smollm2-135m-instruct --policy paper --out DIR/runs/paper --tokens 104857600 "
        "--workers 8 --compile --save-dtype bfloat16"
    )
    assert told[4] == ("clrs-text evaluate --model DIR/runs/paper --out DIR/evaluations/paper --samples 25 --seeds 3")
    assert told[9].endswith("--seeds 3,14")
    assert told[15].startswith("diagnose smollm2-135m-instruct --prompts DIR/prompts.jsonl --lengths 8,16 ")
    assert told[16] == (
        "reproduce fig8 --baseline DIR/evaluations/none --adaptive DIR/evaluations/paper "
        "--also DIR/evaluations/paper-held --out DIR"
    )
    assert (tmp_path / "prompts.jsonl").read_text() == '"model\\n16"\n'


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


def test_one_that_fails_ends_the_others(tmp_path):
    programs: dict[str, Any] = {
        "slow": [sys.executable, "-c", "import time; time.sleep(60)"],
        "bad": [sys.executable, "-c", "print('what went wrong'); raise SystemExit(3)"],
    }
    began = time.monotonic()
    with pytest.raises(study.FailedError, match=r"^bad ended with exit code 3; .*bad\.txt has what it said$"):
        study.together(tmp_path, programs, tmp_path)
    assert time.monotonic() - began < 30
    assert (tmp_path / "logs/bad.txt").read_text() == "what went wrong\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stages", "train,plot"], "expected stages of train, evaluate, diagnose, figure, got 'plot'"),
        (["--policies", "paper,none"], "expected none and one or two other policies, got paper, none"),
        (["--policies", "none"], "expected none and one or two other policies, got none"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, capsys, words, message):
    with pytest.raises(SystemExit):
        study.main(["--out", str(tmp_path), *words])
    assert message in capsys.readouterr().err
