"""The blocks of keys that benchmarks.dead_blocks counts as dead, against a count in float64, block by block."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sharpmax
from benchmarks.dead_blocks import blocks, counted, forward_at_best, visible

NATS = (17.0, 9 * math.log(2))
POLICIES = (sharpmax.PAPER, sharpmax.PAPER_HELD, sharpmax.Constant(1.0))
COLUMNS = 16


def head(length: int, deviation: float) -> tuple[Tensor, Tensor]:
    """Queries and keys that turn slowly along the text, beside noise: whole blocks are far from a query."""
    g = torch.Generator().manual_seed(0)
    angle = torch.arange(length) * (2 * math.pi / 150)
    turning = torch.stack([angle.cos(), angle.sin()], -1) * deviation
    q, k = (torch.cat([turning, torch.randn(length, COLUMNS - 2, generator=g)], -1) for _ in range(2))
    return q, k


def dead_blocks(q: Tensor, k: Tensor, policy: Any, nats: float, grain: int) -> tuple[list[tuple[int, int]], Any]:
    """All dead (tile, block), counted in float64, and the weights of the rows."""
    length = len(q)
    logits = q.double().numpy() @ k.double().numpy().T / math.sqrt(COLUMNS)
    where = np.tril(np.ones((length, length), bool))
    beta = policy(sharpmax.row_stats(logits, where=where))
    weights = sharpmax.softmax(logits * beta[:, None], where=where)
    found = []
    for tile in range(blocks(length, grain)):
        for block in range(tile + 1):
            exponents = [
                beta[i] * (max(logits[i, block * grain : min(block * grain + grain, i + 1)]) - max(logits[i, : i + 1]))
                + math.log(i + 1)
                for i in range(tile * grain, min(tile * grain + grain, length))
                if i >= block * grain
            ]
            if max(exponents) < -nats:
                found.append((tile, block))
    return found, weights


@pytest.mark.parametrize(("length", "grains"), [(256, (32, 16)), (219, (32, 8)), (20, (32, 16))])
@pytest.mark.parametrize("deviation", [3.0, 12.0])
def test_they_are_counted_as_block_by_block_in_float64(length: int, grains: tuple[int, ...], deviation: float) -> None:
    q, k = head(length, deviation)
    found = counted(q, k, POLICIES, NATS, grains)
    for g, grain in enumerate(grains):
        for p, policy in enumerate(POLICIES):
            expected = [len(dead_blocks(q, k, policy, nats, grain)[0]) for nats in NATS]
            assert found.dead[g, p].tolist() == expected
    assert (found.dead <= torch.tensor([visible(length, grain) for grain in grains])[:, None, None]).all()
    if deviation == 12.0 and length > 100:  # these heads have both kinds of blocks
        assert (found.dead > 0).all()
        assert found.dead[0].max() < visible(length, grains[0])


@pytest.mark.parametrize("nats", NATS)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_left_out_weighs_less_than_the_criterion_says(policy: Any, nats: float) -> None:
    q, k = head(256, 12.0)
    found, weights = dead_blocks(q, k, policy, nats, 16)
    left_out = np.zeros_like(weights, bool)
    for tile, block in found:
        left_out[tile * 16 : tile * 16 + 16, block * 16 : block * 16 + 16] = True
    mass = (weights * left_out).sum(1)
    assert 0 < mass.max() < math.exp(-nats)
    assert (weights * ~left_out).sum(1) == pytest.approx(1, abs=math.exp(-nats))


def test_rows_with_a_large_beta_are_counted() -> None:
    q, k = head(219, 3.0)
    beta = [policy(sharpmax.row_stats(q @ k.mT / 4, where=torch.ones(219, 219).tril() > 0)) for policy in POLICIES]
    assert counted(q, k, POLICIES, NATS, (32,)).sharpened.tolist() == [int((b > 1.3).sum()) for b in beta]


def test_equal_logits_have_no_dead_block_and_hard_rows_only_those_without_the_largest() -> None:
    q, k = torch.ones(128, COLUMNS), torch.ones(128, COLUMNS)
    assert counted(q, k, POLICIES, NATS, (32,)).dead.sum() == 0
    k = torch.full((128, COLUMNS), -1e3)
    k[0] = 1.0  # the first block keeps all of the weight
    dead = counted(q, k, POLICIES, NATS, (32,)).dead
    assert (dead == visible(128, 32) - 4).all()


def test_forward_falls_to_a_third_at_best() -> None:
    assert [forward_at_best(share) for share in (0.0, 0.5, 1.0)] == pytest.approx([1, 2 / 3, 1 / 3])
