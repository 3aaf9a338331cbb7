"""Without a GPU, Triton's kernels run in its interpreter; triton reads the variable when it is first imported.

With one, JAX leaves its memory to the other processes of tests.

Tests marked ``thorough`` repeat what others test, with other numbers; they run with ``--thorough``.
"""

import os

import pytest
import torch

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run the tests that are marked thorough too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--thorough"):
        return
    left = [item for item in items if item.get_closest_marker("thorough")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in set(left)]
