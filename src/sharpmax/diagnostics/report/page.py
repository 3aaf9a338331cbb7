"""The page: page.html has text and frames, into which the scripts draw from the data that the page carries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from ..summary import METRICS
from .findings import SINK, Heads, counted, fastest, sentences, sharpest, start, where_read

UNKNOWN = "not recorded"
SCRIPTS = ("page.js", "map.js", "curves.js", "tables.js", "row.js", "controls.js")
"""The page's script, in the order in which it runs."""


def page(data: Mapping[str, Any]) -> str:
    """The whole page, which needs no other file and no network."""
    heads = Heads(data)
    first = heads.heads[start(heads)]
    carried = {key: data[key] for key in ("source", "lengths", "columns", "rows", "attention", "epsilon")}
    carried |= {"start": "{}.{}".format(*first), "sink": SINK}
    content = json.dumps(carried, allow_nan=False, separators=(",", ":"))
    name, layers = escape(data["model"]["name"]), len({layer for layer, _ in heads.heads})
    size = f"{counted(layers, 'layer')} with {counted(len(heads.heads), 'attention head')}"
    return Template(_beside("page.html")).substitute(
        css=_beside("page.css"),
        js="".join(map(_beside, SCRIPTS)),
        data=content.replace("<", "\\u003c"),
        name=name,
        standfirst=f"{size}, {_inputs(heads)}. {_how(heads)}",
        cards=_cards(heads),
        findings="".join(f"<li>{escape(sentence)}</li>" for sentence in sentences(heads)),
        many=" many" if 1 + max(head for _, head in heads.heads) > 16 else "",
        growing="" if len(heads.lengths) > 1 else "hidden",
        order="Sharpness at the longest input" + (", and how fast it is lost." if len(heads.lengths) > 1 else "."),
        policy=escape(policy_name(data["policy"])),
        epsilon=f"{data['epsilon']:g}",
        terms="".join(f"<div><dt><code>{k}</code></dt><dd>{escape(v)}</dd></div>" for k, v in METRICS.items()),
        run=_run(data),
    )


def policy_name(policy: Mapping[str, Any]) -> str:
    """A policy in a few words."""
    from ...core.policies import PAPER, PAPER_HELD, policy_from_dict

    known = {PAPER: "the paper's polynomial (PAPER)", PAPER_HELD: "the paper's polynomial, held at its peak"}
    found = policy_from_dict(dict(policy))
    return known.get(found, str(policy["kind"]))


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _inputs(heads: Heads) -> str:
    source = heads.data["source"]
    if source["kind"] == "max":
        each = " for each length" if len(heads.lengths) > 1 else ""
        return f"on {counted(source['prompts'], 'prompt')} of {heads.span}{each}"
    lines = f"{source['texts']:,} lines of " if source["texts"] > 1 else ""
    return f"on the first {heads.span} of {lines}<code>{escape(source['name'])}</code>"


def _how(heads: Heads) -> str:
    if heads.data["source"]["kind"] == "max":
        return f"The prompt is that of the paper's Figure 3: <q>{escape(heads.data['source']['example'])}</q>"
    grows = ", and what happens as the input grows" if len(heads.lengths) > 1 else ""
    return f"How sharp is each of them{grows}?"


def _cards(heads: Heads) -> str:
    share = heads.read("normalised")[-1]
    cards = [
        ("The average head", f"{np.nanmean(share):.0%}", f"of the entropy of uniform attention, {where_read(heads)}")
    ]
    best, worst = sharpest(heads, 1)[0], fastest(heads)
    about = f"{heads.name(best)}: the sharpest" + ("" if heads.sinks()[best] else " that is no attention sink")
    cards.append(("The sharpest head", f"{heads.read('entropy')[-1][best]:.2f}<small>nats</small>", about))
    if worst is not None:
        gain = heads.slopes()[worst]
        if round(gain, 2) > 0:
            what = f"+{gain:.2f}<small>nats</small>"
            about = f"as n grows e-fold (uniform attention: 1): {heads.name(worst)}"
        else:
            what, about = "none", "no head gains entropy as n grows"
        cards.append(("Loses it fastest", what, about))
    spread = heads.over_heads(f"spread_{heads.reading}")[-1]
    about = f"logit spread δ of a head, from {spread.lowest:.2f} to {spread.highest:.2f}"
    cards.append(("Average spread", f"{spread.average:.2f}<small>± {spread.deviation:.2f}</small>", about))
    return "".join(
        f'<div class="card"><p class="what">{what}</p><p class="number">{number}</p><p class="about">{about}</p></div>'
        for what, number, about in cards
    )


def _run(data: Mapping[str, Any]) -> str:
    origin, model = data["provenance"], data["model"]
    git = origin.get("git") or {}
    commit = git.get("commit") or UNKNOWN
    device = origin["device"]
    lines = {
        "Model": f"{model['name']}, {model['class']}, {model['parameters']:,} parameters, {model['dtype']}",
        "Command": " ".join(origin["command"]) or UNKNOWN,
        "Finished": origin["time"].replace("T", " ").replace("+00:00", " UTC"),
        "Device": ", ".join(device["gpus"]) or f"{device['cpu']}, {device['cores']} cores",
        "Commit": commit + (", with changes" if git.get("dirty") else ""),
        "Versions": ", ".join(f"{package} {version}" for package, version in origin["versions"].items()),
    }
    return "".join(f"<div><dt>{term}</dt><dd>{escape(text)}</dd></div>" for term, text in lines.items())
