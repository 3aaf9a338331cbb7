"""The decoding kernel for Hopper without such a GPU: which calls it serves and is taken for, and that it compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sharpmax.torch.triton import decode_hopper, hopper
from tests.torch.decode_cases import inputs, padding
from tests.torch.triton.compiled import printed
from tests.torch.triton.decode_hopper_cases import NARROW, WIDE


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "is_hopper", lambda _: True)
    monkeypatch.setattr(hopper, "processors", lambda _: 132)
    monkeypatch.setattr(hopper, "RUN_WITH", (hopper.triton_version(),))


@pytest.mark.usefixtures("as_on_hopper")
def test_what_is_served() -> None:
    def refusal(sizes: dict[str, Any], dtype: torch.dtype = torch.float16, left: int = -1, **more: Tensor) -> str:
        tensors = inputs(**(NARROW | sizes), dtype=dtype)
        return decode_hopper.refusal(*tensors, more.get("table"), more.get("lengths"), more.get("mask"), left)

    assert not refusal({})
    assert not refusal({"heads": 16, "kv_heads": 1, "queries": 1, **WIDE})
    assert not refusal({"capacity": 132 * 15 * 128})
    long = {"batch": 1, "heads": 1, "kv_heads": 1, "capacity": 132 * 15 * 128 + 1}
    assert "do not fit" in refusal(long)
    assert not refusal(long, left=132 * 14 * 128)
    assert "more than 16 queries" in refusal({"heads": 16, "kv_heads": 1, "queries": 2})
    assert "64 or 128 columns" in refusal({"dim": 96, "value_dim": 96})
    assert "two-byte" in refusal({}, torch.float32)
    assert "as wide" in refusal({"value_dim": 128})
    assert "mask" in refusal({}, mask=padding())
    table = torch.zeros(2, 40, dtype=torch.int32)
    for page, served in ((8, False), (16, True), (48, False), (128, True), (192, False), (256, True)):
        query = inputs(**NARROW, dtype=torch.float16)[0]
        pages = torch.zeros(9, page, 2, 64, dtype=torch.float16)
        found = decode_hopper.refusal(query, pages, pages, table, torch.ones(2), None, -1)
        assert (found == "") == served
        assert served or "pages" in found
    assert "empty" in refusal({"capacity": 0})
    assert not refusal({"batch": 257, "capacity": 10})
    assert not refusal({"batch": 256, "capacity": 10}, lengths=torch.zeros(256, dtype=torch.int32))
    assert "batch elements" in refusal({"batch": 257, "capacity": 10}, lengths=torch.zeros(257, dtype=torch.int32))
    query, key, value = inputs(**NARROW, dtype=torch.float16)
    assert "contiguous" in decode_hopper.refusal(query, key.mT.contiguous().mT, value, None, None, None, -1)
    assert "contiguous" in decode_hopper.refusal(query.mT.contiguous().mT, key, value, None, None, None, -1)


def test_other_devices_and_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(**NARROW, dtype=torch.float16)
    assert "other than Hopper" in decode_hopper.refusal(*tensors, None, None, None, -1)
    monkeypatch.setattr(hopper, "is_hopper", lambda _: True)
    monkeypatch.setattr(hopper, "RUN_WITH", ())
    assert "versions of Triton" in decode_hopper.refusal(*tensors, None, None, None, -1)
    monkeypatch.setattr(hopper, "RUN_WITH", (hopper.triton_version(),))
    assert not decode_hopper.refusal(*tensors, None, None, None, -1)
    monkeypatch.setattr(hopper, "is_sound", lambda: False)
    assert "versions of Triton" in decode_hopper.refusal(*tensors, None, None, None, -1)


@pytest.mark.usefixtures("as_on_hopper")
@pytest.mark.parametrize(
    ("shape", "left", "expected"),
    [
        ((1, 8, 1024), -1, False),
        ((1, 8, 8192), -1, True),
        ((1, 1, 4096), -1, False),
        ((64, 8, 1024), -1, True),
        ((64, 8, 131072), -1, True),
        ((1, 8, 32768), 100, False),  # a window of two tiles
        ((1, 8, 32768), 30000, True),
        ((64, 8, 32768), 100, True),
    ],
    ids=str,
)
def test_when_it_pays(shape: tuple[int, int, int], left: int, expected: bool) -> None:
    batch, heads, length = shape
    query, key = (torch.empty(size, device="meta") for size in ((batch, heads, 1, 64), (*shape, 64)))
    assert decode_hopper.pays(query, key, None, left) == expected
    pages, table = torch.empty((9, 16, heads, 64), device="meta"), torch.empty((batch, length // 16), device="meta")
    assert decode_hopper.pays(query, pages, table, left) == expected


COMPILE = """
import torch, triton
from triton._utils import canonicalize_dtype
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from sharpmax.torch.triton import decode_hopper, hopper, decode_hopper_kernel

