"""What is compared: policies for all heads, and the same for a model's sharp heads only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import row_stats
from ...core.policies import PAPER, PAPER_HELD, Constant, LogLength, Policy
from ...huggingface import Call, observe, sharpen

SHORT = 512
"""The reference length of ``log_512``; that of ``log_context`` is what the model was trained for."""

ROWS = 32
"""Heads are judged by their last rows of every calibration prompt."""

SHARE = 0.25
"""The part of all heads that counts as sharp."""

MOST_SINK = 0.5
"""Heads that give the first token more than this on average are attention sinks, and not chosen."""


class Choice(NamedTuple):
    """One line of the results."""

    label: str
    policy: Callable[[int], Policy] | None
    """Made for a model's context; ``None`` is the model as it is."""

    sharp_only: bool = False


_EVERYWHERE = {
    "paper": ("the paper's polynomial", lambda context: PAPER),
    "held": ("the polynomial, range-safe", lambda context: PAPER_HELD),
    "log_512": ("log n / log 512", lambda context: LogLength.relative(SHORT)),
    "log_context": ("log n / log of the context", LogLength.relative),
}
CHOICES: dict[str, Choice] = {
    "off": Choice("off", None),
    **{name: Choice(label, policy) for name, (label, policy) in _EVERYWHERE.items()},
    **{f"{name}_sharp": Choice(f"{label}, sharp heads", policy, True) for name, (label, policy) in _EVERYWHERE.items()},
}
"""Every policy that is compared, by name."""

Heads = Mapping[int, Sequence[int]]


def switched(name: str, model: Any, context: int, heads: Heads) -> AbstractContextManager[Any]:
    """The policy on in ``model`` for as long as the ``with`` block lasts."""
    choice = CHOICES[name]
    if choice.policy is None:
        return nullcontext()
    return sharpen(model, choice.policy(context), heads=heads if choice.sharp_only else None)


class HeadStats(NamedTuple):
    """Means over the last rows of calibration prompts, ``[layers, heads]``."""

    entropy: Tensor
    """Entropy over all tokens but the first, divided by the logarithm of their number."""

    sink: Tensor
    """The first token's coefficient."""


def head_stats(model: Any, prompts: Iterable[Tensor]) -> HeadStats:
    """How sharp every head is on ``prompts``, each ``[1, tokens]``, with plain softmax."""
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def look(call: Call) -> None:
        layer = call.module.layer_idx
        assert isinstance(layer, int)
        found.setdefault(layer, []).append(_read(call))

    with torch.no_grad(), sharpen(model, Constant(1.0)), observe(look):
        for ids in prompts:
            model(input_ids=ids.to(model.device), use_cache=False)
    layers = [found[layer] for layer in sorted(found)]
    entropy, sink = (torch.stack([torch.stack([x[i] for x in rows]).mean(0) for rows in layers]) for i in (0, 1))
    return HeadStats(entropy.cpu(), sink.cpu())


def _read(call: Call) -> tuple[Tensor, Tensor]:
    """Normalised entropy without the first token, and that token's coefficient, each ``[heads]``."""
    query, options = call.query[..., -ROWS:, :].float(), call.options
    key = call.key.float().repeat_interleave(call.query.shape[1] // call.key.shape[1], dim=1)
    scale = query.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    logits = query @ key.transpose(-1, -2) * scale
    if (cap := options["softcap"]) is not None:
        logits = cap * torch.tanh(logits / cap)
    n = key.shape[2]
    behind = torch.arange(n - query.shape[2], n, device=logits.device)[:, None] - torch.arange(n, device=logits.device)
    seen = (behind >= 0) & (behind < (options["window"] or n))
    sink = torch.softmax(logits.masked_fill(~seen, -torch.inf), -1)[..., 0]
    seen = seen & (torch.arange(n, device=logits.device) > 0)
    stats = row_stats(logits, where=seen.expand(logits.shape))
    entropy = stats.entropy / seen.sum(-1).clamp(min=2).log()
    return entropy.mean((0, 2)), sink.mean((0, 2))


def sharp_heads(stats: HeadStats, share: float = SHARE, most_sink: float = MOST_SINK) -> dict[int, list[int]]:
    """The ``share`` of all heads with the lowest entropy among those that are no attention sinks, by layer."""
    entropy = stats.entropy.masked_fill(stats.sink > most_sink, torch.inf).flatten()
    count = min(max(1, round(share * entropy.numel())), int(entropy.isfinite().sum()))
    if count == 0:
        raise ValueError(f"expected heads that give the first token at most {most_sink:g}, got none")
    chosen = sorted(entropy.argsort(stable=True)[:count].tolist())
    heads = stats.entropy.shape[1]
    by_layer: dict[int, list[int]] = {}
    for i in chosen:
        by_layer.setdefault(i // heads, []).append(i % heads)
    return by_layer
