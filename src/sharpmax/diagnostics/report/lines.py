"""The findings in a few lines for the terminal."""

from __future__ import annotations

from .findings import FAST, Heads, counted, fastest, gaining, own, sharpest, theorem, where_read

SHARPEST = 3
"""How many of the sharpest heads are named."""


def lines(heads: Heads) -> list[str]:
    """What was found, in plain characters: what was measured, and a few lines for each finding."""
    said = {
        "own policy": _own(heads),
        "sharpest": _sharpest(heads),
        "losing it": _losing(heads),
        "logit spread": _spread(heads),
        "Theorem 2.2": _theorem(heads),
    }
    indented = [f"  {'' if i else what:<13} {line}" for what, several in said.items() for i, line in enumerate(several)]
    return [_about(heads), *indented]


def _about(heads: Heads) -> str:
    layers = len({layer for layer, _ in heads.heads})
    size = f"{counted(layers, 'layer')}, {counted(len(heads.heads), 'head')}"
    return f"{heads.data['model']['name']}: {size}, {heads.span}, read {where_read(heads)}"


def _own(heads: Heads) -> list[str]:
    found = own(heads)
    if found is None:
        return []
    which = "" if found.heads == len(heads.heads) else f" in {counted(found.heads, 'head')}"
    return [f"entropy {found.after:.2f} nats on average after beta{which}, {found.before:.2f} before"]


def _sharpest(heads: Heads) -> list[str]:
    entropy, share = heads.read("entropy")[-1], heads.read("normalised")[-1]
    named = [f"{heads.name(i)}: {entropy[i]:.2f} nats, {share[i]:.0%} of uniform" for i in sharpest(heads, SHARPEST)]
    sinks, total = int(heads.sinks().sum()), len(heads.heads)
    if not sinks:
        return named
    about = "and not ranked" if sinks < total else "so they are ranked all the same"
    verb = "is an attention sink" if sinks == 1 else "are attention sinks"
    return [*named, f"({sinks} of {counted(total, 'head')} {verb}, {about})"]


def _losing(heads: Heads) -> list[str]:
    worst = fastest(heads)
    if worst is None:
        return []
    said, fast = gaining(heads)
    return [
        f"{said}, {fast} of them {FAST:g} nats or more per e-fold of n (uniform: 1)",
        f"fastest: {heads.name(worst)}, {heads.slopes()[worst]:+.2f} nats",
    ]


def _spread(heads: Heads) -> list[str]:
    found = heads.over_heads(f"spread_{heads.reading}")[-1]
    return [f"{found.lowest:.2f} to {found.highest:.2f}, average {found.average:.2f} +- {found.deviation:.2f}"]


def _theorem(heads: Heads) -> list[str]:
    found = theorem(heads)
    if found is None:
        return ["says nothing: all heads have a window"]
    n = "over 1e300" if found.n is None else f"{found.n:,}" if found.n < 10**6 else f"{float(found.n):.1e}"
    of = "" if found.heads == len(heads.heads) else " of heads without a window"
    return [
        f"every coefficient would be below {heads.data['epsilon']:g} from n = {n} on,",
        f"were the average{of}, {found.average:.2f}, the bound of all logits",
    ]
