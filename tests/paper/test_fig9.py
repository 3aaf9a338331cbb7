"""Figure 9: the bound holds wherever training recorded it, and the figure draws what the checkpoint says."""

import copy
import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from sharpmax.inputs import InputError
from sharpmax.paper import fig9, max_retrieval
from sharpmax.paper.figures import render
from sharpmax.tasks.max_retrieval.data import Stream, sample, stream_key
from sharpmax.tasks.max_retrieval.model import ATTENTION, embed_query, hidden, logits

PROTOCOLS = ["paper", "sharp"]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_bound_holds_at_every_step_and_seed(name: str) -> None:
    data = fig9.data(max_retrieval.find_heads(name, None))
    spread, bound, ratio = (np.asarray(data[key], np.float64) for key in ("spread", "bound", "bound_over_spread"))
    assert spread.shape == bound.shape == (len(data["step"]), 10)
    assert np.all(spread > 0)
    assert np.all(spread <= bound)
    np.testing.assert_allclose(ratio, bound / spread, rtol=1e-5)
    assert f"{ratio.size} of {ratio.size} exceed 1" in data["caption"]
    assert f"the smallest is {math.floor(100 * ratio.min()) / 100:.2f}, rounded down" in data["caption"]
    assert "100,000 steps" in data["caption"]
    for key, values in (("spread", spread), ("bound", bound), ("bound_over_spread", bound / spread)):
        np.testing.assert_allclose(data["median"][key], np.median(values, axis=1), rtol=1e-5)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_numbers_are_the_checkpoints(name: str, tmp_path: Path) -> None:
    paths = fig9.run(tmp_path, name)
    stem = "fig9" if name == "paper" else f"fig9_{name}"
    assert [path.name for path in paths] == [f"{stem}.{kind}" for kind in ("png", "pdf", "json")]
    written = json.loads(paths[-1].read_text())
    history = json.loads((max_retrieval.SHIPPED / name / "checkpoint.json").read_text())["history"]
    for key in ("step", "spread", "bound"):
        assert written[key] == [entry[key] for entry in history]
    assert written["step"][-1] == 100_000


def test_the_last_numbers_are_what_the_caption_says() -> None:
    """Kernels with biases, vectors with a 1, the factor 1/sqrt(128), the mean of 128 sets of 16 items: step by step."""
    heads = max_retrieval.find_heads("paper", None)
    seed = heads.checkpoint.seeds[2]
    params = jax.tree.map(lambda a: jnp.asarray(a[2]), heads.checkpoint.params)
    batch = sample(stream_key(seed, Stream.PROBE), 128, 16)
    e = np.asarray(logits(params, batch), np.float64)
    x, y = np.asarray(hidden(params, batch.priority, batch.category)), np.asarray(embed_query(params, batch.query))
    largest = [
        np.linalg.norm(np.vstack([params[ATTENTION][part]["kernel"][:, 0], params[ATTENTION][part]["bias"]]), 2)
        for part in ("query", "key")
    ]
    longest = np.sqrt(1 + np.sum(np.square(x, dtype=np.float64), axis=-1)).max(axis=-1)
    bounds = 2 * math.prod(largest) * np.sqrt(1 + np.sum(np.square(y, dtype=np.float64), axis=-1)) * longest / 128**0.5
    assert np.all(np.ptp(e, axis=-1) <= bounds)
    data = fig9.data(heads)
    assert data["spread"][-1][2] == pytest.approx(np.ptp(e, axis=-1).mean(), rel=1e-3)
    assert data["bound"][-1][2] == pytest.approx(bounds.mean(), rel=1e-3)
    assert "128 fixed sets of 16 items" in data["caption"]


def test_a_run_that_diverged_can_be_drawn() -> None:
    heads = max_retrieval.find_heads("paper", None)
    history = copy.deepcopy(heads.checkpoint.history[:4])
    for key in ("spread", "bound"):
        history[2][key][1] = None
        history[3][key] = [None] * 10
    data = fig9.data(heads._replace(checkpoint=dataclasses.replace(heads.checkpoint, history=history)))
    assert data["bound_over_spread"][2][1] is None
    assert data["median"]["spread"][3] is None
    others = np.delete(np.asarray(history[2]["bound"], np.float64), 1)
    assert data["median"]["bound"][2] == pytest.approx(np.median(others), rel=1e-5)
    assert set(render(data, fig9.draw, (6.75, 2.5))) == {"png", "pdf"}


def test_a_spread_above_its_bound_is_told_and_drawn() -> None:
    heads = max_retrieval.find_heads("paper", None)
    history = copy.deepcopy(heads.checkpoint.history[:3])
    history[1]["bound"][4] = 0.499 * history[1]["spread"][4]
    data = fig9.data(heads._replace(checkpoint=dataclasses.replace(heads.checkpoint, history=history)))
    assert "29 of 30 exceed 1, and the smallest is 0.49, rounded down" in data["caption"]
    figure = Figure()
    fig9.draw(figure, data)
    right = figure.axes[1]
    assert right.get_ylim()[0] < 0.499
    assert "1 exceed their bound" in [text.get_text() for text in right.texts]


def test_a_history_of_a_single_step_can_be_drawn() -> None:
    heads = max_retrieval.find_heads("paper", None)
    history = heads.checkpoint.history[:1]
    data = fig9.data(heads._replace(checkpoint=dataclasses.replace(heads.checkpoint, history=history)))
    assert set(render(data, fig9.draw, (6.75, 2.5))) == {"png", "pdf"}


@pytest.mark.parametrize("lost", [["spread", "bound"], None])
def test_a_history_without_a_spread_is_refused(tmp_path: Path, lost: list[str] | None) -> None:
    heads = max_retrieval.find_heads("paper", None)
    history = [] if lost is None else copy.deepcopy(heads.checkpoint.history)
    for entry in history:
        entry |= {key: [None] * 10 for key in lost or ()}
    dataclasses.replace(heads.checkpoint, history=history).save(tmp_path / "heads")
    with pytest.raises(InputError, match="history"):
        fig9.run(tmp_path / "out", checkpoint=tmp_path / "heads")
    assert not (tmp_path / "out").exists()
