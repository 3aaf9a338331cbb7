"""What a diagnosis says in words: every sentence is chosen by the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...theory import dispersion_length
from ..table import LONGEST

SINK = 0.5
"""A head whose first key has more than this is called a sink."""

FAST = 0.5
"""A head that gains this many nats as n grows e-fold loses sharpness at least half as fast as uniform attention."""


class Spread(NamedTuple):
    """A number over all heads: smallest, largest, average and standard deviation."""

    lowest: float
    highest: float
    average: float
    deviation: float

    def __str__(self) -> str:
        return f"{self.lowest:.2f} to {self.highest:.2f} (average {self.average:.2f} ± {self.deviation:.2f})"


class Heads:
    """The columns of a diagnosis by length and head."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.lengths = [entry["length"] for entry in data["lengths"]]
        at = {name: i for i, name in enumerate(data["columns"])}
        self.heads = sorted({(row[at["layer"]], row[at["head"]]) for row in data["rows"]})
        shape = (len(self.lengths), len(self.heads))
        self._values = {name: np.full(shape, math.nan) for name in at}
        place = {head: i for i, head in enumerate(self.heads)}
        order = {length: i for i, length in enumerate(self.lengths)}
        for row in data["rows"]:
            where = order[row[at["length"]]], place[row[at["layer"]], row[at["head"]]]
            for name, i in at.items():
                if row[i] is not None:
                    self._values[name][where] = row[i]

    @property
    def reading(self) -> str:
        """Figure 3 reads the last token; texts are read over all rows."""
        return "last" if self.data["source"]["kind"] == "max" else "mean"

    def values(self, name: str) -> np.ndarray:
        """A column, ``[lengths, heads]``; NaN where there is nothing."""
        return self._values[name]

    def read(self, metric: str) -> np.ndarray:
        """A metric in the reading that suits the inputs."""
        return self.values(f"{metric}_{self.reading}")

    def over_heads(self, name: str) -> list[Spread]:
        """A column by length, over all heads."""
        return [spread_of(line[~np.isnan(line)]) for line in self.values(name)]

    def slopes(self) -> np.ndarray:
        """How many nats of entropy each head gains as n grows e-fold; NaN for a single length."""
        x, y = np.log(np.maximum(self.values("n"), 1)), self.read("entropy")
        centred = x - x.mean(0)
        variance = (centred**2).sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(variance > 0, (centred * (y - y.mean(0))).sum(0) / variance, math.nan)

    def sinks(self) -> np.ndarray:
        """Which heads are attention sinks at the longest input."""
        return self.read("sink")[-1] > SINK

    def ranked(self) -> np.ndarray:
        """Which heads are put in order: those that are no sinks, unless all are."""
        sinks = self.sinks()
        return np.ones_like(sinks) if sinks.all() else ~sinks

    @property
    def span(self) -> str:
        """The lengths in words, as in "4 to 512 items"."""
        first, last, unit = self.lengths[0], self.lengths[-1], self.data["source"]["unit"]
        return counted(first, unit.removesuffix("s")) if first == last else f"{first:,} to {last:,} {unit}"

    def name(self, index: int) -> str:
        """What to call a head."""
        return "layer {}, head {}".format(*self.heads[index])


def spread_of(values: Sequence[float] | np.ndarray) -> Spread:
    """Smallest, largest, average and standard deviation."""
    found = np.asarray(values, np.float64)
    return Spread(float(found.min()), float(found.max()), float(found.mean()), float(found.std()))


class Theorem(NamedTuple):
    """The n of Theorem 2.2 for the average spread of heads without a window, of which there are ``heads``.

    An n beyond ``LONGEST`` is ``None``.
    """

    average: float
    heads: int
    n: int | None


def start(heads: Heads) -> int:
    """The head that the page opens with: that which loses sharpness fastest, or the sharpest."""
    worst = fastest(heads)
    return sharpest(heads, 1)[0] if worst is None else worst


def sharpest(heads: Heads, count: int) -> list[int]:
    """The sharpest heads at the longest input, attention sinks left out."""
    share = np.where(heads.ranked(), heads.read("normalised")[-1], math.nan)
    order = np.argsort(share, kind="stable")
    return [int(i) for i in order[: min(count, int((~np.isnan(share)).sum()))]]


def fastest(heads: Heads) -> int | None:
    """The head that gains entropy fastest, attention sinks left out; ``None`` for a single length."""
    slopes = np.where(heads.ranked(), heads.slopes(), math.nan)
    return None if np.isnan(slopes).all() else int(np.nanargmax(slopes))


def theorem(heads: Heads) -> Theorem | None:
    """What Theorem 2.2 says at the longest input, were the average spread the bound of all logits."""
    values, growing = heads.read("spread")[-1], np.isnan(heads.values("window")[-1])
    known = ~np.isnan(values) & growing
    if not known.any():
        return None
    average, epsilon = float(values[known].mean()), heads.data["epsilon"]
    within = average - math.log(epsilon) < math.log(LONGEST)
    n = dispersion_length(float(f"{average:.6g}"), epsilon).paper if within else None
    return Theorem(average, int(growing.sum()), n)


def sentences(heads: Heads) -> list[str]:
    """The findings, most important first."""
    made = [
        _growth(heads),
        _own(heads),
        _losing(heads),
        _sinks(heads),
        _spreads(heads),
        _policy(heads),
        _windows(heads),
        _context(heads),
    ]
    return [sentence for sentence in made if sentence]


def where_read(heads: Heads) -> str:
    """The reading in words."""
    return "at the last token" if heads.reading == "last" else "averaged over all rows"


