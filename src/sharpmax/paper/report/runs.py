"""What was run: commands, devices, versions and commits of the exhibits, and how the heads were trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .tags import escape, grid, row, tag

UNKNOWN = "not recorded"


class Origin(NamedTuple):
    """What made an exhibit, as HTML."""

    title: str
    time: str
    command: str
    where: tuple[tuple[str, str], ...]
    """Device, commit and versions: a term and a text each."""


def origin(title: str, provenance: Mapping[str, Any]) -> Origin:
    """What made the exhibit called ``title``."""
    versions = ", ".join(f"{package} {version}" for package, version in (provenance.get("versions") or {}).items())
    where = {
        "Device": escape(device(provenance)),
        "Commit": commit(provenance),
        "Versions": escape(versions or UNKNOWN),
    }
    time = str(provenance.get("time", UNKNOWN)).replace("T", " ").replace("+00:00", " UTC")
    return Origin(escape(title), escape(time), command(provenance), tuple(where.items()))


def runs(origins: Iterable[Origin]) -> str:
    """Where exhibits come from; those of one device, commit and versions share an entry."""
    groups: dict[tuple[tuple[str, str], ...], list[Origin]] = {}
    for made in origins:
        groups.setdefault(made.where, []).append(made)
    return "\n".join(_entry(group) for group in groups.values())


def _entry(group: Sequence[Origin]) -> str:
    times = [made.time for made in group]
    lines = {
        "Exhibits": "; ".join(made.title for made in group),
        "Command": "<br>".join(dict.fromkeys(made.command for made in group)),
        "Finished": min(times) if min(times) == max(times) else f"{min(times)} to {max(times)}",
        **dict(group[0].where),
    }
    return tag("dl", *(tag("div", tag("dt", term), tag("dd", text)) for term, text in lines.items()), class_="run")


def command(provenance: Mapping[str, Any]) -> str:
    """The command line."""
    words = provenance.get("command")
    return shell(" ".join(words)) if words else UNKNOWN


def shell(line: str) -> str:
    """A command line that breaks between its words and nowhere else."""
    return tag("code", " ".join(tag("span", escape(word)) for word in line.split(" ")))


def device(provenance: Mapping[str, Any]) -> str:
    """The GPUs, or the processor where there are none."""
    found = provenance.get("device") or {}
    if gpus := found.get("gpus"):
        counted = (f"{gpus.count(name)} x {name}" if gpus.count(name) > 1 else name for name in dict.fromkeys(gpus))
        return ", ".join(counted)
    return f"{found['cpu']}, {found.get('cores', '?')} cores" if found.get("cpu") else UNKNOWN


def commit(provenance: Mapping[str, Any]) -> str:
    """The commit, and whether sources were changed since."""
    git = provenance.get("git")
    if not git:
        return UNKNOWN
    changed = {True: ", with changes", False: "", None: " (changes not recorded)"}[git.get("dirty")]
    return tag("code", escape(git["commit"][:10]), title=git["commit"]) + changed


def heads_table(heads: Sequence[tuple[str, dict[str, str], Mapping[str, Any]]]) -> str:
    """Names, :func:`training` and protocols of heads side by side, and the settings of the protocols."""
    names, trained, protocols = zip(*heads, strict=True)
    named = [escape(name) for name in names]
    rows = [row(term, [column[term] for column in trained]) for term in trained[0]]
    return grid(
        ["Heads", *named],
        tag("tbody", *rows),
        legend="How the heads of Table 1 were trained and evaluated. The time is that of all seeds together.",
        label="The trained heads",
        class_="words",
    ) + _settings(named, protocols)


def training(data: Mapping[str, Any]) -> dict[str, str]:
    """How the heads of a Table 1 were trained and evaluated: a term and a text each."""
    trained, protocol, fit = data["training"], data["protocol"], data["fit"]
    provenance = trained.get("provenance") or {}
    return {
        "Command": command(provenance),
        "Seeds": f"{len(data['seeds'])}",
        "Steps": f"{trained['step']:,}, each on {protocol['batch']:,} sets",
        "Sizes": "{} to {} items".format(*protocol["sizes"]),
        "Time": f"{trained['seconds']:,.0f} s",
        "Device": escape(device(provenance)),
        "Commit": commit(provenance),
        "Evaluation": f"{data['sets']:,} sets for each seed and size from {_range(data['sizes'])} items",
        "Refitted on": f"{fit['sets']:,} validation sets for each seed and size from {_range(fit['sizes'])} items",
    }


def _range(sizes: Sequence[int]) -> str:
    return f"{min(sizes):,} to {max(sizes):,}"


def _settings(named: Sequence[str], protocols: Sequence[Mapping[str, Any]]) -> str:
    """Settings of the protocols side by side; those that differ stand out."""
    rows = []
    for name in dict.fromkeys(key for protocol in protocols for key in protocol if key != "schema"):
        texts = [escape(_value(protocol.get(name))) for protocol in protocols]
        bold = [tag("b", text) for text in texts]
        rows.append(row(escape(name.replace("_", " ")), texts if len(set(texts)) == 1 else bold))
    inner = grid(
        ["Setting", *named],
        tag("tbody", *rows),
        legend="The protocols. <b>Bold</b>: settings that differ." if len(protocols) > 1 else "The protocol.",
        label="Settings of training",
        class_="words",
    )
    return tag("details", tag("summary", "Settings of training"), inner)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value(entry)}" for key, entry in value.items() if key != "schema")
    if isinstance(value, list):
        return ", ".join(_value(entry) for entry in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return "none" if value is None else str(value)
