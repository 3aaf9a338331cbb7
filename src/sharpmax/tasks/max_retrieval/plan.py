"""How much evaluation works on at a time, so that it fits in memory."""

from __future__ import annotations

from typing import NamedTuple

import jax

from ...mechanisms import Mechanism
from .attention import ROWS, Rule
from .data import QUERIES, Task
from .model import FEATURES

MEMORY = {"cpu": 64 << 20, "gpu": 2 << 30}
"""Bytes that the vectors of the items worked on at a time may take, by platform."""

VECTOR_BYTES = 2 * 4 * FEATURES
"""What an item takes: two float32 vectors are alive at a time."""

Rules = tuple[Rule, ...]
"""One rule for all heads, or a policy for each."""


class Plan(NamedTuple):
    """How much is worked on at a time."""

    members: int
    sets: int
    items: int


def items_at_a_time(rules: tuple[Rules, ...], task: Task, memory: int | None = None) -> int:
    """How many items fit into ``memory`` bytes, :data:`MEMORY` by default."""
    available = MEMORY.get(jax.default_backend(), MEMORY["gpu"]) if memory is None else memory
    return max(1, available // _item_bytes(rules, task))


def _item_bytes(rules: tuple[Rules, ...], task: Task) -> int:
    """What an item takes: its vectors, and beside policies its weights and what it takes to make them."""
    mechanisms = [each[0] for each in rules if isinstance(each[0], Mechanism)]
    queries = QUERIES if task == "recall" else 1
    if not mechanisms and queries == 1:
        return VECTOR_BYTES
    keys = any(m.features is not None or m.reads == "rows" for m in mechanisms)
    rows = any(m.reads == "rows" for m in mechanisms)
    return VECTOR_BYTES + 4 * (4 * queries * len(rules) + 2 * FEATURES * keys + 3 * ROWS * rows)


def make_plan(members: int, sets: int, n: int, rules: tuple[Rules, ...], task: Task, memory: int | None = None) -> Plan:
    """How to evaluate ``sets`` sets of ``n`` items of every member.

    The items of a set stay together, however many, where a rule reads what they ask of each other.
    """
    together = any(isinstance(each[0], Mechanism) and each[0].reads == "rows" for each in rules)
    items = max(items_at_a_time(rules, task, memory), n if together else 1)
    if items < n:
        return Plan(1, 1, items)
    rows = items // n
    side_by_side = max(k for k in range(1, min(members, rows) + 1) if members % k == 0)
    groups = -(-sets // min(sets, rows // side_by_side))
    return Plan(side_by_side, -(-sets // groups), n)
