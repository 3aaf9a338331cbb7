"""The kernels for Hopper when things happen in other orders: the same bits, and those that float64 wants."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sharpmax.torch.triton import prefill
from tests.torch.decode_cases import check, oracle, paper
from tests.torch.triton import decode_hopper_cases, hopper_cases
from tests.torch.triton.gradient_cases import by_kernels, errors, exact
from tests.torch.triton.hopper_cases import CAUSAL, DEVICE, ON_HOPPER, WIDE
from tests.torch.triton.oracle import POLICY, Case, attention, inputs, logits, stats

SEEDS = range(5)
"""Of orders. A GPU has its own, in which the kernels run as often."""
CASE = Case("orders", heads=2, key_heads=1, queries=333, keys=333, geometry=CAUSAL, **WIDE)


def statistics() -> tuple[Tensor, ...]:
    given = inputs(CASE, torch.bfloat16, DEVICE)
    (top, total, moment, _, count), beta, _ = prefill.row_stats_and_scaled_query(
        given.q, given.k, CAUSAL, POLICY, config="hopper"
    )
    expected = stats(*logits(given, given.q.double(), given.k.double()))
    torch.testing.assert_close(total.log() - moment / total, expected.entropy.float(), rtol=1e-4, atol=1e-4)
    assert torch.equal(count, expected.count)
    return top, total, moment, count, beta


def attend() -> tuple[Tensor, ...]:
    given = inputs(CASE, torch.bfloat16, DEVICE)
    top, *_, beta = statistics()
    out, lse = prefill.attend(given.q, given.k, given.v, beta, CAUSAL, row_max=top, config="hopper")
    z, seen = logits(given, given.q.double(), given.k.double())
    expected, of_rows = attention(z, seen, given.v.double(), beta.double())
    assert max(errors((out,), (expected,))) < 6e-3
    torch.testing.assert_close(lse.double(), of_rows, rtol=1e-5, atol=1e-4)
    return out, lse


def gradient() -> tuple[Tensor, ...]:
    given = inputs(CASE, torch.bfloat16, DEVICE)
    found = by_kernels(given)
    assert max(errors(found, exact(given))) < 1e-2
    return found


def decode() -> tuple[Tensor, ...]:
    tensors = decode_hopper_cases.made(batch=3, heads=16, capacity=777, queries=1, **decode_hopper_cases.WIDE)
    result = decode_hopper_cases.run(tensors, [777, 0, 400])
    check(result, oracle(*tensors, [777, 0, 400], paper), 3e-2)
    return result.output, result.beta


KERNELS: dict[Callable[[], tuple[Tensor, ...]], list[str]] = {
    statistics: ["hopper_stats_kernel"],
    attend: ["hopper_stats_kernel", "hopper_attend_kernel"],
    gradient: ["hopper_stats_kernel", "hopper_attend_kernel", "hopper_query_kernel", "hopper_key_kernel"],
    decode: ["hopper_decode_kernel"],
}


@pytest.mark.parametrize("run", KERNELS, ids=lambda run: run.__name__)
def test_the_order_of_events_changes_nothing(
    run: Callable[[], tuple[Tensor, ...]], hopper_kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_hopper_cases.seen_launches(monkeypatch)
    found = []
    for seed in SEEDS:
        monkeypatch.setattr(hopper_cases, "SEED", seed)
        found.append(run())
    assert hopper_kernels == ([] if ON_HOPPER else len(SEEDS) * KERNELS[run])
    for seed, others in zip(SEEDS[1:], found[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True)), f"seed {seed}"
