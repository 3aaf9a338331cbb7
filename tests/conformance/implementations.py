"""Everything that the golden cases run against.

To add an implementation, write a function that takes a :class:`~.cases.Case` and returns a :class:`~.results.Result`,
and register it, here or in a module that is imported here::

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

import numpy as np

from sharpmax import adaptive_temperature_softmax, row_stats

# Importing a module registers what it has.
from . import jax_implementations, torch_implementations  # noqa: F401
from .cases import Case
from .recipes import DTYPES
from .registry import IMPLEMENTATIONS, Implementation, collected, policy_of, register
from .results import Result

__all__ = ["IMPLEMENTATIONS", "Implementation"]


@register("numpy")
def numpy_eager(case: Case) -> Result:
    x, policy = case.logits.astype(DTYPES[case.dtype]), policy_of(case)
    stats = row_stats(x, where=case.where)
    weights = adaptive_temperature_softmax(x, where=case.where, policy=policy)
    with np.errstate(over="ignore"):  # where the spread does not fit its type, NumPy says so, and gives inf
        return collected(stats, policy(stats), weights)
