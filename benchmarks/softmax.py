"""adaptive_temperature_softmax against the framework's own softmax and against a literal Figure 4.

    python -m benchmarks.softmax [--device cpu|cuda]

Every line is one framework, mode, direction and shape. The three functions run in turn, round after round, so that they
share whatever else the machine does; the ratio is that of their median times. Memory is the peak beyond the input while
the function runs once, output included, in copies of the logits.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
import torch

import sharpmax
from benchmarks.figure4 import jax_figure4, numpy_figure4, torch_figure4
from sharpmax.core.files import write_text
from sharpmax.provenance import provenance

SHAPES = ((4096, 4096), (64, 131072))
LOGIT_DEVIATION = 3.0  # Where the paper's polynomial acts: see share_beta_above_1_3 in the result.
Call = Callable[[], Any]


class Case(NamedTuple):
    """One line of the table: three functions of no arguments that do the same job."""

    framework: str
    mode: str
    direction: str
    own: Call
    figure4: Call
    sharpmax: Call
    compiled_copies: dict[str, float] | None = None  # what the compiler says of memory, where it says it


def numpy_cases(x: np.ndarray) -> Iterator[Case]:
    own = functools.partial(scipy.special.softmax, x, axis=-1)
    yield Case("numpy (scipy)", "eager", "forward", own, lambda: numpy_figure4(x), lambda: adaptive(x))


def adaptive(x: Any) -> Any:
    return sharpmax.adaptive_temperature_softmax(x)


def torch_cases(values: np.ndarray, device: str) -> Iterator[Case]:
    x = torch.tensor(values, device=device)
    leaf, cotangent = x.clone().requires_grad_(), torch.randn_like(x)
    functions = (functools.partial(torch.softmax, dim=-1), torch_figure4, adaptive)

    def wait(result: Any) -> Any:
        if device == "cuda":
            torch.cuda.synchronize()
        return result

    def forward(function: Any) -> Call:
        return lambda: wait(function(x))

    def backward(function: Any) -> Call:
        def run() -> Any:
            leaf.grad = None
            return wait(function(leaf).backward(cotangent))

        return run

    for mode in ("eager", "compile"):
        made = functions
        if mode == "compile":
            torch._dynamo.reset()
            made = tuple(torch.compile(f, fullgraph=True, dynamic=False) for f in functions)
        own, figure4, ours = made
        yield Case("torch", mode, "forward", forward(own), forward(figure4), forward(ours))
        yield Case("torch", mode, "forward+backward", backward(own), backward(figure4), backward(ours))


def jax_cases(values: np.ndarray) -> Iterator[Case]:
    x = jnp.asarray(values)
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=values.shape), jnp.float32)
    functions = (jax.nn.softmax, jax_figure4, adaptive)
    gradients = tuple(jax.grad(lambda a, f=f: jnp.vdot(f(a), cotangent)) for f in functions)
    for mode, transform in (("eager", lambda f: f), ("jit", jax.jit)):
        for direction, group in (("forward", functions), ("forward+backward", gradients)):
            made = [transform(f) for f in group]
            calls = [lambda f=f: jax.block_until_ready(f(x)) for f in made]
            copies = None
            if mode == "jit":
                names = ("own", "figure4", "sharpmax")
                copies = {name: compiled_copies(f, x) for name, f in zip(names, made, strict=True)}
            yield Case("jax", mode, direction, *calls, compiled_copies=copies)


def compiled_copies(function: Any, x: jax.Array) -> float:
    """What a compiled function allocates, output included, in copies of ``x``."""
    memory = function.lower(x).compile().memory_analysis()
    return (memory.temp_size_in_bytes + memory.output_size_in_bytes) / x.nbytes


def seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def timed(case: Case, rounds: int) -> dict[str, float]:
    calls = {"own": case.own, "figure4": case.figure4, "sharpmax": case.sharpmax}
    for call in calls.values():
        call()
        call()
    samples = [{name: seconds(call) for name, call in calls.items()} for _ in range(rounds)]
    return {name: statistics.median(s[name] for s in samples) for name in calls}


def resident(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def peak_copies(case: Case, call: Call, size: int, device: str) -> float | None:
    """The peak of memory beyond what is there before ``call``, in multiples of ``size``; ``None`` where JAX hides it.

    JAX keeps freed memory for itself, so what an eager JAX function needs does not show from outside.
    """
    if case.framework == "jax":
        return None
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return (torch.cuda.max_memory_allocated() - before) / size
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    kept = call()
    peak = resident("VmHWM") - before
    del kept
    return peak / size


def measured(case: Case, values: np.ndarray, device: str, rounds: int) -> dict[str, Any]:
    times = timed(case, rounds)
    calls = {"own": case.own, "figure4": case.figure4, "sharpmax": case.sharpmax}
    memory = case.compiled_copies or {n: peak_copies(case, c, values.nbytes, device) for n, c in calls.items()}
    return {
        "framework": case.framework,
        "mode": case.mode,
        "direction": case.direction,
        "shape": list(values.shape),
        "milliseconds": {name: round(1000 * t, 3) for name, t in times.items()},
        "ratio_to_own_softmax": round(times["sharpmax"] / times["own"], 3),
        "ratio_to_figure4": round(times["sharpmax"] / times["figure4"], 3),
        "peak_copies_of_logits": {name: None if m is None else round(m, 2) for name, m in memory.items()},
    }


def line(result: dict[str, Any]) -> str:
    ms, copies = result["milliseconds"], result["peak_copies_of_logits"]["sharpmax"]
    shape = "x".join(map(str, result["shape"]))
    return (
        f"{result['framework']:14} {result['mode']:8} {result['direction']:17} {shape:11} "
        f"{ms['own']:8.2f} {ms['figure4']:8.2f} {ms['sharpmax']:8.2f} {result['ratio_to_own_softmax']:7.2f} "
        f"{result['ratio_to_figure4']:7.2f} {'' if copies is None else format(copies, '.2f'):>6}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=None, help="default: benchmarks/results/softmax_DEVICE.json")
    arguments = parser.parse_args()
    columns = ("own ms", "Fig. 4", "sharpmax", "x own", "x Fig4", "copies")
    print(" " * 54 + "".join(f"{c:>{w}}" for c, w in zip(columns, (8, 9, 9, 8, 8, 7), strict=True)))
    results = []
    shares = {}
    for shape in SHAPES:
        values = np.random.default_rng(0).normal(size=shape).astype(np.float32) * np.float32(LOGIT_DEVIATION)
        beta = sharpmax.PAPER(sharpmax.row_stats(values))
        shares["x".join(map(str, shape))] = float(np.mean(beta > 1.3))
        groups = [torch_cases(values, arguments.device), jax_cases(values)]
        for case in [c for g in ([numpy_cases(values)] if arguments.device == "cpu" else []) + groups for c in g]:
            results.append(measured(case, values, arguments.device, arguments.rounds))
            print(line(results[-1]), flush=True)
    content = {
        "dtype": "float32",
        "logit_deviation": LOGIT_DEVIATION,
        "share_beta_above_1_3": shares,
        "threads": torch.get_num_threads(),
        "rounds": arguments.rounds,
        "results": results,
        "provenance": provenance(["python", "-m", "benchmarks.softmax", "--device", arguments.device]),
    }
    default = Path(__file__).parent / "results" / f"softmax_{arguments.device}.json"
    write_text(arguments.out or default, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
