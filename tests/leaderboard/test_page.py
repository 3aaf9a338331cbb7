"""docs/leaderboard.md: its tables are those of results/leaderboard, complete, or it says that there are none yet."""

import dataclasses
import json
import re
from typing import Any

import pytest

from sharpmax.leaderboard.entries import TASKS
from sharpmax.leaderboard.views import tables
from sharpmax.mechanisms import MECHANISMS
from sharpmax.tasks.max_retrieval import PRESETS, Protocol
from tests.doc_tables import ROOT

PAGE = (ROOT / "docs" / "leaderboard.md").read_text(encoding="utf-8")
FILE = ROOT / "results" / "leaderboard" / "leaderboard.json"
DUE = "The full run is due; there are no numbers here until it is done."


def _missing(page: str, data: Any) -> list[str]:
    """The tables of ``data`` that ``page`` does not hold word for word."""
    return [table for table in tables(data).values() if table not in page]


def test_the_page_holds_every_table_of_a_full_run_or_says_that_it_is_due() -> None:
    if not FILE.exists():
        assert DUE in PAGE
        return
    data = json.loads(FILE.read_text(encoding="utf-8"))
    assert DUE not in PAGE
    assert data["missing"] == []
    assert list(data["tasks"]) == list(TASKS)
    assert list(data["mechanisms"]) == list(MECHANISMS)
    assert _missing(PAGE, data) == []


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
