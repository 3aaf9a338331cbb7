"""Table 1 as HTML: our rows, the paper's printed ones, the distances, and the p-values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..table1_views import ABOVE, BELOW, CEILING, SIGNIFICANT, cells, comparison
from .summary import NEAR
from .tags import escape, grid, row, tag

LEGEND = (
    "Accuracy in %, by number of items. <b>Bold</b>: the best of our rows at this size. {above} above and {below} "
    "below softmax with p&nbsp;&lt;&nbsp;{p:g}. Shading follows the accuracy. {ceiling}"
)
SAME_RECIPE = ' Distances of more than {near:g} points are <span class="far">marked</span>.'
OTHER_RECIPE = " These heads were trained by another recipe than the paper's, so the distances are no errors."


def tables(data: Mapping[str, Any]) -> str:
    """The table, and below it, to be unfolded, the p-values and how the polynomial was refitted."""
    return _accuracy(data) + _p_values(data) + _fit(data["fit"])


def _accuracy(data: Mapping[str, Any]) -> str:
    ceiling, *others = comparison(data)
    papers, distances = others[:2], others[2:]
    ours = [row(escape(label), [_cell(*entry) for entry in line]) for label, line in cells(data)]
    ours.append(row(escape(ceiling[0]), [_shaded(text) for text in ceiling[1]], class_="ceiling"))
    reproduced = data["name"] == "paper"
    legend = LEGEND + (SAME_RECIPE if reproduced else OTHER_RECIPE)
    return grid(
        ["", *(f"{n:,}" for n in data["sizes"])],
        _group("This package", len(data["sizes"]), ours),
        _group("The paper, as printed", len(data["sizes"]), [_papers(*line) for line in papers], class_="papers"),
        _group(
            "Ours less the paper's, in points", len(data["sizes"]), [_distance(*line, reproduced) for line in distances]
        ),
        legend=legend.format(above=ABOVE, below=BELOW, p=SIGNIFICANT, ceiling=CEILING, near=NEAR),
        label=f"Table 1 of the heads {data['name']}",
        class_="accuracy",
    )


def _group(heading: str, columns: int, rows: Sequence[str], **attributes: str | bool) -> str:
    head = tag("tr", tag("th", heading, scope="rowgroup", colspan=str(columns + 1)), class_="group")
    return tag("tbody", head, *rows, **attributes)


def _cell(text: str, mark: str, best: bool) -> str:
    number = tag("b", text) if best else text
    return _shaded(text, number + (tag("sup", mark) if mark else ""))


def _shaded(text: str, content: str | None = None) -> str:
    return tag("td", text if content is None else content, style=f"--v:{float(text) / 100:.3f}")


def _papers(label: str, texts: Sequence[str]) -> str:
    return row(escape(label[:1].upper() + label[1:]), texts)


def _distance(label: str, texts: Sequence[str], mark: bool) -> str:
    far = [mark and text != "-" and abs(float(text)) > NEAR for text in texts]
    entries = [tag("td", _minus(t), class_="far") if f else _minus(t) for t, f in zip(texts, far, strict=True)]
    return row(escape(label.partition(",")[0]), entries)


def _minus(text: str) -> str:
    """A number with the minus sign of print; a dash where there is none."""
    return "&ndash;" if text == "-" else text.replace("-", "&minus;")


def _p_values(data: Mapping[str, Any]) -> str:
    rows = [row(escape(r["label"]), _ps(r["p_value"])) for name, r in data["rows"].items() if name != "softmax"]
    printed = dict(zip(data["paper"]["sizes"], data["paper"]["p_value"], strict=True))
    papers = row("The paper's adaptive", _ps([printed.get(n) for n in data["sizes"]]))
    inner = grid(
        ["", *(f"{n:,}" for n in data["sizes"])],
        tag("tbody", *rows),
        tag("tbody", papers, class_="papers"),
        legend=f"p-values of the paired t-test against softmax over the seeds. <b>Bold</b>: below {SIGNIFICANT:g}.",
        label=f"p-values of the heads {data['name']}",
        class_="p-values",
    )
    return tag("details", tag("summary", "p-values"), inner)


def _ps(values: Sequence[float | None]) -> list[str]:
    return ["&ndash;" if p is None else tag("b", _small(p)) if p < SIGNIFICANT else f"{p:.2f}" for p in values]


def _small(p: float) -> str:
    """Two digits of ``p``: 0.0021, 2e-5."""
    digits, _, power = f"{p:.1e}".partition("e")
    return f"{p:.2g}" if p == 0 or p >= 1e-3 else f"{digits.removesuffix('.0')}e{_minus(str(int(power)))}"


def _fit(fit: Mapping[str, Any]) -> str:
    total = sum(counts["total"] for counts in fit["counts"].values())
    terms = ", ".join(f"{c:.5g}" for c in fit["coefficients"]).replace("-", "&minus;")
    domain = "" if fit["domain"] is None else " on entropies from {:.3f} to {:.3f} nats".format(*fit["domain"])
    sizes = ", ".join(f"{n:,}" for n in fit["sizes"])
    text = (
        f"One polynomial for all seeds was fitted as in Appendix F, on validation sets of {sizes} items, separate from "
        f"the sets of training and evaluation. Of these {total:,} sets {fit['kept']:,} were used; the others have no "
        f"finite optimal temperature. Its coefficients are {terms}, highest power first{domain}. Beyond that range it "
        "is extrapolated, as in the paper; range-safe, it holds its value."
    )
    notes = "".join(tag("p", f"Note: {escape(note)}.") for note in fit["notes"])
    return tag("details", tag("summary", "How the polynomial was refitted"), tag("p", text), notes)
