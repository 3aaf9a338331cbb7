"""What compute-sanitizer says of every Triton kernel, on small calls, by each of its tools.

    python -m benchmarks.sanitized [--out FILE]

racecheck does not follow the barriers by which Triton hands work to specialised warps: it reports a kernel that does
nothing else ("control"). Reports are kept with their source lines, so that those can be told from others. memcheck sees
what lies beside a tensor only where no cache of memory holds it, so torch's is switched off.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch

from sharpmax.core.files import write_text
from sharpmax.provenance import provenance

CALLS = ("control", "hopper_prefill", "hopper_decode", "portable_prefill", "portable_masks", "portable_decode")
TOOLS = ("memcheck", "racecheck")
ROOT = Path(__file__).parent.parent
REPORT = re.compile(r"^.*?========= (?=[A-Z])(?!COMPUTE-SANITIZER|[A-Z]+ SUMMARY)", re.MULTILINE)
"""Before the first line of a report: those that follow are indented."""
PLACE = re.compile(r"at ([\w$]+)\S*(?: in (?:\S*/)?([\w.]+\.py):(\d+))?")
SIDE = re.compile(rf"(Read|Write) access {PLACE.pattern}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sanitizer_cuda.json")
    arguments = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("benchmarks.sanitized needs compute-sanitizer, which comes with CUDA, on the PATH")
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.sanitized needs a GPU that torch sees")
    tasks = list(product(CALLS, TOOLS))
    with ThreadPoolExecutor(len(tasks)) as pool:
        found = list(pool.map(lambda task: sanitized(*task), tasks))
    content: dict[str, Any] = {"results": found, "provenance": provenance(["python", "-m", "benchmarks.sanitized"])}
    write_text(arguments.out, json.dumps(content, indent=2) + "\n")


def sanitized(name: str, tool: str) -> dict[str, Any]:
    """How many errors the tool reports of the calls, and between which lines."""
    command = ["compute-sanitizer", "--tool", tool, sys.executable, "-m", "benchmarks.small_calls", name]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    kernels = re.search(r"^kernels (.*)$", done.stdout, re.MULTILINE)
    errors = re.search(r"SUMMARY: .*?(\d+) errors?\b", done.stdout)
    if kernels is None or errors is None:
        raise SystemExit(f"{tool} of {name} did not end:\n{(done.stdout + done.stderr)[-2000:]}")
    result = {
        "calls": name,
        "tool": tool,
        "kernels": kernels[1].split(),
        "errors": int(errors[1]),
        "reports": reports(done.stdout),
    }
    print(json.dumps(result), flush=True)
    return result


def reports(text: str) -> list[dict[str, Any]]:
    """Every kind of report: how often it is there, its kernel, and its source lines.

    A race is reported as an access and those that it raced with, each with a count of hazards; anything else in a first
    line, and where it was.
    """
    counts: Counter[tuple[str, ...]] = Counter()
    for block in REPORT.split(text)[1:]:
        races, place = list(SIDE.finditer(block)), PLACE.search(block)
        for other in races[1:]:
            counts[(other[2], side(races[0]), side(other))] += 1
        if not races:
            what = block.splitlines()[0].strip()
            counts[(what,) if place is None else (place[1], f"{what}: {source(*place.groups()[1:])}")] += 1
    return [{"count": count, "between": list(what)} for what, count in counts.most_common()]


def side(found: re.Match[str]) -> str:
    """An access: what it does, and the line that does it."""
    kind, _, file, line = found.groups()
    return f"{kind.lower()}: {source(file, line)}"


def source(file: str | None, line: str | None) -> str:
    """A line of ours, with its file."""
    if file is None or line is None:
        return "no source"
    path = next(iter(sorted(ROOT.glob(f"src/**/{file}")) + sorted(ROOT.glob(f"benchmarks/{file}"))), None)
    text = "" if path is None else "".join(path.read_text().splitlines()[int(line) - 1 : int(line)]).strip()
    return f"{text} ({file})"


if __name__ == "__main__":
    main()
