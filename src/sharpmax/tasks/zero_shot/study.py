"""A study: what is measured of one model, kept in its folder, so that everything in there can be compared.

FOLDER/study.json                   the model, its context and weights, and all that was asked for so far
FOLDER/sharp_heads.json             the sharp heads
FOLDER/TASK_SIZE_POLICY.json        a cell
FOLDER/.claims/CELL/                the lock of whoever works on a cell
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple, Self

from ...core.claims import claimed
from ...core.files import write_text
from . import measures, policies

SCHEMA = "sharpmax.zero-shot/1"
FILE = "study.json"
TASKS = {
    "perplexity": "perplexity of a text, by tokens",
    "needle": "numbers found in a text, by tokens",
    "maximum": "the largest of a list, by items",
}


class Cell(NamedTuple):
    """One number of the study; the sharp heads, which all others share, are one of its own."""

    task: str
    size: int = 0
    policy: str = ""

    def __str__(self) -> str:
        return f"{self.task}_{self.size}_{self.policy}" if self.size else f"sharp_{self.task}"

    def file(self, folder: Path) -> Path:
        """Where it is kept."""
        return folder / f"{self}.json"

    def claim(self, folder: Path) -> Path:
        """What is locked by whoever measures it."""
        return folder / ".claims" / str(self)


HEADS = Cell("heads")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured, and of what size; the same settings give the same cells."""

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    """Tokens of stretches of text and of needle prompts. The longest decides which tokens of the text are predicted."""

    items: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)
    """Items of maximum prompts."""

    tasks: tuple[str, ...] = tuple(TASKS)
    policies: tuple[str, ...] = tuple(policies.CHOICES)
    segments: int = 16
    prompts: int = 100
    shots: int = 5
    """Solved examples before a maximum prompt."""

    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.policies if name not in policies.CHOICES]
        if unknown or not self.policies:
            raise ValueError(f"expected policies of {', '.join(policies.CHOICES)}, got {', '.join(unknown) or 'none'}")
        unknown = [name for name in self.tasks if name not in TASKS]
        if unknown or not self.tasks:
            raise ValueError(f"expected tasks of {', '.join(TASKS)}, got {', '.join(unknown) or 'none'}")
        if not self.lengths or min(self.lengths) < 128:
            raise ValueError(f"expected lengths of at least 128 tokens, got {min(self.lengths, default=0)}")
        if not self.items or min(self.items) < 1:
            raise ValueError(f"expected numbers of items of at least 1, got {min(self.items, default=0)}")

    @property
    def targets(self) -> int:
        """Tokens that are predicted at the end of every stretch of text, the same ones for every length."""
        return min(measures.TARGETS, min(self.lengths) // 2)

    @property
    def longest(self) -> int:
        """The longest of all lengths."""
        return max(self.lengths)

    def cells(self) -> list[Cell]:
        """All cells, in the order in which they are measured."""
        sizes = {task: self.items if task == "maximum" else self.lengths for task in TASKS if task in self.tasks}
        return [Cell(task, size, policy) for task in sizes for size in sizes[task] for policy in self.policies]


QUICK = Settings(
    lengths=(256, 512), items=(4, 16), policies=("off", "paper", "held", "paper_sharp"), segments=2, prompts=6
)
"""A few minutes on a CPU: whether it works, not what comes out."""


@dataclasses.dataclass(frozen=True)
class Study:
    """A model, and what is asked of it.

    Attributes:
      model, context: its name, and the tokens that it was trained for.
      weights, dtype: a hash of its parameters, and their type.
      text, text_tokens: a hash of the text whose perplexity is measured, and its length.
      settings: all sizes and policies that were asked for so far.
    """

    model: str
    context: int
    weights: str
    dtype: str
    text: str
    text_tokens: int
    settings: Settings

    def decides(self, cell: Cell) -> dict[str, Any]:
        """What decides the numbers of a cell: a file that says otherwise is refused."""
        settings = self.settings
        shared: dict[str, Any] = {"model": self.model, "weights": self.weights, "dtype": f"torch.{self.dtype}"}
        shared |= {"seed": settings.seed, "shots": settings.shots}
        if cell.task == "perplexity":
            shared |= {"segments": settings.segments, "longest": settings.longest, "targets": settings.targets}
            shared |= {"text": self.text}
        elif cell != HEADS:
            shared |= {"prompts": settings.prompts}
        return shared | cell._asdict()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, content: Any) -> Self:
        """What :meth:`to_dict` described."""
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA!r}")
        try:
            fields = {name: value for name, value in content.items() if name != "schema"}
            settings: dict[str, Any] = fields.pop("settings")
            settings = {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}
            return cls(**fields, settings=Settings(**settings))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it is not complete: {error}") from None


