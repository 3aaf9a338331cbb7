"""docs/leaderboard.md: its tables are those of results/leaderboard, and its words say what they hold."""

import dataclasses
import functools
import json
import re
import statistics
from typing import Any

import pytest
from scipy.stats import ttest_rel

from sharpmax.leaderboard.entries import TASKS, chosen_tasks
from sharpmax.leaderboard.report import assemble
from sharpmax.leaderboard.settings import load_settings
from sharpmax.leaderboard.views import tables
from sharpmax.mechanisms import MECHANISMS
from sharpmax.tasks.max_retrieval import PRESETS, Protocol
from tests.doc_tables import ROOT, markdown

PAGE = (ROOT / "docs" / "leaderboard.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHARP: Any = json.loads((ROOT / "results" / "table1_sharp.json").read_text(encoding="utf-8"))
DATA: Any = json.loads((ROOT / "results" / "leaderboard" / "leaderboard.json").read_text(encoding="utf-8"))
ROWS: Any = {task: content["tables"] for task, content in DATA["tasks"].items()}
PLAIN = {task: both["inference"]["rows"]["softmax"]["mean"] for task, both in ROWS.items()}
SHORT = (
    "softmax",
    "adaptive",
    "adaptive_held",
    "refitted_held",
    "constant",
    "log_n",
    "entmax15",
    "sparsemax",
    "top_k",
    "window",
    "hard",
)
SHORT_TRAINED = ("asentmax", "sparsemax", "ssmax", "learned", "adaptive", "selective", "differential")
COLUMNS = (
    ("max", 256),
    ("max", 1024),
    ("second", 64),
    ("second", 256),
    ("recall", 256),
    ("recall", 1024),
    ("recall", 16384),
)


def _missing(page: str, data: Any) -> list[str]:
    """The tables of ``data`` that ``page`` does not hold word for word."""
    return [table for table in tables(data).values() if table not in page]


def percent(task: str, table: str, name: str, n: int) -> str:
    row = DATA["tasks"][task]["tables"][table]["rows"][name]
    return f"{100 * row['mean'][DATA['sizes'].index(n)]:.1f}"


def on(task: str, name: str, *sizes: int) -> str:
    """Accuracies of what is switched on at inference, as the page has them."""
    return " and ".join(percent(task, "inference", name, n) for n in sizes) + " %"


def by_seed(name: str, n: int, table: str = "trained", what: str = "accuracy") -> list[float]:
    """Numbers of the heads of ``recall``, one for each seed."""
    return DATA["tasks"]["recall"]["tables"][table]["rows"][name][what][DATA["sizes"].index(n)]


def largest(name: str, n: int = 16, digits: int = 2) -> str:
    return f"{statistics.fmean(by_seed(name, n, what='largest')):.{digits}f}"


def seeds(name: str) -> str:
    found = by_seed(name, 16384)
    return f"{100 * min(found):.0f} to {100 * max(found):.0f} %"


def versus(trained: str, switched_on: str, n: int = 16384) -> float:
    """The paired test of a trained mechanism against one in softmax's heads."""
    return float(ttest_rel(by_seed(trained, n), by_seed(switched_on, n, "inference")).pvalue)


def phrases() -> list[str]:
    trained = functools.partial(percent, "recall", "trained")
    late = functools.partial(percent, "second", "trained")
    sharp = SHARP["rows"]["softmax"]["accuracy"][SHARP["sizes"].index(1024)]
    return [
        f"with `hard` find {on('recall', 'hard', 1024)} at 1,024 items and {on('recall', 'hard', 16384)} at 16,384",
        f"with `sparsemax` {on('recall', 'sparsemax', 1024, 16384)}",
        f"with a constant beta of 4 {on('recall', 'constant', 1024, 16384)}",
        f"rows of these heads have {entropy(512)} nats at 512 items and {entropy(1024)} at 1,024, and accuracy goes "
        f"from {percent('recall', 'inference', 'adaptive', 512)} to {on('recall', 'adaptive', 1024)}",
        f"Held at its peak it has {on('recall', 'adaptive_held', 1024)} at 1,024",
        f"and held {on('recall', 'refitted_held', 1024)}. At 16,384 items it takes both: "
        f"{on('recall', 'refitted_held', 16384)}, held alone {on('recall', 'adaptive_held', 16384)}, refitted alone "
        f"{on('recall', 'refitted', 16384)}",
        f"has {on('max', 'hard', 1024)}, softmax {on('max', 'softmax', 1024)}",
        f"lie between ({between()} %), `top_k` is at {on('max', 'top_k', 1024)}",
        f"(`ssmax` {percent('max', 'trained', 'ssmax', 1024)} %, "
        f"`asentmax` {percent('max', 'trained', 'asentmax', 1024)} %)",
        f"a constant beta has {trained('constant', 1024)} % trained and {on('recall', 'constant', 1024)} switched on, "
        f"the held polynomial {trained('adaptive_held', 1024)} and {on('recall', 'adaptive_held', 1024)}",
        f"{trained('adaptive', 256)} % at 256 items (not significantly) and {trained('adaptive', 512)} % at 512, "
        f"softmax {trained('softmax', 256)} and {trained('softmax', 512)} %, after being better at 32 and 64 "
        f"(at 128 {trained('adaptive', 128)} against {trained('softmax', 128)} %, not significantly)",
        f"`learned` is probably below (p = {versus('learned', 'hard'):.3f})",
        f"trained is better at 16 items ({late('sparsemax', 16)} and {on('second', 'sparsemax', 16)}) and worse at "
        f"32 to 1,024 ({late('sparsemax', 64)} and {on('second', 'sparsemax', 64)} at 64)",
        f"(a largest coefficient of {largest('adaptive')}, softmax {largest('softmax')})",
        f"is `asentmax`, {trained('asentmax', 16384)} %, with a largest coefficient of {largest('asentmax', 16384)} "
        f"(softmax {largest('softmax', 16384, 3)}); then "
        + ", ".join(f"`{name}` {trained(name, 16384)} %" for name in ("ssmax", "sparsemax", "entmax"))
        + f" and `learned` {trained('learned', 16384)} %, all of them above softmax's {trained('softmax', 16384)} %",
        f"`asentmax` {seeds('asentmax')}, `ssmax` {seeds('ssmax')}; `sparsemax`, which learns nothing, "
        f"{seeds('sparsemax')}",
        f"{on('recall', 'hard', 16384)}: `asentmax` is above it in 7 of 10 seeds "
        f"(p = {versus('asentmax', 'hard'):.3f}, ",
        f"{trained('sparsemax', 16384)} and {on('recall', 'sparsemax', 16384)} "
        f"(p = {versus('sparsemax', 'sparsemax'):.2f}), at 1,024 items {trained('sparsemax', 1024)} and "
        f"{on('recall', 'sparsemax', 1024)} (p = {versus('sparsemax', 'sparsemax', 1024):.2f}). `entmax15` is worse "
        f"trained: {trained('entmax15', 1024)} and {on('recall', 'entmax15', 1024)} at 1,024",
        f"significantly at 128 ({trained('sigmoid', 128)} %) and 1,024 ({trained('sigmoid', 1024)} %). "
        f"`linear_elu` finds no item: {trained('linear_elu', 16)} % at 16 items",
        f"Softmax gets {on('second', 'softmax', 16)} at 16 items, the best {on('second', 'adaptive', 16)} "
        f"(`adaptive`), and {on('second', 'refitted', 256)} is the most at 256",
        f"(`sparsemax` {on('second', 'sparsemax', 16)}, `hard` {on('second', 'hard', 16)})",
        f"{late('differential', 16)} and {late('selective', 16)} % at the 16 items",
        f"`asentmax` has most at 256 items, {late('asentmax', 256)} % (softmax {late('softmax', 256)} %), and "
        f"`differential` at 1,024, {late('differential', 1024)} % (softmax {late('softmax', 1024)} %, "
        f"`hard` switched on {on('second', 'hard', 1024)})",
        f"softmax has {100 * statistics.fmean(sharp):.1f} % on `max` at 1,024 items",
        f"rounding alone moves means by up to {rounding('max'):.1f} points there, on `recall` by up to "
        f"{rounding('recall'):.1f} (of the ten heads of `top_k` and `window`, one ended at "
        f"{100 * min(by_seed('top_k', 16)):.1f} % at 16 items, where softmax's has "
        f"{100 * by_seed('softmax', 16)[9]:.1f} %)",
        f"has {trained('learned', 1024)} % on `recall` at 1,024 items where softmax has {trained('softmax', 1024)} %",
    ]


def rounding(task: str) -> float:
    """How far heads that were trained as softmax's are from those, at the most."""
    tables = DATA["tasks"][task]["tables"]
    pairs = [[tables[table]["rows"][name]["mean"] for table in tables] for name in ("log_n", "top_k", "window")]
    return 100 * max(abs(a - b) for pair in pairs for a, b in zip(*pair, strict=True))


def entropy(n: int) -> str:
    """Of the rows of softmax on ``recall``."""
    seeds = DATA["tasks"]["recall"]["tables"]["inference"]["rows"]["softmax"]["entropy"][DATA["sizes"].index(n)]
    return f"{statistics.fmean(seeds):.1f}"


def between() -> str:
    names = ("constant", "sparsemax", "log_n", "refitted_held", "refitted", "entmax15", "adaptive_held", "adaptive")
    found = [float(percent("max", "inference", name, 1024)) for name in names]
    return f"{min(found)} to {max(found)}"


def short_table(table: str, names: tuple[str, ...]) -> str:
    """What the README has of it."""
    rows = DATA["tasks"]["max"]["tables"][table]["rows"]
    lines = [[rows[name]["label"], *(percent(task, table, name, n) for task, n in COLUMNS)] for name in names]
    return markdown(["", *(f"{task}, {n:,}" for task, n in COLUMNS)], lines)


def test_the_page_holds_every_table_and_says_what_is_missing() -> None:
    assert list(DATA["tasks"]) == list(TASKS)
    assert list(DATA["mechanisms"]) == list(MECHANISMS)
    assert _missing(PAGE, DATA) == []
    missing, wanted = len(DATA["missing"]), len(TASKS) * len(MECHANISMS)
    assert ("Not complete" in PAGE) == (missing > 0)
    on, with_it = (sum(len(both[table]["rows"]) for both in ROWS.values()) for table in ("inference", "trained"))
    assert missing or f"Nothing is missing: {on} rows switched on at inference, {with_it} trained with" in PAGE
    assert not missing or f"{missing} of {wanted} rows trained with a mechanism are missing" in PAGE
    assert all(", trained: " in text and not text.startswith("max/") for text in DATA["missing"])


def test_the_report_is_that_of_the_cells() -> None:
    folder = ROOT / "results" / "leaderboard"
    settings = load_settings(folder)
    assert settings is not None
    made = json.loads(json.dumps(assemble(folder, settings, chosen_tasks(None), list(DATA["mechanisms"]))))
    assert {key: value for key, value in DATA.items() if key != "provenance"} == made


@pytest.mark.parametrize("phrase", phrases())
def test_the_page_says_what_the_results_say(phrase: str) -> None:
    assert phrase in " ".join(PAGE.split())


def test_readings_of_many_rows_hold() -> None:
    for task in ROWS:  # log_n never harms
        grown = ROWS[task]["inference"]["rows"]["log_n"]["mean"]
        assert all(a >= b for a, b in zip(grown, PLAIN[task], strict=True))
    best_of_all = max(
        row["mean"][DATA["sizes"].index(2048)] for table in ROWS["max"].values() for row in table["rows"].values()
    )
    assert best_of_all < 0.5  # all are below a half at 2,048
    late = ROWS["second"]["trained"]["rows"]
    for name, n in (("asentmax", 256), ("differential", 1024)):
        assert name == max(late, key=lambda other, n=n: late[other]["mean"][DATA["sizes"].index(n)])
    for task in ROWS:
        for n in (64, 256):
            order = sorted(row["mean"][DATA["sizes"].index(n)] for row in ROWS[task]["trained"]["rows"].values())
            assert ROWS[task]["trained"]["rows"]["asentmax"]["mean"][DATA["sizes"].index(n)] >= order[-4]
    sparse = [ROWS["second"][table]["rows"]["sparsemax"]["mean"] for table in ("trained", "inference")]
    assert [n for n, a, b in zip(DATA["sizes"], *sparse, strict=True) if a < b] == [32, 64, 128, 256, 512, 1024]
    fitted, fixed = (ROWS["max"]["inference"]["rows"][name]["mean"] for name in ("refitted_held", "constant"))
    held = ROWS["max"]["inference"]["rows"]["adaptive_held"]["mean"]
    assert all((a >= b) == (n <= 1024) for n, a, b in zip(DATA["sizes"], fitted, held, strict=True))
    assert all(a < b for a, b in zip(fitted, fixed, strict=True))
    for name in ("linear", "linear_elu", "sigmoid", "relu_squared", "stick_breaking", "step", "hard"):
        row = ROWS["max"]["trained"]["rows"][name]["mean"]
        assert all(a < b for a, b in zip(row, PLAIN["max"], strict=True))


def test_readings_of_recall_hold() -> None:
    late, longest = ROWS["recall"]["trained"]["rows"], DATA["sizes"].index(16384)
    for name in ("asentmax", "ssmax", "sparsemax", "entmax", "learned"):
        assert late[name]["p_holm"][longest] < 0.05
    sure = {
        name: [n for n, p in zip(DATA["sizes"], late[name]["p_holm"], strict=True) if p < 0.05]
        for name in ("adaptive", "sigmoid")
    }
    assert sure["sigmoid"] == [128, 1024]
    assert all(a > b for a, b in zip(late["sigmoid"]["mean"][2:], PLAIN["recall"][2:], strict=True))
    assert (sure["adaptive"][:3], late["adaptive"]["mean"][5] < PLAIN["recall"][5]) == ([32, 64, 512], True)
    for name in ("differential", "selective", "threshold_relative", "stick_breaking"):
        assert all(p >= 0.05 for p in late[name]["p_holm"])
    pairs = zip(by_seed("asentmax", 16384), by_seed("hard", 16384, "inference"), strict=True)
    assert sum(a > b for a, b in pairs) == 7
    assert all(versus(name, "hard") > 0.5 for name in ("ssmax", "sparsemax", "entmax"))
    assert min(by_seed("window", 16)) == min(by_seed("top_k", 16)) == by_seed("top_k", 16)[9]
    both, at = ROWS["recall"], DATA["sizes"].index(1024)
    everything = {(table, name): row["mean"][at] for table in both for name, row in both[table]["rows"].items()}
    assert max(everything, key=everything.__getitem__) == ("inference", "hard")
    best = ROWS["recall"]["inference"]["rows"]
    assert sorted(best, key=lambda name: -best[name]["mean"][at])[:2] == ["hard", "refitted_held"]


def test_the_readme_has_the_short_table() -> None:
    for table in (short_table("inference", SHORT), short_table("trained", SHORT_TRAINED)):
        assert table in README, f"README.md should have\n{table}"
    assert f"its ten heads have {seeds('asentmax')} at 16,384 items of recall" in README
    missing, wanted = len(DATA["missing"]), len(TASKS) * len(MECHANISMS)
    assert ("still to be run" in README) == (missing > 0)
    assert not missing or f"({missing} of those {wanted} rows are still to be run)" in README


def test_a_table_that_is_not_as_the_results_have_it_is_noticed() -> None:
    row = {"label": "softmax", "mean": [0.5], "p_holm": [None], "below_90": 16, "below_50": None, "diverged": 0}
    content = {"tables": {"trained": {"rows": {"softmax": row}}}}
    data = {"sizes": [16], "seeds": 3, "tasks": {"max": content}}
    (table,) = tables(data).values()
    assert _missing(f"before\n\n{table}\n\nafter", data) == []
    row["mean"] = [0.501]
    assert len(_missing(table, data)) == 1
    row |= {"mean": [0.5], "diverged": 2}
    assert "softmax (2 of 3 diverged)" in tables(data)["max", "trained"]
    assert len(_missing(table, data)) == 1


@pytest.mark.parametrize("name", ["hard", "window", "top_k", "relu_squared", "step", "linear", "sigmoid"])
def test_what_the_page_explains_is_compared(name: str) -> None:
    assert f"`{name}`" in PAGE
    assert name in MECHANISMS


def test_the_protocol_without_l2_is_that_of_the_paper_otherwise() -> None:
    (text,) = re.findall(r"echo '(.*)' > no_l2.json", PAGE)
    assert Protocol.from_dict(json.loads(text)) == dataclasses.replace(
        PRESETS["paper"], l2=0, l2_kind="sum", l2_on="all"
    )
