"""Makes golden.json: samples of CLRS-Text as dm-clrs itself writes them, with its real dependencies.

It needs an environment of its own, TensorFlow and all (2.9 GB), which the tests do not:

    python3.11 -m venv real && real/bin/pip install dm-clrs==2.0.1
    PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python real/bin/python tests/tasks/clrs_text/make_golden.py

(pip resolves an old tfds-nightly, whose messages the newer protobuf only reads in pure Python.)

Nothing of the package is replaced: samples come from ``generate_clrs_algo_dataset`` of its own script.
"""

import importlib.metadata
import json
import platform
from pathlib import Path

from clrs._src.clrs_text import generate_clrs_text as upstream

SEEDS = (0, 81)
SAMPLES = {4: 2, 6: 2, 11: 1}
"""How many samples of each size; those of the largest only where they are short."""
LONGEST = 1_800
"""Characters; longer samples of the largest size are left out."""
PACKAGES = ("dm-clrs", "numpy", "jax", "jaxlib", "tensorflow", "chex", "attrs", "absl-py", "ml_collections")


def made(algorithm: str, size: int, seed: int, traces: bool) -> list[list[str]]:
    """[question, answer] of the first samples."""
    config = upstream.get_dataset_config(algorithm, size, SAMPLES[size], traces, seed)
    dataset = upstream.generate_clrs_algo_dataset(config)
    found = []
    for tensors in dataset:
        sample = upstream._convert_to_basic_types(tensors, upstream.CLRS_TF_TENSORS_CONVERTERS)
        assert sample["auxiliary"] == {"length": size, "seed": seed, "use_hints": traces}
        (answer,) = sample["references"]
        found.append([sample["prompt"], answer])
    return found


def main() -> None:
    """Write golden.json beside this file."""
    samples = []
    for algorithm in sorted(upstream._DEFAULT_TRAIN_ALGOS_AND_LENGTHS):
        for traces in (False, True):
            for size in SAMPLES:
                for seed in SEEDS:
                    texts = made(algorithm, size, seed, traces)
                    if size < max(SAMPLES) or len("".join(texts[0])) <= LONGEST:
                        names = {"algorithm": algorithm, "traces": traces, "size": size, "seed": seed}
                        samples.append(names | {"texts": texts})
    golden = {
        "versions": {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in PACKAGES},
        "training": {
            "sizes": upstream._DEFAULT_TRAIN_ALGOS_AND_LENGTHS,
            "seeds": upstream._DEFAULT_TRAIN_SEEDS,
            "samples": upstream._DEFAULT_TRAIN_NUMBER_OF_SAMPLES,
        },
        "evaluation": {
            "sizes": upstream._DEFAULT_VAL_ALGOS_AND_LENGTHS,
            "seeds": upstream._DEFAULT_VAL_SEEDS,
            "samples": upstream._DEFAULT_VAL_NUMBER_OF_SAMPLES,
        },
        "samples": samples,
    }
    lines = json.dumps(golden, separators=(",", ":")).replace('{"algorithm"', '\n{"algorithm"')
    Path(__file__).with_name("golden.json").write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
