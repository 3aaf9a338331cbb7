"""What attention over many devices costs, on paper: bytes sent, bytes held and operations, of one layer."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core.policies import PAPER, Policy
from .policies import beta_has_gradient, form_without_statistics
from .ring import check_communication

SHARDS_IN_FLIGHT = 2
"""Foreign shards of what travels that a rank holds: the one it works on, and the one that is coming."""
GRADIENTS_IN_FLIGHT = 4
"""Shards of gradients that a rank holds: its own, the one it adds to, the one that leaves and the one that comes."""


class Cost(NamedTuple):
    """The cost of one layer, for one device.

    ==================  ==================================================================================
    forward_sent        bytes that the device sends forward, to one neighbour; it receives as many
    backward_sent       the same backward
    forward_held        bytes of other devices' keys and values that it holds at most, forward
    backward_held       the same backward, with the gradients of keys and values
    forward_operations  floating-point operations of the matrix products forward
    forward_products    how often a product of queries and keys, or weights and values, is taken forward
    backward_products   the same backward, with ``impl="streaming"``
    ==================  ==================================================================================
    """

    forward_sent: int
    backward_sent: int
    forward_held: int
    backward_held: int
    forward_operations: int
    forward_products: int
    backward_products: int


def cost(
    tokens: int,
    devices: int,
    *,
    heads: int = 32,
    key_heads: int = 8,
    columns: int = 128,
    value_columns: int | None = None,
    bytes_per_number: int = 2,
    bytes_per_gradient: int = 4,
    is_causal: bool = True,
    policy: Policy = PAPER,
    communication: str = "ring",
) -> Cost:
    """The cost of :func:`~sharpmax.torch.distributed.ring_attention` for one sequence, without a window.

    ``policy=Constant(1.0)`` needs no statistics: that is stock ring attention, keys and values once around forward, and
    they and their gradients once around backward. Gradients travel in ``bytes_per_gradient`` bytes a number: ranks add
    to them on the way, which two-byte numbers would not survive.

    A policy of the statistics sends keys around once more forward, and, unless it is detached, keys and their gradient
    once more backward; ``communication="gather"`` keeps the keys instead.
    """
    whole = {"tokens": tokens, "devices": devices, "heads": heads, "key_heads": key_heads, "columns": columns}
    if wrong := [name for name, x in whole.items() if not _at_least_one(x)]:
        raise ValueError(f"expected {wrong[0]} to be a whole number of at least 1, got {whole[wrong[0]]!r}")
    if tokens % devices:
        raise ValueError(f"expected tokens that {devices} devices share evenly, got {tokens}")
    check_communication(communication)
    wide = columns if value_columns is None else value_columns
    statistics, gradient = form_without_statistics(policy) is None, beta_has_gradient(policy)
    gather = communication == "gather"
    shard, hops = tokens // devices * key_heads, devices - 1
    keys, values = (shard * width * bytes_per_number for width in (columns, wide))
    key_gradient, value_gradient = (shard * width * bytes_per_gradient for width in (columns, wide))

    flight, gradients = min(hops, SHARDS_IN_FLIGHT), min(hops * GRADIENTS_IN_FLIGHT, GRADIENTS_IN_FLIGHT)
    kept = hops if gather else flight
    forward = keys + values + keys * (statistics and not gather)
    backward = keys + values + key_gradient + value_gradient
    backward += (key_gradient + keys * (not gather)) * gradient
    logits = tokens * tokens // devices // (2 if is_causal else 1)
    return Cost(
        forward_sent=hops * forward,
        backward_sent=hops * backward,
        forward_held=(kept if statistics else flight) * keys + flight * values,
        backward_held=(kept if gradient else flight) * keys
        + flight * values
        + gradients * (key_gradient + value_gradient),
        forward_operations=2 * heads * logits * (columns * (1 + statistics) + wide),
        forward_products=2 + statistics,
        backward_products=5 + 3 * gradient,
    )


def _at_least_one(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 1
