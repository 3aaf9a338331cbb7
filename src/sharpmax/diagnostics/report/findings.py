"""What a diagnosis says in words: every sentence is chosen by the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...theory import dispersion_length

SINK = 0.5
"""A head whose first key has more than this is called a sink."""


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

    def name(self, index: int) -> str:
        """What to call a head."""
        return "layer {}, head {}".format(*self.heads[index])


def spread_of(values: Sequence[float] | np.ndarray) -> Spread:
    """Smallest, largest, average and standard deviation."""
    found = np.asarray(values, np.float64)
    return Spread(float(found.min()), float(found.max()), float(found.mean()), float(found.std()))


def start(heads: Heads) -> int:
    """The head that the page opens with: that which loses sharpness fastest, or the sharpest."""
    slopes = heads.slopes()
    if np.isnan(slopes).all():
        return int(np.nanargmin(heads.read("normalised")[-1]))
    return int(np.nanargmax(slopes))


def sharpest(heads: Heads) -> int | None:
    """The sharpest head at the longest input that is no sink, if there is one."""
    normalised, sink = heads.read("normalised")[-1], heads.read("sink")[-1]
    kept = np.where(sink > SINK, math.nan, normalised)
    return None if np.isnan(kept).all() else int(np.nanargmin(kept))


def sentences(heads: Heads) -> list[str]:
    """The findings, most important first."""
    made = [_growth(heads), _sinks(heads), _spreads(heads), _policy(heads), _windows(heads), _context(heads)]
    return [sentence for sentence in made if sentence]


def where_read(heads: Heads) -> str:
    """The reading in words."""
    return "at the last token" if heads.reading == "last" else "averaged over all rows"


def _growth(heads: Heads) -> str:
    entropy, share = (np.nanmean(heads.read(m), axis=1) for m in ("entropy", "normalised"))
    unit = heads.data["source"]["unit"]
    if len(heads.lengths) == 1:
        return (
            f"With {heads.lengths[0]:,} {unit} the average head has an entropy of {entropy[0]:.2f} nats "
            f"{where_read(heads)}, {share[0]:.0%} of what uniform attention has."
        )
    verb = "grows" if entropy[-1] > entropy[0] else "falls"
    return (
        f"Read {where_read(heads)}, the entropy of the average head {verb} from {entropy[0]:.2f} to {entropy[-1]:.2f} "
        f"nats as inputs grow from {heads.lengths[0]:,} to {heads.lengths[-1]:,} {unit}; as a share of uniform "
        f"attention's it goes from {share[0]:.0%} to {share[-1]:.0%}."
    )


def _sinks(heads: Heads) -> str:
    sink = heads.read("sink")[-1]
    count, total = int((sink > SINK).sum()), int((~np.isnan(sink)).sum())
    if not total:
        return ""
    if not count:
        return "No head puts more than half of its weight on the first token at the longest input."
    return (
        f"{count} of {total} heads put more than half of their weight on the first token at the longest input: sharp, "
        "but on an attention sink. Their entropy without it says more about them."
    )


def _spreads(heads: Heads) -> str:
    values, growing = heads.read("spread")[-1], np.isnan(heads.values("window")[-1])
    known = ~np.isnan(values)
    text = f"At the longest input the logit spread δ of a head is {spread_of(values[known])}."
    if not (known & growing).any():
        return text
    average, epsilon = float(values[known & growing].mean()), heads.data["epsilon"]
    n = dispersion_length(float(f"{average:.6g}"), epsilon).paper
    which = "" if growing.all() else f", the average of heads without a window ({growing.sum()} of {len(growing)}),"
    return (
        f"{text} Were {average:.2f}{which} the bound of all logits, Theorem 2.2 would have every coefficient below "
        f"{epsilon:g} from {long(n)} keys on."
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
        f"{count} of {len(window)} heads see a window of at most {int(np.nanmax(window)):,} keys: their rows stop "
        "growing there, and Theorem 2.2 says nothing about longer inputs."
    )


def _context(heads: Heads) -> str:
    context = heads.data["model"]["context"]
    longest = max(max(entry["tokens"]) for entry in heads.data["lengths"])
    if context is None or longest <= context:
        return ""
    return f"Inputs of more than {context:,} tokens are longer than the model was made for: extrapolation."


SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def long(n: int) -> str:
    """A count to read: in full as long as that is short, then two digits of it."""
    if n < 10**6:
        return f"{n:,}"
    digits, power = f"{float(n):.1e}".split("e+")
    return f"{digits} \N{MULTIPLICATION SIGN} 10{str(int(power)).translate(SUPERSCRIPT)}"
