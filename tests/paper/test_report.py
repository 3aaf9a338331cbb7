"""The report: what its sentences say for either outcome, and what the page holds, read back from the HTML."""

from __future__ import annotations

import base64
import copy
import itertools
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from sharpmax.core.policies import PAPER, Constant
from sharpmax.inputs import InputError
from sharpmax.paper import EXHIBITS, report, table1_views
from sharpmax.paper.figures import save_exhibit
from sharpmax.paper.published import TABLE1
from sharpmax.paper.report import summary
from sharpmax.paper.table1 import rows_of
from sharpmax.tasks.max_retrieval import PRESETS, paired_p_values

SIZES = (16, 64, 256, 16384)
LINK = "https://arxiv.org/abs/2410.01104"
VOID = {"br", "img", "link", "meta"}


def table(name: str = "paper", sizes: tuple[int, ...] = SIZES, seeds: int = 4, **means: Any) -> dict[str, Any]:
    """A Table 1 whose rows have the given ``means`` in percent (softmax's where none are given)."""
    softmax = means.pop("softmax", (98.0, 90.0, 80.0, 15.0)[: len(sizes)])
    noise = np.linspace(-1, 1, seeds) / 200 if seeds > 1 else np.zeros(1)
    wobble = np.array([1, -1] * seeds)[:seeds] / 1000 if seeds > 1 else np.zeros(1)

    def accuracy(row: str) -> np.ndarray:
        own = wobble if row in means else 0  # so that pairs do not differ by the same amount in every seed
        return np.array(means.get(row, softmax))[:, None] / 100 + noise + own

    rows = {
        row: {
            "label": made.label,
            "policy": {},
            "accuracy": accuracy(row).tolist(),
            "p_value": [None] * len(sizes) if row == "softmax" else paired_p_values(accuracy(row), accuracy("softmax")),
        }
        for row, made in rows_of(PAPER).items()
    }
    printed = {row: dict(zip(TABLE1.sizes, getattr(TABLE1, row), strict=True)) for row in ("softmax", "adaptive")}
    distances = {
        row: [
            None if n not in printed[row] else round(100 * float(mean) - printed[row][n], 3)
            for n, mean in zip(sizes, accuracy(row).mean(axis=1), strict=True)
        ]
        for row in printed
    }
    return {
        "caption": f"Accuracy of {name} & others. (a) One panel.",
        "name": name,
        "sizes": list(sizes),
        "seeds": list(range(seeds)),
        "sets": 32,
        "rows": rows,
        "ceiling": (accuracy("softmax") + 0.01).tolist(),
        "paper": {
            "sizes": list(TABLE1.sizes),
            "rows": {row: {"accuracy": [v / 100 for v in values.values()]} for row, values in printed.items()},
            "p_value": list(TABLE1.p_value),
            "distance_points": distances,
        },
        "fit": {
            "sizes": [16, 32],
            "sets": 8,
            "counts": {"16": {"total": 40}, "32": {"total": 41}},
            "kept": 12,
            "coefficients": [-1.5, 2.0],
            "domain": [0.5, 2.5],
            "notes": ["a note"],
        },
        "protocol": PRESETS[name if name in PRESETS else "paper"].to_dict(),
        "training": {"step": 100_000, "seconds": 47.4, "provenance": {"command": ["sharpmax", "train", name]}},
    }


def line(figure: Any, data: Any) -> None:
    figure.subplots().plot([1, 2], [1, 2])


def fill(out: Path, first: dict[str, Any]) -> Path:
    """A folder with two tables, the first of them given, two figures, and a file of somebody else."""
    for name, data in (("table1", first), ("table1_sharp", table("sharp"))):
        save_exhibit(out, name, data, table1_views.draw, (6.75, 3.2))
        (out / f"{name}.csv").write_text("name\n")
    save_exhibit(out, "fig9", {"caption": "Of nobody's <script>alert(1)</script>. More."}, line, (3.25, 2))
    (out / "policy.json").write_text(json.dumps(Constant(1.0).to_dict()))
    save_exhibit(out, "fig5", {"caption": 'Entropy "H" of a_i. (a) Left; (b) right.'}, line, (3.25, 2))
    return out


