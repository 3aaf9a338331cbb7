"""What docs/clrs_text.md says of the comparison is what its result files hold."""

from __future__ import annotations

import gzip
import json
from functools import cache
from typing import Any

import numpy as np
import pytest

from sharpmax.core.policies import PAPER
from sharpmax.paper.fig8 import comparison, data
from sharpmax.tasks.clrs_text import generate_samples, training
from sharpmax.tasks.clrs_text.scoring import split_answer
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


@cache
def against(baseline: str, other: str, part: str) -> dict[str, Any]:
    """The comparison of two runs, with the algorithms that differ with p < 0.05."""
    found = comparison(evaluated(baseline), evaluated(other), part)
    sure = {name: entry["difference"] for name, entry in found["algorithms"].items() if entry["p_holm"] < 0.05}
    low, high = found["total"]["mean_interval"]
    return {
        "mean": signed(found["total"]["mean_difference"]),
        "interval": f"{signed(low)} to {signed(high)}",
        "above": {name for name, difference in sure.items() if difference > 0},
        "below": {name for name, difference in sure.items() if difference < 0},
    }


def control_table() -> str:
    """Two runs with softmax beside adaptive temperature against each of them."""
    pairs = {
        "softmax again, against softmax": ("none", "none_again"),
        "adaptive temperature, against softmax": ("none", "paper"),
        "adaptive temperature, against softmax again": ("none_again", "paper"),
    }
    lines = []
    for label, pair in pairs.items():
        found = [against(*pair, part) for part in PARTS]
        lines.append([label, *(f"{f['mean']} ({f['interval']}; {len(f['above'])}, {len(f['below'])})" for f in found)])
    return markdown(["", *PARTS.values()], lines)


def entropies_table() -> str:
    lengths = sorted(heads("start"))
    rows = {
        "before training": ("start", "entropy_mean"),
        "the same, with the policy on, after beta": ("start_paper", "acting_mean"),
        "trained with softmax": ("none", "entropy_mean"),
        "trained with adaptive temperature, before beta": ("paper", "entropy_mean"),
        "trained with it, after beta": ("paper", "acting_mean"),
    }
    lines = [[label, *(f"{entropy(name, n, column):.2f}" for n in lengths)] for label, (name, column) in rows.items()]
    return markdown(["tokens", *(f"{n:,}" for n in lengths)], lines)


def losses_table() -> str:
    steps = (50, 100, 200, 300, 400, 500, 600, 700, 768)
    rows = {"softmax": losses("none"), "adaptive temperature": losses("paper")}
    return markdown(
        ["step", *map(str, steps)], [[name, *(f"{loss[n]:.4f}" for n in steps)] for name, loss in rows.items()]
    )


@pytest.mark.parametrize("table", [models_table, paired_table, control_table, losses_table, entropies_table])
def test_tables(table: Any) -> None:
    assert table() in PAGE, f"docs/clrs_text.md lacks\n{table()}"


def test_the_readme_has_the_short_version() -> None:
    kept = ("right at training", "right at other", "last loss", "a step")
    lines = [line for line in models_table().splitlines() if line.startswith(tuple(f"| {name}" for name in kept))]
    nats = entropy("none", 1536), entropy("paper", 1536, "acting_mean")
    assert len(lines) == len(kept)
    lines.append(f"| entropy of the heads at 1,536 tokens, after beta, nats | {nats[0]:.2f} | {nats[1]:.2f} |")
    assert "\n".join(lines) in README
    out = load("results/fig8.json")["comparisons"]["adaptive"]["out"]["algorithms"]
    sure = [found["difference"] for found in out.values() if found["p_holm"] < 0.05]
    above, below = sum(d > 0 for d in sure), sum(d < 0 for d in sure)
    said = f"above softmax on {above} of {len(out)} algorithms and below on {below}."
    assert said in " ".join(README.split())
    assert f"and {evaluated('none')['throughput']['samples']:,} questions:" in README


def shares(algorithm: str, part: str) -> str:
    """Right answers of both models, in %."""
    found = load("results/fig8.json")["comparisons"]["adaptive"][part]["algorithms"][algorithm]
    return f"{100 * found['right'] / found['n']:.1f} % against {100 * found['baseline_right'] / found['n']:.1f} %"


def rows_of(policy: str, algorithm: str | None = None, *, trained: bool = False) -> list[dict[str, Any]]:
    """What was counted at every size of an algorithm, or of all, at training sizes or at others."""
    entries = evaluated(policy)["algorithms"]
    found = entries.values() if algorithm is None else [entries[algorithm]]
    return [row for entry in found for row in entry["sizes"].values() if row["in_distribution"] == trained]


def traces(policy: str, algorithm: str) -> float:
    """The share of right traces at other sizes, in %."""
    rows = rows_of(policy, algorithm)
    return 100 * sum("".join(row["trace"] or []).count("1") for row in rows) / sum(row["n"] for row in rows)


