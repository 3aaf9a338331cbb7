"""What ``auto`` expects of the kernels for Hopper is what launches take, as if this machine had an H200."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

import sharpmax
from sharpmax.core.policies import lowered
from sharpmax.core.policies.base import Lowered
from sharpmax.torch import choice
from sharpmax.torch.checks import checked
from sharpmax.torch.triton import hopper, hopper_backward, prefill
from sharpmax.torch.triton.hopper_attend_kernel import hopper_attend_kernel
from sharpmax.torch.triton.hopper_kernel import hopper_stats_kernel
from sharpmax.torch.triton.launch import Masks, form_of
from tests.torch.triton.hopper_cases import forget_launches

POLICIES: list[Any] = [
    sharpmax.PAPER, sharpmax.PAPER, sharpmax.PAPER, sharpmax.PAPER_HELD, sharpmax.detached(sharpmax.PAPER),
    sharpmax.Constant(2.0), sharpmax.LogLength(), lambda stats: 1.0 + stats.entropy,
]  # fmt: skip


@pytest.fixture(autouse=True)
def as_if_on_an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choice, "hopper_processors", lambda _: 132)
    monkeypatch.setattr(choice, "compute_capability", lambda _: 9)
    monkeypatch.setattr(choice, "triton_refusal", lambda *_: "")
    monkeypatch.setattr(hopper_backward, "known_processors", lambda _: 132)
    monkeypatch.setattr(hopper, "known_processors", lambda _: 132)
    monkeypatch.setattr(hopper, "processors", lambda _: 132)
    monkeypatch.setattr(hopper, "is_hopper", lambda _: True)
    forget_launches()
    yield
    forget_launches()


def tensor(rng: random.Random, dtype: torch.dtype, *shape: int) -> Tensor:
    """Without memory: contiguous, with heads last but one, expanded, or in rows that are apart."""
    batch, heads, length, columns = shape
    kind = rng.choice([0, 0, 0, 0, 1, 1, 2, 3])
    if kind == 1:
        return torch.empty(batch, length, heads, columns, dtype=dtype, device="meta").transpose(1, 2)
    if kind == 2:
        return torch.empty(batch, 1, length, columns, dtype=dtype, device="meta").expand(shape)
    return torch.empty(*shape[:3], columns + (kind == 3) * 4, dtype=dtype, device="meta")[..., :columns]


def taken(made: Any, form: Lowered | None, policy: Any, dropout_p: float, stats: bool, gradient: bool) -> bool:
    """Whether all kernels of a call are those for Hopper."""
    if form is None or form.constant:
        return False
    q, k, v = (form_of(x) for x in (made.q, made.k, made.v))
    geometry, masks = made.geometry, Masks().form
    attends = prefill._attend_launch(q, k, v, geometry, masks, dropout_p, True, None).kernel is hopper_attend_kernel
    if not (gradient and attends):
        return attends
    inside = not stats and not isinstance(policy, type(sharpmax.detached(sharpmax.PAPER)))
    return inside and hopper_backward.taken(made.q, made.k, made.v, geometry, form, dropout_p=dropout_p)


def test_what_auto_expects_is_taken() -> None:
    """Random calls; where it is not expected, but would be taken, torch's attention is not faster."""
    rng, count = random.Random(0), {True: 0, False: 0}
    for _ in range(3000):
        dtype = rng.choice([torch.float16, torch.bfloat16, torch.bfloat16, torch.float32])
        columns, key_heads = rng.choice([64, 128, 128, 96]), rng.choice([1, 4, 16])
        batch, heads = rng.choice([1, 2, 8]), key_heads * rng.choice([1, 1, 2])
        queries = rng.choice([1, 128, 1024, 2048, 4096, 16384])
        keys = rng.choice([queries, queries, queries, 512, 70000])
        q = tensor(rng, dtype, batch, heads, queries, columns)
        k, v = (tensor(rng, dtype, batch, key_heads, keys, n) for n in (columns, rng.choice([columns] * 3 + [64])))
        gradient = rng.random() < 0.5
        q.requires_grad_(gradient)
        made = checked(
            q, k, v, None, None, is_causal=rng.choice([False, True, True, "lower_right"]),
            window=rng.choice([None] * 8 + [7]), softcap=rng.choice([None] * 9 + [3.0]),
            scale=rng.choice([None] * 6 + [0.3, -1.0]), enable_gqa=True,
        )  # fmt: skip
        policy, dropout_p, stats = rng.choice(POLICIES), rng.choice([0.0] * 6 + [0.1]), rng.random() < 0.3
        expected = choice.own_kernels_pay(made, policy, dropout_p, stats)
        found = taken(made, lowered(policy), policy, dropout_p, stats, gradient)
        assert found or not expected
        assert expected or not found or choice.choose("auto", made, policy, may_round=True) == "triton"
        count[expected] += 1
        if expected:
            assert choice.choose("auto", made, policy, may_round=False) == "triton"
    assert min(count.values()) > 30


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_large_call_takes_both_kernels(causal: bool) -> None:
    x = torch.empty(4, 16, 4096, 128, dtype=torch.bfloat16, device="meta")
    geometry = checked(
        x, x, x, None, None, is_causal=causal, scale=None, window=None, softcap=None, enable_gqa=False
    ).geometry  # fmt: skip
    form, masks = form_of(x), Masks().form
    stats = prefill._stats_launch(form, form, geometry, masks, False, lowered(sharpmax.PAPER), False, None)
    assert stats.kernel is hopper_stats_kernel
    for dropout_p, with_max, expected in ((0.0, True, True), (0.1, True, False), (0.0, False, False)):
        launch = prefill._attend_launch(form, form, form, geometry, masks, dropout_p, with_max, None)
        assert (launch.kernel is hopper_attend_kernel) is expected
