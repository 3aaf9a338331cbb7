"""Checks of what attention is called with, and one layout for all of it."""

from __future__ import annotations

import contextlib
import math
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention.bias import CausalBias, CausalVariant

from ..core.arrays import broadcasts, product
from ..core.policies.base import check_callable
from ..mechanisms.base import check_no_mechanism
from .geometry import ALL, Geometry

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
"""The types of whole numbers."""

WIDEST = 1 << 30
"""More keys than there can be: wider windows are as wide."""
Causal = bool | Literal["lower_right"]
Window = int | tuple[int, int] | None


class Inputs(NamedTuple):
    """Checked arguments: ``[B, H, L, D]`` tensors, a mask ``[B or 1, H or 1, Lq or 1, Lk or 1]``, and the geometry."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    mask: Tensor | None
    key_lengths: Tensor | None
    geometry: Geometry
    leading: tuple[int, ...]

    def restore(self, x: Tensor) -> Tensor:
        """``x`` (``[B, Hq, Lq, ...]``) with the axes before the length that the query had."""
        return x if len(self.leading) == 2 else x.reshape(*self.leading, *x.shape[2:])


def checked(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    key_lengths: Any,
    *,
    is_causal: Causal,
    scale: float | None,
    window: Window,
    softcap: float | None,
    enable_gqa: bool,
    maps: int = 1,
) -> Inputs:
    """The arguments of attention in one layout; bad ones are refused.

    Where ``maps`` of logits make one of weights, value (and so the output) has the fewer heads.
    """
    tensors = {"query": query, "key": key} | ({} if value is None else {"value": value})
    check_tensors(tensors)
    if isinstance(attn_mask, CausalBias):
        attn_mask, is_causal = None, _causality(attn_mask, query, key, is_causal, key_lengths)
    _check_mask(attn_mask, query)
    query, key, value, attn_mask = under_autocast(query, key, value, attn_mask)
    _check_shapes(query, key, value, enable_gqa, maps)
    geometry = geometry_of(query, is_causal, scale, window, softcap)
    shape, keys = query.shape, key.shape[-2]
    leading = tuple(shape[:-2])
    if key_lengths is not None:
        key_lengths = _lengths(key_lengths, shape[:-3], keys, query.device)
    if attn_mask is not None:
        attn_mask = _mask(attn_mask, (*leading, shape[-2], keys))
    if maps > 1:
        leading = (*leading[:-1], (leading[-1] if leading else 1) // maps)
    q, k, v = _four(query), _four(key), None if value is None else _four(value)
    return Inputs(q, k, v, attn_mask, key_lengths, geometry, leading)


def check_tensors(tensors: dict[str, Any]) -> None:
    """Refuse what is not a floating-point tensor, or not of the type and device of the first."""
    first = next(iter(tensors.values()))
    check_dense(**tensors)
    for name, x in tensors.items():
        if x.dtype not in DTYPES:
            raise TypeError(f"expected {name} of type float16, bfloat16, float32 or float64, got {type_name(x.dtype)}")
        if x.device != first.device:
            raise ValueError(f"expected {', '.join(tensors)} on one device, got {first.device} and {x.device}")
    types = {x.dtype for x in tensors.values()}
    if len(types) > 1 and len({x.dtype for x in under_autocast(*tensors.values())}) > 1:
        raise TypeError(
            f"expected {', '.join(tensors)} of one type, got {', '.join(type_name(x.dtype) for x in tensors.values())}"
        )


def check_dense(**values: Any) -> None:
    """Refuse what is not a dense tensor."""
    for name, x in values.items():
        if not isinstance(x, Tensor):
            of_numbers = isinstance(x, list | tuple | int | float | np.ndarray)
            raise TypeError(
                f"expected {name} to be a torch tensor, got {type(x).__name__}"
                + ("; torch.as_tensor makes one" if of_numbers else "")
            )
        if x.is_nested:
            raise TypeError(f"expected {name} to be a dense tensor, got a nested one; see varlen_attention")
        if x.layout != torch.strided:
            raise TypeError(f"expected {name} to be a dense tensor, got one of {x.layout}; see Tensor.to_dense")


def under_autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors as autocast casts the arguments of torch's own attention; unchanged where it is off."""
    first = tensors[0]
    assert first is not None
    kind = first.device.type
    if not _autocast(kind):
        return tensors
    to = torch.get_autocast_dtype(kind)
    narrow = (torch.float16, torch.bfloat16, torch.float32)
    return tuple(x.to(to) if isinstance(x, Tensor) and x.dtype in narrow else x for x in tensors)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd is to go back through some of the tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def full_precision(x: Tensor) -> Any:
    """Autocast has done its casts before; in here, float32 stays float32."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if _autocast(kind) else contextlib.nullcontext()


def _autocast(kind: str) -> bool:
    """Whether autocast is on for a kind of device; there is none for tensors without memory."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def type_name(dtype: torch.dtype) -> str:
    """The name of a type without the module's."""
    return str(dtype).removeprefix("torch.")


