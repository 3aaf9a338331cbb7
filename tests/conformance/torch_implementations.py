"""PyTorch against the golden cases: the core functions, eager, functional and compiled, and attention."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch

from sharpmax import RowStats, adaptive_temperature_softmax, row_stats
from sharpmax.torch import (
    Attention,
    decode_attention,
    paged_decode_attention,
    scaled_dot_product_attention,
    stock_on_cpu,
    varlen_attention,
)
from sharpmax.torch import row_stats as torch_row_stats
from sharpmax.torch.geometry import Geometry

from .cases import Case, raw_cases
from .registry import (
    attends,
    collected,
    compile_key,
    kernels_attend,
    length,
    looks_at_values,
    policy_name,
    policy_of,
    register,
    shape_key,
)
from .results import Result


def _torch_inputs(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    dtype = getattr(torch, case.dtype)
    x = torch.tensor(case.logits, dtype=dtype, device=device)
    where = None if case.where is None else torch.tensor(case.where, device=device)
    return x, where, torch.tensor(case.cotangent, dtype=dtype, device=device)


def _torch_row(x: torch.Tensor, where: torch.Tensor | None, policy: Any) -> tuple[tuple[Any, ...], Any, Any]:
    stats = row_stats(x, where=where)
    weights = adaptive_temperature_softmax(x, where=where, policy=policy)
    return tuple(stats), policy(stats), weights


def _torch_autograd(case: Case, device: str, row: Callable[..., Any] = _torch_row) -> Result:
    x, where, cotangent = _torch_inputs(case, device)
    x.requires_grad_(True)
    stats, beta, weights = row(x, where, policy_of(case))
    (gradient,) = torch.autograd.grad(weights, x, cotangent)
    return collected(RowStats(*stats), beta, weights, gradient)


@register("torch")
def torch_eager(case: Case) -> Result:
    return _torch_autograd(case, "cpu")


@register("torch-func", takes=lambda row: not looks_at_values(row))
def torch_func(case: Case) -> Result:
    x, where, cotangent = _torch_inputs(case, "cpu")
    policy = policy_of(case)

    def loss(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        stats, beta, weights = _torch_row(x, where, policy)
        return (weights * cotangent).sum(), (stats, beta, weights)

    gradient, (stats, beta, weights) = torch.func.grad(loss, has_aux=True)(x)
    return collected(RowStats(*stats), beta, weights, gradient)


_TORCH_COMPILED = {
    ("float32", 64, "paper", False),
    ("float32", 33, "held", True),
    ("bfloat16", 64, "paper", False),
    ("float64", 257, "curve", False),
}
"""What torch.compile is tried on: dtype, length, policy and whether under a mask. Each takes seconds to compile."""


def _torch_compiles(row: dict[str, Any]) -> bool:
    return (row["dtype"], length(row), policy_name(row), row["where"] is not None) in _TORCH_COMPILED


@cache
def _torch_compiled(key: str) -> Callable[..., Any]:
    def row(x: torch.Tensor, where: torch.Tensor | None, policy: Any) -> Any:
        return _torch_row(x, where, policy)

    torch.compiler.reset()  # a fresh cache: the limit on recompilations is not what is tested here
    return torch.compile(row, fullgraph=True, dynamic=False)


@register("torch-compile", takes=_torch_compiles, group=compile_key)
def torch_compiled(case: Case) -> Result:
    return _torch_autograd(case, "cpu", _torch_compiled(compile_key(raw_cases()[case.id])))


@register("torch-cuda", gpu="torch")
def torch_cuda(case: Case) -> Result:
    return _torch_autograd(case, "cuda")


def _row_of_a_head(case: Case, device: str, columns: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One query and keys whose products are the case's logits, and which keys it keeps."""
    x, _, _ = _torch_inputs(case, device)
    kept = torch.tensor(case.kept, device=device)
    key = torch.zeros(1, 1, case.n, columns, dtype=x.dtype, device=device)
    key[..., 0] = torch.where(kept, x, 0)
    query = torch.zeros(1, 1, 1, columns, dtype=x.dtype, device=device)
    query[..., 0] = 1
    return query, key, kept


