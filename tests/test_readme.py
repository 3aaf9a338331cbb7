"""The README's tree and its Python examples stay true."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.doc_tables import PHRASES, TABLES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = {page.name: re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL) for page in PAGES}


@pytest.mark.parametrize("page", [page for page, examples in EXAMPLES.items() if examples])
def test_the_python_examples_run_as_written(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, as somebody would who follows the page; what only hints at code is not ``python``."""
    monkeypatch.chdir(tmp_path)
    if any("weights.load" in code for code in EXAMPLES[page]):
        weights = pytest.importorskip("sharpmax.huggingface.weights")
        if "smollm2-135m-instruct" not in weights.available():
            pytest.skip("the weights of smollm2-135m-instruct are not installed")
    names = {"__name__": "example"}
    for code in EXAMPLES[page]:
        exec(compile(code, page, "exec", dont_inherit=True), names)


def test_there_are_examples() -> None:
    assert len(EXAMPLES["README.md"]) >= 2


def listed() -> dict[str, str]:
    """Every path of the tree in the README, with what it says of it."""
    (tree,) = re.findall(r"```text\n(sharpmax/\n.*?)```", README, re.DOTALL)
    paths, parents = {}, []
    for line in tree.splitlines()[1:]:
        name, _, text = line.strip().partition("  ")
        depth = (len(line) - len(line.lstrip())) // 2
        parents = [*parents[: depth - 1], name.rstrip("/")]
        paths["/".join(parents)] = text.strip()
    return paths


def test_the_tree_names_what_is_there_and_nothing_else() -> None:
    paths = listed()
    for path, text in paths.items():
        assert (ROOT / path).exists(), f"README lists {path}, which does not exist"
        assert text, f"README says nothing of {path}"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {"/".join(Path(p).parts[:depth]) for p in tracked for depth in (1, 2, 3) if len(Path(p).parts) > depth}
    expected = {
        f
        for f in folders
        if f.partition("/")[0] in ("src", "tests", "benchmarks", "studies", "checkpoints", "docs", "results")
    }
    expected = {f for f in expected if f.count("/") == 0 or f.startswith("src/sharpmax")} - {
        "src/sharpmax/core/policies"
    }
    assert expected <= set(paths), f"README does not list {sorted(expected - set(paths))}"


def test_the_two_commands_come_first() -> None:
    assert README.index("make test") < 1500
    assert README.index("make reproduce") < 1500


def test_relative_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(("page", "table"), [(page, table) for page, tables in TABLES.items() for table in tables])
def test_tables_are_those_of_the_result_files(page: str, table: str) -> None:
    assert table in (ROOT / page).read_text(encoding="utf-8"), f"{page} should have\n{table}"


@pytest.mark.parametrize(("page", "phrase"), [(page, phrase) for page, found in PHRASES.items() for phrase in found])
def test_sentences_with_numbers_are_those_of_the_result_files(page: str, phrase: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert phrase in text, f"{page} should say: {phrase}"


def test_the_speed_table_is_that_of_the_result_file() -> None:
    results = json.loads((ROOT / "benchmarks/results/softmax_cpu.json").read_text(encoding="utf-8"))["results"]
    expected = speed_table(results)
    assert expected in README, f"the table should read\n{expected}"


def speed_table(results: list[dict[str, Any]]) -> str:
    """Ratios to the framework's own softmax / to literal Figure 4, by framework, mode and direction."""
    shapes = sorted({tuple(r["shape"]) for r in results}, key=lambda shape: shape[1])
    lines = ["| | " + " | ".join(f"{a} x {b}" for a, b in shapes) + " |", "|---" * (len(shapes) + 1) + "|"]
    ratios: dict[str, list[str]] = {}
    for shape in shapes:
        for r in results:
            if tuple(r["shape"]) == shape:
                name = f"{r['framework']}, {r['mode']}, {r['direction']}"
                ratio = f"{r['ratio_to_own_softmax']:.2f} / {r['ratio_to_figure4']:.2f}"
                ratios.setdefault(name, []).append(ratio)
    lines += [f"| {name} | " + " | ".join(values) + " |" for name, values in ratios.items()]
    return "\n".join("  " + line for line in lines)
