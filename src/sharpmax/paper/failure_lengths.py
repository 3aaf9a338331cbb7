"""Sets {a, b, b, ...} in closed form: how a head reads them, and from which number of items on it errs.

All b are alike, so everything is a function of the two logits and n, and n may be far larger than any set that could
be laid out. Everything is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.policies import Policy
from ..core.stats import RowStats
from ..tasks.max_retrieval.data import CLASSES
from ..tasks.max_retrieval.model import Params, folded_query, hidden, item_logits, read
from ..theory import MACHINE_EPSILON

TOP, GAPS = 0.9, (0.8, 0.1, 0.01, 0.001, 0.0001)
"""The priority of a, and by how much that of b is below it."""

QUERY = 0.5
LARGEST = 1e100
"""Larger n are not looked at."""

PER_OCTAVE, FINE_UP_TO = 8, 20
"""Every head is asked at so many n an octave up to 2 to this power, then at one, and where it errs is bisected."""

SHARES = 65
"""Points between b alone and a alone at which the class is read, before the places where it changes are bisected."""

BISECTIONS = 52
EPSILONS = {dtype: MACHINE_EPSILON[dtype] for dtype in ("bfloat16", "float32")}


def two_item_stats(e_a: Any, e_b: Any, n: Any) -> RowStats:
    """The RowStats of one logit ``e_a`` and ``n - 1`` logits ``e_b``, without a row; ``n`` is in float64."""
    e_a, e_b, n = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (e_a, e_b, n)))
    highest = np.maximum(e_a, e_b)
    t_a, t_b = e_a - highest, e_b - highest
    weight_a, weight_b = np.exp(t_a), (n - 1) * np.exp(t_b)
    return RowStats(highest, weight_a + weight_b, weight_a * t_a + weight_b * t_b, np.minimum(e_a, e_b), n)


def coefficient(policy: Policy, e_a: Any, e_b: Any, n: Any) -> np.ndarray:
    """``alpha_a = 1 / (1 + (n - 1) exp(-beta (e_a - e_b)))``; with equal logits, 1 / n at every beta."""
    beta = np.asarray(policy(two_item_stats(e_a, e_b, n)), np.float64)
    difference = np.asarray(e_a, np.float64) - np.asarray(e_b, np.float64)
    exponent = np.where(difference == 0, 0.0, -difference) * np.where(difference == 0, 0.0, beta)
    with np.errstate(over="ignore"):
        return 1 / (1 + (np.asarray(n, np.float64) - 1) * np.exp(exponent))


class Cases(NamedTuple):
    """Pairs (a, b) for every head, one after another: seed by seed, gap by gap, class pair by class pair.

    Attributes:
      h_a, h_b: item vectors ``[seeds, gaps * pairs, 128]``.
      e_a, e_b: their logits ``[seeds, gaps * pairs]``.
      class_a, class_b: ``[gaps * pairs]``.
    """

    h_a: np.ndarray
    h_b: np.ndarray
    e_a: np.ndarray
    e_b: np.ndarray
    class_a: np.ndarray
    class_b: np.ndarray


def class_pairs() -> np.ndarray:
    """All ordered pairs of different classes, ``[90, 2]``."""
    return np.argwhere(~np.eye(CLASSES, dtype=bool))


def wide(params: Params) -> Params:
    """Parameters in float64; to be called, as all that uses them, within ``jax.enable_x64``."""
    return jax.tree.map(lambda array: jnp.asarray(np.asarray(array, np.float64)), params)


def cases_of(params: Params, gaps: Sequence[float]) -> Cases:
    """The items of every head, and their logits."""
    class_a, class_b = np.tile(class_pairs(), (len(gaps), 1)).T
    below = np.repeat(np.asarray(gaps, np.float64), len(class_pairs()))
    priority, category = np.stack([np.full_like(below, TOP), TOP - below]), np.stack([class_a, class_b])

    def of_head(head: Params) -> tuple[jax.Array, jax.Array]:
        h = hidden(head, jnp.asarray(priority), jnp.asarray(category))
        return h, item_logits(folded_query(head, jnp.asarray([QUERY]))[0], h)

    h, e = (np.asarray(x) for x in jax.jit(jax.vmap(of_head))(params))
    return Cases(h[:, 0], h[:, 1], e[:, 0], e[:, 1], class_a, class_b)


class Reading(NamedTuple):
    """Which coefficients of a let a head answer with a's class; its answer depends on n through the coefficient alone.

    Attributes:
      at_zero: ``[cases]``, whether it does so for a coefficient of 0, which is what it says of b alone.
      flips: ``[cases, flips]``, coefficients in ascending order at which that changes; ``inf`` where there are fewer.
      says_b: ``[cases]``, whether it answers b alone with b's class.
    """

    at_zero: np.ndarray
    flips: np.ndarray
    says_b: np.ndarray

    @property
    def plain(self) -> np.ndarray:
        """Where it answers with a's class above one coefficient and not below it."""
        return ~self.at_zero & np.isfinite(self.flips[:, 0]) & np.isinf(self.flips[:, 1:]).all(axis=1)

    def right(self, alpha: np.ndarray) -> np.ndarray:
        """Whether the head answers with a's class; ``alpha`` is ``[cases, ...]``."""
        found = np.broadcast_to(self.at_zero[:, None], alpha.shape).copy()
        for flip in self.flips.T:
            found ^= alpha >= flip[:, None]
        return found


