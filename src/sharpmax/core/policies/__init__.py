"""Policies: from the statistics of a row to its inverse temperature beta."""

from .base import Lowered, Policy, load_policy, needs_spread, policy_from_dict
from .compose import Detached, PerHead, detached, is_hard, lowered
from .entropy import PAPER, PAPER_HELD, EntropyCurve, EntropyPolynomial
from .learnable import LearnableLogLength, LearnableStructure, LearnableTemperature
from .length import Constant, Hard, LogLength

__all__ = [
    "PAPER",
    "PAPER_HELD",
    "Constant",
    "Detached",
    "EntropyCurve",
    "EntropyPolynomial",
    "Hard",
    "LearnableLogLength",
    "LearnableStructure",
    "LearnableTemperature",
    "LogLength",
    "Lowered",
    "PerHead",
    "Policy",
    "detached",
    "is_hard",
    "load_policy",
    "lowered",
    "needs_spread",
    "policy_from_dict",
]