def load_study(folder: Path) -> Study | None:
    """The study that was begun in ``folder``, if one was."""
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return Study.from_dict(json.loads(text))
    except ValueError as error:
        raise ValueError(f"{folder / FILE} is not what a study left there: {error}") from None


def read_cell(cell: Cell, folder: Path, study: Study) -> dict[str, Any] | None:
    """What the file of a cell holds, if there is one; it must be of this study."""
    path = cell.file(folder)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known, _, _ = (content[name] for name in ("settings", "result", "provenance"))
        asked = study.decides(cell)
        other = sorted(name for name in {**known, **asked} if known.get(name) != asked.get(name))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not what a study left there ({type(error).__name__}: {error}): remove it to measure it again"
        ) from None
    if other:
        raise ValueError(
            f"{folder} holds results with other {', '.join(other)} ({path.name}): choose another folder, or remove them"
        )
    return content


def settle(folder: Path, quick: bool = False, **given: Any) -> Settings:
    """What to measure: what is given, and for the rest what the study in ``folder`` has, else the defaults.

    A part of the study may be asked for, and tasks, sizes and policies that it does not have yet. Lengths beyond its
    longest, or so short that fewer tokens could be predicted, would change which tokens are predicted, and are refused.
    """
    there = load_study(folder)
    base = QUICK if quick else Settings() if there is None else there.settings
    asked = dataclasses.replace(base, **{name: value for name, value in given.items() if value is not None})
    if there is not None:
        merged(there.settings, asked, folder)
    return asked


def begin(folder: Path, study: Study) -> Study:
    """Write ``study`` into ``folder``, together with what was asked for before; it must be of the same model."""
    with claimed(folder, wait=True):
        there = load_study(folder)
        if there is not None:
            names = [field.name for field in dataclasses.fields(Study) if field.name != "settings"]
            if other := [name for name in names if getattr(there, name) != getattr(study, name)]:
                raise ValueError(f"{folder} holds a study with other {', '.join(other)}: choose another folder")
            study = dataclasses.replace(study, settings=merged(there.settings, study.settings, folder))
        if study != there:
            write_text(folder / FILE, json.dumps(study.to_dict(), indent=1) + "\n")
    return study


def merged(there: Settings, asked: Settings, folder: Path) -> Settings:
    """The settings of a study and of what is asked now, together."""
    for name in ("segments", "prompts", "shots", "seed"):
        if (old := getattr(there, name)) != (new := getattr(asked, name)):
            raise ValueError(f"{folder} holds a study with {name} {old}, got {new}: choose another folder")
    if asked.longest > there.longest or asked.targets < there.targets:
        raise ValueError(
            f"expected lengths from {2 * there.targets:,} to {there.longest:,}, as the study in {folder} predicts the "
            f"last {there.targets} of {there.longest:,} tokens, got {min(asked.lengths):,} to {asked.longest:,}: "
            "choose another folder"
        )
    return dataclasses.replace(
        there,
        lengths=tuple(sorted({*there.lengths, *asked.lengths})),
        items=tuple(sorted({*there.items, *asked.items})),
        tasks=tuple(name for name in TASKS if name in {*there.tasks, *asked.tasks}),
        policies=tuple(name for name in policies.CHOICES if name in {*there.policies, *asked.policies}),
    )
