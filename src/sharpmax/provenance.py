"""Where a result comes from: device, versions, commit, command and time, for every file that holds numbers.

Nothing in it names a place on the machine: no absolute path, no host, no user.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = (
    "numpy", "scipy", "torch", "triton", "jax", "jaxlib", "flax", "optax", "transformers", "tokenizers", "accelerate",
    "dm-clrs", "matplotlib",
)  # fmt: skip
"""Packages whose versions are recorded where they are installed."""

SOURCES = ("src", "benchmarks/*.py", "pyproject.toml")
"""What decides a result: a checkout is dirty where these differ from its commit. Results do not count."""


def provenance(command: Sequence[str] | None = None) -> dict[str, Any]:
    """What made a result, ready for JSON.

    Args:
      command: the program and its arguments; ``sys.argv`` if not given. Only the program's name is kept, and absolute
        paths in arguments become relative to the working directory, or their last part where they lie outside of it.
    """
    return {
        "command": _command(sys.argv if command is None else command),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": _device(),
        "versions": _versions(),
        "git": _git(),
    }


def continued(made: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """``made`` of a result that goes on from one which ``before`` made, and says so under "before".

    What differs from ``made`` in its time alone is left out, and so is an empty ``before``: that of a beginning.
    """
    earlier = [*before.get("before", []), {name: value for name, value in before.items() if name != "before"}]
    known, found = [_timeless(made), {}], []
    for maker in earlier:
        if (shared := _timeless(maker)) not in known:
            known.append(shared)
            found.append(maker)
    return {**made, "before": found} if found else dict(made)


def _timeless(made: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in made.items() if name not in ("time", "times")}


def makers(provenances: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What made the cells of a result, each once: with the first and the last time, and of how many cells.

    A cell whose own time is not known has ``times``, the first and the last of those it was made with.
    """
    found: dict[str, dict[str, Any]] = {}
    for made in provenances:
        shared = _timeless(made)
        maker = found.setdefault(json.dumps(shared, sort_keys=True), {"cells": 0, "times": [], **shared})
        maker["cells"] += 1
        maker["times"] = sorted({*maker["times"], *(made["times"] if "times" in made else [made["time"]])})
    for maker in found.values():
        maker["times"] = [maker["times"][0], maker["times"][-1]]
    return sorted(found.values(), key=lambda maker: maker["times"])


def _command(words: Sequence[str]) -> list[str]:
    if not words:
        return []
    program = Path(words[0])
    name = program.parent.name if program.name == "__main__.py" else program.name  # `python -m sharpmax`
    return [name, *(_relative(word) for word in words[1:])]


def _relative(word: str) -> str:
    """``word`` with every absolute path in it (alone, after ``-o``, or after one of ``= , :``) made relative."""

    def shorten(match: re.Match[str]) -> str:
        path = Path(match[2])
        inside = path.is_relative_to(Path.cwd())
        return match[1] + str(path.relative_to(Path.cwd()) if inside else path.name)

    return re.sub(r"(^-\w|^|[=,:])(/(?!/)[^,:=]*)", shorten, word)


def _device() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": _gpus(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return " ".join(value.split())
    except OSError:
        pass
    if sys.platform == "darwin" and (brand := _output("sysctl", "-n", "machdep.cpu.brand_string")):
        return brand
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Names of the GPUs that torch or JAX sees; neither is imported for this."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    try:
        if torch is not None and torch.cuda.is_available():
            return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if jax is not None:
            return [device.device_kind for device in jax.devices() if device.platform != "cpu"]
    except Exception:  # A broken driver must not cost a finished result.
        pass
    return []


def _versions() -> dict[str, str]:
    from . import __version__

    versions = {"python": platform.python_version(), "sharpmax": __version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions | _cuda_versions()


def _cuda_versions() -> dict[str, str]:
    """What torch runs with on a GPU."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_available():
            return {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    except Exception:  # A broken driver must not cost a finished result.
        pass
    return {}


def _git() -> dict[str, Any] | None:
    """The commit of the checkout that this package runs from, and whether its sources were changed since.

    A copy of a checkout whose history is missing or behind names the commit in the environment variable
    SHARPMAX_COMMIT; whether it was changed is then not known.
    """
    if named := os.environ.get("SHARPMAX_COMMIT"):
        return {"commit": named, "dirty": None}
    package = Path(__file__).resolve().parent
    root = package.parent.parent
    if package == root / "src" / "sharpmax" and (root / ".git").exists():
        commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
        changes = _output("git", "-C", str(root), "status", "--porcelain", "--", *SOURCES)
        if commit and changes is not None:
            return {"commit": commit, "dirty": bool(changes)}
    return None


def _output(*command: str) -> str | None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            check=True,
            env={**environment, "GIT_OPTIONAL_LOCKS": "0"},
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