def lucky(policy: str) -> float:
    """The share of right answers after a wrong trace at other sizes, in %."""
    rows = [row for row in rows_of(policy) if row["trace"]]
    pairs = [pair for row in rows for pair in zip("".join(row["final"]), "".join(row["trace"]), strict=True)]
    return 100 * pairs.count(("1", "0")) / sum(final == "1" for final, _ in pairs)


@cache
def minimum() -> dict[str, tuple[float, float]]:
    """Of replies to ``minimum`` at training sizes, in %: a right first step, and one index all along."""
    truth = {
        (size, seed, sample.index): split_answer(sample.answer)
        for size in training().sizes["minimum"]
        for seed in (3, 14)
        for sample in generate_samples("minimum", size, seed, count=25)
    }
    given = {"truth": truth}
    for policy in POLICIES:
        given[policy] = {}
        for seed in (3, 14):
            path = ROOT / FOLDER / f"evaluations/{policy}/replies/minimum_{seed}.jsonl.gz"
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                replies = [json.loads(line) for line in lines]
            given[policy] |= {(r["size"], seed, r["index"]): split_answer(r["reply"]) for r in replies}
    found = {}
    for name, answers in given.items():
        steps = {key: str(answers[key].trace).split(", ") for key in truth}
        first = [steps[key][0] == str(truth[key].trace).split(", ")[0] for key in truth]
        one = [len({*steps[key], answers[key].final}) == 1 for key in truth]
        found[name] = 100 * float(np.mean(first)), 100 * float(np.mean(one))
    return found


def phrases() -> list[str]:
    found, plain, adapted = evaluated("none"), losses("none"), losses("paper")
    every = [row for entry in found["algorithms"].values() for row in entry["sizes"].values()]
    beyond = load("results/fig8.json")["comparisons"]["adaptive"]["beyond"]
    many = [a for a in beyond["algorithms"].values() if a["n"] >= 20]
    means = [100 * float(np.mean([a[key] / a["n"] for a in many])) for key in ("right", "baseline_right")]
    total, runs = beyond["total"], [trained(policy) for policy in POLICIES]
    busy = [run["median_step_seconds"] - run["median_data_seconds"] for run in runs]
    last, gap = max(adapted), {step: adapted[step] / plain[step] - 1 for step in plain}
    closest = min(gap, key=lambda step: gap[step])
    below = min(step for step in plain if all(plain[n] < adapted[last] for n in plain if n >= step))
    cut = {p: sum(row["cut"] for row in rows_of(p)) for p in POLICIES}
    kmp = {p: sum(row["cut"] for row in rows_of(p, "kmp_matcher")) for p in POLICIES}
    acting = [entropy("paper", n, "acting_mean") for n in (96, 1536)]
    softmax = [entropy("none", n) for n in (96, 1536)]
    spreads = [heads(name)[1536]["spread_mean"].mean() for name in ("paper", "start", "none")]
    sinks = [int((heads(name)[1536]["sink_mean"] > 0.5).sum()) for name in ("paper", "start", "none")]
    (prompts,) = {int(n) for n in heads("none")[1536]["prompts"]}
    first, one = ({name: pair[i] for name, pair in minimum().items()} for i in (0, 1))
    again = {part: 100 * share for part, share in evaluated("none_again")["accuracy"].items()}
    return [
        f"it has {again['in_distribution']:.1f} % at training sizes and {again['out_of_distribution']:.1f} % at "
        f"others, and a last loss of {trained('none_again')['curve']['loss'][-1]:.4f}",
        f"{found['throughput']['samples']:,} samples (the {sum(row['too_long'] for row in every):,} others",
        f"the rest of a step would take {busy[1] / busy[0]:.2f}x",
        f"bubble sort ({shares('bubble_sort', 'out')}; trained on sizes 4 and 5, and no trace",
        f"KMP matcher ({shares('kmp_matcher', 'out')}; there softmax was cut off in {kmp['none']:,} of "
        f"{sum(row['n'] for row in rows_of('none', 'kmp_matcher')):,} replies, "
        f"adaptive temperature in {kmp['paper']:,})",
        f"{shares('minimum', 'in')} at training sizes, {shares('minimum', 'out')} at others",
        f"traces is right in {first['paper']:.0f} % (softmax: {first['none']:.0f} %), and in "
        f"{one['paper']:.0f} % trace and answer are one index all "
        f"along (softmax: {one['none']:.0f} %, the truth: {one['truth']:.0f} %)",
        f"mean over {total['mean_of']} algorithms does not differ, {means[0]:.1f} % against {means[1]:.1f} %",
        f"{100 * total['accuracy']:.1f} % are right against {100 * total['baseline_accuracy']:.1f} % "
        f"(p = {total['p_value']:.1e})",
        f"insertion sort, {traces('paper', 'insertion_sort'):.0f} % against {traces('none', 'insertion_sort'):.0f} %, "
        f"and Kruskal's, {traces('paper', 'mst_kruskal'):.0f} % both",
        f"{lucky('paper'):.0f} % of right answers there follow a wrong trace, {lucky('none'):.0f} % with softmax",
        f"{sum(row['n'] for row in rows_of('none')):,} replies, {cut['paper']:,} were cut off before their end and "
        f"count as wrong, {cut['none']:,} with softmax",
        f"by {100 * gap[closest]:.0f} % at step {closest} and {100 * gap[last]:.0f} % at the end; softmax is below the "
        f"end of it from step {below} on",
        f"Entropy on long samples, {prompts} of them and each of another algorithm, as the mean over "
        f"{len(heads('none')[1536]['layer'])} heads and all rows",
        f"heads act at {acting[1]:.2f} nats at 1,536 tokens where softmax's have {softmax[1]:.2f}, and gain "
        f"{acting[1] - acting[0]:.2f} nats from 96 tokens on where softmax's gain {softmax[1] - softmax[0]:.2f}",
        f"in the model before training, heads act at {entropy('start_paper', 1536, 'acting_mean'):.2f} nats",
        f"({entropy('paper', 1536):.2f} nats against {entropy('start', 1536):.2f})",
        f"an average spread of {spreads[0]:.1f} against {spreads[1]:.1f}; with softmax training it grew to "
        f"{spreads[2]:.1f}",
        f"{sinks[0]} of 270 heads are attention sinks where {sinks[1]} were ({sinks[2]} after training with softmax)",
    ]


