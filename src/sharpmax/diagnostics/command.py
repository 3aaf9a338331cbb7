"""``sharpmax diagnose``: checks what it is given before anything is loaded, measures, and writes the report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

from ..extras import require
from ..inputs import user_input
from .arguments import EPSILON, LONGEST_INPUT, read_arguments
from .progress import progress_bars
from .sources import Prefixes


class Written(NamedTuple):
    """What :func:`diagnose_command` found, in a few lines for the terminal, and the files it wrote."""

    findings: list[str]
    paths: list[Path]


def diagnose_command(
    model: str,
    out: Path,
    *,
    prompts: Path | None = None,
    task: str | None = None,
    text: Path | None = None,
    lengths: str | None = None,
    layers: str | None = None,
    policy: str = "paper",
    count: int = 8,
    seed: int = 0,
    epsilon: float = EPSILON,
    sample: int | None = None,
    device: str | None = None,
    dtype: str = "float32",
) -> Written:
    """Measure how sharp every head of MODEL is on growing inputs, and write a report into the folder ``out``.

    Args:
      model: a packaged model, a folder, or a name on the hub, as for :func:`sharpmax.huggingface.weights.load`;
        or the folder of a run of `sharpmax clrs-text train`.
      out: the folder for report.html, diagnosis.png, .csv and .json; every length is saved there when it is done, so
        the same command goes on where it stopped.
      prompts: a file with a prompt on every line, or a JSON string if it ends in .jsonl; lengths are prefixes in
        tokens.
      task: ``max``, the prompt of Figure 3; lengths are numbers of items. What is taken if nothing is asked for.
      text: a file that is one input; lengths are prefixes in tokens.
      lengths: whole numbers with commas between them.
      layers: the same, or ranges such as ``0-3``; all layers if not given.
      policy: ``paper``, ``paper-held`` or a policy file, JSON.
      count: prompts for each length of a task.
      seed: of the task's prompts.
      epsilon: for the n of Theorem 2.2.
      sample: about how many rows of each input to compute; all if not given.
      device: where to run; a GPU if there is one.
      dtype: of the weights.

    What cannot be used raises :class:`~sharpmax.inputs.InputError`, before PyTorch is imported or the model loaded
    where that can be told.
    """
    with user_input(TypeError, FileNotFoundError):
        asked = read_arguments(
            prompts=prompts, task=task, text=text, lengths=lengths, layers=layers, policy=policy, count=count,
            seed=seed, epsilon=epsilon, sample=sample, dtype=dtype,
        )  # fmt: skip
        source, wanted = asked.source, asked.lengths
        from ..huggingface.weights import model_folder

        name, folder = model_folder(model)
        network, tokenizer = _load(folder, device, dtype)
        from .positions import learned_positions

        _check_layers(network, asked.layers)
        if isinstance(source, Prefixes) and lengths is None:
            longest = min(max(map(len, source.tokens(tokenizer))), learned_positions(network) or LONGEST_INPUT)
            wanted = sorted({min(n, longest) for n in wanted})
        source.check(tokenizer, wanted)
    from . import measure

    inputs = {length: len(source.inputs(tokenizer, length)) for length in wanted}
    with progress_bars(inputs, lambda length: f"{length:,} {source.unit}") as show:
        try:
            with user_input():
                found = measure.diagnose(
                    network, tokenizer, source, wanted, name=name, policy=asked.policy,
                    layers=asked.layers, epsilon=epsilon, sample=sample, out=out, progress=show,
                )  # fmt: skip
        except KeyboardInterrupt:
            print(f"{out}: lengths that are done are saved; the same command goes on from there", file=sys.stderr)
            raise
    return Written(found.findings, found.save(out))


def _load(model: str, device: str | None, dtype: str) -> tuple[Any, Any]:
    require("matplotlib", "experiments", "Drawing figures")
    for package in ("torch", "transformers"):
        require(package, "huggingface", "Running a model")
    import torch

    from ..core.policies import Constant
    from ..huggingface import sharpen
    from ..huggingface.weights import load

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=where).item()
    except (RuntimeError, AssertionError):
        raise ValueError(f"expected a device that torch has here, got {where!r}") from None
    network: Any
    network, tokenizer = load(model, dtype=dtype)
    if network.config.is_encoder_decoder:
        raise ValueError(
            f"{model} has an encoder and a decoder, which take two inputs: run it within sharpmax.diagnostics.record"
        )
    with sharpen(network, Constant(1)):
        pass
    return network.to(where), tokenizer


def _check_layers(network: Any, layers: list[int] | None) -> None:
    known = sorted({m.layer_idx for m in network.modules() if isinstance(getattr(m, "layer_idx", None), int)})
    if layers and known and (unknown := [layer for layer in layers if layer not in known]):
        raise ValueError(f"expected layers from {known[0]} to {known[-1]}, got {', '.join(map(str, unknown))}")
