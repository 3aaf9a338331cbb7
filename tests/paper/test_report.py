"""What the page of the report holds, read back from the HTML."""

from __future__ import annotations

import base64
import copy
import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
