"""Decoding: one or a few queries against a long cache of keys and values, with adaptive temperature.

    decode_attention          a cache [B, heads, capacity, D], of which a part is valid
    paged_decode_attention    a cache of pages and a block table, as serving engines keep it

The queries stand at the end of the valid cache and are causal among themselves. ``impl="triton"`` reads keys once and
values once, whatever the policy; ``impl="torch"`` is plain torch, for any device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.policies import PAPER, Lowered, Policy, lowered, needs_spread
from ..core.softmax import softmax
from ..core.stats import RowStats, row_stats
from .attention import Attention, row_betas
from .blocks import accumulation
from .checks import (
    DTYPES,
    Window,
    check_dense,
    check_policy,
    check_whole,
    forward_mode,
    full_precision,
    geometry_of,
    has_tangent,
    needs_gradient,
    readable,
    type_name,
)
from .choice import before_ampere
from .fused import policy_numbers
from .geometry import ALL, LARGEST_HEAD, LARGEST_POLYNOMIAL, Geometry, capacity_of, heads_of, visible_counts
from .installed import HAS_TRITON, triton_is_old
from .learnable import parameters_of

MOST_QUERIES = 16
IMPLEMENTATIONS = ("auto", "triton", "torch")


class _Cache(NamedTuple):
    """Keys and values, contiguous or, with a block table, paged."""

    key: Tensor
    value: Tensor
    table: Tensor | None
    lengths: Tensor | None
    mask: Tensor | None = None


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache_lengths: Tensor | None = None,
    *,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    policy: Policy = PAPER,
    window: Window = None,
    softcap: float | None = None,
    impl: str = "auto",
    return_stats: bool = False,
) -> Tensor | Attention:
    """Attention of the newest queries to a cache, with the inverse temperature that ``policy`` chooses for each row.

    Args:
      query: ``[B, Hq, Lq, D]`` with ``Lq <= 16``. The last query stands at the last valid key, those before it at
        the keys before, and none sees later keys. Queries for which there are too few valid keys get zeros.
      key, value: ``[B, Hkv, capacity, D]`` and ``[B, Hkv, capacity, Dv]``, of any strides; ``Hq`` is a multiple of
        ``Hkv``.
      cache_lengths: whole numbers ``[B]``, how many keys are valid, those of the queries included; all if not given.
        Numbers outside of 0 to the capacity are taken as the nearest of these. What lies beyond has no influence,
        whatever it holds.
      key_mask: booleans ``[B, capacity]``, False where padding hides a key from every query, such as that before a
        prompt shorter than the others. What it hides has no influence.
      scale: what products of query and key are multiplied by; ``1 / sqrt(D)`` by default.
      policy: any callable that maps RowStats ``[B, Hq, Lq]`` to beta, by default :data:`sharpmax.PAPER`.
      window: ``w``: a query sees the ``w`` latest keys up to its own position; or ``(left, right)``, of which ``left``
        counts the keys before it, -1 for all. All if not given.
      softcap: logits are ``softcap * tanh(logits / softcap)``.
      impl: ``"triton"`` (NVIDIA GPUs from Ampere on), ``"torch"`` (any device, logits of the whole capacity in memory),
        or ``"auto"``, the default: the kernels where they serve.
      return_stats: also return the statistics and beta of every row.

    Returns:
      The output ``[B, Hq, Lq, Dv]``, of the query's type, or with ``return_stats`` an
      :class:`~sharpmax.torch.Attention`, whose statistics (of the logits before beta) and beta are ``[B, Hq, Lq]``.

    Query, key and value are of one type: autocast, which would cast the whole cache in every step, changes nothing.
    There is no gradient: use ``scaled_dot_product_attention`` to train.
    """
    check_dense(query=query, key=key, value=value)
    _check_query(query)
    for name, cache, heads in (("key", key, None), ("value", value, key.shape[1:3] if key.ndim == 4 else None)):
        if cache.ndim != 4 or cache.shape[0] != query.shape[0] or (heads is not None and cache.shape[1:3] != heads):
            raise ValueError(
                f"expected key and value of shapes [{query.shape[0]}, heads, capacity, head size], with the same heads "
                f"and capacity, got {name} of shape {tuple(cache.shape)}"
            )
    if key_mask is not None:
        check_dense(key_mask=key_mask)
        if key_mask.dtype != torch.bool or key_mask.shape != (key.shape[0], key.shape[2]):
            raise ValueError(
                f"expected key_mask to be boolean of shape {(key.shape[0], key.shape[2])}, got "
                f"{type_name(key_mask.dtype)} of shape {tuple(key_mask.shape)}"
            )
    cache = _Cache(key, value, None, _whole_numbers("cache_lengths", cache_lengths), key_mask)
    return _attention(query, cache, scale, policy, window, softcap, impl, return_stats)


def paged_decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cache_lengths: Tensor,
    *,
    scale: float | None = None,
    policy: Policy = PAPER,
    window: Window = None,
    softcap: float | None = None,
    impl: str = "auto",
    return_stats: bool = False,
) -> Tensor | Attention:
    """:func:`decode_attention` on a paged cache, as serving engines keep it.

    Args:
      query: ``[B, Hq, Lq, D]`` with ``Lq <= 16``, as in :func:`decode_attention`.
      key_cache, value_cache: ``[pages, page size, Hkv, D]`` and ``[pages, page size, Hkv, Dv]``, with pages of any
        size; ``Hq`` is a multiple of ``Hkv``.
      block_table: whole numbers ``[B, pages of a sequence]``: key ``n`` of sequence ``b`` is in page
        ``block_table[b, n // page size]``. Entries of pages without a visible key, beyond the valid ones or before the
        window, may be anything; the pages they name are not read. Others must name a page, which is checked on a CPU
        alone.
      cache_lengths: whole numbers ``[B]``, how many keys are valid, those of the queries included. Numbers outside of 0
        to what the table has room for are taken as the nearest of these.
      scale, policy, window, softcap, impl, return_stats: as in :func:`decode_attention`.

    Returns:
      What :func:`decode_attention` returns.
    """
    check_dense(query=query, key_cache=key_cache, value_cache=value_cache)
    _check_query(query)
    if key_cache.ndim != 4 or value_cache.ndim != 4 or key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(
            "expected key_cache and value_cache of shapes [pages, page size, heads, head size], alike but for the "
            f"last, got {tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if key_cache.shape[1] == 0:
        raise ValueError(f"expected key_cache to have pages of at least one key, got shape {tuple(key_cache.shape)}")
    table = _whole_numbers("block_table", block_table)
    if table is None:
        raise TypeError("expected block_table to be a tensor of whole numbers, got NoneType")
    if table.ndim != 2 or table.shape[0] != query.shape[0]:
        raise ValueError(
            f"expected block_table of shape [{query.shape[0]}, pages of a sequence], got shape {tuple(table.shape)}"
        )
    if cache_lengths is None:
        raise ValueError("expected cache_lengths to say how many keys are valid, got None")
    cache = _Cache(key_cache, value_cache, table, _whole_numbers("cache_lengths", cache_lengths))
    return _attention(query, cache, scale, policy, window, softcap, impl, return_stats)


def _attention(
    query: Tensor,
    cache: _Cache,
    scale: float | None,
    policy: Policy,
    window: Window,
    softcap: float | None,
    impl: str,
    return_stats: bool,
) -> Tensor | Attention:
    check_policy(policy)
    _check_cache(query, cache, policy)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"expected impl to be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    cache = cache._replace(
        table=cache.table if cache.table is None or cache.table.stride(1) == 1 else cache.table.contiguous(),
        lengths=None if cache.lengths is None else cache.lengths.contiguous(),
        mask=cache.mask if cache.mask is None or cache.mask.stride(1) == 1 else cache.mask.contiguous(),
    )
    geometry = geometry_of(query, "lower_right", scale, window, softcap)
    run = _torch_attention
    if impl == "triton" or (impl == "auto" and query.device.type == "cuda"):
        obstacle = _obstacle(query, cache)
        if obstacle is None:
            run = _triton_attention
        elif impl == "triton":
            raise ValueError(f"{obstacle}; use impl='torch'")
    with full_precision(query):
        return run(query, cache, geometry, policy, return_stats)


def _whole_numbers(name: str, x: Any) -> Tensor | None:
    """``x`` as int32; numbers that it does not hold are taken as the nearest that it does."""
    if x is None:
        return None
    check_whole(name, x)
    if x.dtype != torch.int64:
        return x.to(torch.int32)
    limit = torch.iinfo(torch.int32)
    return torch.clamp(x, min=limit.min, max=limit.max).to(torch.int32)


def _check_query(query: Tensor) -> None:
    if query.ndim != 4 or not 1 <= query.shape[2] <= MOST_QUERIES or query.shape[3] < 1:
        more = query.ndim == 4 and query.shape[2] > MOST_QUERIES
        raise ValueError(
            f"expected query of shape [batch, heads, 1 to {MOST_QUERIES} queries, head size], got "
            f"{tuple(query.shape)}" + ("; scaled_dot_product_attention serves more queries" if more else "")
        )


def _check_cache(query: Tensor, cache: _Cache, policy: Policy) -> None:
    key, value, heads = cache.key, cache.value, heads_of(cache.key, cache.table)
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"expected keys of query's head size {query.shape[3]}, got {key.shape[3]}")
    if heads < 1 or query.shape[1] % heads != 0:
        cached = "[B, Hkv, capacity, D]" if cache.table is None else "[pages, page size, Hkv, D]"
        raise ValueError(
            f"expected query [B, Hq, Lq, D] with a multiple of the heads of a cache {cached}, got shapes "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    if not (query.dtype == key.dtype == value.dtype) or query.dtype not in DTYPES:
        raise TypeError(
            "expected query, key and value of one type, float16, bfloat16, float32 or float64, got "
            f"{type_name(query.dtype)}, {type_name(key.dtype)} and {type_name(value.dtype)}"
        )
    if cache.lengths is not None and cache.lengths.shape != query.shape[:1]:
        raise ValueError(f"expected cache_lengths of shape [{query.shape[0]}], got shape {tuple(cache.lengths.shape)}")
    for tensor in cache:
        if tensor is not None and tensor.device != query.device:
            raise ValueError(f"expected all tensors on query's device {query.device}, got one on {tensor.device}")
    _check_constant(query, key, value, *parameters_of(policy))


def _check_constant(*tensors: Tensor) -> None:
    """Refuse what is to be differentiated."""
    if needs_gradient(*tensors) or (forward_mode() and has_tangent(*tensors)):
        raise ValueError(
            "decoding has no gradient: call it under torch.no_grad(), or train with scaled_dot_product_attention"
        )


def _betas(policy: Policy, stats: RowStats) -> Tensor:
    beta = row_betas(policy, stats)
    _check_constant(beta)  # a policy may hold what it learns in any way
    return beta


def _obstacle(query: Tensor, cache: _Cache) -> str | None:
    """Why the kernels cannot serve the call, if so."""
    if not HAS_TRITON:
        return "impl='triton' needs the package triton: pip install 'sharpmax[triton]'"
    if triton_is_old():
        return "impl='triton' needs Triton 3.4 or later: pip install 'triton>=3.4'"
    from .triton import decode as kernels

    if query.dtype not in kernels.TYPES:
        return f"impl='triton' serves float16, bfloat16 and float32, got {type_name(query.dtype)}"
    sizes = (query.shape[3], cache.value.shape[3])
    if max(sizes) > LARGEST_HEAD or min(sizes) < 1:
        got = max(sizes) if min(sizes) > 0 else 0
        return f"impl='triton' serves head sizes from 1 to {LARGEST_HEAD}, got {got}"
    if query.device.type != "cuda" and not kernels.INTERPRETED:
        return f"impl='triton' needs tensors on a GPU, got {query.device}"
    if before_ampere(query.device):
        return "impl='triton' needs a GPU of the generation of Ampere or later"
    return None


def _triton_attention(
    query: Tensor, cache: _Cache, geometry: Geometry, policy: Policy, return_stats: bool, splits: int = 0
) -> Tensor | Attention:
    """Kernels of our own; the policy within them if it lowers, else between them."""
    from .triton import decode as kernels

    key, value, table, lengths, mask = cache
    if geometry.left != ALL:
        geometry = geometry._replace(left=min(geometry.left, capacity_of(key, table)))  # which int32 holds
    scale, softcap, left = geometry.scale, geometry.softcap, geometry.left
    form = lowered(policy)
    if form is not None and _inside_kernels(form, mask):
        output, fields, beta = kernels.decode(
            query, key, value, table, lengths, mask, scale, softcap, left, policy_numbers(form), splits
        )
        if not return_stats:
            return output
        return Attention(output, _row_stats(fields, query, cache, geometry), beta)
    with_min = needs_spread(policy)
    logits, fields = kernels.decode_stats(query, key, table, lengths, mask, scale, softcap, left, with_min, splits)
    stats = _row_stats(fields, query, cache, geometry)
    beta = _betas(policy, stats)
    output = kernels.decode_values(logits, stats.max, beta, value, table, lengths, mask, left, splits)
    return Attention(output, stats, beta) if return_stats else output


def _inside_kernels(form: Lowered, mask: Tensor | None) -> bool:
    """Whether the kernels evaluate a policy; they know how many keys are valid, not how many of them a mask hides."""
    counts = form.variable == "log_count" and len(form.coefficients) > 1
    return len(form.coefficients) <= LARGEST_POLYNOMIAL and not (counts and mask is not None)


def _torch_attention(
    query: Tensor, cache: _Cache, geometry: Geometry, policy: Policy, return_stats: bool
) -> Tensor | Attention:
    """Plain torch: logits of all keys in memory, which for a few queries is little beside the cache itself."""
    key, value = cache.key, cache.value
    if cache.table is not None:
        key, value = (_gathered(pages, cache, geometry.left, query.shape[2]) for pages in (key, value))
    batch, query_heads, queries, dim = query.shape
    heads, capacity = key.shape[1:3]
    grouped = query_heads // heads * queries
    wide = accumulation(query.dtype)
    rows = query.reshape(batch, heads, grouped, dim).to(wide)
    logits = (rows @ key.to(wide).mT).reshape(batch, query_heads, queries, capacity) * geometry.scale
    if geometry.softcap > 0:
        logits = geometry.softcap * torch.tanh(logits / geometry.softcap)
    seen = _seen(cache, geometry, queries, capacity)
    stats = row_stats(logits, where=seen, with_min=needs_spread(policy))
    beta = _betas(policy, stats)
    weights = softmax(logits, where=seen, beta=beta).reshape(batch, heads, grouped, capacity)
    values = value.to(wide)
    if cache.lengths is not None or cache.mask is not None:
        values = torch.where(seen.any(-2, keepdim=True).mT, values, 0.0)  # what no query sees may be anything, even NaN
    output = (weights @ values).reshape(batch, query_heads, queries, value.shape[3]).to(query.dtype)
    return Attention(output, stats, beta) if return_stats else output


def _seen(cache: _Cache, geometry: Geometry, queries: int, capacity: int) -> Tensor:
    """Which keys each query sees, broadcastable to ``[B, heads, queries, capacity]``."""
    rows, keys = (torch.arange(n, device=cache.key.device) for n in (queries, capacity))
    lengths = capacity if cache.lengths is None else _valid(cache.lengths, capacity)[:, None, None, None]
    seen = geometry.visible(rows, keys, queries, lengths)
    assert seen is not None
    return seen if cache.mask is None else seen & cache.mask[:, None, None, :]


def _gathered(pages: Tensor, cache: _Cache, left: int, queries: int) -> Tensor:
    """A paged cache as ``[B, heads, capacity, D]``, with 0 for pages that hold no visible key."""
    assert cache.table is not None
    assert cache.lengths is not None
    most, size = cache.table.shape[1], pages.shape[1]
    starts = torch.arange(most, device=pages.device) * size
    lengths = _valid(cache.lengths, most * size)[:, None]
    visible = starts < lengths
    if left != ALL:
        visible = visible & (starts + size > lengths - queries - left)
    table = cache.table
    wrong = visible & ((table < 0) | (table >= len(pages)))
    if readable(wrong) and bool(wrong.any()):
        there = f"pages from 0 to {len(pages) - 1}" if len(pages) else "no page, since there is none"
        raise ValueError(f"expected block_table to name {there}, got {int(table[wrong][0])}")
    if most == 0 or len(pages) == 0:
        return pages.new_zeros((len(table), pages.shape[2], most * size, pages.shape[3]))
    table = torch.where(visible, table, 0)
    held = pages[table].masked_fill(~visible[..., None, None, None], 0.0)
    return held.flatten(1, 2).transpose(1, 2)


def _row_stats(fields: Tensor, query: Tensor, cache: _Cache, geometry: Geometry) -> RowStats:
    """What the kernels return, and how many keys each query sees, as RowStats."""
    capacity = capacity_of(cache.key, cache.table)
    if cache.mask is None:
        lengths = capacity if cache.lengths is None else _valid(cache.lengths, capacity)[:, None, None]
        rows = torch.arange(query.shape[2], dtype=torch.int32, device=query.device)
        count = visible_counts(geometry, rows, query.shape[2], lengths)
    else:
        count = _seen(cache, geometry, query.shape[2], capacity).sum(-1, dtype=torch.int32)
    count = count.expand(query.shape[:3])
    highest, total, moment, *lowest = fields.unbind(0)
    return RowStats(highest, total, moment, lowest[0] if lowest else None, count)


def _valid(lengths: Tensor, capacity: int) -> Tensor:
    return torch.clamp(lengths, min=0, max=capacity)