def _check_shapes(query: Tensor, key: Tensor, value: Tensor | None, enable_gqa: bool, maps: int) -> None:
    tensors = [x for x in (query, key, value) if x is not None]
    q, k, axes = query.shape, key.shape, query.ndim
    if axes < 2 or key.ndim != axes or (value is not None and value.ndim != axes):
        raise misfit("tensors [..., length, columns] with the same number of axes", tensors)
    if q[-1] != k[-1] or q[-1] == 0:
        raise misfit("query and key with the same number of columns, at least 1", tensors)
    if value is not None and maps == 1 and value.shape[:-1] != k[:-1]:
        raise misfit("key and value of the same shape but for their last axis", tensors)
    if value is not None and maps > 1 and _heads_of_value(key, maps) != value.shape[:-1]:
        raise misfit(f"tensors with heads, {maps} of query and of key for each of value", tensors)
    if q[:-3] != k[:-3]:
        raise misfit("the same batch axes (Tensor.expand repeats one without a copy)", tensors)
    if axes > 2 and q[-3] != k[-3]:
        if k[-3] == 0 or q[-3] % k[-3]:
            raise misfit("the query's heads to be a multiple of the key's", tensors)
        if not enable_gqa:
            raise misfit("as many heads of query as of key, or enable_gqa=True", tensors)


def _heads_of_value(key: Tensor, maps: int) -> tuple[int, ...] | None:
    """What the value's shape begins with where ``maps`` heads of the key go with one of the value."""
    if key.ndim < 3 or key.shape[-3] % maps:
        return None
    return (*key.shape[:-3], key.shape[-3] // maps, key.shape[-2])


def misfit(expected: str, tensors: list[Tensor]) -> ValueError:
    """The error that says what shapes were expected, and which came."""
    return ValueError(f"expected {expected}, got shapes {' and '.join(str(tuple(x.shape)) for x in tensors)}")


def _four(x: Tensor) -> Tensor:
    """``x`` as ``[B, H, L, columns]``."""
    if x.ndim == 4:
        return x
    heads = x.shape[-3] if x.ndim > 2 else 1
    return x.reshape(product(x.shape[:-3]), heads, *x.shape[-2:])


def _causality(bias: CausalBias, query: Tensor, key: Tensor, is_causal: Any, key_lengths: Any) -> Causal:
    """What torch's object for a causal mask, which holds no numbers, says."""
    if is_causal:
        raise ValueError("expected either is_causal or a CausalBias as attn_mask, got both")
    sizes, lengths = (bias.seq_len_q, bias.seq_len_kv), (query.shape[-2], key.shape[-2])
    if sizes != lengths:
        raise ValueError(f"expected a CausalBias of {lengths[0]} queries and {lengths[1]} keys, got one of {sizes}")
    if bias.variant == CausalVariant.UPPER_LEFT or sizes[0] == sizes[1]:
        return True
    if key_lengths is not None:
        raise ValueError("a CausalBias counts from the last key; with key_lengths, give is_causal='lower_right'")
    return "lower_right"


def _check_mask(mask: Any, query: Tensor) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or (mask.dtype != torch.bool and mask.dtype not in DTYPES):
        got = type_name(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"expected attn_mask to be a boolean or floating-point tensor, got {got}")
    if mask.is_nested or mask.layout != torch.strided or _overrides_functions(mask):
        raise TypeError(f"expected attn_mask to be a plain tensor, got {type(mask).__name__} of {mask.layout}")
    if mask.device != query.device:
        raise ValueError(f"expected attn_mask on the query's device {query.device}, got it on {mask.device}")


def _overrides_functions(x: Tensor) -> bool:
    """Whether a tensor is of a class that answers torch's functions itself, so that its memory may mean nothing."""
    if type(x) is Tensor or type(x) is torch.nn.Parameter:
        return False
    own: Any = type(x).__torch_function__
    plain: Any = Tensor.__torch_function__
    return own is not torch._C._disabled_torch_function_impl and getattr(own, "__func__", own) is not plain.__func__


def _mask(mask: Tensor, logits: tuple[int, ...]) -> Tensor:
    if not broadcasts(tuple(mask.shape), logits):
        raise ValueError(f"expected attn_mask to broadcast against logits {logits}, got shape {tuple(mask.shape)}")
    mask = mask.reshape((1,) * (len(logits) - mask.ndim) + tuple(mask.shape))
    if len(logits) <= 4:
        return mask.reshape((1,) * (4 - len(logits)) + tuple(mask.shape))
    if all(size == 1 for size in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*logits[:-3], *mask.shape[-3:]).reshape(product(logits[:-3]), *mask.shape[-3:])


def _lengths(lengths: Any, batch_axes: tuple[int, ...], keys: int, device: torch.device) -> Tensor:
    check_whole("key_lengths", lengths)
    batch = product(batch_axes)
    if all(lengths.shape != shape for shape in ((batch,), batch_axes)):  # a compiler knows symbols by !=, not by in
        axes = tuple(batch_axes) if batch_axes else "(): without an axis before the heads there is one length"
        raise ValueError(
            f"expected key_lengths of shape {axes}, one for each batch element, got {tuple(lengths.shape)}"
        )
    if lengths.device != device:
        raise ValueError(f"expected key_lengths on the query's device {device}, got it on {lengths.device}")
    return torch.clamp(lengths.reshape(batch).to(torch.int64), min=0, max=keys).to(torch.int32)


def check_whole(name: str, x: Any) -> None:
    """Refuse what is not a dense tensor of whole numbers."""
    check_dense(**{name: x})
    if x.dtype not in WHOLE:
        raise TypeError(f"expected {name} to be a tensor of whole numbers, got {type_name(x.dtype)}")


def forward_mode() -> bool:
    """Whether derivatives in forward mode may be at work; for a compiler, around what it traces or within."""
    return forward_ad._current_level >= 0 or _forward_mode_within()  # the first is a guard of what was compiled


@torch.compiler.assume_constant_result
def _forward_mode_within() -> bool:
    return forward_ad._current_level >= 0


@torch.compiler.assume_constant_result
def transformed() -> bool:
    """Whether one of torch.func's transforms is at work; for a compiler, where it traces."""
    return torch._C._are_functorch_transforms_active()


@torch.compiler.assume_constant_result
def differentiated() -> bool:
    """Whether one of torch.func's transforms other than vmap is at work; for a compiler, where it traces."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    levels = functorch.get_interpreter_stack() if torch._C._are_functorch_transforms_active() else ()
    return any(level.key() != functorch.TransformType.Vmap for level in levels or ())


def readable(x: Tensor) -> bool:
    """Whether numbers can be read off ``x``, and nothing waits for a device then."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return x.device.type == "cpu" and type(x) is Tensor and not traced


def has_tangent(*values: Any) -> bool:
    """Whether a derivative in forward mode hangs on a tensor among ``values``; for a compiler, whether it may."""
    return torch.compiler.is_compiling() or any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in values
    )


