"""What the processes of a :class:`~tests.torch.distributed.world.World` run, and the same in one process."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import sharpmax
from sharpmax.torch import Attention, Learnable, choice, scaled_dot_product_attention
from sharpmax.torch.distributed import attention as module
from sharpmax.torch.distributed import positions, ring, ring_attention, shard, unshard
from sharpmax.torch.distributed.layout import parts


class Shape(NamedTuple):
    """Of a whole sequence."""

    batch: int = 2
    heads: int = 4
    key_heads: int = 2
    tokens: int = 24
    columns: int = 8
    value_columns: int = 6


def of_spread_and_lse(stats: sharpmax.RowStats) -> Any:
    """A policy that is nothing but a callable, with a gradient of its own."""
    return 1 + 0.1 * stats.spread + 0.2 * torch.sigmoid(stats.lse)


def learnable() -> Learnable:
    """A policy with parameters, the same in every process."""
    policy = Learnable(sharpmax.LearnableTemperature(heads=4))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.linspace(0.1, 0.4, parameter.numel()).view(parameter.shape))
    return policy.double()


def whole(shape: Shape, dtype: torch.dtype, offset: float = 0.0) -> list[Tensor]:
    """Query, key, value, and the gradient of the output, of the whole sequence; logits are about ``offset``."""
    g = torch.Generator().manual_seed(0)
    b, h, hk, n, d, dv = shape
    sizes = ((b, h, n, d), (b, hk, n, d), (b, hk, n, dv), (b, h, n, dv))
    q, k, v, g_out = (torch.randn(s, generator=g, dtype=torch.float64) for s in sizes)
    q, k = 1.3 * q, 1.3 * k
    q[..., 0], k[..., 0] = 1.0, k[..., 0] * 0.1 + offset * d**0.5
    return [x.to(dtype) for x in (q, k, v, g_out)]


def _results(found: Any, tensors: list[Tensor], g_out: Tensor, policy: Any) -> dict[str, np.ndarray]:
    parameters = list(policy.parameters()) if isinstance(policy, torch.nn.Module) else []
    assert isinstance(found, Attention)
    # the entropy has a loss of its own, so that statistics get cotangents from two sides
    loss = (found.output.double() * g_out.double()).sum() + found.stats.entropy.double().square().sum()
    gradients = torch.autograd.grad(loss, [*tensors, *parameters], materialize_grads=True)
    results = {"output": found.output, "beta": found.beta, "entropy": found.stats.entropy, "count": found.stats.count}
    if found.stats.min is not None:
        results["spread"] = found.stats.spread
    results |= dict(zip(("dq", "dk", "dv"), gradients[:3], strict=True))
    results |= {f"parameter {i}": x for i, x in enumerate(gradients[3:])}
    return {name: x.detach().double().numpy() for name, x in results.items()}


def alone(shape: Shape, dtype: torch.dtype, policy: Any, offset: float = 0.0, **given: Any) -> dict[str, np.ndarray]:
    """Every result of the whole sequence in one process, in float64 by the reference."""
    *tensors, g_out = (x.double() for x in whole(shape, dtype, offset))
    tensors = [x.requires_grad_() for x in tensors]
    policy = policy() if policy is learnable else policy
    given |= {"policy": policy, "impl": "reference", "enable_gqa": True}
    q, k, v = tensors
    found = scaled_dot_product_attention(q, k, v, return_stats=True, **given)
    return _results(found, tensors, g_out, policy)


def together(
    shape: Shape, dtype: torch.dtype, policy: Any, layout: str, offset: float = 0.0, ranks: Any = None, **given: Any
) -> dict[str, np.ndarray] | None:
    """The results of this process's tokens; in a group of ``ranks``, if they are given."""
    group: Any = None if ranks is None else dist.new_group(ranks)
    if ranks is not None and dist.get_rank() not in ranks:
        return None
    tensors = [shard(x, 2, group=group, layout=layout) for x in whole(shape, dtype, offset)]
    *tensors, g_out = tensors
    strided = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)  # as projections give them
    tensors = [x.requires_grad_() for x in strided]
    policy = policy() if policy is learnable else policy
    given = {"policy": policy, "layout": layout, "group": group} | given
    found = ring_attention(*tensors, return_stats=True, **given)
    results = _results(found, tensors, g_out, policy)
    plain = ring_attention(*tensors, **given)
    np.testing.assert_allclose(plain.detach().double().numpy(), results["output"], rtol=1e-6, atol=1e-12)
    return results


def assembled(results: list[dict[str, np.ndarray]], layout: str) -> dict[str, np.ndarray]:
    """The results of the whole sequence, from those of all ranks; gradients of parameters are added."""
    size, tokens = len(results), results[0]["output"].shape[2]
    at = [x for r in range(size) for part in parts(r, size, tokens, layout) for x in range(part.start, part.stop)]
    joined = {}
    for name in results[0]:
        if name.startswith("parameter"):
            joined[name] = np.sum([r[name] for r in results], axis=0)
        else:
            joined[name] = np.concatenate([r[name] for r in results], axis=2)[:, :, np.argsort(at)]
    return joined


