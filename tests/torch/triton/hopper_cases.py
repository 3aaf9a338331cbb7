"""Where the kernels for Hopper are tested, and calls that those of statistics and of attention are tested with.

On a Hopper GPU they run there, elsewhere in :mod:`tests.gluon`, as on a GPU of few processors. Tests that want the GPU
(CUDA graphs, torch's other implementations, what takes long) are marked ``gpu``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from sharpmax.torch.geometry import ALL, Geometry
from sharpmax.torch.triton import decode_hopper, hopper, hopper_backward, launch, prefill
from tests.torch.triton.oracle import Case

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = "cuda" if ON_HOPPER else "cpu"
PORTABLE_TYPES = [torch.bfloat16, torch.float16] if ON_HOPPER else [torch.float16]
"""Where the portable kernels are compared with: Triton's interpreter gets products of bfloat16 wrong."""
PROCESSORS = 3
"""Of the GPU that is stood in for: programs have several blocks each."""
SEED = 0
"""Of the order in which things happen there."""
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
    Case("strided", batch=2, heads=4, key_heads=4, queries=230, keys=230, geometry=CAUSAL, strided=True, **WIDE),
    Case("small", heads=4, key_heads=2, queries=300, keys=300, geometry=CAUSAL, **WIDE),
    Case("small and narrow", heads=4, key_heads=2, queries=300, keys=300, geometry=CAUSAL, **NARROW),
    Case("many rounds", batch=8, heads=16, key_heads=16, queries=1300, keys=200, geometry=FULL, **WIDE),
    Case("many causal rounds", batch=8, heads=16, key_heads=16, queries=1300, keys=1300, geometry=CAUSAL, **WIDE),
    Case("whole tiles of keys alone", heads=2, key_heads=2, queries=300, keys=256, geometry=FULL, **WIDE),
    Case("the same, narrow", heads=2, key_heads=2, queries=300, keys=256, geometry=FULL, **NARROW),
)


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    """Calls of all kinds that the kernels serve."""
    heads, key_heads = draw(st.sampled_from([(1, 1), (3, 1), (4, 2), (37, 37)] if ON_HOPPER else [(1, 1), (3, 1)]))
    longest = 700 if ON_HOPPER else 300
    bands = [(ALL, False), (0, False), (0, True), (5, False), (300, True), (2**30, False)]
    right, lower_right = draw(st.sampled_from(bands))
    geometry = Geometry(draw(st.sampled_from([1e-6, 1e-3, 0.1, 3.0])), right=right, lower_right=lower_right)
    sizes = draw(st.sampled_from([NARROW, WIDE]))
    return Case(
        "random", heads=heads, key_heads=key_heads, queries=draw(st.integers(1, longest)),
        keys=draw(st.integers(1, longest)), geometry=geometry, **sizes,
    )  # fmt: skip


def sized(cases: Iterable[Case]) -> list[Any]:
    """Cases as parameters: those of many logits are for a GPU, or take long without one."""

    def marks(case: Case) -> list[Any]:
        logits = case.batch * case.heads * case.queries * case.keys
        if ON_HOPPER or logits <= 500_000:
            return []
        return [pytest.mark.thorough if logits <= 2_200_000 else pytest.mark.gpu]

    return [pytest.param(case, id=case.name, marks=marks(case)) for case in cases]


def interpret(monkeypatch: pytest.MonkeyPatch, interpreted: list[str]) -> None:
    """Let kernels of Gluon run in its interpreter, on tensors of the CPU as if that were a Hopper GPU."""
    runtime = pytest.importorskip("triton.experimental.gluon._runtime")
    from tests import gluon

    def launched(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any, num_warps: int, launch_cooperative_grid: bool = False, **_: Any) -> None:
            interpreted.append(kernel.__name__)
            gluon.run(kernel, grid[0], *arguments, warps=num_warps, together=launch_cooperative_grid, seed=SEED)

        return run

    monkeypatch.setattr(runtime.GluonJITFunction, "__getitem__", launched)
    monkeypatch.setattr(launch, "check_device", lambda *_: None)
    monkeypatch.setattr(hopper, "is_hopper", lambda _: True)
    monkeypatch.setattr(hopper, "RUN_WITH", (hopper.triton_version(),))
    monkeypatch.setattr(hopper, "processors", lambda _: PROCESSORS)


def forget_launches() -> None:
    """What was worked out before, or with other numbers in the place of constants."""
    for cache in (
        prefill._stats_launch, prefill._attend_launch, hopper_backward._serves_and_pays, hopper_backward._launches,
        decode_hopper._decode_launch,
    ):  # fmt: skip
        cache.cache_clear()
