"""Tables and numbers of docs/diagnostics.md are those of result files."""

from __future__ import annotations

from typing import Any

from tests.doc_tables import ROOT, load

AIM = 1.6


def ratio(value: float) -> str:
    return f"{value:.2f}x"


def line(result: dict[str, Any]) -> str:
    found = result["ratio_to_plain"]
    recorded = ratio(found["record"])
    if found["record"] > AIM:
        recorded = f"**{recorded}, above the aim of {AIM}x**"
    plain = f"{result['milliseconds']['plain'] / 1000:.2f} s"
    cells = [plain, ratio(found["off"]), recorded, ratio(found["record_sample"])]
    return f"| {result['model']} | {result['length']:,} | {' | '.join(cells)} |"


def test_the_costs_are_those_of_the_result_file() -> None:
    results = load("benchmarks/results/diagnostics_cpu.json")
    head = "| model | tokens | plain forward | `Constant(1)`, not recorded | recorded | recorded, `sample=512` |"
    table = "\n".join([head, "|---|---|---|---|---|---|", *map(line, results["results"])])
    page = (ROOT / "docs/diagnostics.md").read_text(encoding="utf-8")
    assert f"\n\n{table}\n\n" in page, f"docs/diagnostics.md should have\n{table}"
    assert f"at most {AIM}x" in page
    assert results["sample"] == 512