def stacked(communication: str | None) -> list[np.ndarray]:
    """Gradients of this rank's tokens through two layers, backward twice; of the whole, if not told how to travel."""
    shape = Shape(heads=2, key_heads=2, columns=8, value_columns=8)
    tensors = whole(shape, torch.float64)
    if communication is not None:
        tensors = [shard(x, 2) for x in tensors]
    *tensors, g_out = (x.clone() for x in tensors)
    q, k, v = (x.requires_grad_() for x in tensors)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if communication is None:
            return scaled_dot_product_attention(q, k, v, is_causal=True, impl="reference")
        return ring_attention(q, k, v, is_causal=True, communication=communication)

    out = layer(layer(q, k, v), k, q)
    only_v = torch.autograd.grad(out, v, g_out, retain_graph=True)
    gradients = [*only_v, *torch.autograd.grad(out, (q, k, v), g_out)]
    if communication is not None:
        gradients = [unshard(x, 2) for x in gradients]
    return [x.numpy() for x in gradients]


def with_kernels(*given: Any, **named: Any) -> dict[str, np.ndarray] | None:
    """:func:`together` with Triton's kernels, interpreted."""
    refusal, choice.triton_refusal = choice.triton_refusal, lambda *_: ""
    try:
        return together(*given, impl="triton", **named)
    finally:
        choice.triton_refusal = refusal


def refusal(**changed: Any) -> str:
    """What :func:`ring_attention` says; values that are lists have one for each rank."""
    tokens = changed.pop("tokens", 4)
    mine = {name: x[dist.get_rank()] if isinstance(x, list) else x for name, x in changed.items()}
    if isinstance(tokens, list):
        tokens = tokens[dist.get_rank()]
    dtype = mine.pop("dtype", torch.float32)
    x = torch.zeros(1, 2, tokens, 8, dtype=dtype, requires_grad=True)
    key = torch.zeros(1, 2, mine.pop("keys", tokens), 8, dtype=dtype)
    try:
        ring_attention(x, key, key, **mine)
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return ""


def outside() -> str:
    """What a process that is not in the group hears."""
    group: Any = dist.new_group([0])
    x = torch.zeros(1, 2, 4, 8)
    try:
        ring_attention(x, x, x, group=group)
    except ValueError as error:
        return str(error)
    return ""


def round_trip(layout: str) -> tuple[bool, list[int]]:
    """Whether a sequence comes back whole, and the positions of this rank's tokens."""
    x = torch.arange(48.0).view(2, 24)
    mine = shard(x, 1, layout=layout)
    at = positions(mine.shape[1], layout=layout)
    assert torch.equal(mine, x[:, at])
    return torch.equal(unshard(mine, 1, layout=layout), x), at.tolist()


class Traffic:
    """What a rank sends, and the most bytes of shards and gradients that live in it at a time."""

    def __init__(self) -> None:
        self.sent = self.alive = self.most = 0
        self.known: set[int] = set()

    def watch(self, tensors: tuple[Tensor, ...]) -> None:
        for x in tensors:
            if id(x) not in self.known:
                self.known.add(id(x))
                self.alive += x.nbytes
                weakref.finalize(x, self._gone, id(x), x.nbytes)
        self.most = max(self.most, self.alive)

    def _gone(self, name: int, size: int) -> None:
        self.known.discard(name)
        self.alive -= size


@contextlib.contextmanager
def watched() -> Iterator[Traffic]:
    """Count what the ring does."""
    traffic = Traffic()
    real_room, real_swap, real_add = ring._room, ring.Swap, ring.Homeward.add

    def room(like: Any) -> Any:
        found = real_room(like)
        traffic.watch(found)
        return found

    def swap(member: Any, sent: Any, into: Any, distance: int) -> Any:
        traffic.sent += sum(x.nbytes for x in sent)
        return real_swap(member, sent, into, distance)

    def add(self: Any, gradients: Any) -> None:
        traffic.watch(gradients)
        real_add(self, gradients)

    ring._room, ring.Swap, ring.Homeward.add = room, swap, add
    try:
        yield traffic
    finally:
        ring._room, ring.Swap, ring.Homeward.add = real_room, real_swap, real_add


def traffic(policy: Any, communication: str, window: int | None = None, layout: str = "zigzag") -> list[int]:
    """Bytes sent and most bytes held, forward and backward."""
    shape = Shape(batch=1, heads=4, key_heads=2, tokens=64, columns=8, value_columns=6)
    q, k, v, g_out = (shard(x, 2, layout=layout) for x in whole(shape, torch.float32))
    tensors = [x.clone().requires_grad_() for x in (q, k, v)]
    with watched() as forward:
        out = ring_attention(
            *tensors, is_causal=True, policy=policy, communication=communication, window=window, layout=layout
        )
    with watched() as backward:
        out.backward(g_out)
    assert module.Homeward is ring.Homeward
    return [forward.sent, backward.sent, forward.most, backward.most]
