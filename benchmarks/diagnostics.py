"""What recording every head of a model costs, over a plain forward of the same model with stock SDPA.

    python -m benchmarks.diagnostics [--models smollm2-135m-instruct gemma-3-270m] [--lengths 256 1024] [--rounds 3]

No logits over the vocabulary are computed in either. The functions run in turn, round after round, and ratios are those
of their median times. "off" is the model with sharpmax's attention and policy Constant(1), without recording;
"record_sample" records a sample of 512 rows. On a GPU, where there is one, bfloat16 is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sharpmax import Constant
from sharpmax.core.files import write_text
from sharpmax.diagnostics import record
from sharpmax.huggingface import sharpen
from sharpmax.huggingface.weights import load
from sharpmax.provenance import provenance

TEXT = Path(__file__).parents[1] / "src" / "sharpmax" / "torch"
SAMPLE = 512
Call = Callable[[], Any]


def tokens(tokenizer: Any, length: int, device: str) -> Tensor:
    """The first tokens of this package's own source, again and again if it is too short."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(TEXT.glob("*.py")))
    ids = tokenizer(text, verbose=False)["input_ids"]
    return torch.tensor([(ids * (length // len(ids) + 1))[:length]], device=device)


def calls(model: Any, ids: Tensor) -> dict[str, Call]:
    def plain() -> None:
        model.base_model(input_ids=ids, use_cache=False)

    def off() -> None:
        with sharpen(model, Constant(1)):
            plain()

    def recorded(sample: int | None = None) -> None:
        with record(model, sample=sample) as stats:
            plain()
        assert stats.rows

    return {"plain": plain, "off": off, "record": recorded, "record_sample": lambda: recorded(SAMPLE)}


def seconds(call: Call, device: str) -> float:
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measured(model: Any, tokenizer: Any, name: str, length: int, rounds: int, device: str) -> dict[str, Any]:
    made = calls(model, tokens(tokenizer, length, device))
    with torch.inference_mode():
        for call in made.values():
            seconds(call, device)
        samples = [{key: seconds(call, device) for key, call in made.items()} for _ in range(rounds)]
    times = {key: statistics.median(sample[key] for sample in samples) for key in made}
    return {
        "model": name,
        "length": length,
        "milliseconds": {key: round(1000 * t, 1) for key, t in times.items()},
        "ratio_to_plain": {key: round(t / times["plain"], 3) for key, t in times.items() if key != "plain"},
    }


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m-instruct", "gemma-3-270m"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"diagnostics_{device}.json")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    dtype = "bfloat16" if device == "cuda" else "float32"
    results = []
    for name in arguments.models:
        model: Any
        model, tokenizer = load(name, dtype=dtype, attn_implementation="sdpa")
        model.to(device)
        for length in arguments.lengths:
            results.append(measured(model, tokenizer, name, length, arguments.rounds, device))
            print(json.dumps(results[-1]), flush=True)
    content = {
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "rounds": arguments.rounds,
        "sample": SAMPLE,
        "results": results,
        "provenance": provenance(["python", "-m", "benchmarks.diagnostics", *sys.argv[1:]]),
    }
    write_text(arguments.out, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
