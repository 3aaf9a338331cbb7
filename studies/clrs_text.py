"""Section 4.2 of the paper in one command: fine-tuning on CLRS-Text with softmax, and with adaptive temperature.

    python -m studies.clrs_text --out DIR [--model smollm2-135m-instruct] [--tokens 104857600] [--policies none,paper]

    DIR/runs/POLICY            a training run each, one after the other, from the same weights and over the same samples
    DIR/evaluations/POLICY     greedy answers to the same questions; a process for each policy and seed, all at once
    DIR/heads/NAME             a diagnosis of the model before training (`start`) and after, on the same long samples
    DIR/fig8.png, ...          Figure 8, and what it says in numbers

Every stage goes on where it was stopped: kill it whenever you like and give the same command again. On an NVIDIA GPU,
evaluations share it through MPS where that is installed; what they print is in DIR/logs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sharpmax.core.files import write_text
from sharpmax.tasks.clrs_text import evaluation, generate_samples
from sharpmax.tasks.clrs_text.command import find_encoder

STAGES = ("train", "evaluate", "diagnose", "figure")
MPS = "nvidia-cuda-mps-control"
EVERY = 20
"""Seconds between two lines on how far evaluations are."""


class FailedError(Exception):
    """A program of a stage ended with an error."""


def sharpmax(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "sharpmax", *map(str, words)]


def alone(*words: str | Path) -> None:
    """Run one command of the package, and show what it prints."""
    code = subprocess.run(sharpmax(*words), check=False).returncode
    if code:
        raise FailedError(f"sharpmax {' '.join(map(str, words))} ended with exit code {code}")


def together(out: Path, programs: Mapping[str, list[str]], files: Path) -> None:
    """Run programs at the same time and wait for all; if one fails, the others are ended."""
    (out / "logs").mkdir(parents=True, exist_ok=True)
    running, told = {}, time.monotonic()
    with contextlib.ExitStack() as stack:
        for name, words in programs.items():
            log = stack.enter_context((out / "logs" / f"{name}.txt").open("a"))
            running[name] = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(_end, running[name])
        while running:
            time.sleep(0.2)
            ended = {name: process.returncode for name, process in running.items() if process.poll() is not None}
            for name, code in ended.items():
                del running[name]
                if code:
                    raise FailedError(f"{name} ended with exit code {code}; {out / 'logs' / name}.txt has what it said")
            if ended or time.monotonic() - told > EVERY:
                told = time.monotonic()
                print(f"evaluation: {len(list(files.glob('*/cells/*.json')))} cells are done", flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def shared_gpu(out: Path) -> Iterator[None]:
    """Kernels of several processes run side by side within, where MPS is installed."""
    if shutil.which(MPS) is None:
        yield
        return
    for variable, folder in (("CUDA_MPS_PIPE_DIRECTORY", "pipe"), ("CUDA_MPS_LOG_DIRECTORY", "log")):
        os.environ[variable] = str(out / "mps" / folder)
        (out / "mps" / folder).mkdir(parents=True, exist_ok=True)
    subprocess.run([MPS, "-d"], check=False)
    try:
        yield
    finally:
        subprocess.run([MPS], input=b"quit\n", check=False)
        del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]


def train(asked: argparse.Namespace) -> None:
    for policy in asked.policies:
        run = asked.out / "runs" / policy
        if not (run / "training.json").exists():
            alone(
                "clrs-text", "train", "--model", asked.model, "--policy", policy, "--out", run,
                "--tokens", asked.tokens, *asked.training,
            )  # fmt: skip


def evaluate(asked: argparse.Namespace) -> None:
    folder = asked.out / "evaluations"
    words = {
        policy: (
            "clrs-text", "evaluate", "--model", asked.out / "runs" / policy, "--out", folder / policy,
            "--samples", asked.samples, *asked.evaluation, "--seeds",
        )
        for policy in asked.policies
    }  # fmt: skip
    programs = {
        f"evaluate_{policy}_{seed}": sharpmax(*words[policy], seed) for seed in asked.seeds for policy in asked.policies
    }
    with shared_gpu(asked.out):
        together(asked.out, programs, folder)
    for policy in asked.policies:  # asks nothing more, and counts
        alone(*words[policy], ",".join(asked.seeds))


def diagnose(asked: argparse.Namespace) -> None:
    prompts = asked.out / "prompts.jsonl"
    models = {policy: asked.out / "runs" / policy for policy in asked.policies}
    if not prompts.exists():
        texts = long_samples(str(models["none"] / "model"), max(asked.lengths))
        write_text(prompts, "".join(f"{json.dumps(text)}\n" for text in texts))
    if not made_anew(asked.model):
        models["start"] = asked.model
    lengths = ",".join(map(str, asked.lengths))
    for name, model in models.items():
        alone("diagnose", model, "--prompts", prompts, "--lengths", lengths, "--out", asked.out / "heads" / name)


def made_anew(model: str) -> bool:
    """Whether a model has random weights before training."""
    return model == "scratch" or model.endswith(".json")


def long_samples(model: str, tokens: int) -> list[str]:
    """One sample of each algorithm that has one with at least so many tokens and at most a context of 2,048."""
    encoder, split, texts = find_encoder(model), evaluation(), []
    for algorithm, sizes in split.sizes.items():
        samples = [next(generate_samples(algorithm, size, split.seeds[0])) for size in sizes]
        lengths = [len(document.ids) for document in encoder(samples)]
        texts += [s.question + s.answer for s, n in zip(samples, lengths, strict=True) if tokens <= n <= 2_048][-1:]
    return texts


def figure(asked: argparse.Namespace) -> None:
    names = dict(zip(("baseline", "adaptive", "also"), asked.policies, strict=False))
    words = [word for name, policy in names.items() for word in (f"--{name}", asked.out / "evaluations" / policy)]
    alone("reproduce", "fig8", *words, "--out", asked.out)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", default="104857600", help="of training; 800 steps")
    parser.add_argument("--policies", default="none,paper", help="none first; a third one is green in the figure")
    parser.add_argument("--samples", default="25", help="of each algorithm, size and seed")
    parser.add_argument("--seeds", default="3,14", help="of the evaluation set")
    parser.add_argument("--lengths", default="96,192,384,768,1536", help="of prefixes, in tokens, to diagnose")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument(
        "--training",
        default="--workers 8 --compile --save-dtype bfloat16",
        help="options of `sharpmax clrs-text train`",
    )
    parser.add_argument("--evaluation", default="", help="options of `sharpmax clrs-text evaluate`")
    asked = parser.parse_args(words)
    for name in ("policies", "seeds", "stages"):
        setattr(asked, name, getattr(asked, name).split(","))
    asked.lengths = [int(n) for n in asked.lengths.split(",")]
    asked.training, asked.evaluation = asked.training.split(), asked.evaluation.split()
    if unknown := [stage for stage in asked.stages if stage not in STAGES]:
        parser.error(f"expected stages of {', '.join(STAGES)}, got {unknown[0]!r}")
    if asked.policies[0] != "none" or not 2 <= len(asked.policies) <= 3:
        parser.error(f"expected none and one or two other policies, got {', '.join(asked.policies)}")
    return asked


def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    for name, stage in {"train": train, "evaluate": evaluate, "diagnose": diagnose, "figure": figure}.items():
        if name in asked.stages:
            stage(asked)


if __name__ == "__main__":
    try:
        main()
    except FailedError as error:
        sys.exit(str(error))
