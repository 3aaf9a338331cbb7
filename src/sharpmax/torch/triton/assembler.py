"""Which assembler makes machine code of the kernels: not ptxas 12.8, which Triton 3.4 to 3.7 use for Hopper.

Where two loops after each other multiply by what stays in one place of shared memory, ptxas 12.8.93 may work out that
place for the first loop alone. If the first one has no turns, the second reads from anywhere: results are wrong, or the
address is illegal. ptxas 12.9 does not do that. Triton 3.6 and 3.7 bring a newer assembler along for Blackwell, which
serves Hopper as well; ``TRITON_PTXAS_PATH`` names one for the others.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
import triton

BROKEN = "12.8"
_COMPILING = threading.RLock()


@contextlib.contextmanager
def sound_assembler(kernel: Any) -> Iterator[dict[str, str]]:
    """Within it, ``kernel`` is compiled by an assembler that is not the broken one, if there is one.

    Gives options for its launch, by which Triton's cache tells such code from that of the broken one.
    """
    newer = _newer() if isinstance(kernel, triton.JITFunction) else None  # an interpreted kernel is none
    if newer is None:
        yield {}
        return
    tools = _tools()
    with _COMPILING, tools.scope():  # no other thread ends it meanwhile
        tools.ptxas = newer
        yield {"ptx_options": " ".join(filter(None, (tools.ptxas_options, "-O3")))}  # its default


@functools.cache
def _newer() -> str | None:
    """Where the newer assembler lies that Triton has besides one that is broken."""
    tools = _tools()
    if torch.version.hip is not None or not hasattr(tools, "ptxas_blackwell") or tools.ptxas.version != BROKEN:
        return None
    other = tools.ptxas_blackwell
    return other.path if tuple(map(int, other.version.split("."))) > tuple(map(int, BROKEN.split("."))) else None


def _tools() -> Any:
    """What Triton calls the programs that it compiles with for NVIDIA's GPUs; from Triton 3.4 on."""
    knobs: Any = getattr(triton, "knobs", None)
    return getattr(knobs, "nvidia", None)
