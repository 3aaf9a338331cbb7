"""Time and memory of attention against length, from the results of ``benchmarks.attention``.

python -m benchmarks.attention_plot [--results FILE ...] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
SHOWN = {
    "cudnn forward": ("torch, cuDNN", "#888888", "o"),
    "auto forward": ("sharpmax", "#0072b2", "s"),
    "stock forward": ("sharpmax, stock", "#009e73", "^"),
    "figure 4 forward": ("Figure 4, literal", "#d55e00", "x"),
}


def drawn(results: list[dict[str, Any]]) -> Any:
    """Forward passes, causal, 128 columns; one head of one sequence, so that all lengths compare."""
    found = [case for file in results for part in ("results", "long") for case in file.get(part, [])]
    cases = [c for c in found if c["causal"] and c["shape"][3] == 128]
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, (label, colour, marker) in SHOWN.items():
        found = [(c["shape"], c["times"][name]) for c in cases if (c["times"].get(name) or {}).get("ms") is not None]
        lengths = [shape[2] for shape, _ in found]
        for panel, key in zip(panels, ("ms", "peak_mb"), strict=True):
            heads = [time[key] / (shape[0] * shape[1]) for shape, time in found]
            panel.loglog(lengths, heads, marker=marker, color=colour, label=label, base=2)
    for panel, title in zip(panels, ("milliseconds", "peak memory beyond the inputs, MB"), strict=True):
        panel.set_yscale("log", base=10)
        panel.set_xlabel("tokens")
        panel.set_title(f"{title}, for each head", fontsize=10)
        panel.set_xticks([2**n for n in (10, 12, 14, 17, 20)], ["1k", "4k", "16k", "131k", "1M"])
        panel.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize=9)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    files = [ROOT / "benchmarks" / "results" / f"attention_{name}cuda.json" for name in ("", "million_")]
    parser.add_argument("--results", type=Path, nargs="+", default=files)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "attention.png")
    arguments = parser.parse_args()
    mpl.use("Agg")
    results = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.results]
    drawn(results).savefig(arguments.out, dpi=150)


if __name__ == "__main__":
    main()