def geometry_of(
    query: Tensor, is_causal: Causal, scale: float | None, window: Window, softcap: float | None
) -> Geometry:
    """The geometry that the arguments of attention describe."""
    if not isinstance(is_causal, bool | np.bool_) and not (isinstance(is_causal, str) and is_causal == "lower_right"):
        raise ValueError(f"expected is_causal to be True, False or 'lower_right', got {is_causal!r}")
    for name, x, instead in (
        ("softcap", softcap, "it has no gradient, so pass its item()"),
        ("scale", scale, "to learn a scale, multiply the query by it"),
    ):
        if isinstance(x, Tensor):
            raise TypeError(f"expected {name} to be a number, got a tensor; {instead}")
    if softcap is not None and not (_number(softcap) and 0 < softcap < math.inf):
        raise ValueError(f"expected softcap to be a positive number or None, got {softcap!r}")
    if scale is not None and not (_number(scale) and -math.inf < scale < math.inf):
        raise ValueError(f"expected scale to be a finite number, got {scale!r}")
    left, right = band(window)
    if is_causal:
        right = 0
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    return Geometry(factor, 0.0 if softcap is None else float(softcap), left, right, is_causal == "lower_right")


def _number(x: Any) -> bool:
    """Whether ``x`` is a number, or stands for one."""
    return isinstance(x, int | float | np.number | torch.SymInt | torch.SymFloat)


def whole(x: Any) -> bool:
    """Whether ``x`` is a whole number."""
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def band(window: Any) -> tuple[int, int]:
    """How many keys before and after its own position a query sees, :data:`ALL` for all."""
    if window is None:
        return ALL, ALL
    if whole(window) and window >= 1:
        wide = min(int(window) - 1, WIDEST)
        return wide, wide
    if isinstance(window, tuple | list) and len(window) == 2 and all(whole(w) and w >= ALL for w in window):
        return min(int(window[0]), WIDEST), min(int(window[1]), WIDEST)
    raise ValueError(
        "expected window to be None, a whole number of at least 1, or a pair (left, right) in which -1 means all; "
        f"got {window!r}"
    )


def check_dropout(dropout_p: float) -> None:
    """Refuse a probability that is none."""
    if not (_number(dropout_p) and 0.0 <= dropout_p <= 1.0):
        raise ValueError(f"expected dropout_p to be between 0 and 1, got {dropout_p!r}")


def check_policy(policy: Any) -> None:
    """Refuse a policy that cannot be called, and a mechanism in the place of one."""
    check_no_mechanism(policy)
    check_callable(policy)
