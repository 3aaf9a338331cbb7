"""Figure 6: samples that are optima, polynomials and policies against closed forms."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import sharpmax
from sharpmax.inputs import InputError
from sharpmax.paper import fig6, max_retrieval
from sharpmax.paper.figures import render
from sharpmax.tasks.max_retrieval import Samples, fitting
from sharpmax.tasks.max_retrieval.data import Stream
from sharpmax.tasks.max_retrieval.evaluation import sample_logits

SIZES, SETS = (256, 512), 24


@pytest.fixture(scope="module")
def heads() -> max_retrieval.Heads:
    return max_retrieval.find_heads("paper", None)


@pytest.fixture(scope="module")
def data(heads: max_retrieval.Heads) -> dict[str, Any]:
    return fig6.data(heads, SIZES, SETS)


def test_samples_are_the_optima_of_validation_sets(heads: max_retrieval.Heads, data: dict[str, Any]) -> None:
    """The probability of the true maximum, at the sample's beta and on a grid around it."""
    found = 0
    samples = {key: np.asarray(values) for key, values in data["samples"].items()}
    for seed in (0, 7):
        head = jax.tree.map(lambda a, seed=seed: a[seed], heads.checkpoint.params)
        for n in SIZES:
            logits, target = sample_logits(head, seed, n, SETS, stream=Stream.VALIDATION)
            logits = logits.astype(np.float64)
            kept = logits[np.arange(SETS), target] < logits.max(axis=-1)
            mine = (samples["seed"] == seed) & (samples["size"] == n)
            assert mine.sum() == kept.sum()
            for row, item, entropy, beta in zip(
                logits[kept], target[kept], samples["entropy"][mine], samples["beta"][mine], strict=True
            ):
                found += 1
                p = np.exp(row - row.max())
                p /= p.sum()
                assert entropy == pytest.approx(-np.sum(p * np.log(p)), rel=1e-3)
                grid = beta * np.array([1, 0.5, 0.9, 1.1, 2])[:, None]
                log_p = grid[:, 0] * (row[item] - row.max()) - np.log(np.exp(grid * (row - row.max())).sum(axis=-1))
                assert np.all(log_p[1:] < log_p[0])
    assert found > 5


def test_caption_counts_what_was_kept_and_dropped(data: dict[str, Any]) -> None:
    kept, total = len(data["samples"]["beta"]), 10 * SETS * len(SIZES)
    assert data["fit"]["kept"] == kept
    assert f"Of {total:,} sets {kept:,} were kept and {total - kept:,} dropped" in data["caption"]
    assert "(protocol paper, 100,000 steps)" in data["caption"]


def test_polynomials(data: dict[str, Any]) -> None:
    entropy, ours = np.asarray(data["entropy"]), data["polynomials"]["refitted"]
    refitted = np.polyfit(data["samples"]["entropy"], data["samples"]["beta"], 4)
    inside = (entropy >= data["fit"]["domain"][0]) & (entropy <= data["fit"]["domain"][1])
    np.testing.assert_allclose(np.asarray(ours["value"])[inside], np.polyval(refitted, entropy[inside]), rtol=0.02)
    paper = data["polynomials"]["paper"]
    assert paper["coefficients"] == [-0.037, 0.481, -2.3, 4.917, -1.791]
    np.testing.assert_allclose(paper["above_1"], [[0.8486, 5.9445]], atol=1e-4)
    for polynomial in data["polynomials"].values():
        above = [any(low < h < high for low, high in polynomial["above_1"]) for h in entropy]
        np.testing.assert_array_equal(above, (np.asarray(polynomial["value"]) > 1) & (entropy > data["threshold"]))


def test_policies_are_cut_and_held(data: dict[str, Any]) -> None:
    entropy, (low, high) = np.asarray(data["entropy"]), data["fit"]["domain"]
    for name, polynomial, held in (
        ("paper", "paper", entropy),
        ("refitted", "refitted", entropy),
        ("refitted_held", "refitted", np.clip(entropy, low, high)),
    ):
        value = np.polyval(data["polynomials"][polynomial]["coefficients"], held)
        expected = np.where(entropy > 0.5, np.maximum(value, 1), 1)
        np.testing.assert_allclose(data["policies"][name]["beta"], expected, rtol=1e-4)


def test_means_of_groups() -> None:
    entropies, betas = np.arange(100.0)[::-1], np.arange(100.0)[::-1] ** 2
    means = fig6._means(entropies, betas)
    assert means["entropy"] == [4.5 + 10 * i for i in range(10)]
    np.testing.assert_allclose(means["beta"], [np.mean(np.arange(10 * i, 10 * i + 10.0) ** 2) for i in range(10)])


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_heads_with_hardly_a_sample_can_be_drawn(
    heads: max_retrieval.Heads, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {16: {"total": 8, "already_largest": 8 - kept, "no_optimum": 0}}
    x = np.linspace(1, 2, kept)
    samples = Samples(x, x, np.zeros(kept, int), np.full(kept, 16), counts, (0,), (16,))
    monkeypatch.setattr(fitting, "collect", lambda *args, **options: samples)
    data = fig6.data(heads, (16,), 8)
    assert f"{kept} were kept and {8 - kept} dropped" in data["caption"]
    assert set(render(data, fig6.draw, (6.75, 3))) == {"png", "pdf"}


def test_files(tmp_path: Path) -> None:
    paths = fig6.run(tmp_path, "sharp", sets=2, sizes="32,64")
    assert [path.name for path in paths] == ["fig6_sharp.png", "fig6_sharp.pdf", "fig6_sharp.json"]
    written = json.loads(paths[-1].read_text())
    assert written["sizes"] == [32, 64]
    held = sharpmax.policy_from_dict(written["policies"]["refitted_held"]["policy"])
    assert dataclasses.replace(held, beyond="extrapolate") == sharpmax.policy_from_dict(
        written["policies"]["refitted"]["policy"]
    )


@pytest.mark.parametrize("options", [{"sets": 0}, {"sizes": "1,2"}])
def test_bad_options_are_refused_before_any_work(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^expected "):
        fig6.run(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
