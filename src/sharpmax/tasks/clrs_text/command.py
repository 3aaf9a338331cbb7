"""``sharpmax clrs-text``: reads arguments, checks them before any work, and makes, checks and shows samples."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ...core.files import write_text
from ...inputs import InputError, check_folder, parse_numbers, user_input
from ...progress import progress_bar
from ...provenance import provenance
from . import shards, upstream
from .benchmark import SPLITS, Split
from .lengths import token_lengths
from .packing import LENGTH
from .text import Sample, generate_samples
from .tokens import CharacterTokenizer, Encoder

ALL = "all"


def generate_command(
    out: Path,
    *,
    split: str = ALL,
    algorithms: str | None = None,
    sizes: str | None = None,
    seeds: str | None = None,
    samples: int | None = None,
    traces: bool = True,
    processes: int | None = None,
    shard: int = shards.SHARD,
) -> list[str]:
    """Make the sets of samples that are asked for, in folders of ``out``, and give what there is to say of each.

    Args:
      out: ``out/train`` and ``out/evaluation`` are made, or completed.
      split: ``train``, ``evaluation``, or ``all`` for both.
      algorithms: some of the thirty, with commas between them.
      sizes: such as ``4,5,10-12``, instead of the benchmark's.
      seeds: the same, for one split.
      samples: for each algorithm, size and seed, instead of the benchmark's.
      traces: with traces or without.
      processes: how many work at the same time; as many as there are cores if not given.
      shard: samples in a file.

    What cannot be used raises :class:`InputError` before any work.
    """
    with user_input():
        if split not in (ALL, *SPLITS):
            raise ValueError(f"expected a split to be one of {', '.join((ALL, *SPLITS))}, got {split!r}")
        if split == ALL and seeds is not None:
            raise ValueError("expected seeds for one split, train or evaluation: both would have the same samples")
        chosen = {
            name: made(traces).only(
                words_of(algorithms),
                None if sizes is None else parse_numbers(sizes, "sizes"),
                seeds=None if seeds is None else parse_numbers(seeds, "seeds"),
                samples=samples,
            )
            for name, made in SPLITS.items()
            if split in (ALL, name)
        }
        upstream.find()
    check_folder(out)
    return [line for name, part in chosen.items() for line in _generate(out, name, part, processes, shard)]


def _generate(out: Path, name: str, split: Split, processes: int | None, shard: int) -> list[str]:
    folder, training = out / name, out / "train"
    against = training if name != "train" and _same_kind(training, split) else None
    with progress_bar(f"{name} samples") as show, user_input():
        try:
            made = shards.generate(
                folder, split=split, processes=processes, shard=shard, against=against, progress=show
            )
        except KeyboardInterrupt:
            print(f"{folder}: shards that are done are kept; the same command goes on from there", file=sys.stderr)
            raise
    return describe(folder, made)


def _same_kind(training: Path, split: Split) -> bool:
    """Whether there is a complete training set whose questions could be the same."""
    try:
        return shards.load_manifest(training)["split"]["traces"] == split.traces
    except ValueError:
        return False


def describe(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """What there is to say of a set of samples."""
    total, distinct = manifest["samples"], manifest["distinct"]
    lines = [
        f"{folder}: {total:,} samples in {len(manifest['shards']):,} shards, {manifest['characters']:,} characters",
        f"  {total - distinct:,} repeat another sample's question ({(total - distinct) / total:.1%})"
        + _most(manifest, lambda row: row["samples"] - row["distinct"]),
    ]
    if against := manifest["against"]:
        seen = against["seen"]
        lines.append(
            f"  {seen:,} have a question of the training set ({seen / total:.1%})"
            + _most(manifest, lambda row: sum(size["seen"] for size in row["sizes"].values()))
        )
    return lines


def _most(manifest: dict[str, Any], count: Any) -> str:
    """The three algorithms with the most of something, in brackets."""
    counts = {name: count(row) for name, row in manifest["algorithms"].items()}
    top = [f"{name} {n:,}" for name, n in sorted(counts.items(), key=lambda item: -item[1])[:3] if n]
    return f"; most: {', '.join(top)}" if top else ""


def verify_command(folder: Path) -> list[str]:
    """Read every shard of a folder; one that is missing or corrupt is named."""
    with user_input(), progress_bar("checking samples") as show:
        return describe(folder, shards.verify(folder, show))


CHARACTER_MODEL = "characters"


def lengths_command(
    model: str, out: Path, *, length: int = LENGTH, samples: int = 8, traces: bool = True, begin: bool | None = None
) -> list[Path]:
    """Count the tokens of samples of both sets and write clrs_text_lengths_MODEL.json into ``out``.

    Args:
      model: ``characters``, a packaged model, a folder, or a model on the Hugging Face hub; only its tokenizer is used.
      out: the folder for the file.
      length: tokens that a sample may have.
      samples: how many of each algorithm and size to look at.
      traces: with traces or without.
      begin: whether documents begin with the token that begins texts; by default as the packaged model wants it.
    """
    with user_input():
        if samples < 1 or length < 2:
            raise ValueError(f"expected at least one sample and two tokens, got {samples} and {length}")
        upstream.find()
        encoder = find_encoder(model, begin=begin)
    check_folder(out)
    found: dict[str, Any] = {"model": Path(model).name, "begin": encoder.begin, "end": encoder.end}
    for name, made in SPLITS.items():
        with progress_bar(f"{name} sizes") as show:
            found[name] = token_lengths(made(traces), encoder, samples=samples, length=length, progress=show)
    path = out / f"clrs_text_lengths_{Path(model).name}.json"
    write_text(path, json.dumps(found | {"provenance": provenance()}, indent=1) + "\n")
    return [path]


def find_encoder(model: str, *, begin: bool | None = None) -> Encoder:
    """The encoder of a model, whose weights are not loaded; a packaged one is converted if it was not yet.

    ``model`` is ``characters`` or what :func:`sharpmax.huggingface.weights.load` takes. A tokenizer that loses
    characters of the benchmark raises ValueError.
    """
    if model == CHARACTER_MODEL:
        return Encoder(CharacterTokenizer(), begin=bool(begin))
    from transformers import AutoTokenizer

    from ...huggingface import weights

    known = weights.MODELS.get(model)
    try:
        where = weights.place(model)
        tokenizer = AutoTokenizer.from_pretrained(where, **weights.reach(where))
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer was found for {model!r}: {' '.join(str(error).split())}") from None
    return Encoder(tokenizer, begin=(known is not None and known.bos) if begin is None else begin)


def show_command(algorithm: str, size: int, *, seed: int = 0, index: int = 0, traces: bool = True) -> Sample:
    """One sample of the benchmark, to look at."""
    with user_input():
        if index < 0:
            raise ValueError(f"expected an index of at least 0, got {index}")
        return next(generate_samples(algorithm, size, seed, start=index, count=1, traces=traces))


def words_of(text: str | None) -> list[str] | None:
    """``"minimum,bfs"`` as words."""
    words = None if text is None else [word.strip() for word in text.split(",")]
    if words is not None and not all(words):
        raise InputError(f"expected names with commas between them, got {text!r}")
    return words
