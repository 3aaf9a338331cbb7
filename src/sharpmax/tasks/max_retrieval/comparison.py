"""Rows of results against each other, seed by seed."""

from __future__ import annotations

from typing import Any

import numpy as np


def paired_p_values(row: Any, baseline: Any) -> list[float | None]:
    """The p-value of the paired t-test over seeds, for every size of two tables ``[sizes, seeds]``.

    Rows that are equal in every seed give 1, rows that differ by the same amount in every seed 0, and fewer than three
    seeds, which say too little, ``None``.
    """
    from scipy import stats

    row, baseline = np.asarray(row, np.float64), np.asarray(baseline, np.float64)
    if row.ndim != 2 or row.shape != baseline.shape:
        raise ValueError(f"expected two tables [sizes, seeds] of one shape, got {row.shape} and {baseline.shape}")
    values: list[float | None] = []
    for a, b in zip(row, baseline, strict=True):
        difference = a - b
        if len(difference) < 3:
            values.append(None)
        elif np.ptp(difference) <= 1e-12:
            values.append(1.0 if np.all(np.abs(difference) <= 1e-12) else 0.0)
        else:
            values.append(float(stats.ttest_rel(a, b).pvalue))
    return values
