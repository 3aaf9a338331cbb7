"""Corollary B.1 on trained heads: the number of items from which {a, b, b, ...} is misread, and Remarks B.2 and B.3.

All b are alike, so everything is a function of the two logits and n: attention over n items has a closed form, and n
may be far larger than any set that could be laid out. Everything is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.policies import PAPER, PAPER_HELD, Constant, Hard, LogLength, Policy
from ..core.stats import RowStats
from ..inputs import InputError, user_input
from ..tasks.max_retrieval.data import CLASSES
from ..tasks.max_retrieval.model import Params, folded_query, hidden, item_logits, read
from ..theory import MACHINE_EPSILON
from .failure_order import order_effects
from .failure_views import caption, draw
from .figures import PAGE, numbers, save_exhibit
from .max_retrieval import Heads, file_name, find_heads
from .published import GEMMA_SPREADS


class Mechanism(NamedTuple):
    """How beta is chosen, and what that is called."""

    label: str
    policy: Policy


MECHANISMS = {
    "softmax": Mechanism("softmax", Constant(1.0)),
    "adaptive": Mechanism("adaptive, PAPER", PAPER),
    "adaptive_held": Mechanism("adaptive, PAPER_HELD", PAPER_HELD),
    "log_n": Mechanism("log n / log 16", LogLength.relative(16)),
    "constant_4": Mechanism("constant beta = 4", Constant(4.0)),
    "hard": Mechanism("hard (theta = 0)", Hard()),
}

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


def log_decay(difference: float, n: np.ndarray) -> np.ndarray:
    """Remark B.3: ``alpha_a`` of order ``log n / n``, from logits that differ by ``difference + log log n``."""
    return 1 / (1 + (n - 1) * math.exp(-difference) / np.log(n))


def _quantiles(values: Any) -> dict[str, float | None]:
    """Lowest, (lower) median and highest; ``None`` where that is infinite, beyond the largest n."""
    values = np.sort(np.asarray(values), axis=None)
    middle = values[(len(values) - 1) // 2]
    return {"low": _known(values[0]), "median": _known(middle), "high": _known(values[-1])}


def _known(n: float) -> float | None:
    return None if math.isinf(n) else numbers(n)


def _summary(found: Failures, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Quantiles over class pairs and seeds for each gap, over class pairs for each gap and seed, and counts."""
    first, again = found.errs.first.reshape(shape), found.errs.again.reshape(shape)
    gaps = range(shape[1])
    return {
        "errs_from": [_quantiles(first[:, g]) for g in gaps],
        "errs_from_by_seed": [[_quantiles(of_seed) for of_seed in first[:, g]] for g in gaps],
        "not_up_to_largest_n": [int(np.isinf(first[:, g]).sum()) for g in gaps],
        "at_two": [int((first[:, g] == 2).sum()) for g in gaps],
        "right_again": [int(np.isfinite(again[:, g]).sum()) for g in gaps],
        "for_good_from": [_quantiles(found.errs.last.reshape(shape)[:, g]) for g in gaps],
        "epsilon": {
            dtype: [_quantiles(values.reshape(shape)[:, g]) for g in gaps] for dtype, values in found.epsilon.items()
        },
    }


def beside(first: np.ndarray, other: np.ndarray) -> dict[str, int]:
    """In how many cases ``first`` is earlier than, the same as and later than ``other``, and both are beyond all n."""
    beyond = np.isinf(first) & np.isinf(other)
    counts = {"earlier": first < other, "same": (first == other) & ~beyond, "later": first > other, "beyond": beyond}
    return {word: int(found.sum()) for word, found in counts.items()}


def _at_epsilon(params: Params, cases: Cases) -> dict[str, Any]:
    """By how much class scores differ from those of b alone where a's coefficient is the machine epsilon."""

    read_all = jax.jit(jax.vmap(read))

    def scores(epsilon: float) -> np.ndarray:
        return np.asarray(read_all(params, epsilon * cases.h_a + (1 - epsilon) * cases.h_b))

    alone = scores(0.0)
    ranked = np.sort(alone, axis=-1)
    found: dict[str, Any] = {"smallest_margin_of_b_alone": numbers(np.min(ranked[..., -1] - ranked[..., -2]))}
    for dtype, epsilon in EPSILONS.items():
        close = scores(epsilon)
        found[dtype] = {
            "largest_change_of_a_score": numbers(np.abs(close - alone).max()),
            "same_class_as_b_alone": int((close.argmax(-1) == alone.argmax(-1)).sum()),
        }
    return found