def _torch_attention(case: Case, device: str, impl: str, columns: int = 16) -> Result:
    query, key, kept = _row_of_a_head(case, device, columns)
    key.requires_grad_(True)
    given: dict[str, Any] = {"attn_mask": kept, "scale": 1.0, "impl": impl}
    stats = torch_row_stats(query, key, with_min=True, **given)
    identity = torch.eye(case.n, dtype=key.dtype, device=device)[None, None]
    found = scaled_dot_product_attention(query, key, identity, policy=policy_of(case), return_stats=True, **given)
    fields = (field[0, 0, 0] for field in stats if field is not None)
    row = (RowStats(*fields), found.beta[0, 0, 0], found.output[0, 0, 0])
    if impl == "triton" and case.id.startswith("offsets/"):
        # backward, weights come from logsumexp, in which an offset of 1e4 leaves fewer digits
        return collected(*row, rounded=impl == "triton")
    value = torch.zeros_like(identity)
    value[..., 0] = _torch_inputs(case, device)[2]
    output = scaled_dot_product_attention(query, key, value, policy=policy_of(case), **given)
    (gradient,) = torch.autograd.grad(output[..., 0].sum(), key)
    return collected(*row, gradient[0, 0, :, 0], rounded=impl == "triton")


@register("torch-attention-reference", takes=attends)
def torch_attention_reference(case: Case) -> Result:
    return _torch_attention(case, "cpu", "reference")


@register("torch-attention-streaming", takes=attends)
def torch_attention_streaming(case: Case) -> Result:
    """In blocks of its own: torch's kernel takes no values of another width than the query's."""
    with patch.object(stock_on_cpu, "attend", side_effect=AssertionError):
        return _torch_attention(case, "cpu", "streaming", columns=case.n + 1)


@register("torch-attention-streaming-by-torch", takes=attends)
def torch_attention_streaming_by_torch(case: Case) -> Result:
    """With torch's kernel for the second pass, where that is exact."""
    with patch.object(stock_on_cpu, "attend", wraps=stock_on_cpu.attend) as taken:
        result = _torch_attention(case, "cpu", "streaming", columns=case.n)
    assert taken.called or case.policy["kind"] == "Hard"
    return result


@register("torch-attention-triton", gpu="torch", takes=kernels_attend)
def torch_attention_triton(case: Case) -> Result:
    return _torch_attention(case, "cuda", "triton")


@register("torch-attention-streaming-cuda", gpu="torch", takes=attends)
def torch_attention_streaming_cuda(case: Case) -> Result:
    return _torch_attention(case, "cuda", "streaming")


@register(
    "torch-attention-stock",
    dtypes=("float32", "float64"),
    takes=lambda row: attends(row) and row["policy"]["kind"] != "Hard" and not row["id"].startswith("offsets/"),
    group=shape_key,
)
def torch_attention_stock(case: Case) -> Result:
    """torch's own attention on ``beta * query``, where tolerances allow for the rounding of that: not of two bytes."""
    query, key, kept = _row_of_a_head(case, "cpu", case.n)
    call: dict[str, Any] = {"attn_mask": kept, "scale": 1.0, "impl": "stock", "policy": policy_of(case)}
    found = scaled_dot_product_attention(query, key, _identity(key), return_stats=True, **call)
    key.requires_grad_(True)
    output = scaled_dot_product_attention(query, key, _cotangent(case, key), **call)
    (gradient,) = torch.autograd.grad(output[..., 0].sum(), key)
    return collected(*_of_row(found, (0, 0, 0)), gradient[0, 0, :, 0])


@register("torch-varlen", takes=attends, group=shape_key)
def torch_varlen(case: Case) -> Result:
    """A document of one query and the keys that are kept, after one of others and before one without keys."""
    query, key, kept = _row_of_a_head(case, "cpu", case.n)
    others = torch.ones(3, 1, case.n, dtype=key.dtype)
    row = key[0, 0, kept][:, None].requires_grad_(True)
    starts_q, starts_k = torch.tensor([0, 2, 3, 4]), torch.tensor([0, 3, 3 + len(row), 3 + len(row)])
    queries, keys = torch.cat([others[:2], query[0], others[:1]]), torch.cat([others, row])
    values = [torch.cat([others, x[0, 0, kept][:, None]]) for x in (_identity(key), _cotangent(case, key))]
    call: dict[str, Any] = {"scale": 1.0, "policy": policy_of(case)}
    found = varlen_attention(queries, keys, values[0], starts_q, starts_k, return_stats=True, **call)
    assert isinstance(found, Attention)
    found = found._replace(output=found.output.transpose(0, 1))
    output = varlen_attention(queries, keys, values[1], starts_q, starts_k, **call)
    assert isinstance(output, torch.Tensor)
    (slope,) = torch.autograd.grad(output[2, 0, 0], row)
    gradient = torch.zeros(case.n, dtype=key.dtype).masked_scatter(kept, slope[:, 0, 0])
    return collected(*_of_row(found, (0, 2)), gradient)


