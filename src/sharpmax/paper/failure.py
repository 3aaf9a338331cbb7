"""Corollary B.1 on trained heads: the number of items from which {a, b, b, ...} is misread, and Remarks B.2 and B.3.

All b are alike, so everything is a function of the two logits and n: attention over n items has a closed form, and n
may be far larger than any set that could be laid out. Everything is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ..core.policies import PAPER, PAPER_HELD, Constant, Hard, LogLength, Policy
from ..inputs import InputError, user_input
from ..tasks.max_retrieval.model import Params, read
from .failure_lengths import (
    EPSILONS,
    GAPS,
    LARGEST,
    QUERY,
    TOP,
    Cases,
    Failures,
    Reading,
    cases_of,
    class_pairs,
    coefficient,
    failures,
    lengths,
    number_grid,
    reading,
    wide,
)
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
