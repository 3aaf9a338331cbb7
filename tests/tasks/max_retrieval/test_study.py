"""The study of protocols: what trains together, and on which sets it is judged."""

import itertools
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import sharpmax
from sharpmax.tasks import max_retrieval
from sharpmax.tasks.max_retrieval.data import Stream
from sharpmax.tasks.max_retrieval.protocol import PRESETS, Protocol
from sharpmax.tasks.max_retrieval.step import Fixed
from studies import max_retrieval as study


@pytest.mark.parametrize("grid", study.GRIDS)
def test_groups_can_train_together(grid: str) -> None:
    groups = study.together(study.GRIDS[grid])
    for names in groups:
        Fixed.of([study.GRIDS[grid][name] for name in names])
    assert sorted(itertools.chain(*groups)) == sorted(study.GRIDS[grid])
    assert len(groups) == {"precision": 2, "policy": 4}.get(grid, 1)


def test_the_grid_of_policies_adds_them_to_the_sharp_protocol() -> None:
    policies = [protocol.policy for protocol in study.GRIDS["policy"].values()]
    assert sharpmax.PAPER in policies
    assert sharpmax.LogLength.relative(16) in policies
    assert PRESETS["sharp"] in study.GRIDS["policy"].values()


def test_protocols_are_judged_on_sets_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = []

    def train_together(protocols: list[Protocol], seeds: range, **_: Any) -> list[Any]:
        return [SimpleNamespace(protocol=protocol, params={}, seeds=tuple(seeds)) for protocol in protocols]

    def evaluate(params: Any, seeds: Any, sizes: Any, sets: int, policies: Any, *, stream: Stream, **_: Any) -> Any:
        streams.append(stream)
        shares = np.ones((len(sizes), len(seeds)))
        return SimpleNamespace(ceiling=shares, rows={name: SimpleNamespace(accuracy=shares) for name in policies})

    monkeypatch.setattr(max_retrieval, "train_together", train_together)
    monkeypatch.setattr(max_retrieval, "evaluate", evaluate)
    monkeypatch.setattr(max_retrieval, "progress_bar", lambda _: nullcontext())
    monkeypatch.setattr(sys, "argv", ["study", "policy", "--seeds", "2", "--steps", "3", "--out", str(tmp_path)])
    study.main()
    assert set(streams) == {Stream.STUDY}
    assert len({int(stream) for stream in Stream}) == len(Stream) == 6
    written = json.loads((tmp_path / "max_retrieval_policy.json").read_text())
    assert list(written["results"]) == list(study.GRIDS["policy"])
