"""Calls that the kernels of statistics and of attention for Hopper are tested with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from sharpmax.torch.geometry import ALL, Geometry
from sharpmax.torch.triton import hopper_backward, prefill
from tests.torch.triton.oracle import Case

CAUSAL = Geometry(0.1, right=0)
FROM_THE_END = Geometry(0.1, right=0, lower_right=True)
FULL = Geometry(0.1)
WIDE: dict[str, Any] = {"width": 128, "value_width": 128}
NARROW: dict[str, Any] = {"width": 64, "value_width": 64}
CASES = (
    Case("whole tiles", batch=2, heads=4, key_heads=4, queries=512, keys=512, geometry=FULL, **WIDE),
    Case("ragged", heads=3, key_heads=3, queries=300, keys=457, geometry=FULL, **WIDE),
    Case("causal", batch=2, heads=4, key_heads=4, queries=1024, keys=1024, geometry=CAUSAL, **WIDE),
    Case("grouped", batch=2, heads=6, key_heads=2, queries=700, keys=700, geometry=CAUSAL, **WIDE),
    Case("few keys", heads=2, key_heads=2, queries=300, keys=20, geometry=CAUSAL, **WIDE),
    Case("one query", heads=2, key_heads=1, queries=1, keys=1000, geometry=FROM_THE_END, **WIDE),
    Case("from the end", heads=2, key_heads=2, queries=300, keys=900, geometry=FROM_THE_END, **NARROW),
    Case("rows without keys", heads=2, key_heads=2, queries=900, keys=300, geometry=FROM_THE_END, **NARROW),
    Case("some keys ahead", heads=2, key_heads=2, queries=600, keys=600, geometry=Geometry(0.1, right=77), **NARROW),
    Case("whole tiles ahead", heads=2, key_heads=2, queries=300, keys=556, geometry=FROM_THE_END, **WIDE),
    Case("whole tiles behind", heads=2, key_heads=2, queries=556, keys=300, geometry=FROM_THE_END, **WIDE),
    Case("many blocks", batch=8, heads=16, key_heads=16, queries=520, keys=520, geometry=CAUSAL, **NARROW),
    Case("long", batch=1, heads=3, key_heads=1, queries=8192, keys=8192, geometry=CAUSAL, **NARROW),
    Case("strided", batch=2, heads=4, key_heads=4, queries=400, keys=400, geometry=CAUSAL, strided=True, **WIDE),
    Case("many rounds", batch=8, heads=16, key_heads=16, queries=1300, keys=200, geometry=FULL, **WIDE),
    Case("many causal rounds", batch=8, heads=16, key_heads=16, queries=1300, keys=1300, geometry=CAUSAL, **WIDE),
)


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    """Calls of all kinds that the kernels serve."""
    heads, key_heads = draw(st.sampled_from([(1, 1), (3, 1), (4, 2), (37, 37)]))
    bands = [(ALL, False), (0, False), (0, True), (5, False), (300, True), (2**30, False)]
    right, lower_right = draw(st.sampled_from(bands))
    geometry = Geometry(draw(st.sampled_from([0.0, 1e-3, 0.1, 3.0])), right=right, lower_right=lower_right)
    sizes = draw(st.sampled_from([NARROW, WIDE]))
    return Case(
        "random", heads=heads, key_heads=key_heads, queries=draw(st.integers(1, 700)), keys=draw(st.integers(1, 700)),
        geometry=geometry, **sizes,
    )  # fmt: skip


ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture(autouse=True)
def device_there(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not ON_HOPPER:
        pytest.skip("needs a Hopper GPU")


def forget_launches() -> None:
    """What was worked out before, or with other numbers in the place of constants."""
    for cache in (prefill._stats_launch, prefill._attend_launch, hopper_backward._serves_and_pays):
        cache.cache_clear()


@pytest.fixture(autouse=True)
def launches_of_this_test_alone() -> Iterator[None]:
    forget_launches()
    yield
    forget_launches()
