"""What the sentences of the report say for either outcome."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from sharpmax.paper.report import summary

from .test_report import table


@pytest.mark.parametrize(
    ("adaptive", "expected"),
    [
        (
            (98.0, 90, 80, 15),
            "In distribution (16 items), softmax and adaptive temperature have the same accuracy, 98.0%.",
        ),
        (
            (98.6, 90, 80, 15),
            "In distribution (16 items), adaptive temperature is 0.6 points above softmax: 98.6% against",
        ),
        (
            (98.02, 90, 80, 15),
            "In distribution (16 items), adaptive temperature is less than 0.05 points above softmax: 98.0% against",
        ),
        (
            (96.0, 90, 80, 15),
            "In distribution (16 items), adaptive temperature is 2.0 points below softmax: 96.0% against",
        ),
    ],
)
def test_in_distribution(adaptive: tuple[float, ...], expected: str) -> None:
    assert summary.in_distribution(table(adaptive=adaptive)).startswith(expected)


def test_in_distribution_without_a_size_of_training() -> None:
    for size in (4, 64):
        said = summary.in_distribution(table(sizes=(size,), softmax=(90,)))
        assert said == "No size of the table is one of training (5 to 16 items)."


@pytest.mark.parametrize(
    ("adaptive", "expected"),
    [
        ((98, 90, 80, 15), "and softmax have the same mean at every size."),
        ((99, 92, 83, 16), "is above softmax at every size (with p < 0.05 at each)."),
        ((98, 90, 80, 17), "is above softmax at 16,384 (with p < 0.05)."),
        ((98, 90.01, 83, 17), "is above softmax at 64 to 16,384 (with p < 0.05 at 256 and 16,384)."),
        ((98.01, 90, 80, 15), "is above softmax at 16 (nowhere with p < 0.05)."),
        ((97, 88, 80, 15), "is below softmax at 16 and 64 (with p < 0.05 at each); it is nowhere above softmax."),
        ((99, 90, 79, 15), "is above softmax at 16 (with p < 0.05), and below softmax at 256 (with p < 0.05)."),
    ],
)
def test_significance(adaptive: tuple[float, ...], expected: str) -> None:
    data = table("sharp", adaptive=adaptive)
    if adaptive == (98, 90, 80, 15):
        data["rows"]["adaptive"] = data["rows"]["softmax"]
    assert summary.significance(data) == f"Adaptive temperature, with the paper's polynomial, {expected}"
    assert summary.significance({**data, "name": "paper"}).endswith(
        "In the paper it is above with p < 0.05 at 64 to 16,384."
    )


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_have_no_test(seeds: int) -> None:
    data = table("sharp", seeds=seeds, adaptive=(98, 90, 80, 16))
    assert summary.significance(data).endswith("at 16,384. With fewer than three seeds there is no test.")
    assert ("single seed" in summary.precision(data)) == (seeds == 1)


@pytest.mark.parametrize(
    ("hard", "expected"),
    [
        ((97, 89, 79, 14), "is below adaptive temperature at every size (with p < 0.05 at each); it is nowhere above"),
        ((98, 90, 84, 16), "at 256 and 16,384 (with p < 0.05 at each). Its largest lead is 4.0 points, at 256 items."),
    ],
)
def test_hard_attention(hard: tuple[float, ...], expected: str) -> None:
    assert expected in summary.hard_attention(table(hard=hard))


def test_hard_attention_is_tested_against_adaptive_and_not_softmax() -> None:
    data = table(sizes=(64,), softmax=(50,), adaptive=(90,), hard=(90.01,))
    data["rows"]["hard"]["accuracy"] = [[0.89, 0.93, 0.88, 0.92]]
    p = stats.ttest_rel(data["rows"]["hard"]["accuracy"][0], data["rows"]["adaptive"]["accuracy"][0]).pvalue
    assert p > 0.05
    assert data["rows"]["hard"]["p_value"][0] < 0.05
    assert "nowhere with p < 0.05" in summary.hard_attention(data)


def test_distance() -> None:
    far = summary.distance(table(softmax=(98.6, 94.3, 81.3, 12.4), adaptive=(98.6, 94.5, 82.1, 20.0)))
    assert "is 6.0 points: adaptive temperature at 16,384 items has 20.0%" in far
    assert (
        "the paper 14.0%. Of 8 printed numbers, 7 are within 3 points; the others are at 16,384. Appendix A.4 leaves"
        in far
    )
    assert far.endswith("is in studies/max_retrieval.py and results/studies.")
    near = summary.distance(table(softmax=(98.6, 94.3, 80.3, 12.4), adaptive=(98.6, 94.5, 82.1, 14.0)))
    assert "is 1.0 points: softmax at 256 items has 80.3%" in near
    assert near.endswith("Of 8 printed numbers, 8 are within 3 points.")
    assert summary.distance(table(sizes=(20,), softmax=(90,))).startswith("None of these sizes")


def test_the_distance_is_told_only_where_the_recipe_is_the_papers() -> None:
    assert any("largest distance" in s for s in summary.sentences(table()))
    assert not any("largest distance" in s for s in summary.sentences(table("sharp")))


def test_the_standard_errors() -> None:
    data = table(adaptive=(98, 91, 82, 30))
    accuracy = np.array([row["accuracy"] for row in data["rows"].values()])
    worst = 100 * stats.sem(accuracy, axis=2).max()
    assert summary.precision(data).endswith(
        f"of each size; its standard error is at most {math.ceil(10 * worst) / 10:.1f} points."
    )
    own = 100 * stats.sem(data["rows"]["adaptive"]["accuracy"][3])
    assert f"30.0% (standard error over the seeds: {own:.1f})" in summary.distance(data)


def test_best() -> None:
    data = table(log_n=(98, 90, 80, 50))
    assert summary.best(data) == (
        "At 16,384 items, the best of our rows is “log n / log 16” with 50.0%; the best that the paper prints there is "
        "14.0%. The true maximum has the largest logit in 16.0% of the sets."
    )
    assert summary.best(table()).startswith("At 16,384 items, all policies reach 15.0%; the best that the paper prints")
    assert "paper" not in summary.best(table(sizes=(20, 30), softmax=(90, 80)))
    longer = table(sizes=(16384, 131072), softmax=(15, 9))
    assert summary.best_at_largest(longer).size == 16384


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({1}, "1"),
        ({1, 2}, "1 and 2"),
        ({1, 2, 4}, "1 to 4"),
        ({1, 4, 8, 16}, "1 and 4 to 16"),
        ({1, 2, 8, 2048}, "1, 2, 8 and 2,048"),
        ({1, 2, 4, 8, 16, 2048}, "every size"),
    ],
)
def test_sizes_to_read(chosen: set[int], expected: str) -> None:
    assert summary.sizes_text(chosen, (2048, 1, 2, 4, 8, 16)) == expected
