"""Everything that the golden cases run against.

To add an implementation, write a function that takes a :class:`~.cases.Case` and returns a :class:`~.results.Result`,
and register it::

    @register("torch-triton", gpu="torch", dtypes=("float16", "bfloat16"), takes=lambda row: length(row) <= 4096)
    def torch_triton(case: Case) -> Result: ...

An attention backend is one of these: with scale 1, ``q = 1`` and ``k = logits`` in the first of the head's dimensions
(zeros in the others), attention of one query has the case's row of logits; ``v = identity`` gives its weights, and
``v = cotangent`` an output whose gradient with respect to ``k`` is the case's gradient. What the case masks, by
whatever means, the attention mask hides. Statistics that it does not return are left out of the result.

``takes`` says which cases it serves, given their JSON form; compiled ones take few shapes. ``group`` names cases that
should run together in one test because they share a compilation; a failure still names its case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import torch

from sharpmax import RowStats, adaptive_temperature_softmax, row_stats
from sharpmax.core.policies import policy_from_dict
from sharpmax.jax import blocks, dot_product_attention
from sharpmax.jax import row_stats as jax_row_stats
from sharpmax.torch import row_stats as torch_row_stats
from sharpmax.torch import scaled_dot_product_attention
from sharpmax.torch.geometry import LARGEST_HEAD

from .cases import Case, load, raw_cases
from .recipes import DTYPES
from .results import STATISTICS, Result


@dataclass(frozen=True)
class Implementation:
    """A function to run cases with, and which of them."""

    name: str
    run: Callable[[Case], Result]
    dtypes: tuple[str, ...]
    takes: Callable[[dict[str, Any]], bool]
    group: Callable[[dict[str, Any]], str]
    gpu: str | None

    def cases(self) -> list[str]:
        """The ids of the cases that it takes."""
        return [key for key, row in raw_cases().items() if row["dtype"] in self.dtypes and self.takes(row)]

    def groups(self) -> dict[str, list[str]]:
        """Those ids by group."""
        groups: dict[str, list[str]] = {}
        for key in self.cases():
            groups.setdefault(self.group(raw_cases()[key]), []).append(key)
        return groups


IMPLEMENTATIONS: dict[str, Implementation] = {}


def register(
    name: str,
    *,
    dtypes: tuple[str, ...] = tuple(DTYPES),
    takes: Callable[[dict[str, Any]], bool] = lambda row: True,
    group: Callable[[dict[str, Any]], str] = lambda row: row["id"],
    gpu: str | None = None,
) -> Callable[[Callable[[Case], Result]], Callable[[Case], Result]]:
    """Decorates a function that runs a case; ``takes`` and ``group`` get the case in its JSON form.

    ``gpu`` names the library, ``"torch"`` or ``"jax"``, whose GPU it needs.
    """

    def decorate(run: Callable[[Case], Result]) -> Callable[[Case], Result]:
        if name in IMPLEMENTATIONS:
            raise ValueError(f"two implementations are called {name}")
        IMPLEMENTATIONS[name] = Implementation(name, run, dtypes, takes, group, gpu)
        return run

    return decorate


def gpu_is_there(library: str) -> bool:
    """Whether ``library`` sees a GPU."""
    if library == "torch":
        return torch.cuda.is_available()
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


def length(row: dict[str, Any]) -> int:
    """The length of a case in its JSON form."""
    return len(row["row"]["values"]) if "values" in row["row"] else int(row["row"]["n"])


def looks_at_values(row: dict[str, Any]) -> bool:
    """Whether the policy reads numbers on the host, which nothing but an eager function can (``beyond="raise"``)."""
    return row["policy"].get("beyond") == "raise"


@cache
def _policy(text: str) -> Any:
    return policy_from_dict(json.loads(text))


def policy_of(case: Case) -> Any:
    """The case's policy; the same object for the same policy, so that compilations are shared."""
    return _policy(json.dumps(case.policy))


def host(x: Any) -> np.ndarray:
    """Any array as float64 on the host."""
    return np.asarray(x.detach().cpu().double() if isinstance(x, torch.Tensor) else x, np.float64)


def collected(stats: RowStats, beta: Any, weights: Any, gradient: Any = None) -> Result:
    """A :class:`Result` of one row's arrays."""
    numbers = {name: float(host(getattr(stats, name))) for name in STATISTICS}
    return Result(numbers, float(host(beta)), host(weights), None if gradient is None else host(gradient))


# ----------------------------------------------------------------------------------------------------------------
# NumPy
# ----------------------------------------------------------------------------------------------------------------


@register("numpy")
def numpy_eager(case: Case) -> Result:
    x, policy = case.logits.astype(DTYPES[case.dtype]), policy_of(case)
    stats = row_stats(x, where=case.where)
    weights = adaptive_temperature_softmax(x, where=case.where, policy=policy)
    with np.errstate(over="ignore"):  # where the spread does not fit its type, NumPy says so, and gives inf
        return collected(stats, policy(stats), weights)


