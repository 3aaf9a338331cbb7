"""The table in docs/jax.md is that of the result file."""

from __future__ import annotations

from tests.doc_tables import ROOT, load, markdown


def speed_table() -> str:
    """Time as multiples of those of the peers, and temporary memory, on a CPU."""
    lines = []
    for result in load("benchmarks/results/attention_jax_cpu.json")["results"]:
        mask = "causal" if result["causal"] else "full"
        memory = result["temporary_megabytes"]
        ratios = [f"{result[f'ratio_to_{peer}']['sharpmax']:.2f}x" for peer in ("xla", "figure4")]
        sizes = [f"{memory[name]:,.0f}" for name in ("sharpmax", "xla", "figure4")]
        lines.append([f"{result['shape']['length']:,}, {mask}, {result['direction']}", *ratios, " / ".join(sizes)])
    head = ["", "of `jax.nn`, xla", "of Figure 4, literal", "MB: sharpmax / `jax.nn` / Figure 4"]
    return markdown(head, lines)


def test_the_table_is_that_of_the_result_file() -> None:
    page = (ROOT / "docs" / "jax.md").read_text(encoding="utf-8")
    assert speed_table() in page, f"docs/jax.md should have\n{speed_table()}"
