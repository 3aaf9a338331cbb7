"""What runs golden cases is registered here, with what is common to all of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
import torch

from sharpmax import RowStats
from sharpmax.core.policies import policy_from_dict
from sharpmax.torch.geometry import LARGEST_HEAD

from .cases import Case, raw_cases
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


def collected(stats: RowStats, beta: Any, weights: Any, gradient: Any = None, rounded: bool = False) -> Result:
    """A :class:`Result` of one row's arrays; of statistics that have no minimum, all but what needs it."""
    names = [name for name in STATISTICS if stats.min is not None or name not in ("min", "spread")]
    numbers = {name: float(host(getattr(stats, name))) for name in names}
    slopes = None if gradient is None else host(gradient)
    return Result(numbers, float(host(beta)), host(weights), slopes, rounded)


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


def attends(row: dict[str, Any]) -> bool:
    """Rows that are as many columns of a head; no product gives an infinite logit, which the extremes are next to."""
    return 0 < length(row) <= LARGEST_HEAD and "extremes" not in row["id"]


def kernels_attend(row: dict[str, Any]) -> bool:
    """Those of them that kernels on a GPU serve."""
    return attends(row) and row["policy"]["kind"] != "Hard" and row["dtype"] != "float64"