# ----------------------------------------------------------------------------------------------------------------
# PyTorch
# ----------------------------------------------------------------------------------------------------------------


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


def shape_key(row: dict[str, Any]) -> str:
    """Cases of one key have arrays of the same shapes and types."""
    return f"{row['dtype']}-n{length(row)}" + ("-where" if row["where"] is not None else "")


def compile_key(row: dict[str, Any]) -> str:
    """Cases of one key are one compilation; the policy is told by the name that generate.py gave it."""
    return f"{shape_key(row)}-{policy_name(row)}"


def policy_name(row: dict[str, Any]) -> str:
    """The name of the case's policy in generate.py, which starts its id's last part."""
    name, _, _ = re.split(r"-(normal|sparse|tied|equal|needle|extremes)-", row["id"].split("/")[2], maxsplit=1)
    return name


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


def _attends(row: dict[str, Any]) -> bool:
    """Rows that are as many columns of a head; no product gives an infinite logit, which the extremes are next to."""
    return 0 < length(row) <= LARGEST_HEAD and "extremes" not in row["id"]


def _torch_attention(case: Case, device: str, impl: str) -> Result:
    x, _, cotangent = _torch_inputs(case, device)
    kept = torch.tensor(case.kept, device=device)
    key = torch.zeros(1, 1, case.n, 16, dtype=x.dtype, device=device)
    key[..., 0] = torch.where(kept, x, 0)
    key.requires_grad_(True)
    query = torch.zeros(1, 1, 1, 16, dtype=x.dtype, device=device)
    query[..., 0] = 1
    given: dict[str, Any] = {"attn_mask": kept, "scale": 1.0, "impl": impl}
    stats = torch_row_stats(query, key, with_min=True, **given)
    identity = torch.eye(case.n, dtype=x.dtype, device=device)[None, None]
    found = scaled_dot_product_attention(query, key, identity, policy=policy_of(case), return_stats=True, **given)
    fields = (field[0, 0, 0] for field in stats if field is not None)
    row = (RowStats(*fields), found.beta[0, 0, 0], found.output[0, 0, 0])
    if impl != "reference" and case.id.startswith("offsets/"):
        return collected(*row)  # backward, weights come from logsumexp, in which an offset of 1e4 leaves fewer digits
    value = cotangent[None, None, :, None]
    output = scaled_dot_product_attention(query, key, value, policy=policy_of(case), **given)
    (gradient,) = torch.autograd.grad(output, key, torch.ones_like(output))
    return collected(*row, gradient[0, 0, :, 0])


@register("torch-attention-reference", takes=_attends)
def torch_attention_reference(case: Case) -> Result:
    return _torch_attention(case, "cpu", "reference")


@register("torch-attention-streaming", takes=_attends)
def torch_attention_streaming(case: Case) -> Result:
    return _torch_attention(case, "cpu", "streaming")


def _kernels_attend(row: dict[str, Any]) -> bool:
    return _attends(row) and row["policy"]["kind"] != "Hard" and row["dtype"] != "float64"


@register("torch-attention-triton", gpu="torch", takes=_kernels_attend)
def torch_attention_triton(case: Case) -> Result:
    return _torch_attention(case, "cuda", "triton")


@register("torch-attention-streaming-cuda", gpu="torch", takes=_attends)
def torch_attention_streaming_cuda(case: Case) -> Result:
    return _torch_attention(case, "cuda", "streaming")


# ----------------------------------------------------------------------------------------------------------------
# JAX
# ----------------------------------------------------------------------------------------------------------------


def _jax_row(x: Any, where: Any, cotangent: Any, policy: Any) -> tuple[RowStats, Any, Any, Any]:
    stats = row_stats(x, where=where)
    weights, pullback = jax.vjp(lambda x: adaptive_temperature_softmax(x, where=where, policy=policy), x)
    return stats, policy(stats), weights, pullback(cotangent)[0]


@cache
def _jax_jitted() -> Callable[..., Any]:
    return jax.jit(_jax_row, static_argnames=("policy",))


def _jax(case: Case, row: Callable[..., Any], device: Any = None) -> Result:
    wide: Any = jax.enable_x64(True) if case.dtype == "float64" else nullcontext()
    with wide, jax.default_device(device) if device is not None else nullcontext():
        x = jax.numpy.asarray(case.logits.astype(DTYPES[case.dtype]))
        cotangent = jax.numpy.asarray(case.cotangent.astype(DTYPES[case.dtype]))
        where = None if case.where is None else jax.numpy.asarray(case.where)
        return collected(*row(x, where, cotangent, policy=policy_of(case)))


