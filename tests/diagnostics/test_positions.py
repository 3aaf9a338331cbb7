"""Learned positions, and what is done where they end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sharpmax.diagnostics.positions import learned_positions
from sharpmax.huggingface import weights
from sharpmax.inputs import InputError
from sharpmax.paper import spread_table
from tests.diagnostics.models import Characters, build


def test_learned_positions() -> None:
    assert [learned_positions(build(family)) for family in ("llama", "gpt2", "bert")] == [None, 64, 64]


def test_the_table_of_spreads_takes_what_the_model_has_places_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "load", lambda name, **_: (build(name), Characters()))
    paths = {path.suffix: path for path in spread_table.run(tmp_path, model=["bert"])}
    data = json.loads(paths[".json"].read_text())
    tokens = len(spread_table.SOURCE.read_text())
    assert (data["models"][0]["tokens"], data["models"][0]["cut_from"]) == (64, tokens)
    said = f"bert has learned positions for 64 tokens, and was given the first of {tokens:,}."
    assert data["caption"].endswith(said)
    assert said in paths[".md"].read_text()


def test_what_a_model_cannot_give_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = build("bert")
    broken.embeddings.word_embeddings.weight.data.fill_(float("nan"))
    monkeypatch.setattr(weights, "load", lambda *_, **__: (broken, Characters()))
    with pytest.raises(InputError, match="attention logits of layer 0 are not all finite"):
        spread_table.run(tmp_path, model=["bert"])
