"""torch's own attention for the CPU, on ``beta * q``: the second pass of streaming attention where that is exact.

It computes in float32 or float64, so nothing of ``beta * q`` is rounded to a narrower type.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import accumulation
from .geometry import ALL, Geometry


def serves(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, geometry: Geometry, mask: Tensor | None, key_lengths: Tensor | None,
    dropout_p: float,
) -> bool:  # fmt: skip
    """Whether torch's own kernel on the CPU does the same on ``beta * q``, in float32 or float64."""
    causal = geometry.left == ALL and geometry.right == 0 and (not geometry.lower_right or q.shape[2] == k.shape[2])
    plain = mask is None and key_lengths is None and dropout_p == 0 and geometry.softcap == 0 and geometry.scale > 0
    sizes = q.numel() > 0 and k.numel() > 0 and q.shape[-1] == v.shape[-1]
    fits = q.device.type == "cpu" and plain and sizes and (causal or not geometry.banded)
    return fits and bool(beta.isfinite().all())


class _Prepared(NamedTuple):
    """``beta * q``, keys and values as the kernel takes them: its columns must lie side by side."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool


def _prepared(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, geometry: Geometry) -> _Prepared:
    dtype = accumulation(q.dtype)
    wide = (q.to(dtype) * beta[..., None], k.to(dtype), v.to(dtype))
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in wide)
    return _Prepared(query, key, value, geometry.right == 0)


def attend(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The output, not rounded, and the logsumexp of ``beta`` times the logits."""
    x = _prepared(q, k, v, beta, geometry)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(x.q, x.k, x.v, 0.0, x.causal, scale=geometry.scale)
    return out.contiguous(), lse.contiguous()


def backward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, geometry: Geometry, out: Tensor, lse: Tensor, grad_out: Tensor,
    need_beta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """With ``dx`` the gradient of ``x = beta * q``: that of q is ``beta * dx``, that of beta ``<dx, q>``."""
    x = _prepared(q, k, v, beta, geometry)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dx, dk, dv = kernel(
        grad_out.to(x.q.dtype).contiguous(), x.q, x.k, x.v, out.to(x.q.dtype), lse, 0.0, x.causal, scale=geometry.scale
    )
    d_beta = (dx * q).sum(-1) if need_beta else None
    return (
        (dx * beta[..., None]).to(q.dtype).contiguous(),
        dk.to(k.dtype).contiguous(),
        dv.to(v.dtype).contiguous(),
        d_beta,
    )
