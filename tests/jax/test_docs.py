"""What docs/jax.md and the README say of speed in JAX is what the result files hold."""

from __future__ import annotations

from typing import Any

import pytest

from tests.doc_tables import ROOT, load, markdown


def name(result: dict[str, Any]) -> str:
    return f"{result['shape']['length']:,}, {'causal' if result['causal'] else 'full'}, {result['direction']}"


def cpu_table() -> str:
    """Time as multiples of those of the peers, and temporary memory, on a CPU."""
    lines = []
    for result in load("benchmarks/results/attention_jax_cpu.json")["results"]:
        memory = result["temporary_megabytes"]
        peers = [result.get(f"ratio_to_{peer}") for peer in ("xla", "figure4")]
        ratios = [f"{peer['sharpmax']:.2f}x" if peer else "-" for peer in peers]
        sizes = [f"{memory[which]:,.0f}" if which in memory else "-" for which in ("sharpmax", "xla", "figure4")]
        lines.append([name(result), *ratios, " / ".join(sizes)])
    head = ["", "of `jax.nn`, xla", "of Figure 4, literal", "MB: sharpmax / `jax.nn` / Figure 4"]
    return markdown(head, lines)


def gpu_results(run: str = "") -> list[dict[str, Any]]:
    return load(f"benchmarks/results/attention_jax{run}_cuda.json")["results"]


def gpu_table(*runs: str) -> str:
    """Milliseconds, multiples of cuDNN's, and temporary memory, on a GPU."""
    lines = []
    for result in [result for run in runs for result in gpu_results(run)]:
        times, ratios, memory = result["milliseconds"], result["ratio_to_cudnn"], result["temporary_megabytes"]
        cells = [f"{times['cudnn']:,.2f}"]
        for which in ("sharpmax", "detached", "xla", "figure4"):
            time = times.get(which, "-")  # or why there is none
            cells.append(time if isinstance(time, str) else f"{time:,.2f} ({ratios[which]:.2f}x)")
        sizes = (f"{memory[which]:,.0f}" if which in memory else "-" for which in ("cudnn", "sharpmax", "figure4"))
        columns = result["shape"]["columns"]
        lines.append([name(result) + (f", {columns} columns" if columns != 128 else ""), *cells, " / ".join(sizes)])
    head = ["", "cuDNN, ms", "sharpmax", "policy detached", "`jax.nn`, xla", "Figure 4, literal"]
    return markdown([*head, "MB: cuDNN / sharpmax / Figure 4"], lines)


def gpu_errors() -> str:
    """Errors as multiples of cuDNN's."""
    names = ("output", "dq", "dk", "dv")
    lines = [
        [f"`{impl}`, {'causal' if case['causal'] else 'full'}", *(f"{case[impl][of]:.2f}" for of in names)]
        for case in load("benchmarks/results/attention_jax_cuda.json")["errors"]
        for impl in ("pallas", "streaming")
    ]
    return markdown(["", *names], lines)


def gpu_range(direction: str, which: str = "sharpmax") -> str:
    """Multiples of cuDNN's time from 4,096 tokens on, with heads of 128 columns."""
    results = [r for run in ("", "_short") for r in gpu_results(run) if r["shape"]["length"] >= 4096]
    ratios = [result["ratio_to_cudnn"][which] for result in results if result["direction"] == direction]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def figure4_range() -> str:
    """How many times as long as ours literal Figure 4 takes, wherever it runs."""
    results = [result for run in ("", "_short", "_64", "_full_logits") for result in gpu_results(run)]
    ratios = [1 / result["ratio_to_figure4"]["sharpmax"] for result in results if "ratio_to_figure4" in result]
    least = min(result["shape"]["length"] for result in results if "ratio_to_figure4" in result)
    spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
    return f"From {least:,} tokens on, literal Figure 4 takes {spread} times as long as `pallas`"


PAGES = {
    "docs/jax.md": [
        cpu_table(),
        gpu_table(""),
        gpu_table("_short", "_64", "_full_logits"),
        gpu_errors(),
        figure4_range(),
    ],
    "README.md": [
        f"{gpu_range('forward')} times as long as cuDNN's attention forward and {gpu_range('forward+backward')} times "
        f"with backward ({gpu_range('forward+backward', 'detached')} without the gradient through the temperature)"
    ],
}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_what_the_result_files_hold(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for passage in PAGES[page]:
        assert passage in text or passage in " ".join(text.split()), f"{page} should have\n{passage}"
