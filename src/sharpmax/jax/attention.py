"""``dot_product_attention`` with adaptive temperature, and the statistics of attention rows.

query, key  ->  row_stats  ->  policy  ->  beta  ->  softmax(beta * logits) value
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp

from ..core.arrays import product
from ..core.policies import PAPER, Policy, lowered, needs_spread
from ..core.stats import RowStats
from . import mechanisms, pallas, reference, streaming
from .checks import Inputs, Window, check_policy, checked
from .geometry import accumulation, row_counts

MODULES: dict[str, ModuleType] = {"reference": reference, "streaming": streaming, "pallas": pallas}
"""Every implementation: a module with ``row_stats`` and ``attend``."""
AT_ONCE = 1 << 18
"""Up to so many logits, all of them are held at once where nothing else was asked for."""


class Attention(NamedTuple):
    """What ``return_stats=True`` returns: the output, and the statistics and beta of every row, ``[B, N, T]``."""

    output: jax.Array
    stats: RowStats
    beta: jax.Array


@overload
def dot_product_attention(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *, scale: float | None = None,
    is_causal: bool = False, query_seq_lengths: Any = None, key_value_seq_lengths: Any = None,
    local_window_size: Window = None, implementation: None = None, return_residual: Literal[False] = False,
    policy: Policy = PAPER, mechanism: Any = None, softcap: float | None = None, impl: str = "auto",
    return_stats: Literal[False] = False,
) -> jax.Array: ...  # fmt: skip
@overload
def dot_product_attention(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *, scale: float | None = None,
    is_causal: bool = False, query_seq_lengths: Any = None, key_value_seq_lengths: Any = None,
    local_window_size: Window = None, implementation: None = None, return_residual: Literal[False] = False,
    policy: Policy = PAPER, mechanism: Any = None, softcap: float | None = None, impl: str = "auto",
    return_stats: Literal[True],
) -> Attention: ...  # fmt: skip
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Window = None,
    implementation: None = None,
    return_residual: Literal[False] = False,
    policy: Policy = PAPER,
    mechanism: Any = None,
    softcap: float | None = None,
    impl: str = "auto",
    return_stats: bool = False,
) -> jax.Array | Attention:
    """Attention whose inverse temperature is chosen row by row: ``jax.nn.dot_product_attention``, with a policy.

    Args:
      query: ``[B, T, N, D]`` or ``[T, N, D]``.
      key, value: ``[B, S, K, D]`` and ``[B, S, K, Dv]`` (or without ``B``), of the query's type. N is a multiple of K;
        keys and values are not repeated in memory.
      bias: numbers that are added to the logits; broadcasts against ``[B, N, T, S]``. ``-inf``, or at most half of the
        lowest finite number of its type or of the type that logits are computed in, hides a key.
      mask: boolean, true where a key is seen; broadcasts against ``[B, N, T, S]``.
      scale: what products of query and key are multiplied by, a plain number; ``1 / sqrt(D)`` if not given.
      is_causal: query ``i`` sees keys up to ``i``, both counted from the first.
      query_seq_lengths, key_value_seq_lengths: whole numbers ``[B]``; queries from there on give 0, keys from there on
        are not seen, whatever they hold.
      local_window_size: ``(left, right)``, how many keys before and after its own position a query sees; one number for
        both.
      implementation, return_residual: those of ``jax.nn``, there so that the signature is the same, and refused:
        ``impl`` and ``return_stats`` stand in their place.
      policy: maps :class:`~sharpmax.RowStats` ``[B, N, T]`` to beta, of at least 0; any callable, Flax module or
        built-in policy. Gradient flows through beta unless the policy is :func:`~sharpmax.detached`. Rows of infinite
        beta are hard, uniform over their largest logits.
      mechanism: what stands in the place of softmax and policy: a name or object of :mod:`sharpmax.mechanisms`, or a
        :class:`Held` or Flax module with its parameters. Those that are no temperature take ``impl="reference"``.
      softcap: logits are ``softcap * tanh(logits / softcap)``, before the bias is added; beta multiplies the result.
      impl: ``"reference"`` (all logits at once), ``"streaming"`` (block by block, linear memory), ``"pallas"`` (kernels
        for NVIDIA GPUs, then cuDNN on ``beta * query``), or ``"auto"``: see :func:`choose`.
      return_stats: return :class:`Attention` in place of the output.

    A query that sees no key gets 0, and so do gradients; ``jax.nn`` gives the mean of all values there. ``streaming``
    is differentiated in reverse mode, and in forward mode over that, ``pallas`` in reverse mode; what needs forward
    mode alone (``jax.jvp``, ``jax.jacfwd``) or reverse mode twice takes ``impl="reference"``.
    """
    check_policy(policy)
    _check_names_of_jax(implementation, return_residual)
    if value is None:
        raise TypeError("expected value to be a JAX or NumPy array, got NoneType")
    if mechanism is not None:
        check_impl(impl)
        chosen = mechanisms.settled(mechanism, policy, local_window_size, is_causal, query, key)
        if chosen.mechanism is not None:
            return mechanisms.attention(
                chosen, query, key, value, bias, mask, impl=impl, return_stats=return_stats, scale=scale,
                is_causal=is_causal, query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
                local_window_size=local_window_size, softcap=softcap,
            )  # fmt: skip
        policy, local_window_size = chosen.policy, chosen.window
    inputs = checked(
        query, key, value, bias, mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size, softcap=softcap,
    )  # fmt: skip
    module = choose(impl, inputs, policy)
    q, k, v, *rest, _ = inputs
    assert v is not None
    with _refusing_forward_mode(module):
        beta = None if return_stats else _beta_without_statistics(inputs, policy)
        if beta is not None:
            return inputs.restore(module.attend(q, k, v, beta, *rest))
        stats = module.row_stats(q, k, *rest, with_min=needs_spread(policy))
        beta = row_betas(policy, stats)
        output = module.attend(q, k, v, beta, *rest)
    return inputs.restore(Attention(output, stats, beta) if return_stats else output)


def row_stats(
    query: Any,
    key: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Window = None,
    softcap: float | None = None,
    with_min: bool = False,
    impl: str = "auto",
) -> RowStats:
    """The :class:`~sharpmax.RowStats` (entropy and all) of every attention row, ``[B, N, T]`` (or ``[N, T]``).

    Arguments are those of :func:`dot_product_attention`; ``with_min`` asks for the minimum, which the spread needs.
    Nothing of the size of the logits is held, except by ``impl="reference"``.
    """
    inputs = checked(
        query, key, None, bias, mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size, softcap=softcap,
    )  # fmt: skip
    module = choose(impl, inputs, None)
    with _refusing_forward_mode(module):
        stats = module.row_stats(inputs.q, inputs.k, inputs.bias, inputs.masks, inputs.geometry, with_min=with_min)
    return inputs.restore(stats)


def check_impl(impl: str) -> None:
    """Refuse the name of an implementation that there is not."""
    if impl not in ("auto", *MODULES):
        raise ValueError(f"expected impl to be one of {', '.join(('auto', *MODULES))}, got {impl!r}")


def choose(impl: str, inputs: Inputs, policy: Policy | None) -> ModuleType:
    """The implementation that serves a call: the one called ``impl``, or for ``"auto"`` one by size and device.

    Up to :data:`AT_ONCE` logits (``B * N * T * S``, about what one block of ``"streaming"`` has), ``"auto"`` is
    ``"reference"``, which JAX differentiates in every mode. Beyond, it is ``"pallas"`` for float16 and bfloat16 on an
    NVIDIA GPU where both its parts serve: the kernels (no mask, no bias, heads of at most 256 columns, a policy that
    is not hard) and cuDNN (see :func:`.pallas.cudnn_serves`); and where one device runs the call, since kernels are not
    partitioned: JAX sees one, or the call stands in ``jax.shard_map``. Otherwise it is ``"streaming"``: any device, and
    memory never grows with queries times keys.
    """
    check_impl(impl)
    logits = product((*inputs.q.shape[:3], inputs.k.shape[1]))
    if logits == 0 or (impl == "auto" and logits <= AT_ONCE):
        return reference
    if impl == "auto":
        return pallas if _kernels_are_fast(inputs, policy) else streaming
    reason = pallas.refusal(inputs, policy) if impl == "pallas" else ""
    if reason:
        raise ValueError(f"impl='pallas' does not serve {reason}; reference, streaming can")
    return MODULES[impl]


def _kernels_are_fast(inputs: Inputs, policy: Policy | None) -> bool:
    q, k, v, _, masks, geometry, _ = inputs
    narrow = q.dtype in (jnp.float16, jnp.bfloat16)
    if not narrow or pallas.refusal(inputs, policy) or not pallas.alone():
        return False
    return v is None or pallas.cudnn_serves(q, k, v, masks, geometry)


def row_betas(policy: Policy, stats: RowStats) -> jax.Array:
    """Beta of every row; a policy may give one number for several of them."""
    beta = jnp.asarray(policy(stats), stats.sum.dtype)
    try:
        return jnp.broadcast_to(beta, stats.sum.shape)
    except ValueError:
        raise ValueError(
            f"expected the policy to give beta for rows of shape {stats.sum.shape}, got {beta.shape}"
        ) from None


def _beta_without_statistics(inputs: Inputs, policy: Policy) -> jax.Array | None:
    """Beta of a policy that is a number, or one of how many keys a row sees where no mask needs to be counted."""
    form = lowered(policy)
    number = form is not None and len(form.coefficients) == 1 and form.threshold == -math.inf
    unmasked = inputs.bias is None and inputs.masks.mask is None
    if form is None or not (number or (form.variable == "log_count" and unmasked)):
        return None
    count = row_counts(inputs.q, inputs.k, inputs.masks, inputs.geometry)
    empty = jnp.zeros(count.shape, accumulation(inputs.q.dtype))
    return form(RowStats(empty, empty, empty, None, count))


def _check_names_of_jax(implementation: Any, return_residual: Any) -> None:
    if implementation is not None:
        raise ValueError(
            f"expected implementation to be None, got {implementation!r}: it names implementations of jax.nn, impl ours"
        )
    if return_residual:
        raise ValueError("expected return_residual to be False; return_stats=True gives the statistics of every row")


@contextlib.contextmanager
def _refusing_forward_mode(module: ModuleType) -> Iterator[None]:
    """Says in one sentence what JAX says of functions that have a backward of their own."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        (impl,) = (name for name, known in MODULES.items() if known is module)
        raise ValueError(f"impl={impl!r} does not serve differentiation in forward mode; reference can") from None
