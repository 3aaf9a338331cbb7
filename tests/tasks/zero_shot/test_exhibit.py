"""Table, picture and files of a zero-shot study."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from scipy.stats import binomtest

from sharpmax.core.claims import claimed
from sharpmax.inputs import InputError
from sharpmax.paper import zero_shot as exhibit
from sharpmax.tasks import zero_shot
from sharpmax.tasks.zero_shot import Settings
from sharpmax.tasks.zero_shot.study import Cell

SETTINGS = Settings(lengths=(512, 1024), items=(2,), policies=("off", "paper", "paper_sharp"), segments=2, prompts=2)


def test_the_table_stars_what_is_beyond_the_context() -> None:
    cells = [
        {"task": "perplexity", "size": n, "policy": p, "perplexity": n / 10 + (p == "paper")}
        for n in (512, 1024)
        for p in ("off", "paper")
    ]
    cells += [
        {"task": task, "size": 16, "policy": p, "exact": 0.25, "tokens": tokens}
        for task, tokens in (("needle", 16), ("maximum", 700))
        for p in ("off", "paper")
    ]
    cells.pop()
    labels = {"off": "off", "paper": "the paper's"}
    lacking = ["maximum at 16 (1 of 2 policies)"]
    results = {"model": "m", "context": 512, "policies": labels, "cells": cells, "missing": lacking}
    perplexity, needle, maximum, missing = zero_shot.zero_shot_table(results).split("\n\n")
    assert perplexity.splitlines() == [
        "| Perplexity, by tokens, m | 512 | 1,024* |",
        "| --- | ---: | ---: |",
        "| off | 51.20 | 102 |",
        "| the paper's | 52.20 | 103 |",
    ]
    assert "| 16 |" in needle
    assert "| 16* |" in maximum
    assert "| off | 25 |\n| the paper's | - |" in maximum
    assert missing == "Not measured: maximum at 16 (1 of 2 policies)."


def test_the_exhibit_writes_picture_numbers_and_table(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    asked: dict[str, Any] = {
        "model": str(tmp_path / "tiny"),
        "lengths": "512",
        "items": "2,4",
        "policies": "off,held_sharp",
    }
    out, cell = tmp_path / "out", Cell("needle", 512, "off")
    with claimed(cell.claim(out / "zero_shot" / "tiny")):
        assert exhibit.run(out, **asked, prompts=2) == ([], ["needle_512_off"])
    assert [path.name for path in out.iterdir()] == ["zero_shot"]
    partial = json.loads(exhibit.run(out, "tiny", report=True).paths[2].read_text())
    assert partial["caption"].endswith("Not measured: needle at 512 (1 of 2 policies).")
    paths = exhibit.run(out, **asked).paths
    assert [path.name for path in paths] == [f"zero_shot_tiny.{suffix}" for suffix in ("png", "pdf", "json", "md")]
    data = json.loads(paths[2].read_text())
    assert data["settings"]["items"] == [2, 4]
    assert (len(partial["cells"]), len(data["cells"])) == (7, 8)
    assert "in the 2 of 8 heads" in data["caption"]
    assert "Not measured" not in data["caption"]
    assert zero_shot.zero_shot_table(data) + "\n" == paths[3].read_text()
    assert str(tmp_path) not in paths[2].read_text()


def test_the_exhibit_refuses_what_it_cannot_use_before_loading_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero_shot, "find_subject", None)
    with pytest.raises(InputError, match="expected policies of off"):
        exhibit.run(tmp_path, policies="nothing")
    with pytest.raises(InputError, match="holds no study to report on; leave --report out"):
        exhibit.run(tmp_path, report=True)


@pytest.mark.parametrize(("right", "of"), [(0, 50), (50, 50), (12, 50), (99, 100)])
def test_the_interval_of_a_share_is_that_of_scipy_and_never_empty(right: int, of: int) -> None:
    level = math.erf(1 / math.sqrt(2))
    expected = binomtest(right, of).proportion_ci(level, method="wilson")
    assert exhibit.interval(right, of) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert expected.high - expected.low > 0.005


def test_a_part_of_the_tasks_is_drawn_with_the_captions_letters_and_whole_intervals() -> None:
    cells = [{"task": "maximum", "size": n, "policy": "off", "exact": 1.0, "right": 6, "prompts": 6} for n in (4, 16)]
    settings = {"tasks": ("maximum",), "items": (4, 16), "lengths": (512,)}
    figure = Figure()
    exhibit.draw(figure, {"settings": settings, "cells": cells, "policies": {"off": "off"}, "context": 512})
    (axis,) = figure.axes
    assert axis.get_title(loc="left") == "(c)  the largest of a list"
    low, high = exhibit.interval(6, 6)
    assert axis.get_ylim()[1] > 100 * high
    assert low < 1
