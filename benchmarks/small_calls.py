"""Small calls of the kernels for Hopper, with several parts for each program, for compute-sanitizer to look at.

    compute-sanitizer --tool racecheck python -m benchmarks.small_calls decode|gradient [--programs N]

Prints sizes of the results, so that it can be seen that they do not change.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

import sharpmax
from sharpmax.torch import decode_attention, paged_decode_attention
from sharpmax.torch.geometry import Geometry

PAGE = 16
WIDTHS = (64, 128)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def decode(width: int) -> None:
    query, key, value = normal(3, 8, 1, width), normal(3, 1, 2496, width), normal(3, 1, 2496, width)
    lengths = torch.tensor([2496, 0, 700], device="cuda", dtype=torch.int32)
    keys, values = (cache.reshape(-1, PAGE, 1, width) for cache in (key, value))
    table = torch.arange(len(keys), device="cuda", dtype=torch.int32).view(3, -1)
    found: tuple[Any, ...] = (
        decode_attention(query, key, value, lengths),
        decode_attention(query, key, value),
        paged_decode_attention(query, keys, values, table, lengths),
    )
    print(f"decode {width}", [float(x.abs().max()) for x in found])


def gradient(width: int) -> None:
    from sharpmax.torch import fused

    policy: Any = sharpmax.PAPER.lower()
    numbers = fused.policy_numbers(policy)
    for geometry in (Geometry(0.2, right=0), Geometry(0.2)):
        q, k, v = leaves = [normal(1, heads, 300, width).requires_grad_() for heads in (2, 1, 1)]
        out = fused.sharpened_attention(q, k, v, geometry.numbers, numbers)[0]
        found = torch.autograd.grad(out, leaves, normal(*out.shape))
        print(f"gradient {width}", [round(float(x.float().norm()), 3) for x in found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("decode", "gradient"))
    parser.add_argument("--programs", type=int, default=4, help="which share the work; fewer have more to do each")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("benchmarks.small_calls needs a Hopper GPU")
    from sharpmax.torch.triton import decode_hopper, hopper, hopper_backward

    hopper.processors = hopper_backward.processors = lambda _: arguments.programs
    decode_hopper.LEAST_TILES = 0
    torch.manual_seed(0)
    for width in WIDTHS:
        (decode if arguments.what == "decode" else gradient)(width)


if __name__ == "__main__":
    main()