def reading(params: Params, cases: Cases) -> Reading:
    """Ask every head about points between ``h_b`` and ``h_a``, and bisect where the answer changes."""

    @jax.jit
    def answers(params: Params, h_a: jax.Array, h_b: jax.Array, alpha: jax.Array) -> jax.Array:
        weight = alpha[..., None]
        return jnp.argmax(jax.vmap(read)(params, weight * h_a + (1 - weight) * h_b), axis=-1)

    def ask(alpha: np.ndarray) -> np.ndarray:
        return np.asarray(answers(params, cases.h_a, cases.h_b, np.broadcast_to(alpha, cases.e_a.shape)))

    grid = np.linspace(0, 1, SHARES)
    found = np.stack([ask(alpha) for alpha in grid], axis=-1)
    right = found == cases.class_a[:, None]
    changed = right[..., 1:] != right[..., :-1]
    flips = []
    for k in range(max(1, int(changed.sum(axis=-1).max()))):
        this = changed & (np.cumsum(changed, axis=-1) == k + 1)
        at = np.argmax(this, axis=-1)
        low, high = grid[at], grid[at + 1]
        after = np.take_along_axis(right, at[..., None] + 1, axis=-1)[..., 0]
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            there = (ask(middle) == cases.class_a) == after
            low, high = np.where(there, low, middle), np.where(there, middle, high)
        flips.append(np.where(this.any(axis=-1), high, np.inf).reshape(-1))
    at_zero, says_b = right[..., 0].reshape(-1), (found[..., 0] == cases.class_b).reshape(-1)
    return Reading(at_zero, np.stack(flips, axis=-1), says_b)


class Lengths(NamedTuple):
    """Numbers of items, one for each case; ``inf`` where there is none up to :data:`LARGEST`.

    Attributes:
      first: the first at which it is not so.
      again: the first after that at which it is so again.
      last: the first from which on it is never so.
    """

    first: np.ndarray
    again: np.ndarray
    last: np.ndarray


def number_grid() -> np.ndarray:
    """Every n below 16, then those of :data:`PER_OCTAVE` up to :data:`LARGEST`."""
    fine = np.arange(4 * PER_OCTAVE, FINE_UP_TO * PER_OCTAVE) / PER_OCTAVE
    coarse = np.arange(FINE_UP_TO, math.floor(math.log2(LARGEST)) + 1)
    return np.concatenate([np.arange(2.0, 16.0), np.floor(2.0**fine), 2.0**coarse, [LARGEST]])


def lengths(so: np.ndarray, grid: np.ndarray, holds: Callable[[np.ndarray], np.ndarray]) -> Lengths:
    """Where something stops to hold.

    Args:
      so: ``[cases, grid]``, whether it holds. What changes twice between two n of the grid is not seen.
      grid: numbers of items, ascending from 2.
      holds: the same for other n, ``[cases, 1]`` to ``[cases, 1]``.
    """

    def change(index: np.ndarray, exists: np.ndarray, after: bool) -> np.ndarray:
        """The first n at which it is ``after``, by bisection between the grid's numbers ``index - 1`` and ``index``."""
        high = grid[np.minimum(index, len(grid) - 1)]
        low = np.where(index == 0, high - 1, grid[np.maximum(index - 1, 0)])
        for _ in range(BISECTIONS):
            middle = np.floor((low + high) / 2)
            moves = (middle > low) & (middle < high)
            if not moves.any():
                break
            there = holds(np.where(moves, middle, high)[:, None])[:, 0] == after
            low, high = np.where(moves & ~there, middle, low), np.where(moves & there, middle, high)
        return np.where(exists, high, np.inf)

    fails = np.any(~so, axis=1)
    first = np.argmin(so, axis=1)
    later = so & (np.arange(len(grid)) > first[:, None])
    end = np.where(so.any(axis=1), len(grid) - np.argmax(so[:, ::-1], axis=1), 0)
    return Lengths(
        change(first, fails, after=False),
        change(np.argmax(later, axis=1), np.logical_and(fails, later.any(axis=1)), after=True),
        change(end, end < len(grid), after=False),
    )


class Failures(NamedTuple):
    """Where heads err, and where the coefficient of a is below the machine epsilon for good, by type."""

    errs: Lengths
    epsilon: dict[str, np.ndarray]


def failures(policy: Policy, e_a: np.ndarray, e_b: np.ndarray, found: Reading) -> Failures:
    """For cases with the logits ``e_a`` and ``e_b``, ``[cases]``."""
    grid, e_a, e_b = number_grid(), e_a[:, None], e_b[:, None]

    def alpha(n: np.ndarray) -> np.ndarray:
        return coefficient(policy, e_a, e_b, n)

    on_grid = alpha(grid[None])
    errs = lengths(found.right(on_grid), grid, lambda n: found.right(alpha(n)))
    below = {
        dtype: lengths(on_grid >= epsilon, grid, lambda n, epsilon=epsilon: alpha(n) >= epsilon).last
        for dtype, epsilon in EPSILONS.items()
    }
    return Failures(errs, below)
