"""A zero-shot study in its folder: cells, parts, several processes, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax.tasks import zero_shot
from sharpmax.tasks.prompts import maximum_question
from sharpmax.tasks.zero_shot import Settings, Subject, measures, policies, run

SETTINGS = Settings(lengths=(512, 1024), items=(2,), policies=("off", "paper", "paper_sharp"), segments=2, prompts=2)


def test_what_is_written_is_not_measured_again(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert zero_shot.measure(subject, SETTINGS, tmp_path) == []
    first = zero_shot.collect(tmp_path / "tiny")
    assert {(c["task"], c["size"]) for c in first["cells"]} == {
        ("perplexity", 512), ("perplexity", 1024), ("needle", 512), ("needle", 1024), ("maximum", 2)
    }  # fmt: skip
    assert len(first["cells"]) == 15
    assert (first["missing"], [maker["cells"] for maker in first["measured_by"]]) == ([], [16])
    assert first["measured_by"][0]["versions"]["torch"] == torch.__version__
    count = _counting(monkeypatch)
    assert zero_shot.measure(subject, SETTINGS, tmp_path) == []
    assert zero_shot.collect(tmp_path / "tiny") == first
    assert count == []
    (tmp_path / "tiny" / "needle_512_paper.json").unlink()
    assert zero_shot.collect(tmp_path / "tiny")["missing"] == ["needle at 512 (1 of 3 policies)"]
    zero_shot.measure(subject, SETTINGS, tmp_path)
    assert zero_shot.collect(tmp_path / "tiny")["cells"] == first["cells"]
    assert count == [("needle", 512)]


def test_a_part_of_a_study_is_measured_as_the_whole_is_and_sizes_can_be_added(subject: Subject, tmp_path: Path) -> None:
    whole = dataclasses.replace(SETTINGS, policies=("off",))
    zero_shot.measure(subject, whole, tmp_path)
    folder = tmp_path / "tiny"
    cell = folder / "perplexity_512_off.json"
    first = json.loads(cell.read_text())["result"]
    cell.unlink()
    zero_shot.measure(subject, zero_shot.settle(folder, lengths=(512,)), tmp_path)
    assert json.loads(cell.read_text())["result"] == first  # the same tokens, as 1,024 is still the study's longest
    cell.unlink()
    (folder / "needle_512_off.json").unlink()
    zero_shot.measure(subject, zero_shot.settle(folder, tasks=("perplexity",)), tmp_path)
    assert cell.exists()
    assert not (folder / "needle_512_off.json").exists()
    assert zero_shot.collect(folder)["missing"] == ["needle at 512"]
    zero_shot.measure(subject, zero_shot.settle(folder), tmp_path)
    more = zero_shot.settle(folder, lengths=(768,), items=(3,), policies=("held",))
    assert (more.prompts, more.segments) == (2, 2)
    zero_shot.measure(subject, more, tmp_path)
    found = zero_shot.collect(folder)
    assert found["settings"]["lengths"] == (512, 768, 1024)
    assert found["settings"]["items"] == (2, 3)
    assert {(c["task"], c["size"]) for c in found["cells"] if c["policy"] == "held"} == {
        ("perplexity", 768), ("needle", 768), ("maximum", 3)
    }  # fmt: skip
    assert found["missing"] == [
        "perplexity at 512 (1 of 2 policies), 768 (1 of 2 policies), 1,024 (1 of 2 policies)",
        "needle at 512 (1 of 2 policies), 768 (1 of 2 policies), 1,024 (1 of 2 policies)",
        "maximum at 2 (1 of 2 policies), 3 (1 of 2 policies)",
    ]
    tokens = measures.text_tokens(subject.tokenizer)
    ends = measures.stretch_ends(len(tokens), 1024, 2)
    with policies.switched("held", subject.model, subject.context, {}):
        expected = zero_shot.perplexity(subject.model, tokens, ends, 768)
    assert json.loads((folder / "perplexity_768_held.json").read_text())["result"] == expected


def test_cells_of_other_settings_or_weights_are_refused_and_kept(subject: Subject, tmp_path: Path) -> None:
    few = dataclasses.replace(SETTINGS, lengths=(512,), policies=("off",))
    zero_shot.measure(subject, few, tmp_path)
    folder = tmp_path / "tiny"
    kept = {path: path.read_bytes() for path in folder.glob("*.json")}
    with pytest.raises(ValueError, match="holds a study with prompts 2, got 3: choose another folder"):
        zero_shot.settle(folder, prompts=3)
    for lengths, said in (((512, 1024), "512 to 1,024"), ((256, 512), "256 to 512")):  # other stretches of text
        with pytest.raises(ValueError, match=rf"expected lengths from 512 to 512, as .* got {said}: choose another"):
            zero_shot.measure(subject, dataclasses.replace(few, lengths=lengths), tmp_path)
    with pytest.raises(ValueError, match="expected lengths of at most the text's"):
        zero_shot.measure(subject, dataclasses.replace(few, lengths=(512, 10**7)), tmp_path / "other")
    trained = copy.deepcopy(subject.model)
    with torch.no_grad():
        next(trained.parameters()).add_(0.1)
    changed = Subject("tiny", trained, subject.tokenizer, subject.context)
    with pytest.raises(ValueError, match="holds results with other weights"):
        zero_shot.measure(changed, few, tmp_path)
    assert {path: path.read_bytes() for path in folder.glob("*.json")} == kept
    for path in folder.glob("*_*.json"):
        path.unlink()
    with pytest.raises(ValueError, match="holds a study with other weights"):
        zero_shot.measure(changed, few, tmp_path)
    (folder / "study.json").write_text('{"schema": "something"}')
    with pytest.raises(ValueError, match=r"study\.json is not what a study left there"):
        zero_shot.settle(folder)


def test_a_file_that_is_no_cell_of_the_study_is_named(subject: Subject, tmp_path: Path) -> None:
    few = dataclasses.replace(SETTINGS, lengths=(512,), items=(4,), policies=("off",))
    zero_shot.measure(subject, few, tmp_path)
    cell = tmp_path / "tiny" / "maximum_4_off.json"
    other = json.loads(cell.read_text())
    other["settings"]["prompts"] += 1
    wrong = r"maximum_4_off\.json is not what a study left there .* remove it to measure it again"
    files = dict.fromkeys(["", "{", "[]", "{}", '{"settings": 1, "result": {}, "provenance": {}}'], wrong)
    files[json.dumps(other)] = r"holds results with other prompts \(maximum_4_off\.json\)"
    for content, words in files.items():
        cell.write_text(content)
        for attempt in (lambda: zero_shot.measure(subject, few, tmp_path), lambda: zero_shot.collect(cell.parent)):
            with pytest.raises(ValueError, match=words):
                attempt()
        assert cell.read_text() == content


def test_an_interrupted_measurement_goes_on(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = dataclasses.replace(SETTINGS, lengths=(512,), policies=("off",))
    with monkeypatch.context() as patch:
        patch.setattr(measures, "answers", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            zero_shot.measure(subject, few, tmp_path)
    count = _counting(monkeypatch)
    zero_shot.measure(subject, few, tmp_path)
    assert count == [("needle", 512), ("maximum", 2)]


def test_two_at_once_share_the_cells(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins and ends while the first is at its second cell: it takes all the others."""
    few = dataclasses.replace(SETTINGS, lengths=(512,), policies=("off", "paper"))
    second = dataclasses.replace(subject, model=copy.deepcopy(subject.model))
    measured, left = [], []
    honest = run._Work.measure

    def watched(self: Any, task: str, size: int) -> Any:
        measured.append((self.subject is second, task))
        if len(measured) == 2:
            left.extend(zero_shot.measure(second, few, tmp_path))
        return honest(self, task, size)

    monkeypatch.setattr(run._Work, "measure", watched)
    assert zero_shot.measure(subject, few, tmp_path) == []
    assert list(map(str, left)) == ["perplexity_512_paper"]
    tasks = ["needle", "needle", "maximum", "maximum"]
    assert measured == [(False, "perplexity")] * 2 + [(True, task) for task in tasks]
    assert zero_shot.collect(tmp_path / "tiny")["missing"] == []


def _interrupt(*arguments: Any) -> Any:
    raise KeyboardInterrupt


def _counting(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    honest = run._Work.measure

    def counted(self: Any, task: str, size: int) -> Any:
        found.append((task, size))
        return honest(self, task, size)

    monkeypatch.setattr(run._Work, "measure", counted)
    return found


def test_calibration_prompts_are_not_scored(tokenizer: Any) -> None:
    scored = {p.text for task in ("needle", "maximum") for p in run.prompts(task, 512, tokenizer, SETTINGS)}
    assert not scored & {maximum_question(512, index=run.CALIBRATION + i, shots=5).text for i in range(4)}
    assert SETTINGS.prompts < run.CALIBRATION


def test_settings_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected policies of off, paper, .*, got best"):
        Settings(policies=("off", "best"))
    with pytest.raises(ValueError, match=r"expected tasks of perplexity, needle, maximum, got poetry"):
        Settings(tasks=("poetry",))
    with pytest.raises(ValueError, match="expected lengths of at least 128 tokens"):
        Settings(lengths=(64,))
