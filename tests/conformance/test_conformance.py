"""Every registered implementation against every golden case that it takes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sharpmax.core.policies import policy_from_dict
from tests.conformance import generate
from tests.conformance.cases import load, raw_cases
from tests.conformance.implementations import IMPLEMENTATIONS, Implementation
from tests.conformance.recipes import DTYPES
from tests.conformance.registry import gpu_is_there
from tests.conformance.tolerances import deviations

QUICK = re.compile(
    r"(?!jax:|jax-jit:|jax-attention-reference:|torch-compile:)"
    r"|jax:float32-n(0|1|16|33|64|4096)(-|$)|jax:\w+-n33(-|$)"
    r"|jax-jit:float32-n(16|131072)-|jax-jit:float32-n33-where-held|jax-jit:\w+-n64-paper|torch-compile:float32"
)
"""What is not only for ``--thorough``: JAX compiles every shape, so it is asked for some of them."""


def _parameters() -> list[Any]:
    parameters = []
    for implementation in IMPLEMENTATIONS.values():
        marks = []
        if (library := implementation.gpu) is not None:
            marks.append(pytest.mark.gpu)
            if not gpu_is_there(library):
                marks.append(pytest.mark.skip(reason=f"{library} sees no GPU"))
                parameters.append(pytest.param(implementation, [], id=implementation.name, marks=marks))
                continue
        for group, case_ids in implementation.groups().items():
            name = f"{implementation.name}:{group}"
            chosen = marks if QUICK.match(name) else [*marks, pytest.mark.thorough]
            parameters.append(pytest.param(implementation, case_ids, id=name, marks=chosen))
    return parameters


@pytest.mark.parametrize(("implementation", "case_ids"), _parameters())
def test_case(implementation: Implementation, case_ids: list[str]) -> None:
    wrong = []
    for case_id in case_ids:
        case = load(case_id)
        ratios = dict(deviations(case, implementation.run(case)))
        assert "weights" in ratios, f"{implementation.name} returned no weights for {case_id}"
        wrong += [f"{case_id}: {name} is off by {r:.3g} tolerances" for name, r in ratios.items() if not r <= 1]
    assert not wrong, "\n".join(wrong)


def test_there_are_cases_enough_of_every_kind() -> None:
    rows = raw_cases().values()
    assert len(rows) >= 300
    assert {row["dtype"] for row in rows} == set(DTYPES)
    lengths = {load(case_id).n for case_id in raw_cases()}
    assert {0, 1, 2, 64, 4096, 131072} <= lengths
    kinds = {row["policy"]["kind"] for row in rows}
    assert kinds == {"Constant", "Hard", "LogLength", "EntropyPolynomial", "EntropyCurve", "Detached"}
    beyond = {row["policy"].get("beyond") for row in rows} - {None}
    assert beyond == {"extrapolate", "hold_peak", "hold_end", "raise"}


def test_every_policy_reads_back_as_it_was_stored() -> None:
    for row in raw_cases().values():
        assert policy_from_dict(row["policy"]).to_dict() == row["policy"]


@pytest.mark.parametrize(
    ("name", "least"),
    [("numpy", 400), ("torch", 400), ("torch-func", 400), ("torch-compile", 10), ("jax", 400), ("jax-jit", 200)],
)
def test_every_implementation_takes_the_cases_it_should(name: str, least: int) -> None:
    implementation = IMPLEMENTATIONS[name]
    taken = [
        case_id
        for parameter in _parameters()
        if parameter.values[0] is implementation
        for case_id in parameter.values[1]
    ]
    assert sorted(taken) == sorted(implementation.cases())
    assert len(taken) >= least


def test_every_type_and_kind_of_row_is_compiled() -> None:
    rows = [raw_cases()[case_id] for case_id in IMPLEMENTATIONS["jax-jit"].cases()]
    assert {row["id"].split("/")[0] for row in rows} == {row["id"].split("/")[0] for row in raw_cases().values()}
    assert {row["dtype"] for row in rows} == set(DTYPES)


def test_the_generator_still_makes_what_is_stored() -> None:
    items = list(generate.specs())
    assert [item["id"] for item in items if item["id"] not in raw_cases()] == []
    assert len(items) == len(raw_cases())
    # Every seventh of the short rows, so that the test takes a second; `--check` does them all.
    for item in [item for item in items if item["row"]["n"] <= 257][::7]:
        assert generate.solved(item) == raw_cases()[item["id"]]


def test_the_oracle_gradient_is_the_derivative_of_the_oracle() -> None:
    """Central differences in 50 digits, so that the analytic gradient is not taken on trust."""
    from mpmath import mp, mpf

    from tests.conformance import oracle

    for case_id in ("policies/float64/paper-normal-n16-scale1.5", "policies/float64/curve-normal-n16-scale1.5"):
        case = load(case_id)
        logits, cotangent = case.logits.tolist(), case.cotangent.tolist()
        exact = oracle.solve(logits, None, cotangent, "float64", case.policy)
        with mp.workdps(oracle.DIGITS):
            h = mpf(10) ** -12
            for i in (0, 5, int(case.logits.argmax())):
                losses = []
                for sign in (1, -1):
                    moved = [mpf(s) + (sign * h if j == i else 0) for j, s in enumerate(logits)]
                    losses.append(
                        oracle.dot(oracle.solve(moved, None, cotangent, "float64", case.policy).weights, cotangent)
                    )
                assert abs((losses[0] - losses[1]) / (2 * h) - exact.gradient[i]) < mpf(10) ** -18
