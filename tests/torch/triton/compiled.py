"""Code that runs in a process of its own, where Triton compiles its kernels for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys


def printed(code: str) -> str:
    """What the code prints, without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
