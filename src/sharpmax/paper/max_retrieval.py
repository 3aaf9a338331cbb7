"""Heads trained on max retrieval as exhibits use them: which checkpoint, and what to call it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from ..tasks.max_retrieval import PRESETS, Checkpoint, load_checkpoint, load_protocol

SHIPPED = Path(__file__).resolve().parents[3] / "checkpoints" / "max_retrieval"
"""Where a checkout of the repository has trained heads, by protocol; an installed package has none."""

LARGEST_SIZE = 1 << 24
"""Priorities are multiples of 2**-24: a larger set must have equal ones."""


class Heads(NamedTuple):
    """Trained heads and what to call them.

    A preset's name is that of its heads after all of its steps. After another number of steps that is said with it;
    other heads have the name of the protocol's file or of their folder.
    """

    name: str
    checkpoint: Checkpoint


def find_heads(protocol: str | None, directory: Path | None) -> Heads:
    """The heads in ``directory``, or those shipped for ``protocol``; both given, the one must be of the other."""
    if directory is not None:
        checkpoint = load_checkpoint(directory)
        if checkpoint.protocol.task != "max" or checkpoint.protocol.mechanism is not None:
            raise ValueError(
                f"{directory} holds heads of another task or mechanism; exhibits are about max retrieval with softmax"
            )
        if protocol is None:
            same = (name for name, preset in PRESETS.items() if not _differences(checkpoint, preset))
            return Heads(_name(next(same, directory.resolve().name), checkpoint), checkpoint)
        if different := _differences(checkpoint, load_protocol(protocol)):
            raise ValueError(f"{directory} was not trained with the protocol {protocol}: {', '.join(different)} differ")
        return Heads(_name(protocol if protocol in PRESETS else Path(protocol).stem, checkpoint), checkpoint)
    name = "paper" if protocol is None else protocol
    load_protocol(name)
    if name not in PRESETS or not (SHIPPED / name).is_dir():
        raise ValueError(
            f"no trained heads come with the protocol {name} here; name some with --checkpoint, "
            f"or train them with 'sharpmax train max-retrieval --protocol {name} --out DIR'"
        )
    return find_heads(name, SHIPPED / name)


def file_name(exhibit: str, heads: Heads) -> str:
    """What the files of an exhibit of these heads are called: that of the protocol ``paper`` has the plain name."""
    return exhibit if heads.name == "paper" else f"{exhibit}_{heads.name}"


def _differences(checkpoint: Checkpoint, protocol: Any) -> list[str]:
    """Fields in which the checkpoint's protocol is another one; fewer steps are no other protocol."""
    there, here = checkpoint.protocol.to_dict(), protocol.to_dict()
    return [name for name in here if name != "steps" and here[name] != there[name]]


def _name(name: str, checkpoint: Checkpoint) -> str:
    """``name`` for a file; that of a preset is kept for what it stands for."""
    protocol, preset = checkpoint.protocol, PRESETS.get(name)
    if preset is None or (protocol == preset and checkpoint.finished):
        return _word(name)
    if _differences(checkpoint, preset):
        return f"heads_{name}"
    return f"{name}_{checkpoint.step}{'' if checkpoint.finished else f'_of_{protocol.steps}'}_steps"


def _word(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text) or "heads"


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes as they are written on the command line, ``16,32,64``."""
    words = [word.strip() for word in text.split(",")]
    sizes = tuple(int(word) if re.fullmatch(r"[0-9]{1,8}", word) else 0 for word in words)
    if any(not 2 <= n <= LARGEST_SIZE for n in sizes) or len(set(sizes)) != len(sizes):
        raise ValueError(
            f"expected sizes to be different whole numbers from 2 to {LARGEST_SIZE:,} with commas between them, "
            f"as in 16,32,64, got {text!r}"
        )
    return sizes