@register("torch-decode", takes=attends, group=shape_key)
def torch_decode(case: Case) -> Result:
    """One query and a cache, in which what is masked is hidden, and more room that holds no numbers."""
    query, key, kept = _row_of_a_head(case, "cpu")
    key, value, room = (_with_more_room(x) for x in (key, _identity(key), kept))
    lengths, mask = torch.tensor([case.n]), room[None]
    call: dict[str, Any] = {"key_mask": mask, "scale": 1.0, "policy": policy_of(case), "impl": "torch"}
    found = decode_attention(query, key, value, lengths, return_stats=True, **call)
    assert isinstance(found, Attention)
    return collected(*_of_row(found, (0, 0, 0)))


@register("torch-paged-decode", takes=attends, group=shape_key)
def torch_paged_decode(case: Case, size: int = 16) -> Result:
    """One query and the keys that are kept, in pages that lie in any order."""
    query, key, kept = _row_of_a_head(case, "cpu")
    count = int(kept.sum())
    most = max(-(-count // size), 1)
    table = torch.arange(most).flip(0)[None]
    pages = []
    for x in (key, _identity(key)):
        held = torch.full((most * size, x.shape[-1]), torch.nan, dtype=x.dtype)
        held[:count] = x[0, 0, kept]
        pages.append(held.view(most, size, 1, -1)[table[0]])
    call: dict[str, Any] = {"scale": 1.0, "policy": policy_of(case), "impl": "torch"}
    found = paged_decode_attention(query, pages[0], pages[1], table, torch.tensor([count]), return_stats=True, **call)
    assert isinstance(found, Attention)
    return collected(*_of_row(found, (0, 0, 0)))


def _identity(key: torch.Tensor) -> torch.Tensor:
    """Values of which the output is the weights."""
    return torch.eye(key.shape[2], dtype=key.dtype)[None, None]


def _cotangent(case: Case, key: torch.Tensor) -> torch.Tensor:
    """Values of which the output's first number is that whose gradient is wanted."""
    value = torch.zeros_like(_identity(key))
    value[..., 0] = _torch_inputs(case, "cpu")[2]
    return value


def _with_more_room(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.bool:
        return torch.cat([x, torch.ones(3, dtype=torch.bool)])
    return torch.cat([x, torch.full_like(x[:, :, :1], torch.nan).expand(-1, -1, 3, -1)], 2)


def _of_row(found: Attention, row: tuple[int, ...]) -> tuple[RowStats, torch.Tensor, torch.Tensor]:
    fields = (None if field is None else field[row] for field in found.stats)
    return RowStats(*fields), found.beta[row], found.output[row]


_INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


@register(
    "torch-kernels-interpreted",
    dtypes=("float16", "float32"),
    takes=lambda row: _INTERPRETED and kernels_attend(row),
    group=shape_key,
)
def torch_kernels_interpreted(case: Case) -> Result:
    """The kernels that ``torch-attention-triton`` compiles, under Triton's interpreter; forward only."""
    from sharpmax.torch.triton import prefill

    query, key, kept = _row_of_a_head(case, "cpu")
    mask = kept.expand(1, 1, 1, case.n)
    found = RowStats(*prefill.row_stats(query, key, Geometry(1.0), mask=mask, with_min=True))
    beta = policy_of(case)(found)
    identity = torch.eye(case.n, dtype=key.dtype)[None, None]
    output, _ = prefill.attend(query, key, identity, beta, Geometry(1.0), mask=mask)
    row = RowStats(*(field[0, 0, 0] for field in found if field is not None))
    return collected(row, beta[0, 0, 0], output[0, 0, 0], rounded=True)
