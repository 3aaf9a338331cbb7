"""What every mechanism is held to: names, shapes, files, masks, and what it says of dispersion."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sharpmax
from sharpmax.mechanisms import (
    MECHANISMS,
    ASEntmax,
    Entmax,
    LearnedEntmax,
    Mechanism,
    Temperature,
    TopK,
    Window,
    find,
    load_mechanism,
)
from sharpmax.mechanisms.base import mechanism_from_dict
from tests.arrays import LIBRARIES, make, numbers
from tests.jax.attention_cases import quick
from tests.mechanisms import cases

EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


@pytest.mark.parametrize("name", cases.NAMES)
def test_every_library_gives_the_weights_of_the_oracle(name: str) -> None:
    logits = cases.random_logits()
    spoilt = cases.spoilt(logits)
    want = cases.expected(name, logits, cases.VISIBLE, cases.learned_of(name))
    assert (want[0, 1] == 0).all()
    np.testing.assert_allclose(cases.with_numpy(name, spoilt), want, rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(cases.with_torch(name, spoilt)[0], want, rtol=1e-11, atol=1e-14)
    weights, *_, mapped = cases.with_jax(name, spoilt)
    np.testing.assert_allclose(weights, want, rtol=1e-11, atol=1e-14)
    opposite = cases.expected(name, -logits, cases.VISIBLE, cases.learned_of(name))
    np.testing.assert_allclose(mapped, [want, opposite], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", cases.NAMES)
def test_gradients_are_finite_differences_of_the_oracle(name: str) -> None:
    logits, learned = cases.random_logits(), cases.learned_of(name)

    def change(h: int, q: int, step: np.ndarray, moved: dict[str, np.ndarray]) -> float:
        """The central difference of one row's share of the scalar."""
        sides = []
        for sign in (1, -1):
            at = {key: learned[key] + sign * moved.get(key, 0.0) for key in learned}
            values = {key: float(value[h]) for key, value in at.items()}
            place = q + cases.KEYS - cases.QUERIES
            row = cases.oracle.row(name, logits[h, q] + sign * step, cases.VISIBLE[h, q], place, values)
            sides.append(row @ cases.COTANGENT[h, q])
        return (sides[0] - sides[1]) / 2e-5

    want, slopes = np.zeros(cases.SHAPE), {key: np.zeros(cases.HEADS) for key in learned}
    for h in range(cases.HEADS):
        for q in range(cases.QUERIES):
            for k in np.flatnonzero(cases.VISIBLE[h, q]):
                want[h, q, k] = change(h, q, 1e-5 * np.eye(cases.KEYS)[k], {})
            for key in learned:
                slopes[key][h] += change(h, q, np.zeros(cases.KEYS), {key: np.full(cases.HEADS, 1e-5)})
    _, by_torch, learned_torch = cases.with_torch(name, cases.spoilt(logits))
    _, by_jax, learned_jax, along, _ = cases.with_jax(name, cases.spoilt(logits))
    np.testing.assert_allclose(by_torch, want, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(by_jax, by_torch, rtol=1e-9, atol=1e-12)
    assert (by_torch[~cases.VISIBLE] == 0).all()
    assert (by_jax[~cases.VISIBLE] == 0).all()
    for key in learned:
        np.testing.assert_allclose(learned_torch[key], slopes[key], rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(learned_jax[key], slopes[key], rtol=1e-6, atol=1e-8)
    by_hand = np.sum(by_jax * cases.DIRECTION) + sum(slope.sum() for slope in learned_jax.values())
    np.testing.assert_allclose(along, by_hand, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("offset", [1e4, -1e4])
@pytest.mark.parametrize("name", cases.NAMES)
def test_an_offset_changes_nothing(name: str, offset: float) -> None:
    logits = np.round(cases.random_logits() * 64) / 64  # exact in float32 beside the offset
    want = cases.expected(name, logits, cases.VISIBLE, cases.learned_of(name))
    found = cases.with_torch(name, logits + offset, dtype="float32")
    np.testing.assert_allclose(found[0], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], cases.with_torch(name, logits)[1], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(cases.with_numpy(name, (logits + offset).astype(np.float32)), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(cases.with_jax(name, logits + offset)[0], want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", cases.NAMES)
def test_a_spread_of_twenty_thousand_is_finite(name: str) -> None:
    logits = np.sign(cases.random_logits()) * 1e4 + cases.random_logits(7) * 0.5
    want = cases.expected(name, logits, cases.VISIBLE, cases.learned_of(name))
    for weights, gradient, slopes, *_ in (cases.with_torch(name, logits), cases.with_jax(name, logits)):
        np.testing.assert_allclose(weights, want, rtol=1e-8, atol=1e-9)
        assert np.isfinite(gradient).all()
        assert all(np.isfinite(slope).all() for slope in slopes.values())


@pytest.mark.parametrize("library", LIBRARIES)
def test_narrow_types_are_computed_in_float32(library: str) -> None:
    names = ("softmax", "entmax15", "top_k", "window") if library == "jax" else cases.NAMES
    inputs = {dtype: make(library, cases.random_logits(), dtype) for dtype in EPSILON}
    mask = make(library, cases.VISIBLE, "bool")
    learned = {n: {k: make(library, v) for k, v in cases.learned_of(n).items()} for n in names}

    def weigh(inputs: Any) -> Any:
        return {
            dtype: {n: cases.mechanism(n)(x, mask, parameters=learned[n]) for n in names} for dtype, x in inputs.items()
        }

    found = (quick(weigh) if library == "jax" else weigh)(inputs)
    for dtype, x in inputs.items():
        for name, weights in found[dtype].items():
            assert str(weights.dtype).endswith(dtype)
            want = cases.expected(name, numbers(x), cases.VISIBLE, cases.learned_of(name))
            np.testing.assert_allclose(numbers(weights), want, rtol=EPSILON[dtype], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_key_and_no_key(library: str) -> None:
    one, none = make(library, [[[3.0]], [[-2.0]]]), make(library, np.zeros((2, 1, 0)))
    names = (*cases.SPARSE, "top_k", "window") if library == "jax" else cases.NAMES

    def weigh(x: Any) -> Any:
        return {name: cases.mechanism(name)(x) for name in names}

    for name, weights in (quick(weigh) if library == "jax" else weigh)(one).items():
        np.testing.assert_array_equal(numbers(weights), 1.0, err_msg=name)
    assert all(tuple(weights.shape) == (2, 1, 0) for weights in weigh(none).values())


@pytest.mark.parametrize("name", cases.NAMES)
def test_vmap_and_a_single_row_in_torch(name: str) -> None:
    logits, learned = torch.tensor(cases.random_logits()), cases.learned_of(name)
    visible, parameters = torch.tensor(cases.VISIBLE), {k: torch.tensor(v) for k, v in learned.items()}
    batch = torch.stack([logits, -logits])
    mapped = torch.func.vmap(lambda x: cases.mechanism(name)(x, visible, parameters=parameters))(batch)
    want = [cases.expected(name, x, cases.VISIBLE, learned) for x in numbers(batch)]
    np.testing.assert_allclose(numbers(mapped), want, rtol=1e-11, atol=1e-14)
    if not learned:
        alone = cases.mechanism(name)(logits[1, -1], visible[1, -1])
        np.testing.assert_allclose(numbers(alone), want[0][1, -1], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", [name for name in cases.NAMES if name != "hard"])
def test_a_logit_that_is_not_a_number_is_not_taken_for_a_mask(name: str) -> None:
    logits = np.zeros((2, 1, cases.KEYS))
    logits[..., -1] = math.nan
    assert np.isnan(cases.mechanism(name)(logits)).any()


@pytest.mark.parametrize("name", [name for name, mechanism in MECHANISMS.items() if mechanism.reads != "rows"])
def test_what_is_said_of_dispersion(name: str) -> None:
    """One logit a fixed gap above all others, in rows of up to a million.

    Where all bounded logits disperse, so do those with a gap of 2. Where not all do, a gap of 5 is enough to show it.
    Where earlier queries decide, the length of a row says nothing.
    """
    mechanism = MECHANISMS[name]
    about = mechanism.about
    if name in cases.NAMES:
        assert about.theorem.startswith("applies" if about.disperses else "does not apply")

    def largest(n: int, gap: float) -> float:
        logits = np.ones((mechanism.maps, 1, n), np.float32)
        logits[..., -1] += gap
        return float(np.max(np.abs(mechanism(logits))))

    gap = 2.0 if about.disperses else 5.0
    short, long = largest(10**4, gap), largest(10**6, gap)
    if about.disperses:
        assert long < min(5e-3, short / 20)
    else:
        assert long > max(1 / 17, short / 1.01)


@pytest.mark.parametrize("name", MECHANISMS)
def test_json_round_trip(name: str, tmp_path: Path) -> None:
    for mechanism in {MECHANISMS[name], cases.OTHERS.get(name, MECHANISMS[name])}:
        mechanism.save(tmp_path / "mechanism.json")
        loaded = load_mechanism(tmp_path / "mechanism.json")
        assert loaded == mechanism
        assert hash(loaded) == hash(mechanism)
        assert type(mechanism).load(tmp_path / "mechanism.json") == mechanism
        content = json.loads((tmp_path / "mechanism.json").read_text())
        assert content["schema"] == "sharpmax.mechanism/1"
        assert mechanism_from_dict(content) == mechanism
        assert [p.name for p in tmp_path.iterdir()] == ["mechanism.json"]


def test_loading_refuses_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "mechanism.json"
    schema = '"schema": "sharpmax.mechanism/1"'
    for content, message in (
        ("not json", "is not a mechanism file"),
        ("[]", "schema 'sharpmax.mechanism/1', got None"),
        (json.dumps(sharpmax.PAPER.to_dict()), "got 'sharpmax.policy/1'"),
        (f'{{{schema}, "kind": "Constant"}}', "unknown mechanism kind 'Constant'; known are"),
        (f'{{{schema}, "kind": "Entmax", "beta": 1}}', "Entmax has no field beta; its fields are alpha"),
        (f'{{{schema}, "kind": "Entmax", "alpha": 3}}', "from 1 \\(softmax\\) to 2 \\(sparsemax\\), got 3"),
        (f'{{{schema}, "kind": "TopK", "k": 0.5}}', "expected k to be a whole number of at least 1, got 0.5"),
        (f'{{{schema}, "kind": "Temperature", "chosen_by": 4}}', "expected chosen_by to be a policy"),
        (f'{{{schema}, "kind": "Temperature", "chosen_by": {{"kind": "Entmax"}}}}', "unknown policy kind 'Entmax'"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message) as caught:
            load_mechanism(path)
        assert "\n" not in str(caught.value)
    Entmax().save(path)
    with pytest.raises(ValueError, match="holds a Entmax, not a Temperature"):
        Temperature.load(path)


def test_names() -> None:
    assert all(isinstance(text, str) and text for found in MECHANISMS.values() for text in found.about[:5])
    assert find("sparsemax") is MECHANISMS["sparsemax"]
    assert find(Entmax(1.2)) == Entmax(1.2)
    with pytest.raises(ValueError, match=r"one of softmax, .*window.*, got 'softmx'"):
        find("softmx")
    with pytest.raises(TypeError, match="a mechanism or the name of one, got EntropyPolynomial"):
        find(sharpmax.PAPER)  # pyright: ignore[reportArgumentType]
    with pytest.raises(NotImplementedError):
        Mechanism().formula(np, np.zeros(1), np.ones(1, bool), {})


def test_bad_input_is_refused_in_one_sentence() -> None:
    x = np.zeros((2, 3, 4), np.float32)
    entmax = LearnedEntmax(2)
    calls: list[tuple[Any, str]] = [
        (lambda: Entmax()(np.float32(3)), "with an axis of keys, got a single number"),
        (lambda: Entmax()([1.0, 2.0]), "a NumPy, PyTorch or JAX array, got list"),
        (lambda: Entmax()(np.zeros(3, int)), "float16, bfloat16, float32 or float64, got int64"),
        (lambda: Entmax()(x, np.ones(4)), "where to be a boolean array, got float64"),
        (lambda: Entmax()(x, [True] * 4), "where to be a boolean array, got list"),
        (lambda: Entmax()(x, np.ones((5, 4), bool)), r"broadcast against logits of shape \(2, 3, 4\), got shape"),
        (lambda: Entmax()(x, torch.ones(4, dtype=torch.bool)), "where to be a numpy array like the logits"),
        (lambda: Entmax()(x, parameters={"alpha": x}), "expected parameters none for alpha-entmax, got alpha"),
        (lambda: entmax(x, parameters={}), "expected parameters alpha_logit for .*, got none"),
        (lambda: entmax(x[0]), r"expected logits \[..., 2 heads, queries, keys\] for .*, got \(3, 4\)"),
        (lambda: entmax(x, parameters={"alpha_logit": np.zeros(3)}), r"of shape \[..., 2 heads\], got \(3,\)"),
        (lambda: entmax(x, parameters={"alpha_logit": torch.zeros(2)}), "to be a numpy array like the logits"),
        (lambda: LearnedEntmax()(x, parameters={"alpha_logit": np.zeros(3)}), r"broadcast against .*got \(3,\)"),
        (lambda: Entmax(0.9), "from 1 .* to 2 .*, got 0.9"),
        (lambda: LearnedEntmax(init=2.0), "an alpha between 1 and 2, got 2.0"),
        (lambda: LearnedEntmax(0), "a number of heads or None, got 0"),
        (lambda: TopK(True), "whole number of at least 1, got True"),
        (lambda: Window(0), "expected size to be a whole number of at least 1, got 0"),
        (lambda: ASEntmax(delta=-1.0), "delta to be a finite number of at least 0, got -1.0"),
        (lambda: Temperature("softmax"), "a policy of sharpmax, got 'softmax'"),  # pyright: ignore[reportArgumentType]
    ]
    for call, message in calls:
        with pytest.raises((ValueError, TypeError), match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
