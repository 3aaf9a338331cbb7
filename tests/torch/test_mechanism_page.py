"""docs/mechanisms.md: its tables are what mechanisms say, and its example of a new one works."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sharpmax.mechanisms import MECHANISMS, Mechanism, Window
from tests.doc_tables import ROOT, markdown
from tests.torch.mechanism_cases import attend, inputs


def streams(mechanism: Mechanism) -> str:
    if mechanism.policy is not None or isinstance(mechanism, Window):
        return "as policies"
    return "by chunks" if mechanism.folds else "no"


def switches(mechanism: Mechanism) -> str:
    """What ``sharpen`` says, see tests/huggingface/test_mechanisms.py."""
    if mechanism.initial() or mechanism.activation is not None:
        return "no"
    return "whole sequences" if mechanism.reads == "rows" else "yes"


def tables() -> list[str]:
    """The tables of docs/mechanisms.md."""
    yes = {True: "yes", False: "no"}
    short = [
        [f"`{name}`", m.about.title, m.about.paper, f"`{_cell(m.about.equation)}`", streams(m), switches(m),
         yes[m.inference], yes[m.about.disperses]]
        for name, m in MECHANISMS.items()
    ]  # fmt: skip
    long = [[f"`{name}`", m.about.training, _cell(m.about.theorem)] for name, m in MECHANISMS.items()]
    head = ["", "", "paper", "weights `a` of logits `s`, a row of `n`", "streams", "Hugging Face", "after training",
            "disperses"]  # fmt: skip
    return [markdown(head, short), markdown(["", "what training needs", "Theorem 2.2"], long)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def page() -> str:
    return (ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8")


def test_the_tables_of_the_page_are_what_mechanisms_say() -> None:
    for table in tables():
        assert table in page(), f"docs/mechanisms.md should have\n{table}"


def test_the_new_mechanism_of_the_page(tmp_path: Path) -> None:
    (code,) = re.findall(r"```py\n(.*?)```", page(), re.DOTALL)
    assert code.count("\n") < 80
    (tmp_path / "rectified.py").write_text(code, encoding="utf-8")
    spec: Any = importlib.util.spec_from_file_location("rectified", tmp_path / "rectified.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    rectified = found.Rectified(power=2.0)
    weights = rectified(np.array([[3.0, 1.0, -2.0], [-1.0, -1.0, -1.0]]))
    np.testing.assert_allclose(weights, [[0.9, 0.1, 0.0], [0.0, 0.0, 0.0]])
    q, k, v = inputs()
    outs = [attend(q, k, v, mechanism=rectified, enable_gqa=True, impl=impl) for impl in ("reference", "streaming")]
    torch.testing.assert_close(*outs)
