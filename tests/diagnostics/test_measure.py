"""``diagnose``: growing inputs, means over prompts, and going on after an interruption."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM, RobertaConfig, RobertaModel

from sharpmax import PAPER_HELD, Constant, Hard
from sharpmax.diagnostics import Diagnosis, diagnose, measure, record
from sharpmax.diagnostics.report.findings import Heads, sentences
from sharpmax.diagnostics.sources import MaximumPrompts, Prefixes
from sharpmax.huggingface import sharpen
from sharpmax.tasks.prompts import maximum_items, maximum_prompt
from sharpmax.theory import dispersion_length
from tests.diagnostics.models import Characters, build

TEXT = "What is the maximum? " * 20


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return diagnose(build("llama"), Characters(), MaximumPrompts(3, seed=5), [2, 4, 8], name="tiny")


def test_numbers_are_means_over_the_prompts(found: Diagnosis) -> None:
    model = build("llama")
    with torch.no_grad(), record(model) as stats:
        for i in range(3):
            text = maximum_prompt(maximum_items(4, seed=5, index=i))
            model(input_ids=torch.tensor([Characters()(text)["input_ids"]]))
    for row in found.table.where(length=4):
        of = stats.where(layer=row["layer"], head=row["head"])
        assert row["prompts"] == len(of) == 3
        assert row["entropy_last"] == pytest.approx(np.mean(of.column("entropy_last")), rel=1e-5)
        assert row["entropy_last_over_prompts"] == pytest.approx(np.std(of.column("entropy_last")), rel=1e-4, abs=1e-6)
        assert row["spread_min"] == pytest.approx(min(of.column("spread_min")), rel=1e-5)
        assert row["spread_max"] == pytest.approx(max(of.column("spread_max")), rel=1e-5)
    assert [entry["length"] for entry in found.data["lengths"]] == [2, 4, 8]
    assert len(found.table) == 3 * 3 * 4
    json.dumps(found.data, allow_nan=False)


def test_attention_rows_are_those_of_the_longest_input(found: Diagnosis) -> None:
    attention = found.data["attention"]
    assert attention["length"] == 8
    text = maximum_prompt(maximum_items(8, seed=5, index=0))
    assert "".join(attention["words"]) == text
    model = build("llama", "eager")
    with torch.no_grad():
        ids = torch.tensor([Characters()(text)["input_ids"]])
        weights = model(input_ids=ids, output_attentions=True).attentions
    assert len(attention["heads"]) == 12
    for row in attention["heads"]:
        logits = torch.tensor(measure.unpacked(row))
        truth = weights[row["layer"]][0, row["head"], -1]
        torch.testing.assert_close(torch.softmax(logits, -1).float(), truth, rtol=2e-3, atol=1e-4)


def test_prefixes_of_a_text() -> None:
    source = Prefixes([TEXT, TEXT[:50]], "words")
    table = diagnose(build("gemma2"), Characters(), source, [16, 64], policy=PAPER_HELD).table
    assert {(row["length"], row["prompts"]) for row in table} == {(16, 2), (64, 1)}
    assert {row["n"] for row in table.where(length=64)} == {9, 64}
    with pytest.raises(ValueError, match="words has 420 tokens, and a length of 500"):
        diagnose(build("gemma2"), Characters(), source, [16, 500])


def test_a_length_is_saved_when_it_is_done_and_not_computed_again(tmp_path: Path) -> None:
    model, source = build("llama"), Prefixes([TEXT], "words")

    def stop(length: int, done: float, total: int) -> None:
        if length == 32 and done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        diagnose(model, Characters(), source, [8, 16, 32], out=tmp_path, progress=stop)
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["0000008.json", "0000016.json"]
    told: dict[int, list[float]] = {}
    whole = diagnose(
        model, Characters(), source, [8, 16, 32, 64], out=tmp_path,
        progress=lambda n, so_far, total: told.setdefault(n, []).append(so_far / total),
    )  # fmt: skip
    assert told[8] == told[16] == [1]  # what was there already is told to be done
    assert told[32] == told[64] == [0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1]  # three layers
    again = diagnose(model, Characters(), source, [8, 16, 32, 64])
    assert again.table.rows == whole.table.rows
    with pytest.raises(ValueError, match="holds a diagnosis that differs in policy; choose another folder"):
        diagnose(model, Characters(), source, [8], out=tmp_path, policy=PAPER_HELD)
    with pytest.raises(ValueError, match="holds a diagnosis that differs in layers; choose another folder"):
        diagnose(model, Characters(), source, [24], out=tmp_path, layers=[0])  # of a length that is not there yet
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    with pytest.raises(ValueError, match="holds a diagnosis that differs in model; choose another folder"):
        diagnose(model, Characters(), source, [8], out=tmp_path)
    old = json.loads((tmp_path / "parts" / "0000008.json").read_text())
    old["about"]["schema"] = "sharpmax.diagnosis/1"
    (tmp_path / "parts" / "0000008.json").write_text(json.dumps(old))
    with pytest.raises(ValueError, match="that differs in schema, model; choose another folder"):
        diagnose(model, Characters(), source, [8], out=tmp_path)
    (tmp_path / "parts" / "0000008.json").write_text('{"about"')
    with pytest.raises(ValueError, match=r"0000008\.json is damaged"):
        diagnose(model, Characters(), source, [8], out=tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="kills a process")
def test_a_killed_run_loses_one_length_at_most(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from tests.diagnostics.models import Characters, build\n"
        "from sharpmax.diagnostics import diagnose\n"
        "from sharpmax.diagnostics.sources import Prefixes\n"
        f"source = Prefixes([{TEXT!r}], 'words')\n"
        "wait = lambda n, *_: time.sleep(60 if n == 32 else 0)\n"
        "diagnose(build('llama'), Characters(), source, [8, 16, 32], out=sys.argv[1], progress=wait)\n"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=root)
    late = time.monotonic() + 60
    while not (tmp_path / "parts" / "0000016.json").exists() and time.monotonic() < late:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert sorted(path.name for path in (tmp_path / "parts").glob("0*")) == ["0000008.json", "0000016.json"]
    begun: list[int] = []
    diagnose(
        build("llama"), Characters(), Prefixes([TEXT], "words"), [8, 16, 32], out=tmp_path,
        progress=lambda n, done, _: begun.append(n) if done == 0 else None,
    )  # fmt: skip
    assert begun == [32]


def test_no_logits_over_the_vocabulary_are_made() -> None:
    model = build("llama")

    def refuse(*_: Any) -> None:
        raise AssertionError("the head was called")

    model.lm_head.register_forward_pre_hook(refuse)
    diagnose(model, Characters(), Prefixes([TEXT], "words"), [16])


def test_layers_after_the_last_wanted_are_not_run() -> None:
    model, ran = build("llama"), []
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, i=i: ran.append(i))
    source = Prefixes([TEXT], "words")
    some = diagnose(model, Characters(), source, [16, 32], layers=[0, 1]).table
    assert ran == [0, 1, 0, 1]
    every = diagnose(model, Characters(), source, [16, 32]).table
    assert some.rows == [row for row in every if row["layer"] < 2]


def test_findings_follow_the_data(found: Diagnosis) -> None:
    heads = Heads(found.data)
    said = sentences(heads)
    entropy = heads.values("entropy_last").mean(axis=1)
    assert f"from {entropy[0]:.2f} to {entropy[-1]:.2f} nats as inputs grow from 2 to 8 items" in said[0]
    assert "Theorem 2.2" in "".join(said)
    n, y = np.log(heads.values("n")[:, 5]), heads.values("entropy_last")[:, 5]
    assert heads.slopes()[5] == pytest.approx(np.polyfit(n, y, 1)[0])
    windows = diagnose(build("gemma2"), Characters(), Prefixes([TEXT], "words"), [32])
    said = sentences(Heads(windows.data))
    assert any(s.startswith("8 of 12 heads see a window of at most 9 keys") for s in said)
    assert math.isnan(Heads(windows.data).slopes()[0])


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([], "whole numbers of at least 1"), ([0], "whole numbers of at least 1"), ([1.5], "whole numbers")],
)
def test_bad_lengths(lengths: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        diagnose(build("llama"), Characters(), MaximumPrompts(1), lengths)


def test_learned_positions_end() -> None:
    with pytest.raises(ValueError, match="learned positions for 64 tokens, and an input has 100"):
        diagnose(build("gpt2"), Characters(), Prefixes([TEXT], "words"), [100])


@pytest.mark.parametrize("family", ["roberta", "opt"])
def test_learned_positions_that_do_not_start_at_0(family: str) -> None:
    size: dict[str, Any] = {"vocab_size": 128, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if family == "roberta":
        config = RobertaConfig(**size, intermediate_size=16, max_position_embeddings=34, pad_token_id=1)
        model = RobertaModel(config)
    else:
        model = OPTForCausalLM(OPTConfig(**size, ffn_dim=16, word_embed_proj_dim=16, max_position_embeddings=32))
    source = Prefixes([TEXT], "words")
    assert len(diagnose(model, Characters(), source, [32]).table) == 2
    with pytest.raises(ValueError, match="learned positions for 32 tokens, and an input has 33"):
        diagnose(model, Characters(), source, [33])


def test_inputs_of_one_token_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an input of one token has one key"):
        diagnose(build("llama"), Characters(), Prefixes([TEXT], "words"), [1, 8], out=tmp_path)
    assert list(tmp_path.iterdir()) == []
    diagnose(build("llama"), Characters(), Prefixes([TEXT], "words"), [2]).save(tmp_path)


def test_a_model_that_gives_nan(tmp_path: Path) -> None:
    model = build("llama")
    model.model.layers[1].self_attn.q_proj.weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match="attention logits of layer 1 are not all finite"):
        diagnose(model, Characters(), MaximumPrompts(2), [2], out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_sharpened_model_is_another_model(tmp_path: Path) -> None:
    model, source = build("llama"), Prefixes([TEXT], "words")
    with sharpen(model, Constant(3), layers=[0, 1]):
        found = diagnose(model, Characters(), source, [16], out=tmp_path)
    sharpened, plain = found.table, diagnose(model, Characters(), source, [16]).table
    acting = [row for row in sharpened if row["layer"] < 2]
    after, before = (statistics.fmean(row[name] for row in acting) for name in ("acting_mean", "entropy_mean"))
    assert f"{after:.2f} nats on average after beta in 8 heads, {before:.2f} before" in found.findings[1]
    assert "8 of 12 heads run with a policy of their own" in " ".join(sentences(Heads(found.data)))
    for name in ("entropy_mean", "spread_max", "beta_mean", "sinkless_last"):  # of logits before beta
        assert sharpened.where(layer=0).column(name) == plain.where(layer=0).column(name)
    assert all(row["acting_mean"] < row["entropy_mean"] for row in acting)
    assert plain.column("acting_mean") == [None] * 12
    assert sharpened.where(layer=2).rows != plain.where(layer=2).rows
    with pytest.raises(ValueError, match="holds a diagnosis that differs in model"):
        diagnose(model, Characters(), source, [16], out=tmp_path)


def test_heads_with_a_window_are_left_out_of_the_theorem() -> None:
    found = diagnose(build("gemma2"), Characters(), Prefixes([TEXT], "words"), [32]).data
    at = {name: i for i, name in enumerate(found["columns"])}
    growing = [row[at["spread_mean"]] for row in found["rows"] if row[at["window"]] is None]
    average = float(np.mean(growing))
    (said,) = (s for s in sentences(Heads(found)) if "logit spread" in s)
    n = dispersion_length(float(f"{average:.6g}"), found["epsilon"]).paper
    assert f"Were {average:.2f}, the average of heads without a window (4 of 12), the bound" in said
    assert f"from {n:,} keys on" in said
    windowed = {**found, "rows": [row for row in found["rows"] if row[at["window"]] is not None]}
    (said,) = (s for s in sentences(Heads(windowed)) if "logit spread" in s)
    assert "Theorem" not in said


def test_an_infinite_beta_is_said(tmp_path: Path) -> None:
    found = diagnose(build("llama"), Characters(), MaximumPrompts(2), [2], policy=Hard())
    assert {row["beta_last"] for row in found.table} == {row["beta_mean"] for row in found.table} == {math.inf}
    paths = {path.name: path for path in found.save(tmp_path)}
    data = json.loads(paths["diagnosis.json"].read_text(), parse_constant=pytest.fail)
    assert {row["beta"] for row in data["attention"]["heads"]} == {"inf"}
    rows = list(csv.DictReader(paths["diagnosis.csv"].read_text().splitlines()))
    assert {row["beta_last"] for row in rows} == {"inf"}
    assert Diagnosis(data).table.rows == found.table.rows


def test_policies_that_cannot_be_saved_are_refused() -> None:
    with pytest.raises(ValueError, match="a policy that can be saved as JSON"):
        diagnose(build("llama"), Characters(), MaximumPrompts(1), [2], policy=lambda stats: stats.sum)
    with pytest.raises(ValueError, match="at least one prompt"):
        MaximumPrompts(0)
