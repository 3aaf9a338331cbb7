"""The tables of the README and the docs, made from result files: a page must hold each of them word for word."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]


def load(path: str) -> dict[str, Any]:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def markdown(head: list[str], lines: list[list[str]], indent: str = "") -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"{indent}| {' | '.join(row)} |" for row in rows).replace("| --- ", "|---").replace("---|", "---|")


def percent(accuracy: Any) -> list[str]:
    return [f"{100 * mean:.1f}" for mean in np.mean(np.asarray(accuracy, float), axis=1)]


def accuracy_table(path: str, rows: dict[str, str], paper: bool = True) -> str:
    """Accuracy in % by size: ours, and the paper's rows where ``paper``."""
    data = load(path)
    lines = [[label, *percent(data["rows"][name]["accuracy"])] for name, label in rows.items()]
    if paper:
        printed = data["paper"]["rows"]
        labels = {"softmax": "*the paper's softmax*", "adaptive": "*the paper's adaptive*"}
        lines += [[label, *(f"{100 * a:.1f}" for a in printed[name]["accuracy"])] for name, label in labels.items()]
    return markdown(["", *(f"{n:,}" for n in data["sizes"])], lines)


def study_table(grid: str, sizes: tuple[int, ...], policies: dict[str, str]) -> str:
    """Accuracy in % of every protocol of a grid, a column for each policy and size."""
    data = load(f"results/studies/max_retrieval_{grid}.json")
    at = [list(data["sizes"]).index(n) for n in sizes]
    head = ["", *(f"{label}, {n:,}" for label in policies.values() for n in sizes)]
    lines = [
        [f"`{name}`", *(percent(row[policy])[i] for policy in policies for i in at)]
        for name, row in data["results"].items()
    ]
    return markdown(head, lines)


def training_speed() -> str:
    """Seed-steps per second, and their ratio to the listing's."""
    lines = []
    for device, label in (("cpu", "two CPU cores"), ("cuda", "one H200")):
        found = load(f"benchmarks/results/max_retrieval_{device}.json")["compare"]
        rates, ratios = found["seed_steps_per_second"], found["ratio_to_listing"]
        cells = [f"{rates[name]:,.0f} ({ratios[name]:.1f}x)" for name in ("sharpmax_1", "sharpmax_10")]
        lines.append([label, f"{rates['listing']:,.0f}", *cells])
    return markdown(["", "the paper's listing", "sharpmax, one head", "ten heads together"], lines)


MAIN = [4, 16, 4096, 128]
PROCESSORS = 132
"""Of an H200."""
DIRECTIONS = ("forward", "forward+backward")


def shown(time: dict[str, Any]) -> str:
    """A time and its multiple of cuDNN's."""
    return "out of memory" if time["ms"] is None else f"{time['ms']:,.2f} ms ({time['ratio_to_cudnn']:.2f}x)"


def attention_results() -> list[dict[str, Any]]:
    """Results of attention on a GPU."""
    return load("benchmarks/results/attention_cuda.json")["results"]


def long_results() -> list[dict[str, Any]]:
    """Those of lengths at which one run takes seconds; a million tokens are of a run of their own."""
    return [case for name in ("", "million_") for case in load(f"benchmarks/results/attention_{name}cuda.json")["long"]]


def attention_speed() -> str:
    """Milliseconds on a GPU, as multiples of cuDNN's, forward and forward with backward."""
    found = [case for case in attention_results() if case["shape"] == MAIN]
    head = ["", *(f"{'causal' if case['causal'] else 'full'}, {what}" for case in found for what in DIRECTIONS)]
    rows = {
        "cudnn": "torch, cuDNN",
        "flash": "torch, FlashAttention 2",
        "flex": "torch, FlexAttention",
        "auto": "sharpmax",
        "auto detached": "sharpmax, policy detached",
        "stock": "sharpmax, `stock`",
        "figure 4": "Figure 4, literal",
    }
    lines = []
    for name, label in rows.items():
        kind, detached = name.removesuffix(" detached"), name.endswith("detached")
        cells = [label]
        for case in found:
            for what in DIRECTIONS:
                there = case["times"].get(f"{kind} {what}" + ", detached" * detached)
                cells.append("-" if there is None else shown(there))
        lines.append(cells)
    return markdown(head, lines)