class Page(HTMLParser):
    """A page read back: elements with their attributes, tables as rows of text, and that all tags are closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in {"td", "th"}:
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.text += data
        if "td" in self._open or "th" in self._open:
            self.tables[-1][-1][-1] += data.replace("\N{MINUS SIGN}", "-")

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag in tags]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("report"), table(adaptive=(98, 91, 82, 16)))


@pytest.fixture(scope="module")
def made(folder: Path) -> Page:
    path = report.write(folder)
    assert path == folder / "index.html"
    return Page(path)


@pytest.mark.parametrize(
    ("adaptive", "expected"),
    [
        (
            (98.0, 90, 80, 15),
            "In distribution (16 items), softmax and adaptive temperature have the same accuracy, 98.0%.",
        ),
        (
            (98.6, 90, 80, 15),
            "In distribution (16 items), adaptive temperature is 0.6 points above softmax: 98.6% against",
        ),
        (
            (98.02, 90, 80, 15),
            "In distribution (16 items), adaptive temperature is less than 0.05 points above softmax: 98.0% against",
        ),
        (
            (96.0, 90, 80, 15),
            "In distribution (16 items), adaptive temperature is 2.0 points below softmax: 96.0% against",
        ),
    ],
)
def test_in_distribution(adaptive: tuple[float, ...], expected: str) -> None:
    assert summary.in_distribution(table(adaptive=adaptive)).startswith(expected)


def test_in_distribution_without_a_size_of_training() -> None:
    for size in (4, 64):
        said = summary.in_distribution(table(sizes=(size,), softmax=(90,)))
        assert said == "No size of the table is one of training (5 to 16 items)."


@pytest.mark.parametrize(
    ("adaptive", "expected"),
    [
        ((98, 90, 80, 15), "and softmax have the same mean at every size."),
        ((99, 92, 83, 16), "is above softmax at every size (with p < 0.05 at each)."),
        ((98, 90, 80, 17), "is above softmax at 16,384 (with p < 0.05)."),
        ((98, 90.01, 83, 17), "is above softmax at 64 to 16,384 (with p < 0.05 at 256 and 16,384)."),
        ((98.01, 90, 80, 15), "is above softmax at 16 (nowhere with p < 0.05)."),
        ((97, 88, 80, 15), "is below softmax at 16 and 64 (with p < 0.05 at each); it is nowhere above softmax."),
        ((99, 90, 79, 15), "is above softmax at 16 (with p < 0.05), and below softmax at 256 (with p < 0.05)."),
    ],
)
def test_significance(adaptive: tuple[float, ...], expected: str) -> None:
    data = table("sharp", adaptive=adaptive)
    if adaptive == (98, 90, 80, 15):
        data["rows"]["adaptive"] = data["rows"]["softmax"]
    assert summary.significance(data) == f"Adaptive temperature, with the paper's polynomial, {expected}"
    assert summary.significance({**data, "name": "paper"}).endswith(
        "In the paper it is above with p < 0.05 at 64 to 16,384."
    )


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_have_no_test(seeds: int) -> None:
    data = table("sharp", seeds=seeds, adaptive=(98, 90, 80, 16))
    assert summary.significance(data).endswith("at 16,384. With fewer than three seeds there is no test.")
    assert ("single seed" in summary.precision(data)) == (seeds == 1)


@pytest.mark.parametrize(
    ("hard", "expected"),
    [
        ((97, 89, 79, 14), "is below adaptive temperature at every size (with p < 0.05 at each); it is nowhere above"),
        ((98, 90, 84, 16), "at 256 and 16,384 (with p < 0.05 at each). Its largest lead is 4.0 points, at 256 items."),
    ],
)
def test_hard_attention(hard: tuple[float, ...], expected: str) -> None:
    assert expected in summary.hard_attention(table(hard=hard))


def test_hard_attention_is_tested_against_adaptive_and_not_softmax() -> None:
    data = table(sizes=(64,), softmax=(50,), adaptive=(90,), hard=(90.01,))
    data["rows"]["hard"]["accuracy"] = [[0.89, 0.93, 0.88, 0.92]]
    p = stats.ttest_rel(data["rows"]["hard"]["accuracy"][0], data["rows"]["adaptive"]["accuracy"][0]).pvalue
    assert p > 0.05
    assert data["rows"]["hard"]["p_value"][0] < 0.05
    assert "nowhere with p < 0.05" in summary.hard_attention(data)


def test_distance() -> None:
    far = summary.distance(table(softmax=(98.6, 94.3, 81.3, 12.4), adaptive=(98.6, 94.5, 82.1, 20.0)))
    assert "is 6.0 points: adaptive temperature at 16,384 items has 20.0%" in far
    assert (
        "the paper 14.0%. Of 8 printed numbers, 7 are within 3 points; the others are at 16,384. Appendix A.4 leaves"
        in far
    )
    assert far.endswith("is in studies/max_retrieval.py and results/studies.")
    near = summary.distance(table(softmax=(98.6, 94.3, 80.3, 12.4), adaptive=(98.6, 94.5, 82.1, 14.0)))
    assert "is 1.0 points: softmax at 256 items has 80.3%" in near
    assert near.endswith("Of 8 printed numbers, 8 are within 3 points.")
    assert summary.distance(table(sizes=(20,), softmax=(90,))).startswith("None of these sizes")


def test_the_distance_is_told_only_where_the_recipe_is_the_papers() -> None:
    assert any("largest distance" in s for s in summary.sentences(table()))
    assert not any("largest distance" in s for s in summary.sentences(table("sharp")))


def test_the_standard_errors() -> None:
    data = table(adaptive=(98, 91, 82, 30))
    accuracy = np.array([row["accuracy"] for row in data["rows"].values()])
    worst = 100 * stats.sem(accuracy, axis=2).max()
    assert summary.precision(data).endswith(
        f"of each size; its standard error is at most {math.ceil(10 * worst) / 10:.1f} points."
    )
    own = 100 * stats.sem(data["rows"]["adaptive"]["accuracy"][3])
    assert f"30.0% (standard error over the seeds: {own:.1f})" in summary.distance(data)


def test_best() -> None:
    data = table(log_n=(98, 90, 80, 50))
    assert summary.best(data) == (
        "At 16,384 items, the best of our rows is “log n / log 16” with 50.0%; the best that the paper prints there is "
        "14.0%. The true maximum has the largest logit in 16.0% of the sets."
    )
    assert summary.best(table()).startswith("At 16,384 items, all policies reach 15.0%; the best that the paper prints")
    assert "paper" not in summary.best(table(sizes=(20, 30), softmax=(90, 80)))
    longer = table(sizes=(16384, 131072), softmax=(15, 9))
    assert summary.best_at_largest(longer).size == 16384


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({1}, "1"),
        ({1, 2}, "1 and 2"),
        ({1, 2, 4}, "1 to 4"),
        ({1, 4, 8, 16}, "1 and 4 to 16"),
        ({1, 2, 8, 2048}, "1, 2, 8 and 2,048"),
        ({1, 2, 4, 8, 16, 2048}, "every size"),
    ],
)
def test_sizes_to_read(chosen: set[int], expected: str) -> None:
    assert summary.sizes_text(chosen, (2048, 1, 2, 4, 8, 16)) == expected


def test_nothing_is_fetched_and_every_link_leads_somewhere(made: Page, folder: Path) -> None:
    ids = [attributes["id"] for _, attributes in made.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in made.elements:
        for key in ("src", "href"):
            value = attributes.get(key)
            if value is None or value == LINK or value.startswith("data:"):
                continue
            assert key == "href"
            assert value[1:] in ids if value.startswith("#") else (folder / value).is_file(), value
    assert not {"script", "iframe", "object", "embed"} & {tag for tag, _ in made.elements}
    text = re.sub(r"data:image/png;base64,[\w+/=]+", "", (folder / "index.html").read_text(encoding="utf-8"))
    assert re.findall(r"https?://[^\"\s]+", text) == [LINK]
    assert not re.search(r"url\(|@import", text)


def test_pictures_are_the_files(made: Page, folder: Path) -> None:
    images = made.all("img")
    names = ["fig5", "table1", "table1_sharp", "fig9"]
    assert len(images) == len(names)
    for image, name in zip(images, names, strict=True):
        content = (folder / f"{name}.png").read_bytes()
        assert image["src"] == "data:image/png;base64," + base64.b64encode(content).decode()
        assert "loading" not in image
    assert [image["width"] for image in images] == ["650", "1350", "1350", "650"]
    assert [image["height"] for image in images] == ["400", "640", "640", "400"]
    assert [image["alt"] for image in images] == [
        'Entropy "H" of a_i.',
        "Accuracy of paper & others.",
        "Accuracy of sharp & others.",
        "Of nobody's <script>alert(1)</script>.",
    ]


def test_order_headings_and_accessibility(made: Page) -> None:
    assert [a["id"] for a in made.all("section")] == [
        "summary", "fig5", "table1", "table1_sharp", "fig9", "missing", "run"
    ]  # fmt: skip
    levels = [int(tag[1]) for tag, _ in made.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert made.all("html")[0]["lang"] == "en"
    assert all(attributes.get("scope") in {"row", "col", "rowgroup"} for attributes in made.all("th"))
    assert len(made.all("details")) == 5


def test_table_1_is_that_of_the_json(made: Page, folder: Path) -> None:
    data = json.loads((folder / "table1.json").read_text())
    shown = made.tables[0]
    assert shown[0][1:] == ["16", "64", "256", "16,384"]
    lines = {texts[0]: texts[1:] for texts in reversed(shown[1:])}
    for row in data["rows"].values():
        means = 100 * np.mean(row["accuracy"], axis=1)
        assert [text.strip("*†") for text in lines[row["label"]]] == [f"{mean:.1f}" for mean in means]
    assert lines["adaptive, the paper's polynomial"] == ["98.0", "91.0*", "82.0*", "16.0*"]
    assert lines["The paper's baseline"] == ["98.6", "94.3", "81.3", "12.4"]
    assert lines["The paper's adaptive"] == ["98.6", "94.5", "82.1", "14.0"]
    distances = {texts[0]: texts[1:] for texts in shown}
    assert distances["adaptive"] == ["-0.6", "-3.5", "-0.1", "+2.0"]
    assert lines["ceiling"] == ["99.0", "91.0", "81.0", "16.0"]


def test_best_and_far_numbers_stand_out(folder: Path, made: Page) -> None:
    text = (folder / "index.html").read_text(encoding="utf-8")
    assert "<b>82.0</b><sup>*</sup>" in text
    assert '<td class="far">&minus;3.5</td>' in text
    sharp = text[text.index('<section id="table1_sharp"') :]
    assert 'class="far"' not in sharp
    assert "another recipe" in sharp
    assert text.count("soft weights may be right without") == 2
    assert text.count('class="papers"') == 4


def test_p_values_are_those_of_the_json(made: Page, folder: Path) -> None:
    data = json.loads((folder / "table1.json").read_text())
    lines = {texts[0]: texts[1:] for texts in made.tables[1]}
    for text, p in zip(lines["adaptive, the paper's polynomial"], data["rows"]["adaptive"]["p_value"], strict=True):
        assert float(text) == pytest.approx(p, rel=0.06, abs=0.005 if p >= 0.05 else 0)
    assert lines["The paper's adaptive"] == ["0.40", "0.002", "2e-4", "0.004"]


def test_the_summary_holds_the_sentences(made: Page, folder: Path) -> None:
    for name in ("table1", "table1_sharp"):
        for sentence in summary.sentences(json.loads((folder / f"{name}.json").read_text())):
            assert sentence in made.text
    assert "The paper's best row14.0%at 16,384 items, as printed" in made.text


def test_what_was_run(made: Page, folder: Path) -> None:
    source = json.loads((folder / "fig5.json").read_text())["provenance"]
    assert " ".join(source["command"]) in made.text
    assert source["device"]["cpu"] in made.text
    assert source["git"] is None or source["git"]["commit"][:10] in made.text
    for package, version in source["versions"].items():
        assert f"{package} {version}" in made.text
    heads = {texts[0]: texts[1:] for texts in made.tables[-2]}
    assert heads["Heads"] == ["paper", "sharp"]
    assert heads["Command"] == ["sharpmax train paper", "sharpmax train sharp"]
    assert heads["Steps"] == ["100,000, each on 128 sets"] * 2
    assert heads["Time"] == ["47 s"] * 2
    assert heads["Evaluation"] == ["32 sets for each seed and size from 16 to 16,384 items"] * 2
    settings = {texts[0]: texts[1:] for texts in made.tables[-1]}
    assert settings["learning rate"] == ["0.001", "0.003"]


def test_exhibits_of_several_runs_are_told_apart(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    data = json.loads((tmp_path / "fig5.json").read_text())
    data["provenance"] |= {
        "command": ["sharpmax", "other"],
        "git": {"commit": "f" * 40, "dirty": True},
        "device": {"gpus": ["NVIDIA H200", "NVIDIA H200"]},
    }
    (tmp_path / "fig5.json").write_text(json.dumps(data))
    page = Page(report.write(tmp_path))
    assert len(page.all("dl")) == 2
    assert "sharpmax other" in page.text
    assert "ffffffffff, with changes" in page.text
    assert "2 x NVIDIA H200" in page.text


def test_exhibits_that_differ_by_their_command_share_an_entry(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    data = json.loads((tmp_path / "fig5.json").read_text())
    data["provenance"] |= {"command": ["sharpmax", "<other>"], "time": "1999-01-01T00:00:00+00:00"}
    (tmp_path / "fig5.json").write_text(json.dumps(data))
    page = Page(report.write(tmp_path))
    assert len(page.all("dl")) == 1
    assert "sharpmax <other>" in page.text
    assert "Finished1999-01-01 00:00:00 UTC to 2" in page.text


def test_what_is_missing_is_listed_with_its_command(made: Page, tmp_path: Path) -> None:
    assert "sharpmax reproduce dispersion --out ." in made.text
    assert "sharpmax reproduce fig5 " not in made.text
    page = Page(report.write(tmp_path))
    assert page.tables == []
    assert "Table 1 was not made" in page.text
    for exhibit in EXHIBITS.values():
        assert f"sharpmax reproduce {exhibit.command} --out ." in page.text
    assert "Table 1, protocol sharp: sharpmax reproduce table1 --protocol sharp --out ." in page.text


def test_a_picture_that_is_not_there_is_told(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "fig5.png").unlink()
    page = Page(report.write(tmp_path))
    assert "Its picture, fig5.png, is not there." in page.text
    assert len(page.all("img")) == 3


def without(*keys: str) -> str:
    data = copy.deepcopy({"exhibit": "table1", **table(), "provenance": {}})
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    del inner[keys[-1]]
    return json.dumps(data)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("fig5.json", b'{"exhibit": "fig5"'),
        ("fig5.json", b"\xff\xfe"),
        ("fig5.json", b"[1, 2]"),
        ("fig5.json", b'{"exhibit": "fig5", "caption": "x"}'),
        ("fig5.json", b'{"exhibit": "fig5", "caption": "x", "provenance": {"git": "main"}}'),
        ("fig5_copy.json", b'{"exhibit": "fig5", "caption": "x", "provenance": {}}'),
        ("table1.json", without("ceiling").encode()),
        ("table1.json", without("rows", "hard").encode()),
        ("table1.json", without("training", "step").encode()),
        ("table1.json", json.dumps({**json.loads(without("fit")), "fit": None}).encode()),
        ("fig5.png", b"GIF89a"),
    ],
)
def test_damaged_files_are_refused(name: str, content: bytes, folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("fig5.*"):
        shutil.copy(path, tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=re.escape(str(tmp_path / name))) as raised:
        report.write(tmp_path)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "index.html").exists()
