"""Figure 5 against closed forms."""

import math

import numpy as np
import pytest

from sharpmax.paper import fig5


def test_all_logits_equal_at_base_0_and_1():
    entropy = fig5.entropies(np.array([0.0, 1.0]), np.array([0.01, 1.0, 10.0]))
    np.testing.assert_allclose(entropy, math.log(10), rtol=1e-12)


def test_against_the_definition():
    base, theta = 1.2, 0.7
    weights = np.exp(np.array([base**i for i in range(1, 11)]) / theta)
    p = weights / weights.sum()
    assert fig5.entropies(np.array([base]), np.array([theta]))[0, 0] == pytest.approx(-np.sum(p * np.log(p)), rel=1e-12)


def test_panels_cover_the_four_regions_and_entropy_falls_with_the_temperature():
    panels = fig5.data(points=15)["panels"]
    assert len({panel["region"] for panel in panels}) == 4
    for panel in panels:
        entropy = np.array(panel["entropy"])
        assert entropy.shape == (15, 15)
        assert entropy.min() >= 0
        assert entropy.max() <= math.log(10) + 1e-5
        assert np.all(np.diff(panel["theta"]) > 0)
        assert np.all(np.diff(entropy, axis=0) >= -1e-5)  # Proposition 3.2
        np.testing.assert_allclose(entropy[:, panel["lambda"].index(1.0)], math.log(10), rtol=1e-5)


def test_the_caption_says_which_exponents():
    data = fig5.data(points=3)
    assert data["exponents"] == list(range(1, 11))
    assert "i = 1..10" in data["caption"]
