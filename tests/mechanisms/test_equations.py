"""Mechanisms that are not normalised, or remove attention: values, gradients and files against their equations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mechanisms import cases_unnormalised as cases

NAMES = (
    "sigmoid",
    "linear",
    "linear_elu",
    "stick_breaking",
    "relu_squared",
    "selective",
    "differential",
    "threshold_relative",
)


@pytest.mark.parametrize("name", NAMES)
def test_values(name: str) -> None:
    cases.check_values(name)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str) -> None:
    cases.check_gradients(name)


@pytest.mark.parametrize("name", NAMES)
def test_large_logits(name: str) -> None:
    cases.check_large(name)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision(name: str) -> None:
    cases.check_half(name)


@pytest.mark.parametrize("name", NAMES)
def test_vmap(name: str) -> None:
    cases.check_vmap(name)


@pytest.mark.parametrize("name", NAMES)
def test_file(name: str, tmp_path: Path) -> None:
    cases.check_file(name, tmp_path)
