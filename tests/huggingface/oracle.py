"""Figure 4 of the paper as an attention implementation of transformers: all logits, all weights, dense masks.

Nothing of sharpmax is used. Masks are transformers' own for ``eager``. Figure 4 adds 1e-9 to a probability before it
takes the logarithm, which moves results in the seventh digit: ``PRINTED`` does so too, ``NAME`` adds next to nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

NAME, PRINTED = "figure4_oracle", "figure4_as_printed"
CURVE = (-0.037, 0.481, -2.3, 4.917, -1.791)


def register_oracle() -> None:
    """Make the implementations known."""
    for name, epsilon in ((NAME, 1e-30), (PRINTED, 1e-9)):
        AttentionInterface.register(name, functools.partial(figure_4, epsilon=epsilon))
        AttentionMaskInterface.register(name, eager_mask)


def figure_4(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    epsilon: float = 1e-9,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Softmax of ``beta * logits`` with the beta that Figure 4 computes from the entropy of each row."""
    assert dropout == 0.0
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if position_bias is not None:
        logits = logits + position_bias
    if attention_mask is not None:
        logits = logits.masked_fill(attention_mask < torch.finfo(attention_mask.dtype).min / 2, -torch.inf)
    blind = (logits == -torch.inf).all(-1, keepdim=True)
    logits = logits.masked_fill(blind, 0.0)
    original = torch.softmax(logits, -1)
    entropy = torch.sum(-original * torch.log(original + epsilon), -1, keepdim=True)
    polynomial = torch.zeros_like(entropy)
    for coefficient in CURVE:
        polynomial = polynomial * entropy + coefficient
    beta = torch.where(entropy > 0.5, torch.clamp(polynomial, min=1.0), 1.0)
    visible = logits > -torch.inf
    scaled = torch.where(visible, beta * torch.where(visible, logits, 0.0), -torch.inf)
    weights = torch.softmax(scaled, -1).masked_fill(blind, 0.0)
    return (weights @ value).transpose(1, 2).contiguous(), None
