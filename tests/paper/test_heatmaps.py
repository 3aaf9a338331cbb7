"""Figures 2 and 7: coefficients recomputed from logits and priorities, and the options of both."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharpmax
from sharpmax.inputs import InputError
from sharpmax.paper import fig2, fig7, heatmaps, max_retrieval
from sharpmax.tasks.max_retrieval import evaluate
from sharpmax.tasks.max_retrieval.data import Batch, Stream, sample, stream_key
from sharpmax.tasks.max_retrieval.evaluation import sample_logits

SEED, SIZES, SETS = 3, (16, 512), 8


@pytest.fixture(scope="module")
def heads() -> max_retrieval.Heads:
    return max_retrieval.find_heads("paper", None)


@pytest.fixture(scope="module")
def maps(heads: max_retrieval.Heads) -> dict[str, Any]:
    return fig7.data(heads, SEED, sizes=SIZES, sets=SETS)


def test_coefficients_against_logits_and_priorities(heads: max_retrieval.Heads, maps: dict[str, Any]) -> None:
    head = jax.tree.map(lambda a: a[SEED], heads.checkpoint.params)
    assert maps["seed"] == heads.checkpoint.seeds[SEED] == SEED
    for i, n in enumerate(SIZES):
        logits, target = sample_logits(head, SEED, n, SETS, stream=Stream.EVALUATION)
        priority = sample(jax.random.fold_in(stream_key(SEED, Stream.EVALUATION), n), SETS, n).priority
        exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights = {
            "softmax": exponentials / exponentials.sum(axis=-1, keepdims=True),
            "adaptive": sharpmax.adaptive_temperature_softmax(logits, policy=sharpmax.PAPER),
        }
        for name, of_items in weights.items():
            row = maps["rows"][name]
            drawn = np.asarray(row["coefficients"][i])
            assert drawn.shape == (SETS, 16)
            np.testing.assert_allclose(drawn[:, -1], of_items[np.arange(SETS), target], rtol=1e-2, atol=1e-6)
            ascending = np.argsort(np.asarray(priority), axis=-1, kind="stable")[:, -16:]
            np.testing.assert_allclose(drawn, np.take_along_axis(of_items, ascending, -1), rtol=1e-2, atol=1e-6)
            assert row["on_maximum"][i] == pytest.approx(drawn[:, -1].mean(), rel=1e-3)


def test_means_are_those_of_table_1(heads: max_retrieval.Heads, maps: dict[str, Any]) -> None:
    """The evaluation's own engine, on the same sets."""
    params = jax.tree.map(lambda a: a[SEED : SEED + 1], heads.checkpoint.params)
    policies = {"softmax": sharpmax.Constant(1.0), "adaptive": sharpmax.PAPER}
    measured = evaluate(params, [SEED], SIZES, SETS, policies)
    for name, row in maps["rows"].items():
        np.testing.assert_allclose(row["entropy"], measured.rows[name].entropy[:, 0], rtol=1e-3)
    np.testing.assert_allclose(maps["maximum_has_largest_logit"], measured.ceiling[:, 0], atol=1e-6)
    assert maps["rows"]["adaptive"]["entropy"][-1] < maps["rows"]["softmax"]["entropy"][-1]
    assert maps["rows"]["softmax"]["beta"] == [1.0, 1.0]
    assert maps["rows"]["adaptive"]["beta"][-1] > 1


def test_figure_2_is_the_upper_row_of_figure_7(heads: max_retrieval.Heads, maps: dict[str, Any]) -> None:
    alone = fig2.data(heads, SEED, sizes=SIZES, sets=SETS)
    assert alone["rows"] == {"softmax": maps["rows"]["softmax"]}
    assert f"{alone['rows']['softmax']['on_maximum'][-1]:.1%} at n = 512" in alone["caption"]
    assert f"seed {SEED}" in alone["caption"]
    assert "100,000 steps" in alone["caption"]
    assert "100,000 steps" in maps["caption"]


def test_among_equal_priorities_the_target_is_rightmost(
    heads: max_retrieval.Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    category = jnp.arange(4)[None]

    def equal(key: jax.Array, index: jax.Array, n: int) -> Batch:
        return Batch(jnp.full((1, 4), 0.5), category, jnp.full((1, 1), 0.5), jnp.zeros(1, int), category[:, 0], None)

    monkeypatch.setattr(heatmaps, "sample_sets", equal)
    ranked = heatmaps.ranked_logits(heads, 0, 4, 1)
    head = jax.tree.map(lambda a: jnp.asarray(a[0]), heads.checkpoint.params)
    in_order = heatmaps.model_logits(head, equal(jax.random.key(0), category, 4))
    np.testing.assert_allclose(ranked[:, ::-1], in_order, rtol=1e-5)
    assert len(np.unique(ranked)) == 4


@pytest.mark.parametrize("module", [fig2, fig7])
@pytest.mark.parametrize(("protocol", "suffix"), [(None, ""), ("sharp", "_sharp")])
def test_files(module: Any, protocol: str | None, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heatmaps, "data", partial(heatmaps.data, sizes=(16, 32), sets=3))
    paths = module.run(tmp_path, protocol, seed=4)
    name = module.__name__.rpartition(".")[2] + suffix
    assert [path.name for path in paths] == [f"{name}.{kind}" for kind in ("png", "pdf", "json")]
    data = json.loads(paths[-1].read_text())
    assert (data["seed"], data["sets"], data["sizes"]) == (4, 3, [16, 32])
    assert np.shape(data["rows"]["softmax"]["coefficients"]) == (2, 3, 16)


@pytest.mark.parametrize("module", [fig2, fig7])
def test_a_seed_without_a_head_is_refused(module: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^expected seed to be one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, .* got 10$"):
        module.run(tmp_path / "out", seed=10)
    assert not (tmp_path / "out").exists()
