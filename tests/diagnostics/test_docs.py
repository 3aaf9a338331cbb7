"""Tables and numbers of docs/diagnostics.md are those of result files."""

from __future__ import annotations

import math
import statistics
from typing import Any

from tests.doc_tables import ROOT, load, markdown

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


def long_heads() -> list[list[dict[str, Any]]]:
    """The long diagnosis: heads that see all tokens at 4,096 and 131,072 of them, and heads with a window at both."""
    diagnosis = load("results/diagnose/gemma-3-270m-131072/diagnosis.json")
    rows = [dict(zip(diagnosis["columns"], row, strict=True)) for row in diagnosis["rows"]]
    return [
        [row for row in rows if row["length"] == length and (row["window"] is None) == everywhere]
        for everywhere in (True, False)
        for length in (4096, 131072)
    ]


def long_table() -> str:
    """Means over the heads."""
    groups = long_heads()
    assert [len(group) for group in groups] == [12, 12, 60, 60]
    head = ["", *(f"{kind}, {n}" for kind in ("12 global heads", "60 windowed heads") for n in ("4,096", "131,072"))]

    def means(name: str) -> list[float]:
        return [statistics.fmean(row[name] for row in group) for group in groups]

    spreads = [statistics.pstdev(row["entropy_mean"] for row in group) for group in groups]
    pairs = zip(means("entropy_mean"), spreads, strict=True)
    lines = [
        ["entropy, nats", *(f"{mean:.2f} ± {deviation:.2f}" for mean, deviation in pairs)],
        ["H / log n", *(f"{x:.2f}" for x in means("normalised_mean"))],
        ["entropy without the first token, nats", *(f"{x:.2f}" for x in means("sinkless_mean"))],
        ["largest coefficient", *(f"{x:.2f}" for x in means("largest_mean"))],
        ["coefficient of the first token", *(f"{x:.2f}" for x in means("sink_mean"))],
        ["rows outside of `PAPER`'s range", *(f"{100 * x:.0f} %" for x in means("outside"))],
    ]
    return markdown(head, lines)


def test_the_long_diagnosis_is_quoted_from_its_file() -> None:
    page = (ROOT / "docs/diagnostics.md").read_text(encoding="utf-8")
    assert f"\n\n{long_table()}\n\n" in page
    short, long = long_heads()[:2]
    pairs = list(zip(short, long, strict=True))

    def gains(name: str) -> list[float]:
        return [(b[name] - a[name]) / math.log(131072 / 4096) for a, b in pairs]

    more = sum(b["normalised_mean"] > a["normalised_mean"] for a, b in pairs)
    assert min(gains("entropy_mean")) > 0
    assert min(gains("sinkless_mean")) > 0
    before, after = (statistics.fmean(row["spread_mean"] for row in rows) for rows in (short, long))
    for said in (
        f"the entropy of all 12 grows, by {statistics.fmean(gains('entropy_mean')):.2f} nats on average",
        f"in {more} of them by more than their share of log n",
        f"the entropy of all 12 still grows, by {statistics.fmean(gains('sinkless_mean')):.2f} nats on average",
        f"from {before:.1f} to {after:.1f} on average",
        f"at the last token alone, {sum(x > 0 for x in gains('entropy_last'))} of the 12 gain",
    ):
        assert said in " ".join(page.split())