@register("jax", takes=lambda row: not looks_at_values(row), group=shape_key)
def jax_eager(case: Case) -> Result:
    return _jax(case, _jax_row)


def _jax_compiles(row: dict[str, Any]) -> bool:
    """Everything in float32; of the other types the paper's policy and its held form, at a few lengths."""
    few = policy_name(row) in ("paper", "held") and length(row) in (1, 8, 16, 33, 64, 4096)
    return not looks_at_values(row) and (few or row["dtype"] == "float32")


@register("jax-jit", takes=_jax_compiles, group=compile_key)
def jax_jit(case: Case) -> Result:
    return _jax(case, _jax_jitted())


@register("jax-gpu", gpu="jax", takes=lambda row: not looks_at_values(row), group=compile_key)
def jax_gpu(case: Case) -> Result:
    return _jax(case, _jax_jitted(), jax.devices("gpu")[0])


_SPLIT = blocks.Sizes(rows=64, keys=100, together=False)
"""Blocks of which a row of keys has three, the last one partly in the one before it."""


def _jax_attention(case: Case, impl: str) -> Result:
    """All rows are filled up to one length with keys that the mask hides, so that they share a compilation."""
    dtype, length = DTYPES[case.dtype], LARGEST_HEAD
    kept, key, value = np.zeros(length, bool), np.zeros((1, length, 1, 16)), np.zeros((1, length, 1, 1))
    kept[: case.n] = case.kept
    key[0, : case.n, 0, 0] = np.where(case.kept, case.logits, 0)
    value[0, : case.n, 0, 0] = case.cotangent
    query = np.zeros((1, 1, 1, 16))
    query[..., 0] = 1
    wide: Any = jax.enable_x64(True) if case.dtype == "float64" else nullcontext()
    with wide, patch.object(blocks, "CPU", _SPLIT):
        identity = np.eye(length)[None, :, None]
        q, k, v, one = (jax.numpy.asarray(x.astype(dtype)) for x in (query, key, value, identity))
        return _with_gradient(case, q, k, v, one, {"mask": jax.numpy.asarray(kept), "scale": 1.0, "impl": impl})


def _with_gradient(case: Case, q: Any, k: Any, v: Any, identity: Any, given: dict[str, Any]) -> Result:
    """What attention to a row of keys gives: its weights with the identity for values, and the gradient of ``k``."""
    stats = jax_row_stats(q, k, with_min=True, **given)
    given["policy"] = policy_of(case)
    found = dot_product_attention(q, k, identity, return_stats=True, **given)
    output, pullback = jax.vjp(lambda k: dot_product_attention(q, k, v, **given), k)
    (gradient,) = pullback(jax.numpy.ones_like(output))
    row = RowStats(*(field[0, 0, 0] for field in stats if field is not None))
    return collected(row, found.beta[0, 0, 0], found.output[0, 0, 0, : case.n], gradient[0, : case.n, 0, 0])


def _jax_attends(row: dict[str, Any]) -> bool:
    return _attends(row) and not looks_at_values(row)


@register("jax-attention-reference", dtypes=("float32",), takes=_jax_attends, group=lambda row: row["dtype"])
def jax_attention_reference(case: Case) -> Result:
    return _jax_attention(case, "reference")


@register(
    "jax-attention-streaming",
    dtypes=("float64",),
    takes=_jax_attends,
    group=lambda row: row["dtype"],
)
def jax_attention_streaming(case: Case) -> Result:
    return _jax_attention(case, "streaming")


def _kernels_attend_in_jax(row: dict[str, Any]) -> bool:
    """The kernels know no mask: rows of which every logit counts."""
    return _kernels_attend(row) and _jax_attends(row) and bool(load(row["id"]).kept.all())


@register("jax-attention-pallas", gpu="jax", dtypes=("float32",), takes=_kernels_attend_in_jax, group=shape_key)
def jax_attention_pallas(case: Case) -> Result:
    """The keys that fill rows up lie beyond the sequence length, and hold NaN."""
    length = LARGEST_HEAD
    key, value, query = np.full((1, length, 1, 16), np.nan), np.full((1, length, 1, 1), np.nan), np.zeros((1, 1, 1, 16))
    key[0, : case.n] = 0
    key[0, : case.n, 0, 0] = case.logits
    value[0, : case.n, 0, 0] = case.cotangent
    query[..., 0] = 1
    identity = np.eye(length)[None, :, None]
    q, k, v, one = (jax.numpy.asarray(x.astype(DTYPES[case.dtype])) for x in (query, key, value, identity))
    given = {"key_value_seq_lengths": jax.numpy.asarray([case.n], "int32"), "scale": 1.0, "impl": "pallas"}
    with jax.default_matmul_precision("highest"):
        return _with_gradient(case, q, k, v, one, given)
