"""``sharpmax diagnose``: what it writes, and one sentence for everything that cannot be used."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sharpmax import LogLength
from sharpmax.diagnostics import measure
from sharpmax.diagnostics.command import diagnose_command
from sharpmax.huggingface import weights
from sharpmax.inputs import InputError
from tests.diagnostics.models import Characters, build


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models are tiny ones, by their family; returns the names that were loaded."""
    loaded: list[str] = []

    def load(name: str, **_: Any) -> tuple[Any, Any]:
        loaded.append(name)
        return build(name), Characters()

    monkeypatch.setattr(weights, "load", load)
    return loaded


def test_the_files(tiny: list[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A text of a few words. " * 10)
    out = tmp_path / "out"
    findings, paths = diagnose_command("llama", out, text=text, lengths="16,64", layers="0-1", policy="paper-held")
    assert findings[0] == "llama: 2 layers, 8 heads, 16 to 64 tokens, read averaged over all rows"
    assert [path.name for path in paths] == ["report.html", "diagnosis.png", "diagnosis.csv", "diagnosis.json"]
    data = json.loads(paths[3].read_text())
    rows = list(csv.DictReader(paths[2].read_text().splitlines()))
    assert len(rows) == len(data["rows"]) == 2 * 2 * 4
    assert {row["layer"] for row in rows} == {"0", "1"}
    assert data["policy"]["beyond"] == "hold_peak"
    assert data["source"] | {"sha256": ""} == {
        "kind": "text",
        "name": "text.txt",
        "texts": 1,
        "sha256": "",
        "unit": "tokens",
    }
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    page = paths[0].read_text()
    assert "How sharp are the heads of llama?" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert tiny == ["llama"]


def test_prompts_of_a_file_and_the_task(tiny: list[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first prompt of several\n\nand a second one that is longer\n")
    LogLength.relative(8).save(tmp_path / "policy.json")
    policy = str(tmp_path / "policy.json")
    *_, path = diagnose_command("gpt2", tmp_path / "a", prompts=prompts, lengths="8,30", policy=policy).paths
    data = json.loads(path.read_text())
    assert [len(entry["tokens"]) for entry in data["lengths"]] == [2, 1]
    *_, path = diagnose_command("llama", tmp_path / "b", lengths="2,4", count=2).paths
    data = json.loads(path.read_text())
    assert data["source"]["kind"] == "max"
    assert "What is the maximum in the following sequence: " in data["source"]["example"]
    *_, path = diagnose_command("llama", tmp_path / "c", prompts=prompts).paths  # default lengths end with the text
    assert [e["length"] for e in json.loads(path.read_text())["lengths"]] == [31]
    prompts.write_text("x" * 100)
    *_, path = diagnose_command("gpt2", tmp_path / "d", prompts=prompts).paths  # and with the learned positions
    assert [e["length"] for e in json.loads(path.read_text())["lengths"]] == [64]
    (tmp_path / "texts.jsonl").write_text('"two lines\\nof\u2028one"\n"and a second text"\n')
    *_, path = diagnose_command("llama", tmp_path / "e", prompts=tmp_path / "texts.jsonl", lengths="16,17").paths
    assert [len(entry["tokens"]) for entry in json.loads(path.read_text())["lengths"]] == [2, 1]
    assert len(tiny) == 5


def test_the_folder_of_a_training_run(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "first"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text("{}")
    (run / "checkpoint.json").write_text("{}")
    with pytest.raises(InputError, match=r"a model whose training is finished, got .*, a run that is not"):
        diagnose_command(str(run), tmp_path / "out", lengths="2", count=1)
    (run / "training.json").write_text("{}")
    monkeypatch.setattr(weights, "load", lambda name, **_: (build("llama"), tiny.append(name) or Characters()))
    findings, _ = diagnose_command(str(run), tmp_path / "out", lengths="2", count=1)
    assert findings[0].startswith("first: ")
    assert tiny == [str(run / "model")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lengths": "16,sixty"},
            "expected lengths to be whole numbers or ranges with commas between them, got '16,sixty'",
        ),
        ({"lengths": ""}, "expected lengths to be whole numbers"),
        ({"lengths": "0"}, "expected lengths to be whole numbers of at least 1"),
        ({"lengths": "1-99999999999"}, "expected at most 10,000 lengths, got '1-99999999999'"),
        ({"lengths": "99999999999"}, "expected lengths of at most 9,999,999, got 99999999999"),
        ({"layers": "0-99999999999"}, "expected at most 10,000 layers, got '0-99999999999'"),
        ({"layers": "0-7000,8000-16000"}, "expected at most 10,000 layers"),
        ({"layers": "3-1"}, "expected layers to be whole numbers"),
        ({"policy": "papper"}, "expected the policy to be paper, paper-held or a policy file, got 'papper'"),
        (
            {"policy": "{folder}/other.json"},
            "other.json: expected a policy with schema 'sharpmax.policy/1', got 'sharpmax.policy/9'",
        ),
        ({"policy": "{folder}/plain.json"}, "plain.json: expected a policy with schema 'sharpmax.policy/1', got None"),
        ({"policy": "{folder}/latin.txt"}, "latin.txt is not a policy file"),
        ({"task": "min"}, "expected the task to be max, got 'min'"),
        ({"task": "max", "text": Path("x")}, "expected one of --prompts, --task and --text, got several"),
        ({"text": Path("nowhere.txt")}, "expected a text file, got 'nowhere.txt', which is none"),
        ({"text": Path("{folder}/short.txt"), "lengths": "99"}, "short.txt has 5 bytes, so it has no 99 tokens"),
        ({"prompts": Path("{folder}/empty.txt")}, "expected empty.txt to hold some text"),
        ({"prompts": Path("{folder}/plain.jsonl")}, "plain.jsonl to be a JSON string, got ['a list']"),
        ({"text": Path("{folder}/latin.txt")}, "to be text in UTF-8"),
        ({"count": 0}, "expected at least one prompt for each length"),
        ({"epsilon": 2.0}, "expected epsilon to be above 0 and at most 1"),
        ({"sample": 0}, "expected a sample of at least one row, got 0"),
        ({"dtype": "int8"}, "expected dtype to be one of float32, bfloat16, float16, got 'int8'"),
        ({"device": "abacus"}, "expected a device that torch has here, got 'abacus'"),
        ({"device": "meta"}, "expected a device that torch has here, got 'meta'"),
    ],
)
def test_one_sentence_before_anything_is_loaded(
    tiny: list[str], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "other.json").write_text('{"schema": "sharpmax.policy/9"}')
    (tmp_path / "plain.json").write_text('{"kind": "Constant", "beta": 2}')
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "plain.jsonl").write_text("\"a string\"\n['a list']\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    given: dict[str, Any] = {
        k: type(v)(str(v).format(folder=tmp_path)) if isinstance(v, str | Path) else v for k, v in options.items()
    }
    with pytest.raises(InputError) as caught:
        diagnose_command("llama", tmp_path / "out", **given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert tiny == []
    assert not (tmp_path / "out").exists()


def test_what_only_the_model_tells(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="expected layers from 0 to 2, got 7"):
        diagnose_command("llama", tmp_path, layers="1,7")
    text = tmp_path / "text.txt"
    text.write_text("x" * 80)
    with pytest.raises(InputError, match="learned positions for 64 tokens"):
        diagnose_command("gpt2", tmp_path, text=text, lengths="70")

    class Own(type(build("llama"))):
        def _can_set_attn_implementation(self) -> bool:
            return False

    monkeypatch.setattr(weights, "load", lambda *_, **__: (Own(build("llama").config), Characters()))
    with pytest.raises(InputError, match=r"^Own has .* attention .*transformers can"):
        diagnose_command("llama", tmp_path)


def test_unknown_models_and_missing_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match=r"expected a packaged model \(.*, got '.*no-model'"):
        diagnose_command(str(tmp_path / "no-model"), tmp_path / "out")


def test_an_interrupt_says_what_is_saved(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "diagnose", interrupted)
    with pytest.raises(KeyboardInterrupt):
        diagnose_command("llama", tmp_path, lengths="2")
    assert "lengths that are done are saved; the same command goes on from there" in capsys.readouterr().err


def test_what_only_a_forward_tells(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    model.model.embed_tokens.weight.data.fill_(float("nan"))
    monkeypatch.setattr(weights, "load", lambda *_, **__: (model, Characters()))
    with pytest.raises(InputError, match="attention logits of layer 0 are not all finite"):
        diagnose_command("llama", tmp_path / "out", lengths="2", count=1)
    text = tmp_path / "text.txt"
    text.write_text("some words")
    with pytest.raises(InputError, match="an input of one token has one key"):
        diagnose_command("llama", tmp_path / "out", text=text, lengths="1")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [["--policy", "papper"], ["--text", "nowhere.txt"], ["--lengths", "4,x"]])
def test_arguments_are_checked_before_torch_is_imported(tmp_path: Path, options: list[str]) -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from sharpmax.__main__ import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "diagnose", "model", "--out", str(tmp_path), *options]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert answer.returncode == 2, answer.stderr
    assert answer.stderr.startswith("sharpmax: expected ")
    assert answer.stderr.count("\n") == 1


def test_names_are_not_formulas(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "load", lambda *_, **__: (build("llama"), Characters()))
    findings, paths = diagnose_command("folder/x$a_{$b<script>", tmp_path, lengths="2", count=1)
    assert findings[0].startswith("x$a_{$b<script>: 3 layers")
    assert all(path.is_file() for path in paths)
    assert "How sharp are the heads of x$a_{$b&lt;script&gt;?" in paths[0].read_text()
