"""The files of the exhibits, and that drawing leaves matplotlib as it was."""

import json
import math
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import pytest

from sharpmax.paper import dispersion, fig5
from sharpmax.paper.figures import numbers, render, save_exhibit, to_json
from tests.nested import strings

SMALL = {
    "fig5": lambda: fig5.data(points=31),
    "dispersion": lambda: dispersion.data(lengths=(1, 2, 10, 100, 1000, 10**6)),
}
MODULES = {"fig5": fig5, "dispersion": dispersion}


@pytest.mark.parametrize("name", list(MODULES))
def test_files_of_an_exhibit(name, tmp_path):
    data = SMALL[name]()
    paths = save_exhibit(tmp_path / "new" / "folder", name, data, MODULES[name].draw, (6.75, 3))
    assert [path.name for path in paths] == [f"{name}.png", f"{name}.pdf", f"{name}.json"]
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == sorted(path.name for path in paths)
    png, pdf, text = (path.read_bytes() for path in paths)
    assert png.startswith(b"\x89PNG")
    assert len(png) > 20_000
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 10_000
    assert b"CreationDate" not in pdf
    record = json.loads(text)
    assert record["exhibit"] == name
    assert {key: record[key] for key in data} == json.loads(json.dumps(data))
    assert {"command", "time", "device", "versions", "git"} == set(record["provenance"])
    assert not [s for s in strings(record) if s.startswith("/") or str(Path.cwd()) in s or str(tmp_path) in s]


def line(figure, data):
    axis = figure.subplots()
    axis.plot(data["x"], data["x"], label=r"$\lambda$")
    axis.legend()


def test_the_same_data_gives_the_same_bytes_whatever_the_users_matplotlib():
    data = {"x": [1, 2, 4]}
    expected = render(data, line, (3, 2))
    assert render(data, line, (3, 2)) == expected
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        before = dict(mpl.rcParams)
        assert render(data, line, (3, 2)) == expected
        assert dict(mpl.rcParams) == before


def test_drawing_needs_no_pyplot():
    code = (
        "import sys; from sharpmax.paper.figures import render;"
        "render({}, lambda figure, data: figure.subplots(), (1, 1)); print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("spread", [0.0, 700.0])
def test_extreme_spreads_can_be_drawn(spread):
    pictures = render(dispersion.data(spread, lengths=(1, 2, 10, 1000)), dispersion.draw, (6.75, 3))
    assert set(pictures) == {"png", "pdf"}


def test_json_reads_back_and_refuses_what_is_not_json():
    value = {"a": {"b": [1, 2.5], "c": [[1, 2], [3, 4]]}, "d": [], "e": {}, "f": None, "g": [{"h": "δ"}], "i": True}
    text = to_json(value)
    assert json.loads(text) == value
    assert text.endswith("}\n")
    assert "[1, 2.5]" in text
    with pytest.raises(ValueError, match="JSON"):
        to_json({"a": math.nan})


def test_numbers_are_rounded_to_significant_digits():
    assert numbers([[1 / 3, 2e-9], [1, 123456789]]) == [[0.333333, 2e-9], [1.0, 123457000.0]]
