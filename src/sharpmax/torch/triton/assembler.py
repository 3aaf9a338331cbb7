"""Which assembler makes machine code of the kernels for Hopper: not ptxas 12.8, which Triton 3.4 to 3.7 take for it.

Products find their tiles in shared memory by uniform registers. Of some kernels, ptxas 12.8.93 makes code that reads
such registers where it has not set them, or not on every way there: results are wrong, or an address is illegal.
Triton 3.6 brings ptxas 12.9 along for other GPUs, which does not do that. That of Triton 3.7 is of CUDA 13, whose code
may be too new for a driver. There, and where there is none, the environment variable TRITON_PTXAS_PATH can name one.
"""

from __future__ import annotations

import contextlib
import functools
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


def is_sound() -> bool:
    """Whether kernels for Hopper are compiled by an assembler that is not the broken one."""
    return _state() != "broken"


def _newer() -> str | None:
    """Where another assembler lies, if the one that Triton takes for the current GPU is broken."""
    if _state() != "replaced":
        return None
    target: Any = triton.runtime.driver.active.get_current_target()
    if target.arch != HOPPER:
        return None
    _remember_the_version()
    return _tools().ptxas_blackwell.path


@functools.cache
def _state() -> str:
    """Of what Triton compiles with for Hopper: "sound", "replaced" by another one that it has, or "broken"."""
    tools = _tools()
    if torch.version.hip is not None or tools is None:
        return "sound"
    with _COMPILING:  # not while another one is in its place
        used, other = (_version(tools, name) for name in ("ptxas", "ptxas_blackwell"))
    if used != BROKEN:
        return "sound"
    return "replaced" if BROKEN < other < (BROKEN[0] + 1,) else "broken"


def _remember_the_version() -> None:
    """Let Triton ask its own assembler for the version by which it files all code, before another one answers."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    get_ptxas_version(HOPPER)


def _version(tools: Any, name: str) -> tuple[int, ...]:
    """That of an assembler, nothing where there is none."""
    try:
        return tuple(int(part) for part in getattr(tools, name).version.split("."))
    except (AttributeError, RuntimeError):
        return ()


def _tools() -> Any:
    """What Triton calls the programs that it compiles with for NVIDIA's GPUs; from Triton 3.4 on."""
    knobs: Any = getattr(triton, "knobs", None)
    return getattr(knobs, "nvidia", None)