FLOATS = ("parts", "stats", "betas", "shares", "sums")

def type_of(name, made, flags):
    dtype = canonicalize_dtype(made.base.dtype)
    if name.endswith("_desc"):
        return f"tensordesc<{dtype}{made.block_shape},{made.layout!r}>"
    if name in ("query", "output"):
        return f"*{dtype}"
    if name in flags:
        return "constexpr"
    if name in ("lengths", "table", "counters"):
        return "*i32"
    return "*fp32" if name in FLOATS else "i32" if name in decode_hopper_kernel.WHOLE_NUMBERS else "fp32"

for width, dtype, rows, columns, splits, batch, page, lines in (
    (128, torch.bfloat16, 8, 8, 128, 1, 0, 1),
    (128, torch.bfloat16, 8, 8, 128, 256, 0, 1),
    (128, torch.bfloat16, 8, 8, 128, 256, 0, 8),
    (64, torch.float16, 12, 16, 1, 64, 0, 16),
    (128, torch.bfloat16, 8, 8, 128, 256, 16, 8),
):
    sizes = (page, decode_hopper.PIECE) if page else (decode_hopper.KEYS, width)
    made = hopper.descriptor(torch.zeros(1, 1, 256, width, dtype=dtype), *sizes)
    kernel = decode_hopper_kernel.hopper_decode_kernel
    flags = {
        "ROWS": rows, "COLUMNS": columns, "QUERIES": 1, "CAPPED": False, "ENTROPY": True, "KEYS": decode_hopper.KEYS,
        "STAGES": decode_hopper.STAGES[width], "BATCH": batch, "TILES": decode_hopper.TILES[columns],
        "SPLITS": splits, "LINES": lines, "CHUNK": decode_hopper.PARTS // lines, "D": width, "PAGE": page,
    } | ({"lengths": None} if batch == 1 else {}) | ({} if page else {"table": None})
    source = GluonASTSource(kernel, {name: type_of(name, made, flags) for name in kernel.arg_names}, flags)
    options = {"num_warps": decode_hopper.WARPS, "launch_cooperative_grid": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    print("kernel", compiled.metadata.shared, ptx.count("wgmma.mma_async"), ptx.count("cp.async.bulk.tensor"))
"""


def test_it_compiles_for_hopper_without_a_gpu_and_keeps_both_products() -> None:
    pytest.importorskip("triton.experimental.gluon._runtime")
    found = [tuple(map(int, line.split()[1:])) for line in printed(COMPILE).splitlines() if line.startswith("kernel")]
    shared, products, copies = zip(*found, strict=True)
    assert products == (2 * 2 * 8, 2 * 2 * 8, 2 * 2 * 8, 2 * 2 * 4, 2 * 2 * 8)
    assert copies == (2 * 2, 2 * 2, 2 * 2, 2, 2 * 8 * 2)  # of keys and of values, each by 64 columns, and by pages
    assert max(shared) <= 227 * 1024  # what a program may have
