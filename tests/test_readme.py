"""The README's tree and its Python examples stay true."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.strip().splitlines()[0])
def test_the_python_examples_run_as_written(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


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
    expected = {f for f in folders if f.partition("/")[0] in ("src", "tests", "benchmarks", "docs", "results")}
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
