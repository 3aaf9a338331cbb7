"""Sequences over several devices: eight of them, in a process of its own, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharpmax.jax import dot_product_attention, sharded

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.jax.sharded_cases"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_eight_devices_give_what_one_gives(found: dict[str, dict[str, float]]) -> None:
    assert len(found) == 2
    for name, errors in found.items():
        assert errors.pop("permutes") > 0, name
        assert errors.pop("gathers") == 0, name
        assert errors.pop("count") == 0, name
        assert {"output", "entropy", "beta", "dq", "dk", "dv"} <= set(errors), name
        assert max(errors.values()) < 1e-12, (name, errors)
    assert "spread" in found["window and spread"]


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_zigzag_gives_every_device_the_same_work(devices: int) -> None:
    order = sharded.zigzag(16, devices)
    assert sorted(order) == list(range(16))
    work = (order + 1).reshape(devices, -1).sum(1)
    assert len(set(work.tolist())) == 1


def test_one_device_is_a_ring_too() -> None:
    mesh = jax.make_mesh((1,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 2, 4)), jnp.bfloat16)
    got: Any = jax.jit(lambda x: sharded.dot_product_attention(x, x, x, mesh=mesh, is_causal=True))(q)
    assert got.dtype == q.dtype
    expected: Any = dot_product_attention(q, q, q, is_causal=True)
    np.testing.assert_allclose(got.astype(float), expected.astype(float), atol=0.01)


def test_refused() -> None:
    mesh = jax.make_mesh((1,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.zeros((1, 6, 2, 4))
    cases: list[tuple[dict[str, Any], tuple[Any, Any, Any], str]] = [
        ({"layout": "spiral"}, (x, x, x), "layout to be one of contiguous, zigzag, got 'spiral'"),
        ({"axis": "rows"}, (x, x, x), "axis to be one of the mesh's sequence, got 'rows'"),
        ({"layout": "zigzag"}, (x[:, :5], x[:, :5], x[:, :5]), "a multiple of 2, got query of shape"),
        ({}, (x, x[:, :4], x[:, :4]), "with one T, a multiple of 1, got key of shape"),
        ({}, (x[0], x, x), "got query of shape"),
        ({"policy": 3}, (x, x, x), "policy"),
    ]
    for options, arrays, words in cases:
        with pytest.raises((ValueError, TypeError), match=words):
            sharded.dot_product_attention(*arrays, mesh=mesh, **options)
    with pytest.raises(ValueError, match="twice the 4 devices, got 12"):
        sharded.zigzag(12, 4)
