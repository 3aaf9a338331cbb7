"""Which assembler makes machine code of the kernels for Hopper: not ptxas 12.8, which Triton 3.4 to 3.7 take for it.

Products find their tiles in shared memory by uniform registers. Of some kernels, ptxas 12.8.93 makes code that reads
such registers where it has not set them, or not on every way there: results are wrong, or an address is illegal.
Triton 3.6 brings ptxas 12.9 along for other GPUs, which does not do that. That of Triton 3.7 is of CUDA 13, whose code
may be too new for a driver. There, and where there is none, the environment variable TRITON_PTXAS_PATH can name one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import triton

BROKEN = (12, 8)
HOPPER = 90
_COMPILING = threading.RLock()


@contextlib.contextmanager
def sound_assembler(kernel: Any) -> Iterator[dict[str, str]]:
    """Within it, ``kernel`` is compiled by an assembler that is not the broken one, if there is one.

    Gives options for its launch, by which Triton's caches tell such code from that of the broken one.
    """
    newer = _newer() if isinstance(kernel, triton.JITFunction) else None  # an interpreted kernel is none
    if newer is None:
        yield {}
        return
    tools = _tools()
    with _COMPILING:
        values = vars(tools)  # set as an attribute, it would be in the environment, too, for all to see
        before = values.get("ptxas")
        values["ptxas"] = newer
        try:
            yield {"ptx_options": " ".join(filter(None, (tools.ptxas_options, "-v")))}  # Triton asks for -v anyway
        finally:
            del values["ptxas"]
            if before is not None:
                values["ptxas"] = before


def _newer() -> str | None:
    """Where the newer assembler lies, if the one that Triton would take for the current GPU is broken."""
    tools = _tools()
    if torch.version.hip is not None or "ptxas_blackwell" not in dir(tools):
        return None
    try:
        used, other = (_version(tool) for tool in (tools.ptxas, tools.ptxas_blackwell))
    except RuntimeError:  # one of them is missing
        return None
    if used != BROKEN or not BROKEN < other < (BROKEN[0] + 1,):
        return None
    target: Any = triton.runtime.driver.active.get_current_target()
    if target.arch != HOPPER:
        return None
    _remember_the_version()
    return tools.ptxas_blackwell.path


def _remember_the_version() -> None:
    """Let Triton ask its own assembler for the version by which it files all code, before another one answers."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    get_ptxas_version(HOPPER)


def _version(tool: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in tool.version.split("."))


def _tools() -> Any:
    """What Triton calls the programs that it compiles with for NVIDIA's GPUs; from Triton 3.4 on."""
    knobs: Any = getattr(triton, "knobs", None)
    return getattr(knobs, "nvidia", None)
