"""Which calls the kernels of statistics and of attention for Hopper take, and their launch.

All others are for the portable kernels.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..geometry import ALL, LEAST_SCALE, Geometry
from ..installed import triton_version
from .assembler import is_sound
from .launch import FORMS, OPTIONS, Form, Launch, Making, form_of

LINES = 64
"""Rows of queries, or, for their gradients, of keys, that one warpgroup works on at a time."""
KEYS = 128
"""Keys of a tile."""
ROWS = 256
"""Query rows of a program at a time, for the statistics."""
ATTEND_ROWS = 128
"""Query rows of a program at a time, for attention."""
STAGES = {64: 6, 128: 3}
"""Tiles of keys in shared memory, by the head size, for the statistics; other sizes are not served."""
ATTEND_STAGES = {64: (6, 6), 128: (3, 2)}
"""The same for attention, of keys and of values."""
RUN_WITH = ((3, 6),)
"""The versions of Triton that the kernels were run with: Gluon, which they are written in, still changes."""
SECTION = 64 << 20
"""Bytes of what programs read in tiles at the same time, as measured best on an H200; for causality only."""
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
        ("BENT", "a softcap or a scale that is not positive"),
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


def plain_refusal(q: Tensor | Form, k: Tensor | Form, v: Tensor | Form, geometry: Geometry) -> str:
    """What calls the kernels of attention and of its gradient for Hopper are for, or nothing for such a call.

    Masks, devices and how tensors lie in memory are for others to look at.
    """
    if geometry.softcap > 0 or geometry.scale < LEAST_SCALE:
        return "calls without a softcap and with a positive scale"
    aligned = not geometry.lower_right or q.shape[2] == k.shape[2]
    if geometry.left != ALL or geometry.right not in (ALL, 0) or not aligned:
        return "calls that see all keys, or those up to a row's own number"
    if q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] not in STAGES:
        return "heads of 64 or 128 columns in a two-byte type"
    if v.shape[-1] != q.shape[-1]:
        return "values as wide as queries"
    return "tensors that are not empty" if 0 in (*q.shape, *k.shape) else ""


def attend_refusal(q: Form, k: Form, v: Form, shared: dict[str, Any], dropout_p: float) -> str:
    """Why the kernel does not give this attention, or nothing where it does."""
    if dropout_p > 0:
        return "calls without dropout"
    if v.shape[-1] != q.shape[-1]:
        return "values as wide as queries"
    return refusal(q, k, shared, False, False) or refusal(q, v, shared, False, False)


def pays(q: Form, causal: bool, rows: int) -> bool:
    """Whether to take a kernel where it serves: known to run, and with blocks of ``rows`` rows for all of the card.

    Blocks that are equally long come in rounds, of which the last one should be filled; with causality, every processor
    should have a short one for each long one.
    """
    return fills(q.shape, rows, causal, known_processors(q.device))


def fills(shape: Sequence[int], rows: int, causal: bool, count: int) -> bool:
    """Whether ``count`` processors, if there are any, all have blocks of so many rows to do."""
    blocks = -(-shape[2] // rows) * shape[0] * shape[1]
    return count > 0 and blocks >= (2 * count if causal else FILLED * count * -(-blocks // count))


def known_processors(device: torch.device) -> int:
    """How many processors a GPU has that the kernels are known to run on, 0 for any other device."""
    known = is_hopper(device) and triton_version() in RUN_WITH and is_sound()
    return processors(device) if known else 0


def stats_launch(q: Form, k: Form, shared: dict[str, Any], policy: dict[str, Any], scaled_query: bool) -> Launch:
    """The launch that fills the tensors that the portable kernel fills, by the same names."""
    from .hopper_kernel import hopper_stats_kernel

    programs, numbers = _programs(q, k, shared, ROWS, 1)
    numbers |= {**policy, "STAGES": STAGES[q.shape[-1]], "SCALED_QUERY": scaled_query}
    numbers["EDGES"] |= q.shape[2] % ROWS != 0  # warpgroups without rows pass keys by
    made = tiles_of({"q_desc": "q", "out_desc": "out_q"}, LINES) | tiles_of({"k_desc": "k"}, KEYS)
    return Launch(hopper_stats_kernel, programs, numbers, {"num_warps": 4, **OPTIONS}, made=made)


def attend_launch(q: Form, k: Form, shared: dict[str, Any]) -> Launch:
    """The same for attention with beta; it also takes ``row_max`` of the statistics."""
    from .hopper_attend_kernel import hopper_attend_kernel

    programs, numbers = _programs(q, k, shared, ATTEND_ROWS, 2)
    numbers["K_STAGES"], numbers["V_STAGES"] = ATTEND_STAGES[q.shape[-1]]
    numbers["LATER"] = shared["RIGHT"] and numbers["shift"] % KEYS != 0
    made = tiles_of({"q_desc": "q", "out_desc": "out"}, LINES) | tiles_of({"k_desc": "k", "v_desc": "v"}, KEYS)
    return Launch(hopper_attend_kernel, programs, numbers, {"num_warps": 4, **OPTIONS}, made=made)


def tiles_of(sources: dict[str, str], rows: int) -> dict[str, Making]:
    """Arguments of a kernel that are tensors, taken ``rows`` rows at a time, by names of arguments and of tensors."""
    return {name: (source, functools.partial(descriptor, rows=rows)) for name, source in sources.items()}


def programs_in_order(owned: Form, rows: int, streamed: Form, tensors: int, causal: bool) -> tuple[int, dict[str, int]]:
    """How many programs share the blocks of ``owned``, of so many rows each, and in which order they take them.

    For each block they go through ``tensors`` tensors like ``streamed``.
    """
    batch, heads, length, _ = owned.shape
    blocks, sequences = -(-length // rows), batch * heads
    section = max(1, SECTION // (tensors * streamed.shape[2] * streamed.shape[3] * streamed.dtype.itemsize))
    items = blocks * sequences
    return min(items, processors(owned.device)), {
        "items": items,
        "section": min(section, sequences) if causal else 1,
        "blocks": blocks,
        "sequences": sequences,
        "heads": heads,
    }


def _programs(q: Form, k: Form, shared: dict[str, Any], rows: int, tensors: int) -> tuple[int, dict[str, Any]]:
    """How many programs there are, and their numbers; for each block of rows they read so many tensors like ``k``."""
    queries, keys, causal = q.shape[2], k.shape[2], shared["RIGHT"]
    shift = (min(shared["right"], queries + keys) if causal else 0) + (keys - queries if shared["LOWER_RIGHT"] else 0)
    programs, order = programs_in_order(q, rows, k, tensors, causal)
    return programs, order | {
        "group": shared["group"],
        "queries": queries,
        "keys": keys,
        "shift": shift,
        "unit": shared["unit"],
        "CAUSAL": causal,
        "EDGES": causal or keys % KEYS != 0,
    }


@functools.lru_cache(FORMS)
def strides(x: Form) -> tuple[int, ...] | None:
    """Strides as the copy engine wants them, or ``None``; where an axis has one entry, any stride is as good."""
    if not (x.aligned and regular(x.shape, x.strides)):
        return None
    return tuple(8 if n == 1 and i < 3 else s for i, (n, s) in enumerate(zip(x.shape, x.strides, strict=True)))


def regular(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the copy engine takes two-byte numbers with such strides, of a tensor that begins where it should."""
    return strides[-1] == 1 and all(s > 0 and s % 8 == 0 for n, s in zip(shape[:-1], strides, strict=False) if n > 1)


def descriptor(x: Tensor, rows: int, columns: int | None = None) -> Any:
    """A tensor as the copy engine takes it, in tiles of ``rows`` rows of one head, and all their columns or so many.

    Tiles of two-byte numbers are laid out as products take them, others row after row. Made without the checks of its
    constructor: :func:`refusal` has made them, and they cost the host time.
    """
    kind, layout = _descriptor_parts(8 * x.dtype.itemsize)
    made: Any = object.__new__(kind)
    places = strides(form_of(x))
    assert places is not None
    made.base, made.shape, made.strides = x, list(x.shape), list(places)
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
