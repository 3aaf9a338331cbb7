"""Section 4.2 of the paper in one command: fine-tuning on CLRS-Text with softmax, and with adaptive temperature.

    python -m studies.clrs_text --out DIR [--model smollm2-135m-instruct] [--tokens 100663296] [--policies none,paper]

    DIR/runs/POLICY            a training run each, one after the other, from the same weights and over the same samples
    DIR/evaluations/POLICY     greedy answers to the same questions; a process for each policy, all at once
    DIR/fig8.png, ...          Figure 8, and what it says in numbers
    DIR/heads/NAME             a diagnosis of the model after training, and before if it had weights then: as it was
                               (`start`), and with a policy switched on that it was not trained with (`start_POLICY`)

Every stage goes on where it was stopped, by Ctrl-C say: give the same command again. On an NVIDIA GPU,
evaluations share it through MPS where that works; what programs print that run together is in DIR/logs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from sharpmax.core.files import write_text
from sharpmax.inputs import InputError, find_policy, parse_numbers
from sharpmax.tasks.clrs_text import evaluation, generate_samples
from sharpmax.tasks.clrs_text.command import find_encoder
from sharpmax.tasks.clrs_text.models import SCRATCH, find_model, save_model
from sharpmax.tasks.clrs_text.packing import LENGTH
from sharpmax.tasks.clrs_text.training_command import POLICIES

MPS = "nvidia-cuda-mps-control"
MPS_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
EVERY = 20
"""Seconds between two lines on how far evaluations are."""


def sharpmax(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "sharpmax", *map(str, words)]


def alone(*words: str | Path) -> None:
    """Run one command of the package, and show what it prints; where it fails, that has been said."""
    code = subprocess.run(sharpmax(*words), check=False).returncode
    if code:
        sys.exit(code)


def together(out: Path, programs: Mapping[str, list[str]], files: str) -> None:
    """Run programs at the same time and wait for all; if some failed, end with what they said last.

    ``files`` is a pattern in ``out``: how many there are tells how far it is.
    """
    (out / "logs").mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // max(1, len(programs)))  # more would wait for one another
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    running, failed, told = {}, [], time.monotonic()
    with contextlib.ExitStack() as stack:
        for name, words in programs.items():
            log = stack.enter_context((out / "logs" / f"{name}.txt").open("w"))
            running[name] = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment)
            stack.callback(_end, running[name])
        while running:
            time.sleep(0.2)
            ended = {name: process.returncode for name, process in running.items() if process.poll() is not None}
            for name, code in ended.items():
                del running[name]
                failed += [(name, code)] * bool(code)
            if ended or time.monotonic() - told > EVERY:
                told = time.monotonic()
                print(f"{', '.join(programs)}: {len(list(out.glob(files)))} parts are done", flush=True)
    if failed:
        logs = {name: out / "logs" / f"{name}.txt" for name, _ in failed}
        sys.exit(
            "\n".join(f"{name} ended with {code}: {last_line(logs[name])} (in {logs[name]})" for name, code in failed)
        )


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def shared_gpu() -> Iterator[list[str]]:
    """Within, kernels of several processes run side by side on a GPU, if there is one and MPS works.

    Gives the options that keep programs on it: one that does not find it shall say so, and not take the CPU.
    """
    if not torch.cuda.is_available():
        yield []
        return
    options = ["--device", "cuda"]
    if shutil.which(MPS) is None or any(name in os.environ for name in MPS_FOLDERS):  # none, or somebody's own
        yield options
        return
    with tempfile.TemporaryDirectory() as folder:  # its path is short, as that of a socket must be
        for name, place in zip(MPS_FOLDERS, ("pipe", "log"), strict=True):
            (Path(folder) / place).mkdir()
            os.environ[name] = f"{folder}/{place}"
        subprocess.run([MPS, "-d"], check=False)
        try:
            if not gpu_answers():
                _stop_mps()
                print("MPS does not work here: evaluations take turns on the GPU", flush=True)
            yield options
        finally:
            _stop_mps()


def gpu_answers() -> bool:
    """Whether a new process can use the GPU."""
    probe = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda').item()"]
    try:
        return subprocess.run(probe, check=False, timeout=60, capture_output=True).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _stop_mps() -> None:
    if MPS_FOLDERS[0] in os.environ:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([MPS], input=b"quit\n", check=False, timeout=20)
        for name in MPS_FOLDERS:
            del os.environ[name]


def train(asked: argparse.Namespace) -> None:
    for name, policy in asked.policies.items():  # one that is finished is not trained again, and others are refused
        alone(
            "clrs-text", "train", "--model", asked.model, "--policy", policy, "--out", asked.out / "runs" / name,
            "--tokens", asked.tokens, *asked.training,
        )  # fmt: skip


def trained(asked: argparse.Namespace) -> dict[str, Path]:
    """The runs, which must be finished."""
    runs = {name: asked.out / "runs" / name for name in asked.policies}
    for run in runs.values():
        if not (run / "training.json").exists():
            sys.exit(f"expected a finished training run in {run}: leave --stages out, or begin with train")
    return runs


def evaluate(asked: argparse.Namespace) -> None:
    runs, folder = trained(asked), asked.out / "evaluations"
    with shared_gpu() as options:
        if options:  # all begin at the same time, and see the same free memory
            options += ["--memory", f"{0.8 / len(asked.policies):.2f}"]
        programs = {
            f"evaluate_{name}": sharpmax(
                "clrs-text", "evaluate", "--model", run, "--out", folder / name, "--samples", asked.samples,
                "--seeds", asked.seeds, *options, *asked.evaluation,
            )
            for name, run in runs.items()
        }  # fmt: skip
        together(asked.out, programs, "evaluations/*/cells/*.json")


def figure(asked: argparse.Namespace) -> None:
    names = dict(zip(("baseline", "adaptive", "also"), asked.policies, strict=False))
    words = [word for name, run in names.items() for word in (f"--{name}", asked.out / "evaluations" / run)]
    alone("reproduce", "fig8", *words, "--out", asked.out)


def diagnose(asked: argparse.Namespace) -> None:
    models: dict[str, str | Path] = {**trained(asked)}
    lengths = parse_numbers(asked.lengths, "lengths")
    prompts = asked.out / f"prompts_{lengths[-1]}.jsonl"
    if not prompts.exists():
        texts = long_samples(str(asked.out / "runs" / "none" / "model"), lengths[-1])
        if not texts:
            sys.exit(
                f"expected samples of {lengths[-1]:,} to {LENGTH:,} tokens to diagnose with, got none: see --lengths"
            )
        write_text(prompts, "".join(f"{json.dumps(text)}\n" for text in texts))
    if not made_anew(asked.model):
        models |= at_start(asked)
    words = ("--prompts", prompts, "--lengths", asked.lengths)
    programs = {
        f"diagnose_{name}": sharpmax("diagnose", model, *words, "--out", asked.out / "heads" / name)
        for name, model in models.items()
    }
    together(asked.out, programs, "heads/*/parts/*.json")


def at_start(asked: argparse.Namespace) -> dict[str, str | Path]:
    """The model before training, as it is and with each policy switched on."""
    models: dict[str, str | Path] = {"start": asked.model}
    for name, policy in asked.policies.items():
        if (chosen := find_policy(policy, POLICIES)) is not None:
            folder = models[f"start_{name}"] = asked.out / "starts" / name
            if not folder.exists():
                network, tokenizer = find_model(asked.model, policy=chosen)
                save_model(network, tokenizer, network.state_dict(), folder, "float32")
    return models


def made_anew(model: str) -> bool:
    """Whether a model has random weights before training."""
    return model == SCRATCH or model.endswith(".json")


def long_samples(model: str, tokens: int) -> list[str]:
    """One sample of each algorithm that has one with at least so many tokens and at most those of a context."""
    tokenizer, split, texts = find_encoder(model).tokenizer, evaluation(), []
    for algorithm, sizes in split.sizes.items():
        samples = [next(generate_samples(algorithm, size, split.seeds[0])) for size in sizes]
        whole = [sample.question + sample.answer for sample in samples]
        texts += [text for text in whole if tokens <= len(tokenizer(text)["input_ids"]) <= LENGTH][-1:]
    return texts


STAGES = {"train": train, "evaluate": evaluate, "figure": figure, "diagnose": diagnose}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    workers = min(8, os.cpu_count() or 1)
    options = f"--workers {workers} --compile --save-dtype bfloat16"
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=100_663_296, help="of training; 768 steps")
    parser.add_argument("--policies", default="none,paper", help="none first; a third one is green in the figure")
    parser.add_argument("--samples", type=int, default=25, help="of each algorithm, size and seed")
    parser.add_argument("--seeds", default="3,14", help="of the evaluation set")
    parser.add_argument("--lengths", default="96,192,384,768,1536", help="of prefixes, in tokens, to diagnose")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--training", default=options, help=f"of `sharpmax clrs-text train`, in place of {options!r}")
    parser.add_argument("--evaluation", default="", help="of `sharpmax clrs-text evaluate`")
    asked = parser.parse_args(words)
    asked.stages, policies = asked.stages.split(","), asked.policies.split(",")
    asked.training, asked.evaluation = asked.training.split(), asked.evaluation.split()
    if unknown := [stage for stage in asked.stages if stage not in STAGES]:
        parser.error(f"expected stages of {', '.join(STAGES)}, got {unknown[0]!r}")
    if policies[0] != "none" or not 2 <= len(policies) <= 3:
        parser.error(f"expected none and one or two other policies, got {', '.join(policies)}")
    asked.policies = {Path(policy).stem: policy for policy in policies}
    if len(asked.policies) < len(policies) or any(name.startswith("start") for name in asked.policies):
        parser.error(f"expected policies of different names, none of them start..., got {', '.join(policies)}")
    if asked.samples < 1 or asked.tokens < 1:
        parser.error(f"expected at least one sample and one token, got {asked.samples} and {asked.tokens}")
    try:
        for policy in policies:
            find_policy(policy, POLICIES)
        for name in ("seeds", "lengths"):
            parse_numbers(getattr(asked, name), name)
    except InputError as error:
        parser.error(str(error))
    return asked


def leave(*_: object) -> None:
    """End as after an exception, so that the programs of a stage end too."""
    sys.exit(143)


def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    for name, stage in STAGES.items():
        if name in asked.stages:
            stage(asked)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: what was done is kept, and the same command goes on from there")