def _growth(heads: Heads) -> str:
    entropy, share = (np.nanmean(heads.read(m), axis=1) for m in ("entropy", "normalised"))
    if len(heads.lengths) == 1:
        return (
            f"With {heads.span} the average head has an entropy of {entropy[0]:.2f} nats "
            f"{where_read(heads)}, {share[0]:.0%} of what uniform attention has."
        )
    verb = "grows" if entropy[-1] > entropy[0] else "falls"
    return (
        f"Read {where_read(heads)}, the entropy of the average head {verb} from {entropy[0]:.2f} to {entropy[-1]:.2f} "
        f"nats as inputs grow from {heads.span}; as a share of uniform "
        f"attention's it goes from {share[0]:.0%} to {share[-1]:.0%}."
    )


class Own(NamedTuple):
    """Heads that run with a policy of their own, at the longest input: how many, and their mean entropies."""

    heads: int
    before: float
    after: float


def own(heads: Heads) -> Own | None:
    """What the model's own policies do to entropies; ``None`` for plain softmax."""
    if f"acting_{heads.reading}" not in heads.data["columns"]:
        return None
    after, before = heads.read("acting")[-1], heads.read("entropy")[-1]
    known = ~np.isnan(after)
    if not known.any():
        return None
    return Own(int(known.sum()), float(before[known].mean()), float(after[known].mean()))


def _own(heads: Heads) -> str:
    found = own(heads)
    if found is None:
        return ""
    total = len(heads.heads)
    which = "The heads run" if found.heads == total else f"{found.heads} of {counted(total, 'head')} run"
    return (
        f"{which} with a policy of their own. All other numbers are of logits before its beta; after it, the entropy "
        f"of these heads at the longest input is {found.after:.2f} nats on average, {found.before:.2f} before."
    )


def gaining(heads: Heads) -> tuple[str, int]:
    """How many heads gain entropy as n grows, in words, and how many of them by :data:`FAST` or more.

    As in what is shown, slopes are taken with two digits. Heads whose rows do not grow from one length to another have
    none, and with a single length that is all of them: nothing is said then.
    """
    slopes = heads.slopes()
    shown = slopes[~np.isnan(slopes)].round(2)
    if not len(shown):
        return "", 0
    gain, which = int((shown > 0).sum()), "" if len(shown) == len(slopes) else " whose rows grow"
    verb = "gains" if gain == 1 else "gain"
    return f"{gain} of {counted(len(shown), 'head')}{which} {verb} entropy", int((shown >= FAST).sum())


def _losing(heads: Heads) -> str:
    said, fast = gaining(heads)
    if not said:
        return ""
    return (
        f"{said} as inputs grow, {fast} of them {FAST:g} nats or more when n grows e-fold; uniform attention gains 1."
    )


def _sinks(heads: Heads) -> str:
    count, total = int(heads.sinks().sum()), len(heads.heads)
    if np.isnan(heads.read("sink")[-1]).all():
        return ""
    if not count:
        return "No head puts more than half of its weight on the first token at the longest input."
    return (
        f"{count} of {counted(total, 'head')} {'puts' if count == 1 else 'put'} more than half of the weight on the "
        "first token at the longest input: sharp, but on an attention sink. The entropy without it says more there."
    )


def _spreads(heads: Heads) -> str:
    values, found = heads.read("spread")[-1], theorem(heads)
    text = f"At the longest input the logit spread δ of a head is {spread_of(values[~np.isnan(values)])}."
    if found is None:
        return text
    total = len(heads.heads)
    which = f", the average of heads without a window ({found.heads} of {total})," if found.heads < total else ""
    return (
        f"{text} Were {found.average:.2f}{which} the bound of all logits, Theorem 2.2 would have every coefficient "
        f"below {heads.data['epsilon']:g} from {long(found.n)} keys on."
    )


def _policy(heads: Heads) -> str:
    acts, outside = (heads.values(name)[-1] for name in ("acts", "outside"))
    text = f"At the longest input the policy would act on {np.nanmean(acts):.0%} of all rows"
    if np.isnan(outside).all():
        return text + "."
    return text + f"; {np.nanmean(outside):.0%} have an entropy outside of its range."


def _windows(heads: Heads) -> str:
    window = heads.values("window")[-1]
    count = int((~np.isnan(window)).sum())
    if not count:
        return ""
    return (
        f"{count} of {counted(len(window), 'head')} {'sees' if count == 1 else 'see'} a window of at most "
        f"{int(np.nanmax(window)):,} keys: rows stop growing there, and Theorem 2.2 says nothing about longer inputs."
    )


def _context(heads: Heads) -> str:
    context = heads.data["model"]["context"]
    longest = max(max(entry["tokens"]) for entry in heads.data["lengths"])
    if context is None or longest <= context:
        return ""
    return f"Inputs of more than {context:,} tokens are longer than the model was made for: extrapolation."


def counted(n: int, thing: str) -> str:
    """A number of things, one or several."""
    return f"{n:,} {thing}" if n == 1 else f"{n:,} {thing}s"


SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def long(n: int | None) -> str:
    """A count to read: in full as long as that is short, then two digits of it; ``None`` is beyond all."""
    if n is None:
        return "over 10³⁰⁰"
    if n < 10**6:
        return f"{n:,}"
    digits, power = f"{float(n):.1e}".split("e+")
    return f"{digits} \N{MULTIPLICATION SIGN} 10{str(int(power)).translate(SUPERSCRIPT)}"
