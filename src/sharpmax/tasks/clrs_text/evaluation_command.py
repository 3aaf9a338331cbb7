"""``sharpmax clrs-text evaluate``: reads arguments, checks them before any work, and asks a model every question."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...inputs import InputError, check_folder, parse_numbers, user_input
from ...progress import progress_bar
from . import accuracy, upstream
from .command import words_of
from .models import check_length
from .outcomes import FILE, training_seeds, training_summary
from .packing import LENGTH

DTYPES = ("float32", "bfloat16", "float16")
RUN_FILES = ("training.json", "checkpoint.json", "log.jsonl")
"""What a training run leaves in its folder."""


def evaluate_command(
    model: str,
    out: Path,
    *,
    algorithms: str | None = None,
    sizes: str | None = None,
    seeds: str | None = None,
    samples: int | None = None,
    traces: bool | None = None,
    length: int = LENGTH,
    dtype: str | None = None,
    device: str | None = None,
    memory: float | None = None,
) -> list[str]:
    """Ask a model the questions of the evaluation set, write ``out/evaluation.json``, and give what there is to say.

    Args:
      model: a packaged model, a folder, or a model on the Hugging Face hub; or the folder of a training run. Policies
        that it was saved with are on; without any, it has plain softmax.
      out: folder for what is found; what is there already is not asked again.
      algorithms: some of the thirty, with commas between them.
      sizes: such as ``4,5,10-12``, instead of the benchmark's.
      seeds: the same.
      samples: of each algorithm, size and seed, instead of the benchmark's 125.
      traces: with traces or without; by default as the model was trained, which nothing else may contradict.
      length: tokens that a question and its answer may have together; longer ones are left out and counted.
      dtype: of the weights; by default bfloat16 on a GPU and float32 elsewhere.
      device: where to run; a GPU if there is one.
      memory: the part of a GPU's free memory that keys and values may take: less where others begin beside it.

    What cannot be used raises :class:`InputError` before any work.
    """
    given: dict[str, Any] = {"samples": samples}
    with user_input():
        given["algorithms"] = None if algorithms is None else tuple(words_of(algorithms) or ())
        given |= {"sizes": _tuple(sizes, "sizes"), "seeds": _tuple(seeds, "seeds")}
        known = {key: value for key, value in given.items() if value is not None}
        settings = accuracy.Settings(traces=traces is not False, length=length, **known)
        if dtype not in (None, *DTYPES):
            raise ValueError(f"expected dtype to be one of {', '.join(DTYPES)}, got {dtype!r}")
        if memory is not None and not 0 < memory < 1:
            raise ValueError(f"expected a part of the memory between 0 and 1, got {memory}")
        if found := [file for file in RUN_FILES if (out / file).exists()]:
            raise ValueError(f"expected a folder for an evaluation, got {str(out)!r}, a training run with {found[0]}")
        upstream.find()
    check_folder(out)
    with user_input():
        from ...huggingface.weights import model_folder

        name, folder = model_folder(model)
        training = training_summary(folder)
        settings = replace(settings, traces=_traces(traces, training))
        network, encoder = find_subject(folder, dtype, device)
        check_length(network, settings.length)
        accuracy.known_cells(out, accuracy.describe(network, encoder, name), settings)
    for line in notes(name, settings, training):
        print(line, file=sys.stderr)
    import torch

    with progress_bar("answers") as show:
        try:
            report = accuracy.evaluate(
                network, encoder, settings, out, show, name=name, training=training, memory=memory
            )
        except KeyboardInterrupt:
            print(f"{out}: cells that are done are kept; the same command goes on from there", file=sys.stderr)
            raise
        except torch.OutOfMemoryError as error:
            raise InputError(
                "the device has no memory for this: free some, or take a smaller --length or --dtype bfloat16; cells "
                "that are done are kept"
            ) from error
    return describe(report, out)


def _tuple(text: str | None, what: str) -> tuple[int, ...] | None:
    return None if text is None else tuple(parse_numbers(text, what))


def _traces(asked: bool | None, training: dict[str, Any] | None) -> bool:
    """Whether to ask with traces."""
    trained = None if training is None else training["settings"]["traces"]
    if trained is None:
        return asked is not False
    if asked not in (None, trained):
        words = {True: "with traces", False: "without traces"}
        raise ValueError(f"expected questions {words[trained]}, as in the model's training, got {words[not trained]}")
    return trained


def notes(name: str, settings: accuracy.Settings, training: dict[str, Any] | None) -> list[str]:
    """What is taken for granted of a model's training, and where questions are not those of a test."""
    lines = []
    if training is None:
        lines.append(f"{name}: nothing is known of its training; the benchmark's training sizes are taken for its own")
    elif settings.length > training["settings"]["length"]:
        lines.append(
            f"{name}: samples may have {settings.length:,} tokens, and training had sequences of "
            f"{training['settings']['length']:,}"
        )
    if shared := sorted(set(settings.seeds) & set(training_seeds(training))):
        lines.append(f"{name}: at training sizes, samples of seed {shared[0]} are those of training")
    return lines


def find_subject(model: str, dtype: str | None = None, device: str | None = None) -> tuple[Any, Any]:
    """A model with its stored policies on, plain softmax where it has none, and the encoder of its tokenizer."""
    import torch

    from ...core.policies import Constant
    from ...huggingface import sharpen, stored_rules
    from ...huggingface.ready import layer_windows
    from ...huggingface.weights import load
    from .models import encoder_for

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=where).item()
    except (RuntimeError, AssertionError):
        raise ValueError(f"expected a device that torch has here, got {where!r}") from None
    network: Any
    network, tokenizer = load(
        model, dtype=dtype or ("bfloat16" if where.startswith("cuda") else "float32"), attn_implementation="sharpmax"
    )
    if network.config.is_encoder_decoder or not network.can_generate():
        raise ValueError(f"expected a model that continues a text, got {model!r}, a {type(network).__name__}")
    layer_windows(network.config)
    if stored_rules(network) is None:
        sharpen(network, Constant(1.0))
    return network.to(where), encoder_for(tokenizer)


def describe(report: dict[str, Any], out: Path) -> list[str]:
    """What there is to say of an evaluation."""
    rows = [row for entry in report["algorithms"].values() for row in entry["sizes"].values()]
    speed, shares = report["throughput"], report["accuracy"]
    too_long, cut = (sum(row[key] for row in rows) for key in ("too_long", "cut"))
    lines = [
        f"{report['model']['name']}: {speed['samples']:,} samples of {len(report['algorithms'])} algorithm"
        f"{'s' * (len(report['algorithms']) != 1)}, "
        f"{too_long:,} more are longer than {report['settings']['length']:,} tokens and left out",
        *(
            f"  right at {what}: {_percent(shares[key])}, the mean over algorithms"
            for key, what in (("in_distribution", "training sizes"), ("out_of_distribution", "other sizes"))
        ),
        f"  {cut:,} replies were cut off, a quarter longer than the answer",
    ]
    if speed["samples_per_second"]:
        lines.append(
            f"  {speed['generated_tokens_per_second']:,.0f} generated tokens/s, {speed['samples_per_second']:,.1f} "
            f"samples/s, {speed['seconds']:,.0f} s in all"
        )
    return [*lines, str(out / FILE)]


def _percent(share: float | None) -> str:
    return "no sample" if share is None else f"{share:.1%}"
