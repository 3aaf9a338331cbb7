"""Decoding written out row by row in float64, policies with their betas, and caches to decode from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import sharpmax
import sharpmax.torch
from sharpmax.torch.decode import Attention

CURVE = (-0.037, 0.481, -2.3, 4.917, -1.791)
PEAK = max(
    r.real for r in np.roots(np.polyder(CURVE)) if abs(r.imag) < 1e-9 and np.polyval(np.polyder(CURVE, 2), r) < 0
)


def entropy(z: np.ndarray) -> float:
    p = np.exp(z - z.max())
    p /= p.sum()
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def paper(z: np.ndarray, head: int = 0, most: float = math.inf) -> float:
    h = entropy(z)
    return max(float(np.polyval(CURVE, min(h, most))), 1.0) if h > 0.5 else 1.0


def held(z: np.ndarray, head: int = 0) -> float:
    return paper(z, head, float(PEAK))


class SpreadOverTen:
    """A plain callable, which reads everything there is and says nothing of what it needs."""

    def __call__(self, stats: Any) -> Any:
        return 1 + stats.spread / 10 + 0.01 * stats.entropy


PER_HEAD = (sharpmax.PAPER, sharpmax.Constant(2.0), sharpmax.LogLength(), sharpmax.PAPER_HELD)
PER_HEAD_BETAS = (paper, lambda z, h: 2.0, lambda z, h: math.log(z.size), held)
MANY = sharpmax.EntropyPolynomial((0.0,) * 9 + (0.25, 1.0), threshold=0.0, floor=0.0)  # more than the kernel takes
POLICIES: dict[str, tuple[Any, Callable[[np.ndarray, int], float]]] = {
    "paper": (sharpmax.PAPER, paper),
    "held": (sharpmax.PAPER_HELD, held),
    "detached": (sharpmax.detached(sharpmax.PAPER), paper),
    "log length": (sharpmax.LogLength(0.3, 0.2), lambda z, h: 0.3 * math.log(z.size) + 0.2),
    "yarn": (sharpmax.LogLength.yarn(16), lambda z, h: (1 + 0.1 * math.log(max(z.size / 16, 1))) ** 2),
    "constant": (sharpmax.Constant(1.7), lambda z, h: 1.7),
    "flat": (sharpmax.Constant(0.0), lambda z, h: 0.0),
    "hard": (sharpmax.Hard(), lambda z, h: math.inf),
    "callable": (SpreadOverTen(), lambda z, h: 1 + (z.max() - z.min()) / 10 + 0.01 * entropy(z)),
    "per head": (sharpmax.PerHead(PER_HEAD), lambda z, h: PER_HEAD_BETAS[h](z, h)),
    "many coefficients": (MANY, lambda z, h: 0.25 * entropy(z) + 1.0),
}


class Expected(NamedTuple):
    output: np.ndarray
    beta: np.ndarray
    entropy: np.ndarray
    visible: np.ndarray


def oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    betas: Callable[[np.ndarray, int], float],
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    key_mask: Tensor | None = None,
) -> Expected:
    """Attention of every query, one after the other, in float64; beta is 1 where nothing is visible."""
    q, k, v = (x.detach().cpu().double().numpy() for x in (query, key, value))
    batch, heads, queries, dim = q.shape
    group = heads // k.shape[1]
    output = np.zeros((batch, heads, queries, v.shape[-1]))
    beta, entropies, count = np.ones(q.shape[:3]), np.zeros(q.shape[:3]), np.zeros(q.shape[:3], int)
    for b, h, i in np.ndindex(batch, heads, queries):
        last = lengths[b] - queries + i
        first = 0 if window is None else max(last - window + 1, 0)
        seen = np.arange(first, max(last + 1, first))
        if key_mask is not None:
            seen = seen[key_mask[b].cpu().numpy()[seen]]
        if seen.size == 0:
            continue
        z = k[b, h // group, seen] @ q[b, h, i] * (dim**-0.5 if scale is None else scale)
        if softcap is not None:
            z = softcap * np.tanh(z / softcap)
        beta[b, h, i] = chosen = betas(z, h)
        w = (z == z.max()).astype(float) if math.isinf(chosen) else np.exp(chosen * (z - z.max()))
        output[b, h, i] = w / w.sum() @ v[b, h // group, seen]
        entropies[b, h, i], count[b, h, i] = entropy(z), z.size
    return Expected(output, beta, entropies, count)


def inputs(
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    queries: int = 2,
    capacity: int = 70,
    dim: int = 16,
    value_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    deviation: float = 2.0,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value whose logits have about the given deviation."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn((batch, heads, queries, dim), generator=generator) * deviation
    key = torch.randn((batch, kv_heads, capacity, dim), generator=generator)
    value = torch.randn((batch, kv_heads, capacity, value_dim), generator=generator)
    return tuple(x.to(dtype).to(device) for x in (query, key, value))  # pyright: ignore[reportReturnType]


Q, K, V = inputs()


def lengths_of(values: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def nan_beyond(lengths: list[int], *caches: Tensor) -> None:
    """Put NaN where nothing is valid."""
    for cache in caches:
        for b, length in enumerate(lengths):
            cache[b, :, length:] = math.nan


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A call as a CUDA graph, and where its result will be."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def paged(cache: Tensor, lengths: list[int], page_size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A cache ``[B, heads, capacity, D]`` as scattered pages, NaN where nothing is valid, and its block table."""
    batch, heads, capacity, dim = cache.shape
    most = -(-capacity // page_size)
    order = torch.randperm(batch * most, generator=torch.Generator().manual_seed(seed)).tolist()
    pages = torch.full((batch * most, page_size, heads, dim), math.nan, dtype=cache.dtype)
    table = torch.full((batch, most), -1, dtype=torch.int32)
    for b, length in enumerate(lengths):
        for p in range(-(-length // page_size)):
            page = table[b, p] = order[b * most + p]
            keys = cache[b, :, p * page_size : min((p + 1) * page_size, length)].cpu()
            pages[page, : keys.shape[1]] = keys.transpose(0, 1)
    return pages.to(cache.device), table.to(cache.device)


def check(result: Any, expected: Expected, tolerance: float) -> None:
    assert isinstance(result, Attention)
    np.testing.assert_allclose(result.output.double().cpu(), expected.output, atol=tolerance, rtol=0)
    seen = expected.visible > 0
    beta, highest = result.beta.cpu().numpy(), result.stats.max.cpu().numpy()
    np.testing.assert_allclose(beta[seen], expected.beta[seen], rtol=1e-4)
    np.testing.assert_allclose(result.stats.entropy.cpu(), expected.entropy, atol=1e-4)
    np.testing.assert_array_equal(result.stats.count.cpu(), expected.visible)
    assert bool((highest[~seen] == -math.inf).all())


def padding(capacity: int = 70, device: str = "cpu") -> Tensor:
    """Keys hidden before a prompt, within one, both, all and none."""
    mask = torch.ones(5, capacity, dtype=torch.bool)
    mask[0, :13] = mask[1, 20:29] = mask[2, :64] = mask[2, 66] = mask[3] = False
    return mask.to(device)


MASKED_POLICIES = ["paper", "yarn", "constant", "callable", "hard"]


def exact_inputs(**sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers whose logits are multiples of 1/64, with a dimension of the query that is 1 and of the key that is 0."""
    query, key, value = inputs(**sizes)
    query, key = (torch.round(x * 4) / 4 for x in (query, key))
    query[..., -1], key[..., -1] = 1, 0
    return query, key, value


def with_offset(key: Tensor, offset: float) -> Tensor:
    moved = key.clone()
    moved[..., -1] = 4 * offset
    return moved
