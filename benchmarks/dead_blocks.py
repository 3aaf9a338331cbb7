"""Which blocks of keys the second pass of attention could skip, over heads of real models.

    python -m benchmarks.dead_blocks --heads FILE ... [--lengths N ...] [--out FILE]

Pass 1 gives maximum ``m`` and beta of every row, and could give the largest logit ``b`` of every block of keys, too.
Pass 2 may leave a block out for a tile of query rows where, in each of the rows,

    beta (b - m) < -(log n + nats)            n: the keys that the row sees

since the weight of each key there is below ``exp(-nats) / n``, and that of all that the row leaves out is below
``exp(-nats)``. Two numbers of nats are asked for. "float32", 17: what is left out is less than rounding a sum in
float32 may lose, 2^-24. "bfloat16", 9 log 2: it is less than half of what rounding an output to bfloat16 may lose,
2^-8. That one is a bound for looser criteria: it is no longer exact. Blocks that causality hides are no blocks here.

Tiles of 128 rows and blocks of 128 keys are those of attention's kernel for Hopper; 64 and 64 show what finer ones
would give. "softmax" is beta = 1. What is dead there is what a backward pass with the policy's gradient could skip:
the gradient of the statistics has the weights of plain softmax.

``forward_at_best`` is the time of the forward pass as a share of that without skipping, if its three matrix products
took all the time and skipping took none: (1 + 2 (1 - s)) / 3 where a share s of the blocks is dead.

FILEs are what ``benchmarks.recorded_heads`` wrote. Of each, the first N tokens are looked at, for every N that it has:
in a causal model those are the heads over a text of N tokens. Gaussian heads, scaled as in ``benchmarks.attention``,
are there for comparison. Nothing holds all logits of a head: it goes by tiles of rows.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sharpmax
from benchmarks.recorded_heads import read
from sharpmax.core.files import write_text
from sharpmax.provenance import provenance

POLICIES: dict[str, Any] = {
    "paper": sharpmax.PAPER,
    "paper_held": sharpmax.PAPER_HELD,
    "softmax": sharpmax.Constant(1.0),
}
NATS = {"float32": 17.0, "bfloat16": 9 * math.log(2)}
GRAINS = (128, 64)
"""Rows of a tile, and keys of a block: the largest first, and the others divide it."""
ENTROPY = 3.0  # of the Gaussian heads, as in benchmarks.attention
NAMES = [f"{grain}x{grain}" for grain in GRAINS]
PRODUCTS = 3  # matrix products of the forward pass: one for the statistics, two for attention


class Counts(NamedTuple):
    """What was counted in one head."""

    dead: Tensor
    """Blocks, [grains, policies, nats]."""

    sharpened: Tensor
    """Rows with beta above 1.3, [policies]."""


def counted(
    q: Tensor, k: Tensor, policies: Sequence[Any], nats: Sequence[float], grains: Sequence[int] = GRAINS
) -> Counts:
    """The dead blocks of one causal head: ``q`` and ``k`` are [length, columns], scaled by ``1 / sqrt(columns)``."""
    length, columns = q.shape
    most, fewest = grains[0], grains[-1]
    dead = torch.zeros(len(grains), len(policies), len(nats), dtype=torch.int64)
    sharpened = torch.zeros(len(policies), dtype=torch.int64)
    limits = -torch.tensor(nats, dtype=q.dtype)
    for first in range(0, length, most):
        last = min(first + most, length)
        row = torch.arange(first, last)[:, None]
        logits = (q[first:last] @ k[:last].mT).mul_(1 / math.sqrt(columns))
        logits.masked_fill_(torch.arange(last) > row, -math.inf)
        stats = sharpmax.row_stats(logits, with_min=False)
        below = largest(logits, fewest) - stats.max[:, None]
        for p, policy in enumerate(policies):
            beta = policy(stats)
            sharpened[p] += (beta > 1.3).sum()
            exponents = beta[:, None] * below + torch.log(row + 1.0)
            for g, grain in enumerate(grains):
                of_blocks = largest(exponents, grain // fewest)
                for start in range(0, last - first, grain):
                    seen = blocks(min(first + start + grain, last), grain)
                    worst = of_blocks[start : start + grain, :seen].amax(0)  # of all rows of the tile
                    dead[g, p] += (worst[:, None] < limits).sum(0)
    return Counts(dead, sharpened)


def largest(values: Tensor, size: int) -> Tensor:
    """The largest of every ``size`` columns, the last of which may be fewer."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % size), value=-math.inf)
    return padded.view(len(values), -1, size).amax(-1)


