"""Code that runs in a process of its own, where Triton compiles its kernels for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys

LAUNCHES = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from sharpmax.torch.geometry import Geometry
from sharpmax.torch.triton import gradient, hopper, launch, prefill, tiles

class Driver:
    get_current_device = get_current_stream = staticmethod(lambda *_: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

def launched(kernel, grid):
    return lambda *arguments, **options: show(kernel.warmup(*arguments, grid=grid, **options))

driver.set_active(Driver())
triton.JITFunction.__getitem__, launch.check_device = launched, lambda *_: None
tiles._large_memory = hopper.is_hopper = lambda _: True
"""
"""What comes before calls whose launches are compiled for Hopper, and shown by the function ``show``."""


def printed(code: str, **more: str) -> str:
    """What the code prints, without Triton's interpreter, with ``more`` in its environment."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | more
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
