"""Attention over packed documents on a GPU, against torch's own variable-length attention (FlashAttention).

    python -m benchmarks.attention_packed [--out FILE]

Documents are as long as samples of CLRS-Text: 491 tokens on average, 2,048 at most, 65,536 in all. "number" is
``varlen_attention`` with policy Constant(1), which computes no statistics; "detached" has no gradient through beta.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

import sharpmax
from sharpmax.core.files import write_text
from sharpmax.provenance import provenance
from sharpmax.torch import varlen_attention

TOKENS, LONGEST, MEAN = 65_536, 2_048, 491
SHAPES = ((9, 3, 64), (16, 16, 128), (32, 8, 128))
"""Heads, key heads and columns; the first are SmolLM2's."""

POLICIES = {
    "adaptive": sharpmax.PAPER,
    "detached": sharpmax.detached(sharpmax.PAPER),
    "number": sharpmax.Constant(1.0),
}
ENTROPY = 3.0  # where the paper's polynomial acts


def document_starts(generator: torch.Generator) -> Tensor:
    """Where documents start, lengths drawn from an exponential distribution that is cut off."""
    starts = [0]
    while starts[-1] < TOKENS:
        length = 16 + int(torch.empty(1).exponential_(1 / MEAN, generator=generator))
        starts.append(min(starts[-1] + min(length, LONGEST), TOKENS))
    return torch.tensor(starts, dtype=torch.int32, device="cuda")


def inputs(heads: int, key_heads: int, columns: int) -> list[Tensor]:
    """Queries, keys, values and the cotangent of the output; logits deviate so that the policy acts."""
    deviation = math.sqrt(2 * max(0.5, math.log(MEAN) - ENTROPY))
    shapes = ((heads, deviation), (key_heads, 1.0), (key_heads, 1.0), (heads, 1.0))
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = [torch.randn((TOKENS, n, columns), generator=generator, device="cuda") * factor for n, factor in shapes]
    return [x.to(torch.bfloat16).requires_grad_() for x in tensors]


def functions(tensors: list[Tensor], starts: Tensor) -> dict[str, Callable[[], Any]]:
    """What is compared, forward and forward with backward."""
    q, k, v, cotangent = tensors
    longest = int(starts.diff().max())

    def peer(q: Tensor, k: Tensor, v: Tensor) -> Any:
        from torch.nn.attention.varlen import varlen_attn

        # Older torch takes fewer key heads without being told.
        told = q.shape[1] != k.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters
        grouped: Any = {"enable_gqa": True} if told else {}
        return varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0), **grouped)

    forward: dict[str, Callable[..., Any]] = {"varlen_attn": peer}
    for name, policy in POLICIES.items():
        forward[name] = lambda q, k, v, policy=policy: varlen_attention(
            q, k, v, starts, starts, causal=True, policy=policy
        )
    plain = [x.detach() for x in (q, k, v)]
    found: dict[str, Callable[[], Any]] = {}
    for name, function in forward.items():
        found[f"{name} forward"] = lambda f=function: f(*plain)
        found[f"{name} forward+backward"] = lambda f=function: torch.autograd.grad(f(q, k, v), (q, k, v), cotangent)
    return found


def milliseconds(function: Callable[[], Any]) -> float | str:
    try:
        return float(triton.testing.do_bench(function, warmup=25, rep=100, return_mode="median"))  # pyright: ignore
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        return str(error).splitlines()[0][:200]


def measured(heads: int, key_heads: int, columns: int) -> dict[str, Any]:
    starts = document_starts(torch.Generator().manual_seed(0))
    times = {name: milliseconds(f) for name, f in functions(inputs(heads, key_heads, columns), starts).items()}
    ratios = {}
    for name, time in times.items():
        peer = times["varlen_attn forward" + "+backward" * ("+backward" in name)]
        if isinstance(time, float) and isinstance(peer, float):
            ratios[name] = round(time / peer, 3)
    result = {
        "heads": heads,
        "key_heads": key_heads,
        "columns": columns,
        "documents": len(starts) - 1,
        "milliseconds": {name: round(time, 4) if isinstance(time, float) else time for name, time in times.items()},
        "ratio_to_varlen_attn": ratios,
    }
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "attention_packed_cuda.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.attention_packed needs a GPU")
    results: list[dict[str, Any]] = []
    for shape in SHAPES:
        results.append(measured(*shape))
        made = provenance(["python", "-m", "benchmarks.attention_packed", *sys.argv[1:]])
        content = {"dtype": "bfloat16", "tokens": TOKENS, "results": results, "provenance": made}
        write_text(arguments.out, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
