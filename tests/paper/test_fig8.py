"""Figure 8 from made-up evaluations: repeats counted once, files, refusals, drawing again."""

from __future__ import annotations

import copy
import html
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

from sharpmax.__main__ import main
from sharpmax.core.policies import PAPER, PAPER_HELD, Constant, LogLength
from sharpmax.inputs import InputError
from sharpmax.paper import EXHIBITS, Exhibit, fig8, report
from sharpmax.paper.fig8_views import BLUE, FAINT, draw, findings, markdown, points, title
from sharpmax.paper.paired import holm
from sharpmax.tasks.clrs_text import ALGORITHMS
from sharpmax.tasks.clrs_text import evaluation as upstream
from sharpmax.tasks.clrs_text.benchmark import TRAINING_SIZES
from tests.paper.evaluations import falling, made_up, rule, saved


@pytest.fixture(autouse=True)
def nothing_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the package is installed without a checkout."""
    monkeypatch.setattr(fig8, "SHIPPED", tmp_path / "nowhere")


FEW = upstream().only(["minimum", "bfs", "quicksort", "segments_intersect"], seeds=(3, 14), samples=12)


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    return {
        "baseline": made_up(FEW, falling(0), seed=1, repeats=3),
        "adaptive": made_up(FEW, falling(0.4), PAPER, seed=2, repeats=3),
    }


def test_pairs_are_by_sample_and_repeats_count_once(two: dict[str, Any]) -> None:
    content = fig8.data(two)
    for part in ("in", "out", "beyond"):
        for algorithm, row in content["comparisons"]["adaptive"][part]["algorithms"].items():
            counts, seen = np.zeros((2, 2), int), set[tuple[int, str]]()
            for size, entry in two["baseline"]["algorithms"][algorithm]["sizes"].items():
                other = two["adaptive"]["algorithms"][algorithm]["sizes"][size]
                for seed, i in product(range(2), range(12)):
                    tag = (int(size), f"{seed} {i}" if i < 9 else "one question")
                    new = tag not in seen
                    seen.add(tag)
                    a, b = entry["final"][seed][i], other["final"][seed][i]
                    trained = TRAINING_SIZES[algorithm]
                    inside = {
                        "in": int(size) in trained,
                        "out": int(size) not in trained,
                        "beyond": int(size) > max(trained),
                    }
                    if new and a != "-" and inside[part]:
                        counts[int(a), int(b)] += 1
            assert (row["n"], row["baseline_alone"], row["alone"]) == (counts.sum(), counts[1, 0], counts[0, 1])
            assert row["right"] == counts[:, 1].sum()
            assert row["difference"] == pytest.approx((counts[0, 1] - counts[1, 0]) / counts.sum(), abs=1e-5)
            expected = stats.binomtest(int(counts[0, 1]), int(counts[0, 1] + counts[1, 0])).pvalue
            assert row["p_value"] == pytest.approx(expected, rel=1e-4)
    rows = content["comparisons"]["adaptive"]["out"]["algorithms"].values()
    assert [row["p_holm"] for row in rows] == pytest.approx(holm([row["p_value"] for row in rows]), rel=1e-4)
    total = content["comparisons"]["adaptive"]["out"]["total"]
    assert total["n"] == sum(row["n"] for row in rows)
    assert total["interval"][0] < total["difference"] < total["interval"][1]
    assert total["mean_difference"] == pytest.approx(np.mean([row["difference"] for row in rows]), abs=1e-5)


def test_an_algorithm_whose_questions_repeat_at_every_size_is_not_out_of_distribution() -> None:
    split = FEW.only(["minimum", "segments_intersect"])
    evaluations = {"baseline": made_up(split, falling(0)), "adaptive": made_up(split, falling(0.1), PAPER)}
    for found in evaluations.values():
        for size, row in found["algorithms"]["segments_intersect"]["sizes"].items():
            row["distinct"] = [("1" if size == "4" else "0") * 12] * 2
    content = fig8.data(evaluations)["comparisons"]["adaptive"]
    assert content["in"]["algorithms"]["segments_intersect"]["n"] == 24
    assert list(content["out"]["algorithms"]) == ["minimum"]


def test_a_trained_model_is_named_and_what_its_training_took_is_told(two: dict[str, Any]) -> None:
    evaluations = copy.deepcopy(two)
    for name, found in evaluations.items():
        step = 0.5 if name == "baseline" else 0.6
        policy = None if name == "baseline" else PAPER.to_dict()
        found["training"] = {
            "settings": {"policy": policy, "model": "somewhere/tiny-llm"}, "start": "a", "processes": 1, "sizes": {},
            "counts": {"tokens": 1_000_000}, "median_step_seconds": step, "median_tokens_per_second": 4000.0,
            "median_data_seconds": 0.01,
            "peak_memory_bytes": 3 * 2**30, "curve": {"step": [1, 2], "tokens": [1, 2], "loss": [2.0, 1.25]},
        }  # fmt: skip
    content = fig8.data(evaluations)
    assert "size: tiny-llm (softmax) and tiny-llm (adaptive temperature)." in content["caption"]
    rows = [line.split(" | ") for line in markdown(content).splitlines() if "| tiny-llm |" in line]
    assert [row[4:10] for row in rows] == [
        ["4,000", "500.0", "1.00x", "10.0", "3.0", "1.2500"],
        ["4,000", "600.0", "1.20x", "10.0", "3.0", "1.2500"],
    ]
    assert content["variants"]["adaptive"]["training"]["curve"]["loss"] == [2.0, 1.25]
    traced = two["baseline"]["trace_accuracy"]
    assert f"{traced['in_distribution']:.1%}, {traced['out_of_distribution']:.1%}" in rows[0]


def test_lines_are_faint_where_few_samples_fit(two: dict[str, Any]) -> None:
    content = copy.deepcopy(fig8.data(two))
    assert content["algorithms"]["quicksort"]["too_long"][-1] == 12
    assert content["algorithms"]["minimum"]["too_long"][-1] == 0
    content["algorithms"]["minimum"]["too_long"][-2:] = [100, 100]
    figure = Figure(layout="constrained")
    draw(figure, content)
    panel = next(axis for axis in figure.axes if axis.get_title(loc="left") == "minimum")
    blue = [line for line in panel.lines if line.get_color() == BLUE]
    assert [line.get_alpha() for line in blue] == [FAINT, None]
    sizes = content["algorithms"]["minimum"]["sizes"]
    assert list(blue[0].get_xdata()) == sizes  # pyright: ignore[reportArgumentType]
    assert [x for x in blue[1].get_xdata() if x == x] == sizes[:-2]  # pyright: ignore


def test_curves_are_means_and_deviations_over_seeds(two: dict[str, Any]) -> None:
    entry = fig8.data(two)["algorithms"]["quicksort"]
    rows = two["adaptive"]["algorithms"]["quicksort"]["sizes"]
    assert entry["sizes"] == list(range(4, 13))
    assert entry["training_sizes"] == [4, 5, 10]
    assert entry["n"][-1] == 12
    shares = [[t.count("1") / (12 - t.count("-")) for t in row["final"]] for row in rows.values()]
    curve = entry["curves"]["adaptive"]
    assert curve["accuracy"] == pytest.approx(np.mean(shares, axis=1), rel=1e-4)
    assert curve["deviation"] == pytest.approx(np.std(shares, axis=1, ddof=1), rel=1e-4)


def test_files_of_three_variants_and_the_page(two: dict[str, Any], tmp_path: Path) -> None:
    also = made_up(FEW, falling(-0.2), PAPER_HELD, seed=3, repeats=3)
    paths = EXHIBITS["fig8"].run(tmp_path / "out", **saved(tmp_path, **two, also=also))
    assert [path.name for path in paths] == [f"fig8.{suffix}" for suffix in ("png", "pdf", "json", "md")]
    content = json.loads(paths[2].read_text())
    assert [v["label"] for v in content["variants"].values()] == [
        "softmax", "adaptive temperature", "adaptive temperature, held"
    ]  # fmt: skip
    assert set(content["comparisons"]) == {"adaptive", "also"}
    assert content["findings"] == findings(content)
    assert len(content["findings"]) == 7
    for sentence in content["findings"]:
        assert sentence in content["caption"]
        assert sentence in paths[3].read_text()
    assert "held against softmax" in paths[3].read_text()
    page = report.write(tmp_path / "out").read_text()
    assert '<section id="fig8"' in page
    assert "sharpmax reproduce fig8" not in page
    short = page[page.index('<section id="summary"') : page.index('<section id="fig8"')]
    assert "nothing to say about max retrieval" in short
    assert all(html.escape(line) in short for line in json.loads(paths[2].read_text())["findings"])


def test_it_is_drawn_again_from_its_file(two: dict[str, Any], tmp_path: Path) -> None:
    paths = fig8.run(tmp_path / "out", **saved(tmp_path, **two))
    before = {path: path.read_bytes() for path in paths}
    for path in paths:
        if path.suffix != ".json":
            path.unlink()
    assert fig8.run(tmp_path / "out") == paths
    assert {path: path.read_bytes() for path in paths} == before
    paths[2].write_text('{"exhibit": "fig8"}')
    with pytest.raises(InputError, match="is not what `sharpmax reproduce fig8` writes"):
        fig8.run(tmp_path / "out")


def test_sentences_tell_whichever_outcome_there_is() -> None:
    split = FEW.only(["minimum", "bfs"])
    right, wrong = (made_up(split, lambda *_, c=c: c, p) for c, p in ((1.0, None), (0.0, PAPER)))
    said = findings(fig8.data({"baseline": right, "adaptive": wrong}))
    assert said[0].startswith(
        "Adaptive temperature, in distribution, is above softmax on 0 of 2 algorithms (0 with p < 0.05 after "
        "Holm's correction) and below on 2 (2); the mean difference is \N{MINUS SIGN}100.0 points"
    )
    assert "480 samples 0.0% are right against 100.0%" in said[0]
    only = split.only(sizes=[4])
    same = fig8.data({"baseline": made_up(only, falling(0)), "adaptive": made_up(only, falling(0), PAPER)})
    assert (
        "on 0 of 2 algorithms (0 with p < 0.05 after Holm's correction) and below on 0 (0); the mean difference is 0.0 "
        in same["findings"][0]
    )
    assert same["findings"][1] == "No sample is out of distribution."
    few = {name: copy.deepcopy(found) for name, found in (("baseline", right), ("adaptive", wrong))}
    for found in few.values():  # four samples of one algorithm that are not repeated: too few for the mean
        for i, row in enumerate(found["algorithms"]["minimum"]["sizes"].values()):
            row["distinct"] = [
                "1100" + "0" * (len(text) - 4) if i == 0 else "0" * len(text) for text in row["distinct"]
            ]
    content = fig8.data(few)
    total = content["comparisons"]["adaptive"]["in"]["total"]
    assert (total["mean_of"], total["mean_difference"]) == (1, -1.0)
    assert "the mean difference over the 1 with at least 20 samples is" in content["findings"][0]
    assert points(-0.0123) == "\N{MINUS SIGN}1.2"


def changed(found: dict[str, Any], *keys: str, to: Any) -> dict[str, Any]:
    copied = copy.deepcopy(found)
    inner = copied
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    return copied


@pytest.mark.parametrize(
    ("keys", "to", "says"),
    [
        (("settings", "split", "samples"), 13, "got other samples for adaptive than for baseline"),
        (("settings", "split", "seeds"), [3, 35], "got other seeds for"),
        (("settings", "split", "traces"), False, "got other traces for"),
        (("settings", "split", "sizes"), {"minimum": [4]}, "got other algorithms, sizes for"),
        (("settings", "length"), 1024, "got other length for"),
        (("settings", "questions"), "x", "got other questions for"),
        (("model", "tokenizer"), "x", "got other tokenizer for"),
        (("model", "dtype"), "bfloat16", "got other dtype for"),
        (("algorithms", "bfs", "training_sizes"), [4], "got other training sizes for"),
        (("model", "policy"), None, "expected a model with adaptive temperature beside the baseline"),
        (
            ("format",),
            1,
            "an evaluation in format 2, got format 1 in .*: evaluate again, which takes the cells",
        ),
    ],
)
def test_evaluations_of_something_else_are_refused(
    two: dict[str, Any], tmp_path: Path, keys: tuple[str, ...], to: Any, says: str
) -> None:
    paths = saved(tmp_path, baseline=two["baseline"], adaptive=changed(two["adaptive"], *keys, to=to))
    with pytest.raises(InputError, match=says):
        fig8.run(tmp_path / "out", **paths)
    assert not (tmp_path / "out").exists()


def test_other_mistakes_are_one_sentence(two: dict[str, Any], tmp_path: Path) -> None:
    paths = saved(tmp_path, **two)
    with pytest.raises(InputError, match="expected the baseline to be a model with plain softmax"):
        fig8.run(tmp_path, baseline=paths["adaptive"], adaptive=paths["baseline"])
    for given in ({}, {"baseline": paths["baseline"]}, {"also": paths["baseline"]}):
        with pytest.raises(InputError, match=r"^expected --baseline and --adaptive"):
            fig8.run(tmp_path, **given)
    with pytest.raises(InputError, match="expected a folder that `sharpmax clrs-text evaluate` made"):
        fig8.run(tmp_path, baseline=tmp_path / "nowhere", adaptive=paths["adaptive"])
    (tmp_path / "begun" / "cells").mkdir(parents=True)
    with pytest.raises(InputError, match="whose evaluation is not complete"):
        fig8.run(tmp_path, baseline=tmp_path / "begun", adaptive=paths["adaptive"])
    older = {key: value for key, value in two["baseline"].items() if key != "trace_accuracy"}
    for text in ("{", json.dumps(older)):
        (paths["baseline"] / "evaluation.json").write_text(text)
        with pytest.raises(InputError, match="is not an evaluation, or is damaged: evaluate again"):
            fig8.run(tmp_path, **paths)


def trained(policy: Any, *, tokens: int = 100) -> dict[str, Any]:
    """What an evaluation tells of a training run."""
    settings = {"policy": policy and policy.to_dict(), "tokens": tokens, "seed": 0, "model": "tiny"}
    return {"settings": settings, "sizes": {}, "start": "a", "processes": 1}


def test_training_that_differed_in_more_than_the_policy_is_told(two: dict[str, Any]) -> None:
    def caption(first: dict[str, Any], second: dict[str, Any]) -> str:
        given = zip(two.items(), (first, second), strict=True)
        return fig8.data({name: changed(found, "training", to=training) for (name, found), training in given})[
            "caption"
        ]

    plain, paper = trained(None), trained(PAPER)
    assert "Training was from the same start, and differed in nothing but the policy." in caption(plain, paper)
    assert "more than the policy: tokens." in caption(plain, trained(PAPER, tokens=200))
    assert "more than the policy: start, processes." in caption(plain, paper | {"start": "b", "processes": 2})


def test_the_caption_says_what_is_known_of_training(two: dict[str, Any]) -> None:
    caption = fig8.data(two)["caption"]
    assert "Blue: softmax, at inference; its training is not known." in caption
    assert "Whether training differed in more than the policy is not known." in caption
    policies = {"baseline": Constant(1.0), "adaptive": PAPER}
    known = {name: changed(found, "training", to=trained(policies[name])) for name, found in two.items()}
    caption = fig8.data(known)["caption"]
    assert "Blue: softmax, in training and at inference. Red: adaptive temperature, in training and" in caption
    known["adaptive"] = changed(two["adaptive"], "training", to=trained(None))
    assert "Red: adaptive temperature, at inference, after training with softmax." in fig8.data(known)["caption"]
    other = changed(two["adaptive"], "model", "policy", to=rule(LogLength.relative(16)))
    known["adaptive"] = changed(other, "training", to=trained(LogLength.relative(32)))
    assert "LogLength, at inference, after training with adaptive temperature, Log" in fig8.data(known)["caption"]


def test_an_algorithm_of_which_nothing_fits_has_an_empty_panel(tmp_path: Path) -> None:
    split = FEW.only(["minimum", "bfs"], [4, 6])
    evaluations = {"baseline": made_up(split, falling(0)), "adaptive": made_up(split, falling(0), PAPER)}
    for found in evaluations.values():
        for row in found["algorithms"]["bfs"]["sizes"].values():
            row |= {"final": ["-" * 12] * 2, "n": 0, "accuracy": None, "deviation": None}
    content = json.loads(fig8.run(tmp_path, **saved(tmp_path, **evaluations))[2].read_text())
    assert content["algorithms"]["bfs"]["curves"]["adaptive"]["accuracy"] == [None, None]
    assert list(content["comparisons"]["adaptive"]["in"]["algorithms"]) == ["minimum"]


def test_labels_of_policies() -> None:
    assert fig8.label(None) == "softmax"
    assert fig8.label(rule(LogLength.relative(16))) == "adaptive temperature, LogLength"
    assert fig8.label([{**rule(PAPER)[0], "layers": [0]}]) == "adaptive temperature, in some heads"


def test_every_algorithm_has_a_title_of_its_own() -> None:
    titles = [title(name) for name in ALGORITHMS]
    assert len(set(titles)) == 30
    assert not any("_" in text for text in titles)
    assert max(map(len, titles)) <= 26


def test_the_command_and_what_all_does(
    two: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths, out = saved(tmp_path, **two), tmp_path / "out"
    asked: list[tuple[str, dict[str, Any]]] = []

    def command(*words: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 0
        return capsys.readouterr().out

    def note(self: Any, out: Path, **options: Any) -> list[Path]:
        asked.append((self.name, options))
        return []

    with monkeypatch.context() as patch:
        patch.setattr(Exhibit, "run", note)
        assert "fig8: left out, since it is made from results that --baseline and --adaptive name" in command(
            "reproduce", "all", "--out", str(out)
        )
        assert "fig8" not in dict(asked)
        assert "sharpmax reproduce fig8 --out . --baseline ... --adaptive ..." in _text(out / "index.html")
    given = ["--baseline", str(paths["baseline"]), "--adaptive", str(paths["adaptive"] / "evaluation.json")]
    printed = command("reproduce", "fig8", *given, "--out", str(out))
    assert printed.split() == [str(out / f"fig8.{suffix}") for suffix in ("png", "pdf", "json", "md")]
    assert '<section id="fig8"' in (out / "index.html").read_text()
    monkeypatch.setattr(Exhibit, "run", note)
    command("reproduce", "all", "--out", str(out))
    assert dict(asked)["fig8"] == {}  # drawn again from its file


def test_a_checkout_has_evaluations_of_its_own(
    two: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = saved(tmp_path, **two)
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    paths["baseline"].rename(shipped / "none")
    paths["adaptive"].rename(shipped / "paper")
    monkeypatch.setattr(fig8, "SHIPPED", shipped)
    out = tmp_path / "out"
    assert EXHIBITS["fig8"].ready(out)
    EXHIBITS["fig8"].run(out)
    made = json.loads((out / "fig8.json").read_text())
    assert made["comparisons"] == fig8.data(two)["comparisons"]
    monkeypatch.setattr(fig8, "SHIPPED", tmp_path / "nowhere")
    assert EXHIBITS["fig8"].ready(out)  # its file is there
    assert not EXHIBITS["fig8"].ready(tmp_path)


def _text(page: Path) -> str:
    return " ".join(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")).split())
