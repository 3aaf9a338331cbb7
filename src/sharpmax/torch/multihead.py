"""``torch.nn.MultiheadAttention`` with adaptive temperature or another mechanism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.policies import PAPER, LearnableStructure, Policy
from ..mechanisms import Mechanism, find
from .attention import scaled_dot_product_attention
from .checks import check_dense, check_dropout, check_policy, misfit, type_name, under_autocast, whole
from .choice import check_impl
from .learnable import Learnable
from .mechanisms import settled


class MultiheadAttention(nn.MultiheadAttention):
    """Takes the arguments and the ``state_dict`` of ``torch.nn.MultiheadAttention``, and a policy.

    Args:
      embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first, device, dtype: as in torch's module. ``add_bias_kv``
        and ``add_zero_attn`` are refused.
      policy: as in :func:`~sharpmax.torch.scaled_dot_product_attention`. One with parameters, such as
        :class:`~sharpmax.torch.Learnable`, becomes a submodule; its parameters are not in the ``state_dict`` of torch's
        module, which then loads with ``strict=False``.
      mechanism: likewise, in the place of the policy. One with parameters, given by name or as an object, is made a
        :class:`~sharpmax.torch.Learnable` here. Differential attention splits queries and keys of a head in two.
      impl: the implementation, likewise.

    Attention weights are never formed, so ``need_weights`` must be ``False``, which is the default here, unlike in
    torch's module. Inside ``torch.nn.TransformerEncoderLayer`` it is called in evaluation too: torch's fused layer,
    which has no policy, is not taken. Build a ``TransformerEncoder`` with ``enable_nested_tensor=False``: torch warns
    otherwise that it does not use nested tensors.
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
        mechanism: Mechanism | Learnable | str | None = None,
        impl: str = "auto",
    ) -> None:
        if add_bias_kv or add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn are not served; append the key yourself")
        if not all(whole(n) and n > 0 for n in (embed_dim, num_heads)) or embed_dim % num_heads:
            raise ValueError(f"expected embed_dim to be a multiple of num_heads, got {embed_dim!r} and {num_heads!r}")
        check_dropout(dropout)
        check_policy(policy)
        check_impl(impl)
        chosen = None if mechanism is None else settled(mechanism, policy)
        super().__init__(
            embed_dim, num_heads, dropout, bias, kdim=kdim, vdim=vdim, batch_first=batch_first, device=device,
            dtype=dtype,
        )  # fmt: skip
        like = self.out_proj.weight
        self.policy = Learnable(policy).to(like) if isinstance(policy, LearnableStructure) else policy
        self.mechanism = _learnable(mechanism, like)
        self.maps = 1 if chosen is None or chosen.held is None else chosen.held.mechanism.maps
        self.windowed = chosen is not None and chosen.size is not None
        self.impl = impl
        if self.head_dim % self.maps:
            raise ValueError(f"expected heads whose columns can be split in {self.maps}, got {self.head_dim} columns")

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._refuse_fused_layer()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._refuse_fused_layer()

    def _refuse_fused_layer(self) -> None:
        """Say what keeps ``TransformerEncoderLayer`` from its fused kernel, which reads weights and calls no module."""
        self._qkv_same_embed_dim = False

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

        Args:
          query, key, value: ``[L, B, columns]``, with ``batch_first`` ``[B, L, columns]``; without a batch
            ``[L, columns]``; or, with ``batch_first``, nested tensors.
          key_padding_mask: ``[B, Lk]``, true where a key is *hidden*, or numbers that are added to the logits.
          need_weights: must be ``False``.
          attn_mask: ``[Lq, Lk]`` or ``[B * num_heads, Lq, Lk]``, likewise.
          average_attn_weights: not used.
          is_causal: causal attention, in the place of ``attn_mask``, of which torch takes it for a hint: a mask that
            is given besides is ignored.
        """
        if need_weights:
            raise ValueError("attention weights are never formed here; call with need_weights=False")
        self._check(query=query, key=key, value=value)
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        check_dense(**{name: mask for name, mask in masks.items() if mask is not None})
        if query.is_nested or key.is_nested or value.is_nested:
            return self._nested(query, key, value, key_padding_mask, attn_mask, is_causal), None
        batched = query.ndim == 3
        if query.ndim not in (2, 3) or not query.ndim == key.ndim == value.ndim:
            raise misfit("query, key and value with 2 or 3 axes each", [query, key, value])
        if key.shape[:-1] != value.shape[:-1]:
            raise misfit("key and value of the same shape but for their last axis", [key, value])
        if batched and query.shape[1 - self.batch_first] != key.shape[1 - self.batch_first]:
            raise misfit(f"query and key of one batch size, on axis {1 - self.batch_first}", [query, key])
        for name, x, columns in (
            ("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim),
        ):  # fmt: skip
            if x.shape[-1] != columns:
                raise ValueError(f"expected {name} with {columns} columns, got {tuple(x.shape)}")
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        mask = self._mask(None if is_causal else attn_mask, key_padding_mask, query, key)
        output = self._attended(query, key, value, mask, None, is_causal)
        if not batched:
            output = output.squeeze(0)
        elif not self.batch_first:
            output = output.transpose(0, 1)
        return self.out_proj(output), None

    def extra_repr(self) -> str:
        """The policy or the mechanism and the implementation, for ``repr``; what has parameters is a submodule."""
        name, held = ("policy", self.policy) if self.mechanism is None else ("mechanism", self.mechanism)
        shown = [] if isinstance(held, nn.Module) else [f"{name}={held!r}"]
        return ", ".join(shown + [f"impl={self.impl!r}"] * (self.impl != "auto"))

    def _check(self, **tensors: Any) -> None:
        """Refuse what a product with the weights would not take."""
        own = self.in_proj_weight
        weights = (own,) * 3 if own is not None else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        for (name, x), weight in zip(tensors.items(), weights, strict=True):
            if not (isinstance(x, Tensor) and x.is_nested):
                check_dense(**{name: x})
            if x.device != weight.device:
                raise ValueError(f"expected {name} on the module's device {weight.device}, got it on {x.device}")
            if x.dtype != weight.dtype and under_autocast(x)[0].dtype != under_autocast(weight)[0].dtype:
                raise TypeError(
                    f"expected {name} of the module's type {type_name(weight.dtype)}, got {type_name(x.dtype)}"
                )

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        key_lengths: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        """What heads make of ``[batch, length, columns]`` tensors, side by side."""
        heads = (self.num_heads * self.maps, self.num_heads * self.maps, self.num_heads)
        projected = zip(self._projected(query, key, value), heads, strict=True)
        q, k, v = (x.unflatten(-1, (count, -1)).transpose(1, 2) for x, count in projected)
        dropout = self.dropout if self.training else 0.0
        output = scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal, policy=self.policy, mechanism=self.mechanism, key_lengths=key_lengths,
            impl=self.impl,
        )  # fmt: skip
        return output.transpose(1, 2).flatten(-2)

    def _nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        """The output of nested tensors, nested likewise."""
        if not (query.is_nested and key.is_nested and value.is_nested and self.batch_first):
            raise ValueError("expected query, key and value all to be nested tensors, and batch_first=True")
        if key_padding_mask is not None or (attn_mask is not None and not is_causal):
            raise ValueError("nested tensors know their lengths: expected no key_padding_mask and no attn_mask")
        lengths = [[len(part) for part in x.unbind()] for x in (query, key)]
        if self.windowed and not is_causal and lengths[0] != lengths[1]:
            raise ValueError(
                "a sliding window counts positions from the first query and key of nested tensors: expected as many "
                "queries as keys in each, or is_causal=True"
            )
        q, k, v = (nn.utils.rnn.pad_sequence(list(x.unbind()), batch_first=True) for x in (query, key, value))
        key_lengths = torch.tensor(lengths[1], dtype=torch.int32).to(query.device)
        output = self.out_proj(self._attended(q, k, v, None, key_lengths, is_causal or self.windowed))
        parts = [row[:length] for row, length in zip(output, lengths[0], strict=True)]
        return torch.nested.as_nested_tensor(parts, layout=query.layout)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        inputs = (query, key, value)
        return tuple(nn.functional.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))

    def _mask(self, mask: Tensor | None, padding: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        """One mask that broadcasts to ``[batch, heads, queries, keys]``: true where seen, or numbers to be added."""
        batch, queries, keys = query.shape[0], query.shape[1], key.shape[1]
        if mask is not None and mask.ndim == 3:
            if mask.shape != (batch * self.num_heads, queries, keys):
                raise ValueError(
                    f"expected attn_mask of shape {(queries, keys)} or {(batch * self.num_heads, queries, keys)}, "
                    f"batch times heads, got {tuple(mask.shape)}"
                )
            mask = mask.reshape(batch, self.num_heads, queries, keys)
            if self.maps > 1:
                mask = mask.repeat_interleave(self.maps, dim=1)
        for name, x in {"attn_mask": mask, "key_padding_mask": padding}.items():
            if x is not None and x.dtype != torch.bool and not x.dtype.is_floating_point:
                raise TypeError(f"expected {name} to be boolean or floating-point, got {type_name(x.dtype)}")
        if mask is not None and mask.dtype == torch.bool:
            mask = ~mask
        if padding is None:
            return mask
        if padding.shape != (batch, keys):
            raise ValueError(f"expected key_padding_mask of shape {(batch, keys)}, got {tuple(padding.shape)}")
        padding = padding[:, None, None]
        if padding.dtype == torch.bool:
            if mask is None or mask.dtype == torch.bool:
                return ~padding if mask is None else mask & ~padding
            return mask.masked_fill(padding, float("-inf"))
        if mask is not None and mask.dtype == torch.bool:
            return padding.masked_fill(~mask, float("-inf"))
        return padding if mask is None else mask + padding


def _learnable(mechanism: Mechanism | Learnable | str | None, like: Tensor) -> Mechanism | Learnable | None:
    """A module for a mechanism with parameters, where ``like`` is and of its type."""
    if mechanism is None or isinstance(mechanism, Learnable):
        return mechanism
    found = find(mechanism)
    return Learnable(found).to(like.device, like.dtype) if found.initial() else found
