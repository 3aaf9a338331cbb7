"""Remark C.1 on random stacks, against a stack written out token by token."""

import functools
import json
import math

import numpy as np
import pytest

from sharpmax.inputs import InputError
from sharpmax.paper import depth
from sharpmax.paper.stacks import Layer, random_layers, stacked

FEATURES, HEADS = 12, 3


def token_by_token(layers: list[Layer], tokens: np.ndarray, residual: bool, betas: list[float], causal: bool = False):
    """Embeddings ``[n, d]`` and coefficients ``[heads, n, n]`` after every layer, without kinds or counts."""

    def norm(h: np.ndarray) -> np.ndarray:
        return np.stack([(row - row.mean()) / row.std() for row in h])

    h, found = tokens, []
    for layer, beta in zip(layers, betas, strict=True):
        x, outputs, weights = norm(h), [], []
        for query, key, value in zip(layer.query, layer.key, layer.value, strict=True):
            logits = beta * (x @ query) @ (x @ key).T / math.sqrt(query.shape[1])
            if causal:
                logits[np.triu_indices(len(h), 1)] = -np.inf
            raised = np.exp(logits)
            weights.append(raised / raised.sum(axis=1, keepdims=True))
            outputs.append(weights[-1] @ (x @ value))
        h = residual * h + np.concatenate(outputs, axis=1) @ layer.out
        h = residual * h + np.maximum(norm(h) @ layer.up, 0) @ layer.down
        found.append((h, np.stack(weights)))
    return found


@pytest.fixture
def layers() -> list[Layer]:
    return random_layers(np.random.default_rng(5), 5, FEATURES, HEADS, 2.0)


