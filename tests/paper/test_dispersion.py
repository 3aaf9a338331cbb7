"""The dispersion figure: every coefficient within the bounds, extremes attained, policies as they are."""

import math

import numpy as np
import pytest

import sharpmax
from sharpmax.inputs import InputError
from sharpmax.paper import dispersion

SMALL = (1, 2, 3, 10, 100, 1000, 20_000)


@pytest.fixture(scope="module", params=[(5.69, 1.0), (2.0, 0.5), (0.0, 1.0), (30.0, 1.0)])
def data(request):
    return dispersion.data(*request.param, lengths=SMALL)


def test_softmax_lies_between_the_bounds(data):
    bounds = {key: np.array(value) for key, value in data["bounds"].items()}
    largest = data["random_rows"]["largest"]["softmax"]
    slack = 1 + 2e-5  # numbers are written with six digits
    for row in (*largest.values(), data["two_point_rows"]["largest"]["softmax"]):
        assert np.all(np.array(row) <= bounds["attained_upper"] * slack)
        assert np.all(np.array(row) * slack >= 1 / np.array(data["n"]))
    assert np.all(bounds["lower"] <= bounds["attained_lower"] * slack)
    assert np.all(bounds["attained_upper"] <= bounds["upper"] * slack)


def test_two_point_rows_attain_the_extremes(data):
    n, exponent = np.array(data["n"]), data["spread"] / data["theta"]
    rows = data["two_point_rows"]
    np.testing.assert_allclose(rows["largest"]["softmax"], np.exp(exponent) / (np.exp(exponent) + n - 1), rtol=1e-5)
    np.testing.assert_allclose(rows["smallest"], 1 / (1 + (n - 1) * np.exp(exponent)), rtol=1e-5)
    np.testing.assert_allclose(rows["largest"]["softmax"], data["bounds"]["attained_upper"], rtol=1e-5)
    np.testing.assert_allclose(rows["smallest"], data["bounds"]["attained_lower"], rtol=1e-5)


def test_adaptive_rows_are_never_less_sharp(data):
    for kind in (
        data["two_point_rows"]["largest"],
        {k: v["median"] for k, v in data["random_rows"]["largest"].items()},
    ):
        for policy in ("PAPER", "PAPER_HELD"):
            assert np.all(np.array(kind[policy]) >= np.array(kind["softmax"]) * (1 - 1e-5))


def test_coefficients_are_those_of_the_package():
    row = next(dispersion.random_rows(300, 5.69, seed=3))
    coefficients, betas = dispersion.largest_coefficients(row)
    assert row.min() >= 0
    assert row.max() <= 5.69
    assert coefficients["softmax"] == pytest.approx(sharpmax.softmax(row).max())
    for name, policy in (("PAPER", sharpmax.PAPER), ("PAPER_HELD", sharpmax.PAPER_HELD)):
        assert coefficients[name] == pytest.approx(sharpmax.adaptive_temperature_softmax(row, policy=policy).max())
        assert betas[name] > 1


def test_the_printed_polynomial_switches_off_and_the_held_one_does_not():
    data = dispersion.data(lengths=(20_000,))
    assert data["beta"]["PAPER"] == {"one_item": [1.0], "random": [1.0]}
    assert data["beta"]["PAPER_HELD"]["random"][0] == pytest.approx(2.421, abs=1e-3)


def test_theorem_2_2_is_marked_where_it_applies():
    data = dispersion.data(lengths=(10,))
    assert data["dispersed"] == {"epsilon": 0.01, "n": {"paper": 29590, "attained": 29295}}
    assert "29,590" in data["caption"]


def test_rows_are_seeded():
    first, again, other = (next(dispersion.random_rows(50, 1.0, seed)) for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    "options", [{"spread": -1.0}, {"spread": math.nan}, {"spread": 1e9}, {"theta": 0.0}, {"theta": math.inf}]
)
def test_bad_options_are_refused_before_any_work(options, tmp_path):
    with pytest.raises(InputError, match=r"^expected "):
        dispersion.run(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
