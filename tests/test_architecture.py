"""The dependency rules of DESIGN.md, and that they would notice a breach."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def lint_imports(config: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "lint-imports", "--config", config, "--no-cache"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_dependency_rules_hold() -> None:
    result = lint_imports(ROOT / "pyproject.toml")
    assert result.returncode == 0, result.stdout


def test_a_breach_is_noticed(tmp_path: Path) -> None:
    # The rules turned round: the core on top of everything. The code breaks them, and the linter says so.
    reversed_rules = tmp_path / "rules.toml"
    reversed_rules.write_text(
        '[tool.importlinter]\nroot_package = "sharpmax"\n[[tool.importlinter.contracts]]\nname = "upside down"\n'
        'type = "layers"\nlayers = ["sharpmax.core", "sharpmax.theory"]\n'
    )
    assert lint_imports(reversed_rules).returncode == 1


def test_kernels_and_adapters_hold_no_constant_of_the_paper() -> None:
    for path in (ROOT / "src" / "sharpmax").rglob("*.py"):
        if path.name != "entropy.py":
            assert "4.917" not in path.read_text(encoding="utf-8"), path