def test_sentences() -> None:
    page = " ".join(PAGE.split())
    assert [phrase for phrase in phrases() if phrase not in page] == []


def test_no_trace_of_bubble_sort_is_right_beyond_its_sizes() -> None:
    assert [traces(policy, "bubble_sort") for policy in POLICIES] == [0, 0]
    assert evaluated("none")["algorithms"]["bubble_sort"]["training_sizes"] == [4, 5]


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


def test_the_second_run_with_softmax_differs_in_the_order_of_its_samples_and_in_what_ends_them() -> None:
    first, again = trained("none"), trained("none_again")
    differ = [key for key, value in first["settings"].items() if again["settings"][key] != value]
    assert differ == ["seed", "checkpoint_every"]  # how often it saves changes no bit
    assert first["start"] == again["start"]
    asked = [evaluated(name)["settings"] for name in ("none", "none_again")]
    assert asked[0] == asked[1]
    tokenizers = {name: evaluated(name)["model"]["tokenizer"] for name in ("none", "none_again", "paper")}
    assert tokenizers["none"] == tokenizers["paper"] != tokenizers["none_again"]  # the token that ends texts


def test_what_holds_against_both_runs_with_softmax() -> None:
    both = {
        (part, side): against("none", "paper", part)[side] & against("none_again", "paper", part)[side]
        for part in ("in", "out")
        for side in ("above", "below")
    }
    assert both["in", "above"] == set()
    softmax = against("none", "none_again", "out")
    assert len(softmax["above"] | softmax["below"]) == 7
    assert both["out", "above"] == {"bubble_sort", "kmp_matcher"}
    assert (len(both["in", "below"]), len(both["out", "below"])) == (10, 7)
    for text in ("above both on bubble sort and the KMP matcher, below both on 7 of 29", "below both on 10 of 30"):
        assert text in " ".join(PAGE.split())
    pairs = (("none", "paper"), ("none_again", "paper"), ("none", "none_again"))
    each = [100 * comparison(evaluated(pair[0]), evaluated(pair[1]), "out")["total"]["difference"] for pair in pairs]
    said = (
        f"{-each[0]:.1f} points fewer right than softmax and {-each[1]:.1f} fewer than softmax again, and these differ "
    )
    assert f"{said}by {each[2]:.1f}." in " ".join(PAGE.split())
    assert "what holds against both is 2 algorithms above and 7 below" in " ".join(README.split())
    again = evaluated("none_again")["accuracy"]
    said = f"has {100 * again['in_distribution']:.1f} and {100 * again['out_of_distribution']:.1f} %"
    assert said in " ".join(README.split())


def test_the_figure_is_of_these_evaluations() -> None:
    made = data({"baseline": evaluated("none"), "adaptive": evaluated("paper")})
    kept = load("results/fig8.json")
    for part in PARTS:
        for algorithm, found in made["comparisons"]["adaptive"][part]["algorithms"].items():
            told = kept["comparisons"]["adaptive"][part]["algorithms"][algorithm]
            assert [told[key] for key in ("n", "right", "alone")] == [found[key] for key in ("n", "right", "alone")]
    assert (ROOT / "results/fig8.md").read_text(encoding="utf-8").count(kept["caption"]) == 1