def _example(heads: Heads, cases: Cases, found: Reading, gaps: Sequence[float]) -> dict[str, Any]:
    """One head and pair: the gap whose logits differ about as those of Gemma 2B, and in it the median difference."""
    differences = (cases.e_a - cases.e_b).reshape(len(cases.e_a), len(gaps), -1)
    medians = np.maximum(np.median(differences, axis=(0, 2)), 1e-3)
    gap = int(np.argmin(np.abs(np.log(medians / GEMMA_SPREADS[0].average))))
    away = np.abs(differences[:, gap] - medians[gap])
    away[~found.plain.reshape(differences.shape)[:, gap]] = np.inf
    seed, pair = np.unravel_index(np.argmin(away), away.shape)
    case = gap * away.shape[1] + int(pair)
    e_a, e_b = float(cases.e_a[seed, case]), float(cases.e_b[seed, case])
    index = int(seed) * len(cases.class_a) + case
    flip, difference = float(found.flips[index, 0]), e_a - e_b
    only = Reading(*(field[index : index + 1] for field in found))
    by = {name: failures(row.policy, np.array([e_a]), np.array([e_b]), only) for name, row in MECHANISMS.items()}
    top = math.log10(min(by["softmax"].epsilon["float32"][0], LARGEST)) + 2
    n = np.unique(np.floor(10 ** np.arange(math.log10(2), top, 1 / 16)))
    grid = number_grid()
    slow = {
        name: lengths(
            (log_decay(difference, grid) >= least)[None], grid, lambda n, least=least: log_decay(difference, n) >= least
        )
        for name, least in {"errs": flip, **EPSILONS}.items()
    }
    return {
        "seed": heads.checkpoint.seeds[seed],
        "class_a": int(cases.class_a[case]),
        "class_b": int(cases.class_b[case]),
        "gap": gaps[gap],
        "difference": numbers(difference),
        "errs_below": numbers(flip),
        "n": numbers(n, 15),
        "coefficient": {name: numbers(coefficient(row.policy, e_a, e_b, n)) for name, row in MECHANISMS.items()},
        "errs_from": {name: _known(found.errs.first[0]) for name, found in by.items()},
        "epsilon": {name: {d: _known(v[0]) for d, v in found.epsilon.items()} for name, found in by.items()},
        "log_decay": {
            "logits": "differ by difference + log log n, which no head over a fixed vocabulary does (Theorem 2.2)",
            "coefficient": numbers(log_decay(difference, n)),
            "errs_from": _known(slow["errs"].first[0]),
            "epsilon": {dtype: _known(slow[dtype].last[0]) for dtype in EPSILONS},
        },
    }


def data(heads: Heads, gaps: Sequence[float] = GAPS) -> dict[str, Any]:
    """Where every head errs on every pair, by mechanism; one example of it; and Remark B.2 on random stacks."""
    checkpoint = heads.checkpoint
    with jax.enable_x64(True):
        params = wide(checkpoint.params)
        cases = cases_of(params, gaps)
        found = reading(params, cases)
        at_epsilon = _at_epsilon(params, cases)
    shape = (len(checkpoint.seeds), len(gaps), len(class_pairs()))
    if np.any(found.plain.reshape(shape).mean(axis=(0, 2)) <= 0.5):
        raise InputError(
            "expected heads that answer with a's class above one coefficient of a and not below it, for most pairs at "
            f"every gap, but those of {heads.name} do not; train them for more steps"
        )
    e_a, e_b = cases.e_a.reshape(-1), cases.e_b.reshape(-1)
    where = {name: failures(row.policy, e_a, e_b, found) for name, row in MECHANISMS.items()}
    rows = {
        name: {
            "label": row.label,
            "policy": row.policy.to_dict(),  # pyright: ignore[reportAttributeAccessIssue]
            **_summary(where[name], shape),
            "beside_softmax": beside(where[name].errs.first, where["softmax"].errs.first),
            "errs_before_epsilon": {
                dtype: beside(where[name].errs.first, n) for dtype, n in where[name].epsilon.items()
            },
        }
        for name, row in MECHANISMS.items()
    }
    differences = (e_a - e_b).reshape(shape)
    once = np.isfinite(found.flips[:, 0]) & np.isinf(found.flips[:, 1:]).all(axis=1)
    content = {
        "name": heads.name,
        "seeds": list(checkpoint.seeds),
        "step": checkpoint.step,
        "trained_up_to": checkpoint.protocol.sizes[1],
        "priority_a": TOP,
        "gaps": list(gaps),
        "class_pairs": shape[2],
        "query": QUERY,
        "largest_n": LARGEST,
        "machine_epsilon": EPSILONS,
        "difference": [_quantiles(differences[:, g]) for g in range(len(gaps))],
        "b_has_the_larger_logit": [int((differences[:, g] < 0).sum()) for g in range(len(gaps))],
        "reading": {
            "cases": int(e_a.size),
            "plain": int(found.plain.sum()),
            "errs_below": _quantiles(found.flips[found.plain, 0]),
            "the_other_way_round": int((once & found.at_zero).sum()),
            "changes_more_than_once": int(np.isfinite(found.flips[:, 1:]).any(axis=1).sum()),
            "b_alone_is_misread": int((~found.says_b).sum()),
            "never_changes": int(np.isinf(found.flips[:, 0]).sum()),
        },
        "at_epsilon": at_epsilon,
        "mechanisms": rows,
        "example": _example(heads, cases, found, gaps),
        "order": order_effects(),
    }
    return {"caption": caption(content), **content}


def run(out: Path, protocol: str | None = None, checkpoint: Path | None = None) -> list[Path]:
    """Write failure.png, failure.pdf and failure.json into ``out``.

    Args:
      out: folder for the files. They are called ``failure`` for the protocol ``paper``, else ``failure_NAME``.
      protocol: a preset or a protocol file; without it and ``checkpoint``, ``paper``.
      checkpoint: folder of the heads, if not the shipped ones.
    """
    with user_input():
        heads = find_heads(protocol, checkpoint)
    return save_exhibit(out, file_name("failure", heads), data(heads), draw, (PAGE, 5.7))
