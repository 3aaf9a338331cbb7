"""Heads trained on max retrieval as exhibits use them: which checkpoint, and the policy that Appendix F fits to it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core.policies import EntropyPolynomial
from ..tasks.max_retrieval import PRESETS, Checkpoint, Samples, collect, load_checkpoint, load_protocol

SHIPPED = Path(__file__).resolve().parents[3] / "checkpoints" / "max_retrieval"
"""Where a checkout of the repository has trained heads, by protocol; an installed package has none."""

FIT_SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Where optimal temperatures are looked for, unless other sizes are asked for."""

FIT_SETS = 64
"""Validation sets for each size and seed."""

LARGEST_FIT_SIZE, ENOUGH_SAMPLES = 16_384, 100
"""Heads that seldom err give few samples: sizes are doubled up to the first until there are as many as the second."""

DEGREE, SAMPLES_PER_DEGREE = 4, 10
"""Degree of the paper's polynomial; with fewer samples than this for each degree it is lowered."""

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


@dataclass(frozen=True)
class Fitted:
    """The samples of Appendix F, and the polynomial through them, which holds its value beyond their range.

    Attributes:
      samples: pairs of entropy and optimal beta, of all heads.
      sets: validation sets for each size and seed.
      polynomial: one for all heads.
      notes: where it was not done as asked: sizes that were added, a degree that was lowered.
    """

    samples: Samples
    sets: int
    polynomial: EntropyPolynomial
    notes: tuple[str, ...]

    @property
    def kept(self) -> int:
        """How many samples there are."""
        return len(self.samples.betas)

    def to_dict(self) -> dict[str, Any]:
        """What to report, for JSON."""
        polynomial = self.polynomial
        return {
            "data": "validation sets, separate from those of training and evaluation; one polynomial for all seeds",
            "sizes": list(self.samples.sizes),
            "sets": self.sets,
            "counts": {str(n): dict(counts) for n, counts in self.samples.counts.items()},
            "kept": self.kept,
            "coefficients": list(polynomial.coefficients),
            "domain": None if polynomial.domain is None else list(polynomial.domain),
            "notes": list(self.notes),
        }


def fit(
    checkpoint: Checkpoint,
    sizes: Sequence[int] | None = None,
    sets: int = FIT_SETS,
    progress: Callable[[int], None] | None = None,
) -> Fitted:
    """Fit one polynomial to all heads (Appendix F).

    Args:
      checkpoint: the heads.
      sizes: numbers of items of the validation sets. Without, :data:`FIT_SIZES`, and larger ones for heads that
        err too seldom there.
      sets: validation sets for each size and seed.
      progress: called with every size before it is worked on.
    """
    samples, notes = None, []
    for n in FIT_SIZES if sizes is None else sizes:
        samples = _with_size(checkpoint, samples, n, sets, progress)
    assert samples is not None
    if sizes is None:
        first = f"sizes up to {FIT_SIZES[-1]:,} gave {len(samples.betas)} samples"
        while len(samples.betas) < ENOUGH_SAMPLES and samples.sizes[-1] < LARGEST_FIT_SIZE:
            samples = _with_size(checkpoint, samples, 2 * samples.sizes[-1], sets, progress)
        if samples.sizes != FIT_SIZES:
            notes.append(f"{first}, so sizes up to {samples.sizes[-1]:,} were added: {len(samples.betas)} in all")
    distinct = len(np.unique(samples.entropies))
    degree = min(DEGREE, len(samples.betas) // SAMPLES_PER_DEGREE, max(distinct - 1, 0))
    if not distinct:
        notes.append("the true maximum had the largest logit in every set, so there is nothing to fit: beta is 1")
        return Fitted(samples, sets, EntropyPolynomial((1.0,)), tuple(notes))
    if degree < DEGREE:
        notes.append(f"{len(samples.betas)} samples are too few for degree {DEGREE}; the polynomial has {degree}")
    return Fitted(samples, sets, samples.fit(degree), tuple(notes))


def _with_size(
    checkpoint: Checkpoint, before: Samples | None, n: int, sets: int, progress: Callable[[int], None] | None
) -> Samples:
    if progress is not None:
        progress(n)
    new = collect(checkpoint.params, checkpoint.seeds, (n,), sets)
    if before is None:
        return new
    arrays = ("entropies", "betas", "seed", "size")
    return dataclasses.replace(
        before,
        **{name: np.concatenate([getattr(before, name), getattr(new, name)]) for name in arrays},
        counts=before.counts | new.counts,
        sizes=before.sizes + new.sizes,
    )
