"""The tolerances are tight: implementations with one known mistake each are caught by the golden cases."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.conformance.cases import Case, load, raw_cases
from tests.conformance.results import Result
from tests.conformance.tolerances import deviations

COEFFICIENTS = (-0.037, 0.481, -2.3, 4.917, -1.791)
PEAK = float(max(np.roots(np.polyder(COEFFICIENTS)).real, key=lambda h: np.polyval(COEFFICIENTS, h)))


def run(case: Case, mistake: str | None) -> Result:
    """The paper's softmax of one unmasked row in torch, with a ``mistake`` (``None``: with none)."""
    x = torch.tensor(case.logits, dtype=getattr(torch, case.dtype)).requires_grad_(True)
    s = x if case.dtype == "float64" else x.float()
    t = s - s.max().detach()
    e = torch.exp(t)
    total = e.sum()
    p = e / total
    entropy = total.log() - (e * t).sum() / total
    if mistake in ("epsilon", "figure 4"):
        entropy = -(p * torch.log(p + 1e-9)).sum()
    elif mistake == "unshifted moment":
        entropy = total.log() + s.max().detach() - (e * s).sum() / total
    elif mistake == "log of rounded weights":
        entropy = -torch.special.xlogy(p.to(x.dtype), p.to(x.dtype)).sum().to(s.dtype)
    elif mistake == "half-precision sum":
        entropy = (total.to(x.dtype).log() - (e * t).sum().to(x.dtype) / total.to(x.dtype)).to(s.dtype)
    value = torch.zeros_like(entropy)
    for coefficient in COEFFICIENTS:
        value = value * (entropy.clamp_max(PEAK) if case.policy["beyond"] == "hold_peak" else entropy) + coefficient
    beta = torch.where(entropy > 0.5, value.clamp_min(1.0), 1.0)
    if mistake == "stop-gradient":
        beta = beta.detach()
    weights = torch.softmax(beta * (s if mistake == "figure 4" else t), -1).to(x.dtype)
    if mistake == "theta for beta":
        weights = torch.softmax(t / beta, -1).to(x.dtype)
    (gradient,) = torch.autograd.grad(weights, x, torch.tensor(case.cotangent, dtype=x.dtype))
    stats = {"entropy": entropy.item()}
    return Result(stats, beta.item(), weights.detach().double().numpy(), gradient.double().numpy())


def served() -> list[Case]:
    """The cases of the paper's policy, as printed or held, whose rows have logits and no masked ones."""
    cases = [load(key) for key in raw_cases() if key.split("/")[2].startswith(("paper-", "held-"))]
    return [case for case in cases if case.n and case.kept.all() and "extremes" not in case.id]


def failures(mistake: str | None, chosen: Callable[[Case], bool] = lambda case: True) -> set[tuple[str, str]]:
    """Which cases fail in which quantity."""
    found = set()
    for case in filter(chosen, served()):
        found |= {(case.id, name) for name, ratio in deviations(case, run(case, mistake)) if not ratio <= 1}
    return found


def test_the_form_without_a_mistake_passes() -> None:
    assert failures(None) == set()


@pytest.mark.parametrize(
    ("mistake", "dtype", "quantity", "least"),
    [
        ("figure 4", "float32", "weights", 2),  # beta times logits of 1e4 rounds their differences away
        ("figure 4", "float32", "entropy", 1),
        ("epsilon", "float32", "entropy", 1),  # n * 1e-9 of entropy is missing
        ("epsilon", "float64", "entropy", 5),
        ("unshifted moment", "float32", "entropy", 2),
        ("unshifted moment", "float32", "beta", 1),
        ("unshifted moment", "float64", "entropy", 1),
        ("stop-gradient", "float32", "gradient", 5),
        ("stop-gradient", "float64", "gradient", 5),
        ("stop-gradient", "float16", "gradient", 3),
        ("log of rounded weights", "bfloat16", "entropy", 5),
        ("half-precision sum", "float16", "entropy", 5),
        ("theta for beta", "float32", "weights", 5),
    ],
)
def test_a_mistake_is_caught(mistake: str, dtype: str, quantity: str, least: int) -> None:
    found = failures(mistake, lambda case: case.dtype == dtype)
    caught = sorted(case_id for case_id, name in found if name == quantity)
    assert len(caught) >= least, f"{mistake} in {dtype} is caught by {caught} only"


@pytest.mark.parametrize(("name", "factor"), [("max", 1e-6), ("sum", 1e-4), ("moment", 1e-4)])
def test_a_maximum_that_may_be_rounded_excuses_nothing_more(name: str, factor: float) -> None:
    case = load("sizes/float32/held-normal-n33")
    for rounded, off in ((False, 0.0), (True, 0.0), (True, factor), (False, factor)):
        result = Result({name: case.stats[name] * (1 + off)}, rounded=rounded)
        ratio = dict(deviations(case, result))[name]
        assert (ratio > 1) == (off > 0), (rounded, off, ratio)
