"""Selective, differential and threshold relative attention: against the equations of their papers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sharpmax.mechanisms import Differential, Selective, ThresholdRelative, find
from tests.arrays import LIBRARIES, make, numbers
from tests.mechanisms import cases_unnormalised as cases
from tests.mechanisms import oracle_unnormalised as oracle


@pytest.mark.parametrize("name", ["differential", "threshold_relative"])
def test_one_number_for_all_heads(name: str) -> None:
    """Without ``heads`` the parameter is a single number, and starts as the paper's first layer does."""
    logits, visible, _ = cases.case(name)
    shared = find(name)
    assert shared.heads is None
    ((key, start),) = shared.initial().items()
    want = cases.expected(name, logits, visible, {key: np.full(2, np.float32(start))})
    np.testing.assert_allclose(shared(logits, visible), want, rtol=1e-12, atol=1e-15)
    assert start == {"lambda": 0.2, "gate": 0.0}[key]


# ------------------------------------------------------------------------------------------------------------------
# Selective attention
# ------------------------------------------------------------------------------------------------------------------


def square(queries: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Causal logits of three heads, most of them positive in the first, so that much is selected."""
    logits = np.random.default_rng(0).normal(size=(3, queries, queries)) + 0.5
    return logits, np.tril(np.ones((3, queries, queries), bool))


@pytest.mark.parametrize("first_stays", [True, False])
def test_the_first_key_stays_if_told_to(first_stays: bool) -> None:
    logits, visible = square()
    want = oracle.selective(logits, visible, {}, first_stays)
    np.testing.assert_allclose(Selective(first_stays)(logits, visible), want, rtol=1e-12)
    other = oracle.selective(logits, visible, {}, not first_stays)
    assert np.abs(want - other).max() > 0.1


@pytest.mark.parametrize("library", LIBRARIES)
def test_padding_before_a_sequence_changes_nothing(library: str) -> None:
    """The key that stays is the first that is seen, wherever it stands."""
    logits, visible = square()
    padded = np.pad(logits, ((0, 0), (3, 0), (3, 0)), constant_values=9.0)
    seen = np.pad(visible, ((0, 0), (3, 0), (3, 0)))
    weights = numbers(cases.at_once(library, Selective())(make(library, padded), make(library, seen, "bool")))
    np.testing.assert_allclose(weights[:, 3:, 3:], oracle.selective(logits, visible, {}), rtol=1e-5, atol=1e-7)
    assert not weights[:, :3].any()
    assert not weights[..., :3].any()


def test_the_first_head_selects_for_all() -> None:
    """Other heads' logits change their own weights alone; the first head's change everyone's."""
    logits, visible = square()
    before = Selective()(logits, visible)
    logits[1] += np.random.default_rng(1).normal(size=logits[1].shape)
    np.testing.assert_array_equal(Selective()(logits, visible)[[0, 2]], before[[0, 2]])
    logits[0] += np.random.default_rng(2).normal(size=logits[1].shape)
    assert np.abs(Selective()(logits, visible)[2] - before[2]).max() > 0.1


def test_a_query_selects_neither_its_own_key_nor_for_itself() -> None:
    """Only query 1 sees anything positive: its own key stays, key 0 is gone for those below, and not for itself."""
    logits = np.zeros((1, 3, 3))
    logits[0, 1, :2] = 50.0
    visible = np.tril(np.ones((1, 3, 3), bool))
    np.testing.assert_allclose(
        Selective(first_stays=False)(logits, visible)[0], [[1, 0, 0], [0.5, 0.5, 0], [0, 0.5, 0.5]], atol=1e-15
    )


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("first_stays", [True, False])
def test_a_last_query_needs_the_sum_of_what_others_left(library: str, first_stays: bool) -> None:
    logits, visible = square()
    mechanism, xp = Selective(first_stays), cases.namespace(library)

    def last(logits: Any, visible: Any) -> Any:
        held = xp.where(visible, logits, 0.0)
        left = mechanism.leaves(xp, held[..., :-1, :], visible[..., :-1, :], position=0)
        return left, mechanism.given(xp, held[..., -1:, :], visible[..., -1:, :], left)

    left, weights = cases.at_once(library, last)(make(library, logits), make(library, visible, "bool"))
    assert tuple(left.shape) == (1, 1, 6)
    want = oracle.selective(logits, visible, {}, first_stays)[:, -1:]
    np.testing.assert_allclose(numbers(weights), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("block", [1, 4, 6])
def test_rows_in_blocks(block: int) -> None:
    """What blocks leave behind adds up to what the whole computes."""
    logits, visible = square()
    held, mechanism, rows = np.where(visible, logits, 0.0), Selective(), []
    past = np.zeros((1, 1, 6))
    for start in range(0, 6, block):
        part = (np, held[:, start : start + block], visible[:, start : start + block])
        rows.append(mechanism.given(*part, past + mechanism.before(*part, position=start)))
        past = past + mechanism.leaves(*part, position=start)
    np.testing.assert_allclose(np.concatenate(rows, axis=1), oracle.selective(logits, visible, {}), rtol=1e-12)


def test_selected_keys_escape_dispersion() -> None:
    """A head that selects all but one key keeps it as rows grow; one that selects nothing is softmax."""
    kept = []
    for n in (64, 512):
        logits = np.ones((1, n, n))
        logits[0, :, 5] = 0.0
        causal = np.tril(np.ones((n, n), bool))
        kept.append(Selective()(logits, causal)[0, -1, 5])
        assert Selective()(logits - 2, causal)[0, -1].max() < math.e / n
    assert kept[1] > 0.09
    assert kept[0] == pytest.approx(kept[1], rel=1e-9)


def test_selective_refuses_a_single_row() -> None:
    with pytest.raises(ValueError, match="reads earlier queries"):
        Selective()(np.zeros(4))
    with pytest.raises(ValueError, match="expected first_stays to be True or False, got 1"):
        Selective(1)  # pyright: ignore[reportArgumentType]


# ------------------------------------------------------------------------------------------------------------------
# Differential and threshold relative attention
# ------------------------------------------------------------------------------------------------------------------


def test_differential_has_half_as_many_heads() -> None:
    with pytest.raises(ValueError, match="heads a multiple of 2"):
        Differential()(np.zeros((3, 4, 5)))
    with pytest.raises(ValueError, match="expected logits"):
        Differential(heads=2)(np.zeros((6, 4, 5)))
    assert Differential(heads=2)(np.zeros((4, 4, 5))).shape == (2, 4, 5)


@pytest.mark.parametrize("kind", [Differential, ThresholdRelative])
def test_what_cannot_be_learned_from(kind: Any) -> None:
    with pytest.raises(ValueError, match="expected heads to be a number of heads or None, got 0"):
        kind(heads=0)
    with pytest.raises(ValueError, match="expected init to be a finite number, got nan"):
        kind(init=math.nan)


def test_a_difference_disperses_as_its_maps_do() -> None:
    """The bound of ``about.theorem``, and what is left of it where equal maps cancel: a share, not a size."""
    for n in (100, 10_000):
        logits = np.zeros((2, 1, n))
        logits[0, 0, 7] = 3.0
        for factor in (0.2, 1.0):
            weights = np.abs(Differential(init=factor)(logits))
            assert weights.max() <= (1 + factor) * math.exp(3) / n
            assert (weights.max() / weights.sum() > 0.4) == (factor == 1.0 or (n == 100 and factor > 0.9))


def test_nothing_above_the_threshold_weighs_nothing() -> None:
    weights = ThresholdRelative()(np.array([[-1.0, 0.0, -3.0], [-1.0, 0.5, -3.0]]))
    np.testing.assert_array_equal(weights, [[0, 0, 0], [0, 1, 0]])


def test_distance_counts_what_is_kept() -> None:
    """Removed keys between two others do not move them apart; a gate of 1/2 halves with every kept key."""
    weights = ThresholdRelative()(np.array([1.0, 1.0, 1.0])[None])
    np.testing.assert_allclose(weights[0], np.array([1, 2, 4]) / 7, rtol=1e-12)
    spread = ThresholdRelative()(np.array([1.0, -1.0, 1.0, -9.0, -2.0, 1.0, -1.0])[None])
    np.testing.assert_allclose(spread[0, [0, 2, 5]], weights[0], rtol=1e-12)


def test_the_nearest_kept_key_never_fades() -> None:
    for n in (10, 10_000):
        logits = np.random.default_rng(0).uniform(-2, 2, size=(1, n))
        weights = ThresholdRelative()(logits)[0]
        nearest = np.flatnonzero(logits[0] > 0)[-1]
        assert weights[nearest] >= 0.5 * math.exp(-2)