def attention_lengths() -> str:
    """Times from 4,096 tokens on, and those of cuDNN and of Figure 4."""
    lines = []
    for case in attention_results() + long_results():
        batch, heads, length, width = case["shape"]
        if length < MAIN[2]:
            continue
        times = case["times"]
        cells = [f"{batch} x {heads} x {length:,} x {width}, {'causal' if case['causal'] else 'full'}"]
        for what in DIRECTIONS:
            for name in ("cudnn", "auto", "figure 4"):
                time = times.get(f"{name} {what}")
                plain = time is not None and name == "cudnn"
                cells.append("-" if time is None else f"{time['ms']:,.2f} ms" if plain else shown(time))
        lines.append(cells)
    head = [f"{name}, {what}" for what in DIRECTIONS for name in ("cuDNN", "sharpmax", "Figure 4")]
    return markdown(["", *head], lines)


def attention_kinds() -> str:
    """Milliseconds of calls with masks, windows, caps and grouped heads, and multiples of FlexAttention's."""
    names = {
        "flex forward": "FlexAttention, forward",
        "torch forward": "torch's own, forward",
        "sharpmax forward": "sharpmax, forward",
        "flex forward+backward": "FlexAttention, forward+backward",
        "torch forward+backward": "torch's own, forward+backward",
        "sharpmax forward+backward": "sharpmax, forward+backward",
        "detached forward+backward": "policy detached, forward+backward",
    }
    lines = []
    for case in load("benchmarks/results/attention_kinds_cuda.json")["results"]:
        times, ratios = case["milliseconds"], case["ratio_to_flex"]
        cells = [case["kind"]]
        for name in names:
            multiple = "" if name.startswith("flex") else f" ({ratios[name]:.2f}x)" if name in ratios else None
            cells.append("-" if multiple is None else f"{times[name]:.2f} ms{multiple}")
        lines.append(cells)
    return markdown(["", *names.values()], lines)


def kinds_phrases() -> list[str]:
    """What docs/attention_performance.md says of the same beside the table."""
    cases = load("benchmarks/results/attention_kinds_cuda.json")["results"]
    shares = [100 * case["share_beta_above_1_3"] for case in cases]
    times = [case["milliseconds"] for case in cases]
    compiled = [t[f"compiled {what}"] / t[f"sharpmax {what}"] for t in times for what in DIRECTIONS]
    return [
        f"beta above 1.3 in {extremes(shares, 0)} % of the rows",
        f"compiled, they take {extremes(compiled)} times as long",
    ]


def attention_memory() -> str:
    """The peak of memory beyond inputs, at 131,072 and 1,048,576 tokens."""
    lines = []
    for case in long_results():
        batch, heads, length, width = case["shape"]
        for what in DIRECTIONS:
            times = [case["times"].get(f"{name} {what}") for name in ("cudnn", "auto", "stock")]
            if None not in times:
                cells = [f"{time['peak_mb']:,.0f} MB ({time['returned_mb']:,.0f} returned)" for time in times if time]
                lines.append([f"{batch} x {heads} x {length:,} x {width}, {what}", *cells])
    return markdown(["", "cuDNN", "sharpmax", "sharpmax, `stock`"], lines)


CPUS = {"attention_cpu": "AMD EPYC", "attention_cpu_intel": "Intel Xeon"}
"""Result files, and on whose cores they were made."""


