"""What a result says about where it comes from, and what it must not say."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import sharpmax
from sharpmax import provenance as module
from sharpmax.provenance import continued, provenance
from tests.nested import strings

ROOT = Path(__file__).parents[1]


def test_it_is_json_with_device_versions_command_and_time():
    record = provenance(["sharpmax", "bound"])
    assert record == json.loads(json.dumps(record))
    assert record["command"] == ["sharpmax", "bound"]
    assert record["device"]["cpu"]
    assert record["device"]["cores"] >= 1
    assert record["versions"]["sharpmax"] == sharpmax.__version__
    assert {"python", "numpy"} <= set(record["versions"])
    assert record["time"].endswith("+00:00")


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["/usr/bin/sharpmax", "bound"], ["sharpmax", "bound"]),
        (["/opt/lib/sharpmax/__main__.py", "bound"], ["sharpmax", "bound"]),
        (["x", "--out", "/var/results"], ["x", "--out", "results"]),
        (["x", "--out=/var/results"], ["x", "--out=results"]),
        (["x", "-o/var/results"], ["x", "-oresults"]),
        (["x", "a,/var/b,/var/c"], ["x", "a,b,c"]),
        (["x", "some/where", "../up", "--n", "1/2"], ["x", "some/where", "../up", "--n", "1/2"]),
        (["x", "https://example.org/a"], ["x", "https://example.org/a"]),
        ([], []),
    ],
)
def test_absolute_paths_are_left_out_of_the_command(words, kept):
    assert provenance(words)["command"] == kept


def test_paths_inside_the_working_directory_become_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert provenance(["x", "--out", str(tmp_path / "a" / "b")])["command"] == ["x", "--out", "a/b"]


def test_what_went_on_from_something_says_what_made_that():
    a, b, c = ({"commit": name, "time": f"{i} o'clock"} for i, name in enumerate("abc"))
    assert continued(a, {}) == a
    assert continued(a | {"time": "later"}, a) == a | {"time": "later"}
    ba = continued(b, a)
    assert ba == b | {"before": [a]}
    assert continued(c, ba) == c | {"before": [a, b]}
    assert continued(a | {"time": "later"}, ba) == a | {"time": "later", "before": [b]}


def test_no_absolute_path_anywhere():
    assert not [s for s in strings(provenance()) if s.startswith("/") or str(Path.home()) in s]


def _repository(root: Path) -> None:
    package = root / "src" / "sharpmax"
    package.mkdir(parents=True)
    (package / "provenance.py").write_text("")
    (root / "results").mkdir()
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments], cwd=root, check=True)


def test_commit_and_dirty_follow_the_sources_and_not_the_results(tmp_path, monkeypatch):
    _repository(tmp_path)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "src" / "sharpmax" / "provenance.py"))
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as inside a git hook
    assert provenance()["git"] == {"commit": head.strip(), "dirty": False}
    (tmp_path / "results" / "fig5.json").write_text("{}")
    assert provenance()["git"]["dirty"] is False
    (tmp_path / "src" / "sharpmax" / "new.py").write_text("")
    assert provenance()["git"]["dirty"] is True


def test_no_commit_outside_of_a_checkout(tmp_path, monkeypatch):
    _repository(tmp_path)
    installed = tmp_path / ".venv" / "lib" / "site-packages" / "sharpmax"  # inside somebody's repository, but not of it
    monkeypatch.setattr(module, "__file__", str(installed / "provenance.py"))
    assert provenance()["git"] is None


def test_a_gpu_of_an_imported_framework_is_named(monkeypatch):
    class Cuda:
        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 2)
        get_device_name = staticmethod(lambda i: f"GPU {i}")

    version, backends = SimpleNamespace(cuda="13.0"), SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91900))
    named = SimpleNamespace(cuda=Cuda, version=version, backends=backends)
    monkeypatch.setitem(sys.modules, "torch", named)
    made = provenance()
    assert made["device"]["gpus"] == ["GPU 0", "GPU 1"]
    assert (made["versions"]["cuda"], made["versions"]["cudnn"]) == ("13.0", "91900")


def test_a_broken_driver_does_not_cost_the_result(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", type("torch", (), {}))
    assert provenance()["device"]["gpus"] == []


def test_importing_it_imports_no_framework():
    code = (
        "import sys, sharpmax.provenance as p; p.provenance(); print({'torch', 'jax', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


def _history() -> set[str]:
    """All commits up to this one; empty where git or a part of them is missing."""
    if shutil.which("git") is None or not (ROOT / ".git").exists() or (ROOT / ".git" / "shallow").exists():
        return set()
    words = ["git", "-C", str(ROOT), "rev-list", "HEAD"]
    return set(subprocess.run(words, capture_output=True, text=True, check=False).stdout.split())


def test_commits_of_results_are_in_the_history_or_said_to_be_rewritten():
    if not (known := _history()):
        pytest.skip("needs git, and a clone with its history")
    files = [
        *ROOT.glob("results/**/*.json"),
        *ROOT.glob("benchmarks/results/*.json"),
        *ROOT.glob("checkpoints/**/*.json"),
    ]
    named = {
        commit: file
        for file in files
        for commit in re.findall(r'"commit": "([^"]*)"', file.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    rewritten = json.loads((ROOT / "results/commits.json").read_text(encoding="utf-8"))["rewritten"]
    between = {entry[end] for entry in rewritten for end in ("after", "until")}
    assert between <= known
    gone = {commit for entry in rewritten for commit in entry["commits"]}
    there = known | gone
    lost = {commit: file.name for commit, file in named.items() if not any(c.startswith(commit) for c in there)}
    assert lost == {}
    assert gone <= set(named)
