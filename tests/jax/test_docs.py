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


def gpu_results() -> list[dict[str, Any]]:
    return load("benchmarks/results/attention_jax_cuda.json")["results"]


def gpu_table() -> str:
    """Milliseconds, multiples of cuDNN's, and temporary memory, on a GPU."""
    lines = []
    for result in gpu_results():
        times, ratios, memory = result["milliseconds"], result["ratio_to_cudnn"], result["temporary_megabytes"]
        cells = [f"{times['cudnn']:,.2f}"]
        for which in ("sharpmax", "detached", "xla", "figure4"):
            cells.append(f"{times[which]:,.2f} ({ratios[which]:.2f}x)" if which in times else "-")
        sizes = (f"{memory[which]:,.0f}" if which in memory else "-" for which in ("cudnn", "sharpmax", "figure4"))
        lines.append([name(result), *cells, " / ".join(sizes)])
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
    ratios = [result["ratio_to_cudnn"][which] for result in gpu_results() if result["direction"] == direction]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


PAGES = {
    "docs/jax.md": [cpu_table(), gpu_table(), gpu_errors()],
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
