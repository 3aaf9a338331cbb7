"""What all cells of a comparison share: kept in its folder, so that everything in there can be compared."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax

from ..core.claims import claimed
from ..core.files import write_text
from ..core.policies import Constant
from ..paper.max_retrieval import parse_sizes
from ..paper.published import TABLE1
from ..paper.table1 import SETS
from ..tasks.max_retrieval import PRESETS, Protocol, load_protocol
from ..tasks.max_retrieval.protocol import check_whole

SCHEMA = "sharpmax.leaderboard-settings/1"
FILE = "settings.json"
SEEDS = 10


@dataclass(frozen=True)
class Settings:
    """How every head of a comparison is trained and evaluated.

    Attributes:
      name: what the protocol is called.
      protocol: how heads are trained; the task and the mechanism are those of a cell.
      seeds: how many heads, seeded 0, 1, 2, ...
      sizes: numbers of items to evaluate at, ascending.
      sets: sets for each size and seed.
    """

    name: str
    protocol: Protocol
    seeds: int
    sizes: tuple[int, ...]
    sets: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        fields = {"name": self.name, "seeds": self.seeds, "sizes": list(self.sizes), "sets": self.sets}
        return {"schema": SCHEMA, **fields, "protocol": self.protocol.to_dict()}

    @classmethod
    def from_dict(cls, content: Any) -> Self:
        """What :meth:`to_dict` described."""
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(f"expected settings with the schema {SCHEMA!r}")
        try:
            sizes = parse_sizes(",".join(str(n) for n in content["sizes"]))
            whole = {name: check_whole(content[name], name, 1) for name in ("seeds", "sets")}
            return cls(str(content["name"]), Protocol.from_dict(content["protocol"]), sizes=sizes, **whole)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the settings are not complete: {error}") from None


def load_settings(out: Path) -> Settings | None:
    """The settings of the comparison in ``out``, if one was begun there."""
    try:
        text = (out / FILE).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return Settings.from_dict(json.loads(text))
    except ValueError as error:
        raise ValueError(f"{out / FILE} is not what a comparison left there: {error}") from None


def settle(
    out: Path,
    protocol: str | None = None,
    seeds: int | None = None,
    steps: int | None = None,
    sets: int | None = None,
    sizes: str | None = None,
) -> Settings:
    """The settings of the comparison in ``out``, which is begun if there is none; others than its own are refused.

    What is not given is as it is there, else by default: the protocol ``paper``, ten seeds, the sizes of Table 1, and
    as many sets as Table 1 is made with.
    """
    there = load_settings(out)
    name = protocol if protocol is not None else "paper" if there is None else there.name
    chosen = _protocol(name) if protocol is not None or there is None else there.protocol
    if steps is not None:
        chosen = dataclasses.replace(chosen, steps=steps)
    elif there is not None and protocol is not None:
        chosen = dataclasses.replace(chosen, steps=there.protocol.steps)
    default_sets = SETS.get(jax.default_backend(), SETS["gpu"])
    asked = Settings(
        name=name if name in PRESETS else Path(name).stem,
        protocol=chosen,
        seeds=seeds or (SEEDS if there is None else there.seeds),
        sizes=tuple(sorted(parse_sizes(sizes))) if sizes else (TABLE1.sizes if there is None else there.sizes),
        sets=sets or (default_sets if there is None else there.sets),
    )
    if there is None:
        return asked
    _check_same(there, asked, out)
    return there


def begin(out: Path, settings: Settings) -> None:
    """Write the settings into ``out``; if another process did so meanwhile, they must be the same."""
    with claimed(out, wait=True):
        there = load_settings(out)
        if there is None:
            write_text(out / FILE, json.dumps(settings.to_dict(), indent=1, allow_nan=False) + "\n")
        else:
            _check_same(there, settings, out)


def _protocol(name: str) -> Protocol:
    protocol = load_protocol(name)
    if protocol.mechanism is not None or protocol.task != "max" or protocol.policy != Constant():
        raise ValueError(
            f"expected a protocol without mechanism, policy and task, which a comparison chooses itself, got {name}"
        )
    return protocol


def _check_same(there: Settings, here: Settings, out: Path) -> None:
    """Refuse settings that are not those of the folder; the name of a protocol is no difference."""
    a, b = _flat(there), _flat(here)
    if different := [name for name in a if a[name] != b[name]]:
        said = ", ".join(f"{name} {a[name]!r} there and {b[name]!r} here" for name in different)
        raise ValueError(f"{out} holds another comparison ({said}); choose another folder")


def _flat(settings: Settings) -> dict[str, Any]:
    content = settings.to_dict()
    shared = {name: content[name] for name in ("seeds", "sets")}
    return {**content["protocol"], **shared, "evaluation sizes": content["sizes"]}