@pytest.mark.parametrize("residual", [False, True])
def test_kinds_with_counts_are_the_tokens_written_out(layers, residual):
    kinds, counts = np.random.default_rng(1).standard_normal((4, FEATURES)), np.array([1, 7, 3, 2])
    which, betas = np.repeat(np.arange(4), counts), [1.0, 1.0, 0.5, 1.0, 1.0]
    few = stacked(layers, kinds, counts, residual=residual, betas=betas)
    for ours, (h, weights) in zip(few, token_by_token(layers, kinds[which], residual, betas), strict=True):
        np.testing.assert_allclose(ours.h[which], h, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(ours.coefficients[:, which][:, :, which], weights, rtol=1e-7, atol=1e-12)
        np.testing.assert_allclose(ours.entropy[:, which], -np.sum(weights * np.log(weights), axis=-1), rtol=1e-7)


def test_counts_may_depend_on_who_looks(layers):
    """A causal stack: every token is a kind of its own and sees those before it."""
    tokens = np.random.default_rng(2).standard_normal((9, FEATURES))
    ours = stacked(layers, tokens, np.tril(np.ones((9, 9))), residual=True)
    for found, (h, weights) in zip(ours, token_by_token(layers, tokens, True, [1.0] * 5, causal=True), strict=True):
        np.testing.assert_allclose(found.h, h, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(found.coefficients, weights, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("n", [16, 304, 10**9])
def test_one_uniform_layer_flattens_all_later_ones_unless_there_are_residuals(layers, n):
    kinds, counts = np.random.default_rng(3).standard_normal((4, FEATURES)), n // 8 * np.array([1, 2, 1, 4])
    betas = [1.0, 0.0, 1.0, 1.0, 1.0]
    found = stacked(layers, kinds, counts, residual=False, betas=betas)
    assert np.ptp(found[0].h, axis=0).max() > 0.1
    assert n * found[0].coefficients.max() > 1.5
    for layer in found[1:]:
        assert np.ptp(layer.h, axis=0).max() < 1e-11
        np.testing.assert_allclose(n * layer.coefficients, 1, rtol=1e-11)
        np.testing.assert_allclose(layer.entropy, math.log(n), rtol=1e-11)
    with_residuals = stacked(layers, kinds, counts, residual=True, betas=betas)
    np.testing.assert_allclose(n * with_residuals[1].coefficients, 1, rtol=1e-11)
    for layer in with_residuals[1:]:
        assert np.ptp(layer.h, axis=0).max() > 0.1
    for layer in with_residuals[2:]:
        assert n * layer.coefficients.max() > 1.5


@pytest.fixture(scope="module")
def data():
    return depth.data(seed=2, stacks=2)


def test_numbers_agree_with_tokens_written_out(data):
    seed, n, generator = 2, 16, np.random.default_rng(2)
    layers = random_layers(generator, depth.LAYERS, depth.FEATURES, depth.HEADS, depth.GAIN)
    vocabulary = generator.standard_normal((depth.KINDS, depth.FEATURES))
    counts = np.random.default_rng((seed, n)).multinomial(n, np.full(depth.KINDS, 1 / depth.KINDS))
    tokens = np.repeat(vocabulary, counts, axis=0)
    assert tokens.shape == (n, depth.FEATURES)
    for name in ("without", "with"):
        metrics = data["residuals"][name]["as_is"]
        written_out = token_by_token(layers, tokens, name == "with", [1.0] * depth.LAYERS)
        for i, (h, weights) in enumerate(written_out[:4]):
            entropy = -np.sum(weights * np.log(weights), axis=-1)
            spread = np.log(weights).max(axis=-1) - np.log(weights).min(axis=-1)
            apart = np.linalg.norm(h - h.mean(axis=0), axis=1).mean() / np.linalg.norm(h, axis=1).mean()
            assert metrics["entropy"][0][0][i] == pytest.approx(entropy.mean() / math.log(n), rel=1e-5)
            assert metrics["largest"][0][0][i] == pytest.approx(n * weights.max(), rel=1e-5)
            assert metrics["spread"][0][0][i] == pytest.approx(spread.mean(), rel=1e-5)
            assert metrics["distance"][0][0][i] == pytest.approx(apart, rel=1e-5)


def test_small_coefficients_are_not_enough(data):
    """Every coefficient is below the machine epsilon, and yet outputs differ as much as with few tokens."""
    plain = data["residuals"]["without"]["as_is"]
    most = data["sizes"][-1]
    assert np.max(plain["largest"][-1]) / most < data["machine_epsilon"]
    first = np.array(plain["distance"])[:, :, 0]
    np.testing.assert_allclose(first[-1].mean(), first[1].mean(), rtol=0.05)
    assert first.min() > 0.5


def test_the_flattened_layer_in_the_data(data):
    at = data["flattened_layer"] - 1
    without, with_ = (data["residuals"][name]["flattened"] for name in ("without", "with"))
    np.testing.assert_allclose(np.array(without["largest"])[..., at:], 1, rtol=1e-5)
    assert np.max(np.array(without["distance"])[..., at:]) < 1e-13
    np.testing.assert_allclose(np.array(with_["largest"])[..., at], 1, rtol=1e-5)
    assert np.min(np.array(with_["largest"])[..., at + 1]) > 5
    assert np.min(with_["distance"]) > 0.3


def test_files_and_seeds(data, tmp_path, monkeypatch):
    monkeypatch.setattr(depth, "data", functools.partial(depth.data, stacks=2))
    paths = depth.run(tmp_path, seed=2)
    assert [path.name for path in paths] == ["depth.png", "depth.pdf", "depth.json"]
    record = json.loads(paths[-1].read_text())
    assert np.shape(record["residuals"]["with"]["as_is"]["entropy"]) == (4, 2, 8)
    assert record["residuals"] == data["residuals"]
    assert record["caption"] == data["caption"]
    few = {"sizes": (64,), "stacks": 1, "kinds": 2}
    assert depth.data(seed=0, **few)["residuals"] != depth.data(seed=1, **few)["residuals"]
    with pytest.raises(InputError, match=r"^expected seed"):
        depth.run(tmp_path / "none", seed=-1)
    assert not (tmp_path / "none").exists()