def attention_on_a_cpu() -> str:
    """Times on CPUs as multiples of torch's own attention."""
    names = {"sharpmax": "sharpmax", "detached": "policy detached", "figure4": "Figure 4, literal"}
    found = [
        {
            (case["length"], DIRECTIONS.index(case["direction"]), case["kind"]): case["ratio_to_torch"]
            for case in load(f"benchmarks/results/{file}.json")["results"]
        }
        for file in CPUS
    ]
    calls = dict.fromkeys(call for measured in found[::-1] for call in measured)
    lines = []
    for length, direction, kind in sorted(calls, key=lambda call: call[:2]):
        ratios = [measured.get((length, direction, kind), {}).get(name) for measured in found for name in names]
        cells = ("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)
        lines.append([f"{length:,}, {kind}, {DIRECTIONS[direction]}", *cells])
    return markdown(["", *(f"{cpu}: {label}" for cpu in CPUS.values() for label in names.values())], lines)


def cpu_phrases() -> list[str]:
    """What docs/attention_performance.md says of masks of numbers on CPUs."""
    ratios = [
        case["ratio_to_torch"]["sharpmax"]
        for file in CPUS
        for case in load(f"benchmarks/results/{file}.json")["results"]
        if (case["length"], case["direction"], case["kind"]) == (16384, "forward", "mask of numbers")
    ]
    return [f"at 16,384 tokens {ratios[0]:.2f} and {ratios[1]:.2f} times torch's attention forward"]


def attention_errors() -> str:
    """Errors against float64 as multiples of the peer's, which is stock attention on what it is given."""
    names = ("output", "dq", "dk", "dv")
    rows = {"auto": "sharpmax", "stock": "sharpmax, `stock`", "figure 4": "Figure 4, literal"}
    lines = []
    for case in load("benchmarks/results/attention_cuda.json")["accuracy"]:
        kind, ratios = "causal" if case["causal"] else "full", case["ratios_to_peer"]
        lines += [[f"{label}, {kind}", *(f"{ratios[path][n]:.2f}" for n in names)] for path, label in rows.items()]
    return markdown(["", *names], lines)


DECODES = {
    "sharpmax": "sharpmax",
    "sharpmax paged": "from pages",
    "sharpmax, portable": "portable kernels",
    "sharpmax paged, portable": "portable, from pages",
}
"""Ways of decoding, by their names in the results."""


def stock_errors() -> list[float]:
    """Errors of the output of ``stock`` as multiples of the peer's."""
    cases = load("benchmarks/results/attention_cuda.json")["accuracy"]
    return [case["ratios_to_peer"]["stock"]["output"] for case in cases]


def decode_speed() -> str:
    """Milliseconds of one decoding step against the best stock one."""
    lines = []
    for case in load("benchmarks/results/decode_cuda.json")["results"]:
        times = case["milliseconds"]
        best = times[case["best_stock"]]
        cells = [f"{times[name]:.4f} ({times[name] / best:.2f}x)" for name in DECODES]
        lines.append([f"{case['batch']}", f"{case['length']:,}", f"{best:.4f} ({case['best_stock']})", *cells])
    return markdown(["batch", "keys", "best stock, ms", *(f"{label}, ms" for label in DECODES.values())], lines)


def decode_lengths() -> str:
    """Milliseconds of one decoding step where a part of the cache is valid, and multiples of the portable kernels'."""
    names = ("sharpmax", "sharpmax paged")
    lines = []
    for case in load("benchmarks/results/decode_cuda.json")["partly_valid"]:
        times = case["milliseconds"]
        portable, best = times["sharpmax, portable"], case["best_stock"]
        cells = [f"{case['batch']}", f"{case['length']:,}", case["valid"], f"{times[best]:.4f}" if best else "-"]
        cells += [f"{times[name]:.4f} ({times[name] / portable:.2f}x)" for name in names]
        lines.append([*cells, f"{portable:.4f}"])
    head = ["batch", "capacity", "valid keys", "best stock, ms", *(f"{DECODES[name]}, ms" for name in names)]
    return markdown([*head, "portable kernels, ms"], lines)


def extremes(numbers: list[float], digits: int = 2) -> str:
    """The smallest and the largest."""
    return f"{min(numbers):.{digits}f} to {max(numbers):.{digits}f}"


def decode_ranges() -> dict[str, str]:
    """Multiples of the best stock decode's time, and with lengths of the portable kernels'."""
    found = load("benchmarks/results/decode_cuda.json")
    full = [(case["milliseconds"], case["milliseconds"][case["best_stock"]]) for case in found["results"]]
    ranges = {name: extremes([times[name] / best for times, best in full]) for name in DECODES}
    for valid in ("ragged", "a tenth", "1,024"):
        there = [case["milliseconds"] for case in found["partly_valid"] if case["valid"] == valid]
        ranges[valid] = extremes([times["sharpmax"] / times["sharpmax, portable"] for times in there])
    return ranges


def host_time() -> str:
    """Microseconds of the host for one call, and their multiple of torch's own attention."""
    found = load("benchmarks/results/host_cuda.json")["results"]
    rows = {
        "torch": "torch's own", "stock": "`stock`", "stock, detached": "`stock`, policy detached", "triton": "`triton`",
        "triton, detached": "`triton`, policy detached", "row_stats": "`row_stats`", "varlen": "`varlen_attention`",
        "decode": "`decode_attention`", "figure 4": "Figure 4, literal",
    }  # fmt: skip
    lines = []
    for name, label in rows.items():
        times = (found.get(f"{name} {what}") for what in DIRECTIONS)
        cells = ("-" if t is None else f"{t['microseconds']:,.0f} us ({t['ratio_to_torch']:.1f}x)" for t in times)
        lines.append([label, *cells])
    return markdown(["", *DIRECTIONS], lines)


def decode_phrases() -> list[str]:
    """What docs/attention_performance.md says of decoding beside the tables."""
    steps, ranges = load("benchmarks/results/decode_cuda.json")["results"], decode_ranges()
    shares = [100 * step["share_beta_above_1_3"] for step in steps]
    times = [step["milliseconds"] for step in steps]
    partly = load("benchmarks/results/decode_cuda.json")["partly_valid"]
    paged = [100 * (t["sharpmax paged"] / t["sharpmax"] - 1) for t in times]
    of_stock = [step["ratio_to_best_stock"] for step in partly if step["batch"] == 1 and step["mean_length"] < 4096]
    hopper = [t["sharpmax"] / t["sharpmax, portable"] for t in times]
    between = [t["sharpmax, policy between kernels"] - t["sharpmax"] for t in times]
    return [
        f"beta exceeds 1.3 in {extremes(shares, 0)} % of the rows",
        f"It takes {extremes(hopper)} times as long as the portable kernels",
        f"Pages of 16 keys cost {extremes(paged, 0)} % more than a contiguous cache where all of it is valid",
        f"and costs {extremes(between)} ms more a step",
        f"takes {extremes(of_stock)} times as long as the best stock decode on the valid part",
        f"ragged ones (lengths drawn evenly) take {ranges['ragged']} times as long as with the portable kernels",
        f"those of which a tenth is valid {ranges['a tenth']} times, and those with 1,024 keys {ranges['1,024']} times",
    ]


def of_kernels(phrases: Callable[[], list[str]]) -> list[str]:
    """Phrases with numbers of kernels, where Triton is installed, with which these can be imported."""
    return phrases() if find_spec("triton") is not None else []


def decode_limits() -> list[str]:
    """What docs/attention_performance.md says of the sizes that the decoding kernel for Hopper takes."""
    from sharpmax.torch.triton import decode_hopper as kernel

    (few, keys), (_, fewer) = ((columns, kernel.KEYS * tiles) for columns, tiles in kernel.TILES.items())
    return [
        f"from {kernel.LEAST_TILES * PROCESSORS:.0f} tiles of {kernel.KEYS} keys on",
        f"a capacity of {PROCESSORS * keys:,} keys ({PROCESSORS * fewer:,} with more than {few} queries for each head)",
        f"for batches of up to {kernel.MOST_BATCH}",
    ]


def decode_memory() -> list[str]:
    """What docs/attention.md says of the memory that decoding reserves, from the kernel's constants."""
    from sharpmax.torch.triton import decode_hopper as kernel

    (few, keys), (_, fewer) = ((columns, kernel.KEYS * tiles) for columns, tiles in kernel.TILES.items())
    return [
        f"`batch * heads * ceil(capacity / {keys:,}) + {kernel.SPARE * PROCESSORS:,}` splits",
        f"({fewer} in place of {keys:,} with more than {few} queries for a head)",
    ]


def packed_speed() -> str:
    """Milliseconds over packed documents, and their multiples of torch's own variable-length attention."""
    head = [f"{name}, {what}" for what in DIRECTIONS for name in ("torch", "sharpmax", "policy detached")]
    lines = []
    for case in load("benchmarks/results/attention_packed_cuda.json")["results"]:
        times, ratios = case["milliseconds"], case["ratio_to_varlen_attn"]
        cells = [f"{case['heads']} on {case['key_heads']} of {case['columns']}"]
        for what in DIRECTIONS:
            cells.append(f"{times[f'varlen_attn {what}']:.2f} ms")
            for name in (f"adaptive {what}", f"detached {what}"):
                cells.append(f"{times[name]:.2f} ms ({ratios[name]:.2f}x)")
        lines.append(cells)
    return markdown(["heads", *head], lines)


def recorded_speed() -> str:
    """Milliseconds over heads of a real model, and their multiples of cuDNN's."""
    head = [f"{name}, {what}" for what in DIRECTIONS for name in ("cuDNN", "sharpmax", "policy detached", "Figure 4")]
    lines = []
    for case in load("benchmarks/results/attention_recorded_cuda.json")["recorded"]:
        cells = [f"layer {case['layer']}, beta > 1.3 in {100 * case['share_beta_above_1_3']:.0f} %"]
        for what in DIRECTIONS:
            cells.append(f"{case['times'][f'cudnn {what}']['ms']:.2f} ms")
            for name in (f"auto {what}", f"auto {what}, detached", f"figure 4 {what}"):
                if (time := case["times"].get(name)) is not None:
                    cells.append(f"{time['ms']:.2f} ms ({time['ratio_to_cudnn']:.2f}x)")
        lines.append(cells)
    return markdown(["", *(name for name in head if name != "policy detached, forward")], lines)


SANITIZED = {
    "control": "none of ours: specialised warps that do nothing",
    "hopper_prefill": "statistics, attention and gradients for Hopper, several blocks a program",
    "hopper_decode": "decoding for Hopper, several parts a program, contiguous and from pages",
    "portable_prefill": "portable, prefill and backward",
    "portable_masks": "the same with masks, softcap, dropout, packed documents",
    "portable_decode": "portable, decoding",
}


def sanitizer_reports() -> str:
    """What compute-sanitizer says of small calls; reports of the kinds that the control has, and others."""
    found = {(case["calls"], case["tool"]): case for case in load("benchmarks/results/sanitizer_cuda.json")["results"]}
    known = {report_kind(report) for report in found["control", "racecheck"]["reports"]}
    lines = []
    for calls, label in SANITIZED.items():
        races = found[calls, "racecheck"]["reports"]
        of_cudnn = [report for report in races if report["between"][0].startswith("cudnn_")]
        ours = [report for report in races if report not in of_cudnn]
        handed = [report for report in ours if report_kind(report) in known]
        cells = [found[calls, "memcheck"]["errors"]]
        cells += [sum(report["count"] for report in some) for some in (handed, of_cudnn)]
        cells.append(sum(report["count"] for report in ours if report not in handed))
        lines.append([label, *(str(cell) for cell in cells)])
    head = [
        "calls",
        "memcheck",
        "racecheck: work handed to specialised warps",
        "racecheck: within cuDNN",
        "racecheck: other",
    ]
    return markdown(head, lines)


def report_kind(report: dict[str, Any]) -> tuple[str, ...]:
    """The two sides of a report, without the names of the kernel and of its file."""
    kernel, *sides = report["between"]
    return tuple(re.sub(rf"def {kernel}\(.*", "head", side.partition(" (")[0]) for side in sides)


def attention_ranges(least: int) -> dict[str, str]:
    """The smallest and the largest multiple of cuDNN's time, from ``least`` tokens on, in the words of the pages."""
    cases = [case for case in attention_results() if case["shape"][2] >= least]
    long = long_results()
    wide, narrow = ([case for case in cases if (case["shape"][3] == MAIN[3]) is of_main] for of_main in (True, False))
    trained = [case for case in long if "auto forward+backward" in case["times"]]
    names = {
        "forward": ("auto forward", cases + long),
        "wide forward": ("auto forward", wide + long),
        "narrow forward": ("auto forward", narrow),
        "backward": ("auto forward+backward", wide + trained),
        "narrow backward": ("auto forward+backward", narrow),
        "detached": ("auto forward+backward, detached", cases),
    }
    ranges = {}
    for what, (name, there) in names.items():
        ranges[what] = extremes([case["times"][name]["ratio_to_cudnn"] for case in there])
    for width, peer in ((MAIN[3], "flash"), (64, "narrow flash")):
        there = [case["times"] for case in cases if case["shape"][3] == width and "flash forward" in case["times"]]
        for what in DIRECTIONS:
            ratios = [times[f"auto {what}"]["ms"] / times[f"flash {what}"]["ms"] for times in there]
            low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
            ranges[f"{peer} {what}"] = low if low == high else f"{low} to {high}"
    return ranges


def detached_memory() -> str:
    """Peak memory of a training step with a detached policy as a multiple of cuDNN's, from 4,096 tokens on."""
    cases = attention_results()
    names = ("auto forward+backward, detached", "cudnn forward+backward")
    peaks = [[case["times"][name]["peak_mb"] for name in names] for case in cases if case["shape"][2] >= MAIN[2]]
    (ratio,) = {f"{ours / theirs:.2f}" for ours, theirs in peaks}
    return ratio


def readme_speed() -> str:
    """The README's table of attention's time."""
    ranges = attention_ranges(MAIN[2])
    lines = [
        ["forward, 128 columns", ranges["wide forward"], ranges["flash forward"]],
        ["forward, 64 columns", ranges["narrow forward"], ranges["narrow flash forward"]],
        ["forward and backward, 128 columns", ranges["backward"], ranges["flash forward+backward"]],
        ["forward and backward, 64 columns", ranges["narrow backward"], ranges["narrow flash forward+backward"]],
        ["forward and backward, detached policy", ranges["detached"], ""],
    ]
    return markdown(["", "of cuDNN's", "of FlashAttention 2's"], lines)


def attention_phrases() -> list[str]:
    """What the README says of decoding's speed."""
    ranges = decode_ranges()
    return [
        f"takes {ranges['sharpmax']} times as long as the best stock decode of torch",
        f"from pages {ranges['sharpmax paged']} times",
    ]


def short_phrases() -> list[str]:
    """What docs/attention_performance.md says of lengths below 4,096."""
    cases = [case for case in attention_results() if case["shape"][2] < MAIN[2]]
    times = {what: [case["times"][f"auto {what}"]["ms"] for case in cases] for what in DIRECTIONS}
    forward, both = (f"{min(times[what]):.2f} to {max(times[what]):.2f} ms" for what in DIRECTIONS)

    ratios = [
        case["times"][f"figure 4 {what}"]["ms"] / case["times"][f"auto {what}"]["ms"]
        for case in cases
        for what in DIRECTIONS
    ]
    short = [case["times"] for case in cases if case["shape"][2] == 1024]
    of_cudnn = [extremes([times[f"auto {what}"]["ratio_to_cudnn"] for times in short]) for what in DIRECTIONS]
    return [
        f"sharpmax took {forward} forward and {both} with backward",
        f"literal Figure 4 took {min(ratios):.2f} to {max(ratios):.1f} times as long",
        f"{of_cudnn[0]} times as long as cuDNN's attention forward and {of_cudnn[1]} times with backward",
    ]


def causal_phrases() -> list[str]:
    """What docs/attention_performance.md says of one call in several runs."""
    (case,) = (case for case in attention_results() if case["shape"] == MAIN and case["causal"])
    (normal,) = load("benchmarks/results/attention_cuda.json")["standard_normal"]
    times, normally = case["times"], normal["times"]["auto forward"]
    alone = sum(times[f"kernel {name}"]["ms"] for name in ("stats", "attend"))
    (other,) = (
        kind["milliseconds"]["sharpmax forward"]
        for kind in load("benchmarks/results/attention_kinds_cuda.json")["results"]
        if kind["kind"] == "causal"
    )
    whole = times["auto forward"]
    return [
        f"took {whole['ms']:.2f} ms, {whole['ratio_to_cudnn']:.2f} times as long as cuDNN's forward",
        f"its two kernels by themselves took {alone:.2f} ms",
        f"{normally['ratio_to_cudnn']:.2f} times as long as cuDNN's; in",
        f"it took {other:.2f} ms.",
    ]


def tiles_phrases() -> list[str]:
    """How far the tiles in use are from the best that sweeps have found: without a mask, and with one."""
    from sharpmax.torch.triton.tiles import LARGE, LARGE_MASKED

    lost: dict[bool, list[float]] = {False: [], True: []}
    for file in ("64", "256", "masks"):
        runs = load(f"benchmarks/results/attention_tiles_{file}_cuda.json")["sweep"]
        for run in runs:
            kernel, width, masked = run["kernel"], run["width"], "mask" in run.get("kind", "")
            used = LARGE[kernel][width]
            used = LARGE_MASKED.get((kernel, width), used) if masked else used
            same = ("kernel", "width", "causal", "kind")
            others = [r["ms"] for r in runs if all(r.get(name) == run.get(name) for name in same)]
            if tuple(run["tiles"]) == used:
                lost[masked].append(run["ms"] / min(ms for ms in others if isinstance(ms, float)) - 1)
    assert [len(found) for found in lost.values()] == [7, 31]
    plain, masked = (f"{100 * max(found):.0f} %" for found in lost.values())
    return [f"those in use take at most {plain} longer than the best, under a mask {masked}"]


def dead_blocks_phrases() -> list[str]:
    """What docs/attention_performance.md says of blocks that the second pass could skip."""
    found = load("benchmarks/results/dead_blocks_cpu.json")
    models = {(case["model"], case["length"]): case for case in found["models"]}
    case = models["smollm2-135m-instruct", 8192]
    exact, rounded = (case["summary"]["paper"][kind] for kind in ("float32", "bfloat16"))
    layers = [(x["share_dead"]["128x128"], x["forward_at_best"]["128x128"]) for x in case["recorded"]]
    most, at_best = max((shares["paper"]["float32"], best["paper"]["float32"]) for shares, best in layers)
    heads = [x for layer in case["recorded"] for x in layer["share_dead_of_heads"]["128x128"]["paper"]["float32"]]
    long = models["gemma-3-270m", 16384]["summary"]
    nothing = [
        case["summary"]["softmax"]["float32"]["largest_of_a_head"],
        *(models[name, 2048]["summary"]["paper"]["float32"]["largest_of_a_head"] for name, _ in models),
        *(share for noise in found["gaussian"] for share in noise["share_dead"]["128x128"]["paper"].values()),
    ]
    assert not any(nothing)

    def percent(share: float) -> str:
        return f"{100 * share:.1f} %"

    return [
        f"in all {len(heads)} heads of SmolLM2 135M, {percent(exact['share_dead']['128x128'])} of the blocks",
        f"({percent(most)} in the layer with the most, {percent(max(heads))} in one head, none in {heads.count(0)} "
        f"heads), so that forward would take {exact['forward_at_best']} times as long at best, and {at_best} times in "
        "that layer",
        f"would hide {percent(rounded['share_dead']['128x128'])} ({rounded['forward_at_best']} times at best",
        f"over 16,384, in the {long['heads']} heads of Gemma 3 270M without a window, "
        f"{percent(long['paper']['float32']['share_dead']['128x128'])} (",
    ]


def attention_doc_phrases() -> list[str]:
    """What docs/attention_performance.md says of the same."""
    ranges = attention_ranges(MAIN[2])
    return [
        *of_kernels(tiles_phrases),
        *kinds_phrases(),
        *cpu_phrases(),
        *dead_blocks_phrases(),
        *short_phrases(),
        *decode_phrases(),
        *of_kernels(decode_limits),
        f"forward takes {ranges['forward']} times as long as cuDNN",
        f"needs {detached_memory()} times the memory of cuDNN's",
        f"{ranges['flash forward']} times as long as FlashAttention 2 (with 64 columns, "
        f"at 16,384 tokens, {ranges['narrow flash forward']} times)",
        f"forward and backward together take {ranges['backward']} times as long as cuDNN's (with 64 columns, "
        f"at 16,384 tokens, {ranges['narrow backward']} times), and, up to 32,768 tokens, "
        f"{ranges['flash forward+backward']} times as long as FlashAttention 2 (with 64 columns, at 16,384 tokens, "
        f"{ranges['narrow flash forward+backward']} times)",
        *causal_phrases(),
    ]


def training_phrases() -> list[str]:
    """What docs/max_retrieval.md says of the time that the whole of it takes on a GPU."""
    whole = load("benchmarks/results/max_retrieval_cuda.json")["whole"]
    warm, cold = whole["without_compilation"], whole["with_compilation"]
    return [
        f"in {warm['training']} s and Table 1 with {whole['sets']:,} sets takes {warm['table1']} s",
        f"with it {cold['training']} s and {cold['table1']} s",
    ]


SHORT = {
    "softmax": "softmax",
    "adaptive": "adaptive (`PAPER`)",
    "constant_4": "constant beta = 4",
    "hard": "hard (temperature 0)",
}
ALL = {
    "softmax": "softmax",
    "adaptive": "adaptive, the paper's polynomial",
    "refitted": "adaptive, refitted",
    "refitted_held": "adaptive, refitted, range-safe",
    "log_n": "log n / log 16",
    "constant_4": "constant beta = 4",
    "hard": "hard (theta = 0)",
}
STUDIED = {"softmax": "softmax", "PAPER": "adaptive"}
TABLES = {
    "README.md": [
        readme_speed(),
        accuracy_table("results/table1.json", SHORT),
        accuracy_table("results/table1_sharp.json", SHORT, paper=False),
    ],
    "docs/max_retrieval.md": [
        accuracy_table("results/table1.json", ALL),
        accuracy_table("results/table1_sharp.json", ALL, paper=False),
        accuracy_table("results/long/table1_sharp.json", ALL, paper=False),
        study_table("paper", (512, 1024, 4096, 16384), STUDIED),
        study_table("precision", (512, 1024, 4096, 16384), STUDIED),
        study_table("recipe", (1024, 4096, 16384), {"softmax": "softmax", "const4": "beta = 4"}),
        study_table("combined", (16384, 131072), {"softmax": "softmax", "const4": "beta = 4"}),
        training_speed(),
    ],
    "docs/attention_performance.md": [
        attention_speed(),
        attention_lengths(),
        attention_kinds(),
        attention_memory(),
        attention_errors(),
        decode_speed(),
        decode_lengths(),
        host_time(),
        packed_speed(),
        recorded_speed(),
        attention_on_a_cpu(),
        sanitizer_reports(),
    ],
}
PHRASES = {
    "README.md": attention_phrases(),
    "docs/attention.md": [
        f"the error of its output was measured at {max(stock_errors()):.0f} times that of stock attention",
        *of_kernels(decode_memory),
    ],
    "docs/attention_performance.md": attention_doc_phrases(),
    "docs/max_retrieval.md": training_phrases(),
}
