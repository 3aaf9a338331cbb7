"""Small calls of the Triton kernels, for compute-sanitizer to look at; ``benchmarks.sanitized`` does that.

    compute-sanitizer --tool racecheck python -m benchmarks.small_calls NAME

Kernels for Hopper are run by few programs, so that each of them has several blocks or parts to do. "control" is none of
ours: a kernel that does nothing but hand work to specialised warps. Prints the kernels that ran.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import sharpmax
from sharpmax.torch import (
    decode_attention,
    fused,
    paged_decode_attention,
    row_stats,
    scaled_dot_product_attention,
    varlen_attention,
)
from sharpmax.torch.geometry import Geometry
from sharpmax.torch.triton import decode_hopper, hopper
from sharpmax.torch.triton.hopper_kernel import synchronize

PAGE = 16
WIDTHS = (64, 128)
PROGRAMS = 3


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def few_programs() -> None:
    """Let kernels for Hopper be taken, as on a GPU of few processors."""
    hopper.processors = lambda _: PROGRAMS
    decode_hopper.LEAST_TILES = 0


def hopper_prefill() -> None:
    """Statistics, beta and ``beta * q``, attention and its gradient kernels, with tiles that are partly filled."""
    few_programs()
    policy: Any = sharpmax.PAPER.lower()
    numbers = fused.policy_numbers(policy)
    sizes = ((1, 300, 300), (2, 130, 333))  # sequences, queries, keys
    for width, (batch, queries, keys) in product(WIDTHS, sizes):
        for geometry in (Geometry(0.2, right=0), Geometry(0.2), Geometry(0.2, right=0, lower_right=True)):
            shapes = ((batch, 4, queries, width), (batch, 2, keys, width), (batch, 2, keys, width))
            q, k, v = leaves = [normal(*shape).requires_grad_() for shape in shapes]
            check(fused.sharpened_query(q, k, None, None, geometry.numbers, numbers, False)[0])
            out = fused.adaptive_attention(q, k, v, *(None,) * 5, geometry.numbers, numbers, False, 0.0)[0]
            check(*torch.autograd.grad(out, leaves, normal(*out.shape)))


def hopper_decode() -> None:
    few_programs()
    for width in WIDTHS:
        decoded(width, torch.bfloat16)


def portable_prefill() -> None:
    """Statistics, attention and gradients by the kernels for every GPU, with what tiles have at their edges."""
    for dtype in (torch.float16, torch.float32):
        for width, options in ((64, {"is_causal": True}), (80, {}), (32, {"is_causal": True, "window": (40, 0)})):
            portable(width, dtype, **options)


def portable_masks() -> None:
    """The same with masks of every kind, softcap, dropout, packed documents, and the minimum of a row."""
    seen = torch.rand(150, 150, device="cuda") > 0.3
    lengths = torch.tensor([150, 70], device="cuda", dtype=torch.int32)
    for options in (
        {"attn_mask": seen},
        {"attn_mask": normal(4, 150, 150, dtype=torch.float16)},
        {"key_lengths": lengths},
        {"softcap": 5.0, "dropout_p": 0.2, "is_causal": "lower_right"},
    ):
        portable(64, torch.float16, **options)
    q, k, v = leaves = [normal(220, heads, 64, dtype=torch.float16).requires_grad_() for heads in (4, 2, 2)]
    starts = torch.tensor([0, 150, 150, 220], device="cuda", dtype=torch.int32)
    out: Any = varlen_attention(q, k, v, starts, starts, 150, 150, causal=True, impl="triton")
    check(out, *torch.autograd.grad(out, leaves, normal(*out.shape, dtype=torch.float16)))
    q, k = (normal(2, heads, 150, 64, dtype=torch.float16) for heads in (4, 2))
    check(row_stats(q, k, key_lengths=lengths, with_min=True, enable_gqa=True, impl="triton").min)


def portable(width: int, dtype: torch.dtype, **options: Any) -> None:
    q, k, v = leaves = [normal(2, heads, 150, width, dtype=dtype).requires_grad_() for heads in (4, 2, 2)]
    out = scaled_dot_product_attention(q, k, v, impl="triton", enable_gqa=True, **options)
    check(out, *torch.autograd.grad(out, leaves, normal(*out.shape, dtype=dtype)))


def portable_decode() -> None:
    for width in (32, 64):
        decoded(width, torch.float16)


def decoded(width: int, dtype: torch.dtype) -> None:
    """Decoding with lengths and without them, and from pages."""
    query, key, value = (normal(*shape, width, dtype=dtype) for shape in ((3, 8, 1), (3, 1, 2496), (3, 1, 2496)))
    lengths = torch.tensor([2496, 0, 700], device="cuda", dtype=torch.int32)
    keys, values = (cache.reshape(-1, PAGE, 1, width) for cache in (key, value))
    table = torch.arange(len(keys), device="cuda", dtype=torch.int32).view(3, -1)
    check(decode_attention(query, key, value, lengths), decode_attention(query, key, value))
    check(paged_decode_attention(query, keys, values, table, lengths))


@gluon.jit
def _wait_and_store(out, value, rounds):
    for _ in range(rounds):
        synchronize()
    gl.store(out, value)


@gluon.jit
def control_kernel(out, rounds):
    """Specialised warps that wait for each other within their warpgroup, and have no shared memory of their own."""
    synchronize()
    gl.warp_specialize([
        (_wait_and_store, (out, 1, rounds)),
        (_wait_and_store, (out + 1, 2, rounds)),
        (_wait_and_store, (out + 2, 3, rounds)),
    ], [4, 1], [240, 24])  # fmt: skip


def control() -> None:
    out = torch.zeros(3, device="cuda", dtype=torch.int32)
    launch: Any = control_kernel[(PROGRAMS,)]
    launch(out, 1000, num_warps=4)
    assert out.tolist() == [1, 2, 3]


def check(*found: Any) -> None:
    assert all(bool(x.isfinite().all()) for x in found)


CALLS: dict[str, Callable[[], None]] = {
    "control": control,
    "hopper_prefill": hopper_prefill,
    "hopper_decode": hopper_decode,
    "portable_prefill": portable_prefill,
    "portable_masks": portable_masks,
    "portable_decode": portable_decode,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CALLS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("benchmarks.small_calls needs a Hopper GPU")
    kernels: set[str] = set()
    knobs.runtime.launch_enter_hook.add(lambda metadata: kernels.add(metadata.get()["name"]))
    torch.manual_seed(0)
    CALLS[arguments.name]()
    torch.cuda.synchronize()
    print("kernels", *sorted(kernels))


if __name__ == "__main__":
    main()
