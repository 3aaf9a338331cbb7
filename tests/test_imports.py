"""What importing the package imports, and what happens where an optional package is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def run(code: str, blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(blocked=blocked) + code], capture_output=True, text=True, check=False
    )


def test_import_sharpmax_imports_no_framework() -> None:
    result = run("import sharpmax; print(*sorted({m.partition('.')[0] for m in sys.modules}))")
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert "numpy" in loaded
    assert not loaded & {"torch", "jax", "jaxlib", "flax", "scipy", "matplotlib", "typer", "rich", "mpmath", "triton"}


def test_numpy_alone_is_enough_for_the_core() -> None:
    code = (
        "import numpy, sharpmax; x = numpy.random.default_rng(0).normal(size=(4, 9)); "
        "print(sharpmax.adaptive_temperature_softmax(x).sum(), sharpmax.theory.failure_length(5.69))"
    )
    result = run(code, ("torch", "jax", "flax", "scipy", "matplotlib", "typer", "rich"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[1] == "2482135594"


@pytest.mark.parametrize(
    ("module", "package", "extra"), [("torch", "torch", "torch"), ("jax", "jax", "jax"), ("flax", "flax", "jax")]
)
def test_a_missing_extra_is_named(module: str, package: str, extra: str) -> None:
    result = run(f"import sharpmax.{module}", (package,))
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.endswith(f"sharpmax.{module} needs {package}, which is not installed: pip install 'sharpmax[{extra}]'")


def test_a_package_broken_inside_is_not_called_missing() -> None:
    result = run("import sharpmax.torch", ("typing_extensions",))
    assert result.returncode != 0
    assert "No module named 'typing_extensions'" in result.stderr
    assert "sharpmax[torch]" not in result.stderr


def test_every_public_name_exists_and_is_documented() -> None:
    import sharpmax
    import sharpmax.flax
    import sharpmax.jax
    import sharpmax.torch

    for module in (sharpmax, sharpmax.theory, sharpmax.torch, sharpmax.jax, sharpmax.flax):
        assert module.__doc__
        for name in module.__all__:
            value = getattr(module, name)
            assert not callable(value) or value.__doc__, name
