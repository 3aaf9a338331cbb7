"""Which calls the statistics kernel for Hopper takes, and its launch; all others are for the portable kernel."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from .launch import OPTIONS, Form, Launch, form_of, version

ROWS = 256
"""Query rows of a program at a time."""
STAGES = {64: 6, 128: 3}
"""Tiles of keys in shared memory, by the head size; other sizes are not served."""
RUN_WITH = ((3, 6),)
"""The versions of Triton that the kernel was run with: Gluon, which it is written in, still changes."""
SECTION = 64 << 20
"""Bytes of keys that programs work on at the same time, as measured best on an H200; with causality alone."""
FILLED = 0.8
"""The least share of the processors that should be busy on average; below it, smaller blocks of rows do better."""


def refusal(q: Form, k: Form, shared: dict[str, Any], with_min: bool, log_count: bool) -> str:
    """Why the kernel does not give these statistics, or nothing where it does."""
    if with_min:
        return "no minimum"
    if log_count:
        return "policies of the entropy alone"
    for name, what in (
        ("PACKED", "packed documents"), ("LENGTHS", "key lengths"), ("LEFT", "a window"), ("MASK", "a mask"),
        ("BENT", "a softcap or a negative scale"),
    ):  # fmt: skip
        if shared[name]:
            return f"calls without {what}"
    if q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] not in STAGES:
        return "heads of 64 or 128 columns in a two-byte type"
    if 0 in (*q.shape, *k.shape):
        return "tensors that are not empty"
    if strides(q) is None or strides(k) is None:
        return "rows that are contiguous and begin at multiples of 16 bytes"
    if not is_hopper(q.device):
        return "tensors on a Hopper GPU"
    return "" if _has_gluon() else "calls with a Triton that has Gluon"


def pays(q: Form, causal: bool) -> bool:
    """Whether to take the kernel where it serves: known to run, and with blocks of rows for all of the card.

    Blocks that are equally long come in rounds, of which the last one should be filled; with causality, every processor
    should have a short one for each long one.
    """
    if version() not in RUN_WITH:
        return False
    blocks = -(-q.shape[2] // ROWS) * q.shape[0] * q.shape[1]
    count = processors(q.device)
    return blocks >= (2 * count if causal else FILLED * count * -(-blocks // count))


def stats_launch(q: Form, k: Form, shared: dict[str, Any], policy: dict[str, Any], scaled_query: bool) -> Launch:
    """The launch that fills the tensors that the portable kernel fills, by the same names."""
    from .hopper_kernel import KEYS, LINES, hopper_stats_kernel

    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    blocks, causal = -(-queries // ROWS), shared["RIGHT"]
    section = max(1, SECTION // (keys * k.shape[-1] * k.dtype.itemsize)) if causal else 1
    items = blocks * batch * heads
    shift = (min(shared["right"], queries + keys) if causal else 0) + (keys - queries if shared["LOWER_RIGHT"] else 0)
    numbers = {
        "items": items,
        "section": min(section, batch * heads),
        "blocks": blocks,
        "sequences": batch * heads,
        "heads": heads,
        "group": shared["group"],
        "queries": queries,
        "keys": keys,
        "shift": shift,
        "unit": shared["unit"],
        **policy,
        "STAGES": STAGES[q.shape[-1]],
        "CAUSAL": causal,
        "EDGES": causal or keys % KEYS.value != 0 or queries % ROWS != 0,
        "SCALED_QUERY": scaled_query,
    }
    made = {
        f"{name}_desc": (of, functools.partial(descriptor, rows=rows))
        for name, of, rows in (("q", "q", LINES.value), ("k", "k", KEYS.value), ("out", "out_q", LINES.value))
    }
    programs = min(items, processors(q.device))
    return Launch(hopper_stats_kernel, programs, numbers, {"num_warps": 4, **OPTIONS}, made=made)


def strides(x: Form) -> list[int] | None:
    """Strides as the copy engine wants them, or ``None``; where an axis has one entry, any stride is as good."""
    *outer, last = (8 if n == 1 and i < 3 else s for i, (n, s) in enumerate(zip(x.shape, x.strides, strict=True)))
    fine = last == 1 and x.aligned and all(s > 0 and s % 8 == 0 for s in outer)
    return [*outer, last] if fine else None


def descriptor(x: Tensor, rows: int, columns: int | None = None) -> Any:
    """A tensor as the copy engine takes it, in tiles of ``rows`` rows of one head, and all their columns or so many.

    Tiles of two-byte numbers are laid out as products take them, others row after row. Made without the checks of its
    constructor: :func:`refusal` has made them, and they cost the host time.
    """
    kind, layout = _descriptor_parts(8 * x.dtype.itemsize)
    made: Any = object.__new__(kind)
    made.base, made.shape, made.strides = x, list(x.shape), strides(form_of(x))
    made.block_shape, made.layout = [1, 1, rows, columns or x.shape[-1]], layout
    return made


@functools.cache
def _descriptor_parts(bits: int) -> tuple[Any, Any]:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor, gl.NVMMASharedLayout(128 if bits == 16 else 0, bits, 4)


@functools.cache
def _has_gluon() -> bool:
    try:
        return importlib.util.find_spec("triton.experimental.gluon") is not None
    except ModuleNotFoundError:  # not even triton.experimental
        return False


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device is a GPU of compute capability 9.0."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def processors(device: torch.device) -> int:
    """How many streaming multiprocessors a GPU has, 1 for any other device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