def blocks(length: int, grain: int) -> int:
    return -(-length // grain)


def visible(length: int, grain: int) -> int:
    """Pairs of a tile and a block of which causality leaves anything."""
    tiles = blocks(length, grain)
    return tiles * (tiles + 1) // 2


def forward_at_best(share: Any) -> Any:
    return (1 + (PRODUCTS - 1) * (1 - share)) / PRODUCTS


def named(values: Tensor) -> dict[str, Any]:
    """Numbers [policies, nats, ...] by their names, rounded."""
    return {
        policy: {kind: torch.round(found, decimals=4).tolist() for kind, found in zip(NATS, of_policy, strict=True)}
        for policy, of_policy in zip(POLICIES, values, strict=True)
    }


def looked_at(q: Tensor, k: Tensor, length: int, **about: Any) -> dict[str, Any]:
    """What could be skipped in the heads of a layer, [batch, heads, length, columns], over their first tokens."""
    start = time.perf_counter()
    heads = [
        counted(a[:length].float(), b[:length].float(), list(POLICIES.values()), list(NATS.values()))
        for a, b in zip(q.flatten(0, 1), k.flatten(0, 1), strict=True)
    ]
    every = torch.tensor([visible(length, grain) for grain in GRAINS], dtype=torch.float64)
    shares = torch.stack([head.dead for head in heads], -1) / every[:, None, None, None]
    sharpened = torch.stack([head.sharpened for head in heads]).double().mean(0) / length
    means = shares.mean(-1)
    found = {grain: named(mean) for grain, mean in zip(NAMES, means, strict=True)}
    name = ", ".join(f"{key} {value}" for key, value in about.items())
    shown = ", ".join(f"{p} {x['float32']:.2%} ({x['bfloat16']:.2%})" for p, x in found[NAMES[0]].items())
    print(f"{name}, {length:,} tokens: {shown} dead; {time.perf_counter() - start:.0f} s", flush=True)
    return {
        **about,
        "shape": [*q.shape[:2], length, q.shape[3]],
        "share_beta_above_1_3": {p: round(float(x), 4) for p, x in zip(POLICIES, sharpened, strict=True)},
        "share_dead": found,
        "share_dead_of_heads": {NAMES[0]: named(shares[0])},
        "forward_at_best": {NAMES[0]: named(forward_at_best(means[0]))},
    }


def gaussian(length: int, heads: int, columns: int) -> tuple[Tensor, Tensor]:
    """Queries and keys whose logits are normal; rows that see all keys have about the entropy of benchmarks.attention.

    Logits of deviation d have entropy log(n) - d^2 / 2.
    """
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, length, columns, generator=generator) for _ in range(2))
    q *= math.sqrt(columns) / q.norm(dim=-1, keepdim=True)
    factor = math.sqrt(math.sqrt(2 * (math.log(length) - ENTROPY)))
    q, k = ((x * factor).to(torch.bfloat16) for x in (q, k))
    return q, k


def summary(layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all layers of a model together: means, and what its heads have."""
    found: dict[str, Any] = {"layers": len(layers)}
    for policy in POLICIES:
        found[policy] = {}
        for kind in NATS:
            heads = [share for x in layers for share in x["share_dead_of_heads"][NAMES[0]][policy][kind]]
            means = {name: statistics.fmean(x["share_dead"][name][policy][kind] for x in layers) for name in NAMES}
            found["heads"] = len(heads)
            found[policy][kind] = {
                "share_dead": {name: round(mean, 4) for name, mean in means.items()},
                "largest_of_a_layer": max(x["share_dead"][NAMES[0]][policy][kind] for x in layers),
                "largest_of_a_head": max(heads),
                "median_head": round(statistics.median(heads), 4),
                "heads_above_a_tenth": sum(share > 0.1 for share in heads),
                "heads_above_a_half": sum(share > 0.5 for share in heads),
                "forward_at_best": round(forward_at_best(means[NAMES[0]]), 4),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=Path, nargs="+", default=[], help="files of recorded heads")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192], help="tokens, where a file has them")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "dead_blocks_cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    layers: list[dict[str, Any]] = []
    noise = [looked_at(*gaussian(n, 4, 64), n, input="gaussian") for n in arguments.lengths]
    for path in arguments.heads:
        said, (q, k, _) = read(path)
        lengths = [n for n in arguments.lengths if n <= q.shape[2]]
        layers += [looked_at(q, k, n, model=said["model"], layer=int(said["layer"])) for n in lengths]
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for layer in sorted(layers, key=lambda layer: (layer["model"], layer["shape"][2], layer["layer"])):
        groups.setdefault((layer["model"], layer["shape"][2]), []).append(layer)
    content = {
        "policies": {name: policy.to_dict() for name, policy in POLICIES.items()},
        "nats": NATS,
        "gaussian": noise,
        "models": [
            {"model": model, "length": length, "summary": summary(found), "recorded": found}
            for (model, length), found in groups.items()
        ],
        "provenance": provenance(["python", "-m", "benchmarks.dead_blocks", *sys.argv[1:]]),
    }
    text = re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda found: " ".join(found[0].split()), json.dumps(content, indent=2))
    write_text(arguments.out, text + "\n")  # what holds numbers alone is one line


if __name__ == "__main__":
    main()
