"""The package is imported only by those who ask for it, and says what it needs."""

from __future__ import annotations

import subprocess
import sys

import sharpmax.torch.distributed

CODE = """
import sys
import torch.distributed
import sharpmax.torch
assert "sharpmax.torch.distributed" not in sys.modules
torch.distributed.is_available = lambda: False
try:
    import sharpmax.torch.distributed
except ImportError as error:
    print(error)
"""


def test_it_is_imported_by_name_alone_and_names_what_is_missing() -> None:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    expected = "sharpmax.torch.distributed needs torch.distributed, which this build of PyTorch does not have"
    assert result.stdout.strip() == expected


def test_every_public_name_exists_and_is_documented() -> None:
    module = sharpmax.torch.distributed
    assert module.__doc__
    for name in module.__all__:
        assert getattr(module, name).__doc__, name
