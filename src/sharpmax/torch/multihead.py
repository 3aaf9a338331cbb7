"""``torch.nn.MultiheadAttention`` with adaptive temperature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.policies import PAPER, Policy
from .attention import scaled_dot_product_attention
from .checks import check_policy


class MultiheadAttention(nn.MultiheadAttention):
    """Takes the arguments and the ``state_dict`` of ``torch.nn.MultiheadAttention``, and a policy.

    Args:
      policy: as in :func:`~sharpmax.torch.scaled_dot_product_attention`; one with parameters becomes a submodule.
      impl: the implementation, likewise.

    Attention weights are never formed, so ``need_weights`` must be ``False``, which is the default here.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        policy: Policy = PAPER,
        impl: str = "auto",
    ) -> None:
        if add_bias_kv or add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn are not served; append the key yourself")
        check_policy(policy)
        super().__init__(
            embed_dim, num_heads, dropout, bias, kdim=kdim, vdim=vdim, batch_first=batch_first, device=device,
            dtype=dtype,
        )  # fmt: skip
        self.policy = policy
        self.impl = impl

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """The output and ``None``, as torch's module returns them without weights.

        As there, a true value in a boolean mask *hides* a key, and ``is_causal`` is a hint about ``attn_mask``; here it
        needs no mask, and is applied in place of it.
        """
        if need_weights:
            raise ValueError("attention weights are never formed here; call with need_weights=False")
        batched = query.ndim == 3
        if query.ndim not in (2, 3) or not query.ndim == key.ndim == value.ndim:
            raise ValueError(f"expected query, key and value with 2 or 3 axes each, got {tuple(query.shape)}")
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        mask = self._mask(None if is_causal else attn_mask, key_padding_mask, query, key)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in self._projected(query, key, value))
        dropout = self.dropout if self.training else 0.0
        heads = scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal, policy=self.policy, impl=self.impl
        )  # fmt: skip
        output = self.out_proj(heads.transpose(1, 2).flatten(-2))
        if not batched:
            return output.squeeze(0), None
        return output if self.batch_first else output.transpose(0, 1), None

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self._qkv_same_embed_dim:
            weights: Any = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        inputs = (query, key, value)
        return tuple(nn.functional.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))

    def _mask(self, mask: Tensor | None, padding: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        """One mask that broadcasts to ``[batch, heads, queries, keys]``: true where seen, or numbers to be added."""
        if mask is not None and mask.ndim == 3:
            mask = mask.view(query.shape[0], self.num_heads, query.shape[1], key.shape[1])
        if mask is not None and mask.dtype == torch.bool:
            mask = ~mask
        if padding is None:
            return mask
        padding = padding[:, None, None]
        if padding.dtype == torch.bool:
            if mask is None or mask.dtype == torch.bool:
                return ~padding if mask is None else mask & ~padding
            return mask.masked_fill(padding, float("-inf"))
        if mask is not None and mask.dtype == torch.bool:
            return padding.masked_fill(~mask, float("-inf"))
        return padding if mask is None else mask + padding
