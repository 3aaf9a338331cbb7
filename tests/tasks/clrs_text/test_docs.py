"""What docs/clrs_text.md says of the comparison is what its result files hold."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest

from sharpmax.core.policies import PAPER
from sharpmax.paper.fig8 import data
from tests.doc_tables import ROOT, load, markdown

PAGE, README = ((ROOT / page).read_text(encoding="utf-8") for page in ("docs/clrs_text.md", "README.md"))
FOLDER = "results/clrs_text"
POLICIES = ("none", "paper")
PARTS = {"in": "training sizes", "out": "other sizes", "beyond": "of these, larger than any of training"}


def evaluated(policy: str) -> dict[str, Any]:
    return load(f"{FOLDER}/evaluations/{policy}/evaluation.json")


def trained(policy: str) -> dict[str, Any]:
    return load(f"{FOLDER}/runs/{policy}/training.json")


def losses(policy: str) -> dict[int, float]:
    lines = (ROOT / FOLDER / "runs" / policy / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


@cache
def heads(name: str) -> dict[int, dict[str, np.ndarray]]:
    """Every column of a diagnosis, by length."""
    found = load(f"{FOLDER}/heads/{name}/diagnosis.json")
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    return {
        n: {key: np.array([row[key] for row in rows if row["length"] == n]) for key in found["columns"]}
        for n in {row["length"] for row in rows}
    }


def entropy(name: str, length: int, column: str = "entropy_mean") -> float:
    return float(heads(name)[length][column].mean())


def signed(points: float) -> str:
    return f"{100 * points:+.1f}".replace("-", "\N{MINUS SIGN}")


def models_table() -> str:
    """What both models reached, and what that took."""
    found, runs = [evaluated(policy) for policy in POLICIES], [trained(policy) for policy in POLICIES]
    steps = [1000 * run["median_step_seconds"] for run in runs]
    lines = [
        ["right at training sizes, %", *(f"{100 * f['accuracy']['in_distribution']:.1f}" for f in found)],
        ["right at other sizes, %", *(f"{100 * f['accuracy']['out_of_distribution']:.1f}" for f in found)],
        ["traces right at training sizes, %", *(f"{100 * f['trace_accuracy']['in_distribution']:.1f}" for f in found)],
        ["traces right at other sizes, %", *(f"{100 * f['trace_accuracy']['out_of_distribution']:.1f}" for f in found)],
        ["last loss", *(f"{run['curve']['loss'][-1]:.4f}" for run in runs)],
        ["training, tokens/s", *(f"{run['median_tokens_per_second']:,.0f}" for run in runs)],
        ["a step, ms", f"{steps[0]:.0f}", f"{steps[1]:.0f} ({steps[1] / steps[0]:.2f}x)"],
        ["of it waiting for data, ms", *(f"{1000 * run['median_data_seconds']:.0f}" for run in runs)],
        ["memory in training, GiB", *(f"{run['peak_memory_bytes'] / 2**30:.1f}" for run in runs)],
        ["replies, tokens/s", *(f"{f['throughput']['generated_tokens_per_second']:,.0f}" for f in found)],
    ]
    return markdown(["", "softmax", "adaptive temperature"], lines)


def paired_table() -> str:
    """The paired tests, of all samples and by algorithm."""
    lines = []
    for part, label in PARTS.items():
        found = load("results/fig8.json")["comparisons"]["adaptive"][part]
        total, each = found["total"], found["algorithms"].values()
        low, high = total["mean_interval"]
        above, below = ([a for a in each if a["difference"] * sign > 0] for sign in (1, -1))
        counts = [f"{len(some)} ({sum(a['p_holm'] < 0.05 for a in some)})" for some in (above, below)]
        lines.append([label, *counts, signed(total["mean_difference"]), f"{signed(low)} to {signed(high)}"])
    return markdown(["", "algorithms above softmax (p < 0.05)", "below", "mean difference, points", "95 %"], lines)


def entropies_table() -> str:
    lengths = sorted(heads("start"))
    rows = {
        "before training": ("start", "entropy_mean"),
        "trained with softmax": ("none", "entropy_mean"),
        "trained with adaptive temperature, before beta": ("paper", "entropy_mean"),
        "the same, after beta": ("paper", "acting_mean"),
    }
    lines = [[label, *(f"{entropy(name, n, column):.2f}" for n in lengths)] for label, (name, column) in rows.items()]
    return markdown(["tokens", *(f"{n:,}" for n in lengths)], lines)


@pytest.mark.parametrize("table", [models_table, paired_table, entropies_table])
def test_tables(table: Any) -> None:
    assert table() in PAGE, f"docs/clrs_text.md lacks\n{table()}"


def test_the_readme_has_the_short_version() -> None:
    kept = ("right at training", "right at other", "last loss", "a step")
    lines = [line for line in models_table().splitlines() if line.startswith(tuple(f"| {name}" for name in kept))]
    nats = entropy("none", 1536), entropy("paper", 1536, "acting_mean")
    assert len(lines) == len(kept)
    lines.append(f"| entropy of the heads at 1,536 tokens, nats | {nats[0]:.2f} | {nats[1]:.2f} |")
    assert "\n".join(lines) in README
    out = load("results/fig8.json")["comparisons"]["adaptive"]["out"]["algorithms"]
    sure = [found["difference"] for found in out.values() if found["p_holm"] < 0.05]
    above, below = sum(d > 0 for d in sure), sum(d < 0 for d in sure)
    said = f"above softmax on {above} of {len(out)} algorithms and below on {below}."
    assert said in " ".join(README.split())


def shares(algorithm: str, part: str) -> str:
    """Right answers of both models, in %."""
    found = load("results/fig8.json")["comparisons"]["adaptive"][part]["algorithms"][algorithm]
    return f"{100 * found['right'] / found['n']:.1f} % against {100 * found['baseline_right'] / found['n']:.1f} %"


def phrases() -> list[str]:
    found, plain, adapted = evaluated("none"), losses("none"), losses("paper")
    rows = [row for entry in found["algorithms"].values() for row in entry["sizes"].values()]
    beyond = load("results/fig8.json")["comparisons"]["adaptive"]["beyond"]["total"]
    last = max(adapted)
    first = min(step for step, loss in plain.items() if loss < adapted[last])
    acting, softmax = ([entropy(*at) for at in pairs] for pairs in (
        [("paper", 96, "acting_mean"), ("paper", 1536, "acting_mean")], [("none", 96), ("none", 1536)],
    ))  # fmt: skip
    spreads = [heads(name)[1536]["spread_mean"].mean() for name in ("paper", "start", "none")]
    sinks = [int((heads(name)[1536]["sink_mean"] > 0.5).sum()) for name in ("paper", "start", "none")]
    return [
        f"{found['throughput']['samples']:,} samples (the {sum(row['too_long'] for row in rows):,} others",
        f"bubble sort ({shares('bubble_sort', 'out')}) and the KMP matcher ({shares('kmp_matcher', 'out')})",
        f"{shares('minimum', 'in')} at training sizes, {shares('minimum', 'out')} at others",
        f"{100 * beyond['accuracy']:.1f} % and {100 * beyond['baseline_accuracy']:.1f} % of all samples",
        f"by {100 * (adapted[300] / plain[300] - 1):.0f} % at step 300 and "
        f"{100 * (adapted[last] / plain[last] - 1):.0f} % at the end",
        f"less than its last loss, {adapted[last]:.4f}, at step {first}",
        f"heads act at {acting[1]:.2f} nats at 1,536 tokens where softmax's have {softmax[1]:.2f}, and gain "
        f"{acting[1] - acting[0]:.2f} nats from 96 tokens on where softmax's gain {softmax[1] - softmax[0]:.2f}",
        f"({entropy('paper', 1536):.2f} nats against {entropy('start', 1536):.2f})",
        f"an average spread of {spreads[0]:.1f} against {spreads[1]:.1f}; with softmax training it grew to "
        f"{spreads[2]:.1f}",
        f"{sinks[0]} of 270 heads are attention sinks where {sinks[1]} were, {sinks[2]} after training with softmax",
    ]


@pytest.mark.parametrize("number", range(10))
def test_sentences(number: int) -> None:
    assert phrases()[number] in " ".join(PAGE.split())


def test_adaptive_temperature_learned_less_all_the_way() -> None:
    plain, adapted = losses("none"), losses("paper")
    assert plain.keys() == adapted.keys()
    assert all(adapted[step] > plain[step] for step in plain)


def test_the_runs_are_those_that_were_asked_for() -> None:
    runs = [trained(policy) for policy in POLICIES]
    assert [run["counts"]["tokens"] for run in runs] == [100_663_296] * 2
    differ = [key for key, value in runs[0]["settings"].items() if runs[1]["settings"][key] != value]
    assert differ == ["policy"]
    assert runs[0]["settings"]["policy"] is None
    assert runs[1]["settings"]["policy"] == PAPER.to_dict()
    assert runs[0]["start"] == runs[1]["start"]


def test_the_figure_is_of_these_evaluations() -> None:
    made = data({"baseline": evaluated("none"), "adaptive": evaluated("paper")})
    kept = load("results/fig8.json")
    for part in PARTS:
        for algorithm, found in made["comparisons"]["adaptive"][part]["algorithms"].items():
            told = kept["comparisons"]["adaptive"][part]["algorithms"][algorithm]
            assert [told[key] for key in ("n", "right", "alone")] == [found[key] for key in ("n", "right", "alone")]
    assert (ROOT / "results/fig8.md").read_text(encoding="utf-8").count(kept["caption"]) == 1
