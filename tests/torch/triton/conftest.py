"""A place for the kernels for Hopper."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def hopper_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A place where the kernels for Hopper run, with launches that are this test's alone.

    The names of those that were interpreted, one after the other.
    """
    cases = pytest.importorskip("tests.torch.triton.hopper_cases")
    interpreted: list[str] = []
    if not cases.ON_HOPPER:
        if request.node.get_closest_marker("gpu") or torch.cuda.is_available():
            pytest.skip("needs a Hopper GPU")  # with another one, Triton's own interpreter is off
        cases.interpret(monkeypatch, interpreted)
    cases.forget_launches()
    yield interpreted
    cases.forget_launches()
