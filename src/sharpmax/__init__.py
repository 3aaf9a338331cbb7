"""sharpmax keeps attention sharp as inputs grow."""

from .core.policies import PAPER, PAPER_HELD, Constant, EntropyPolynomial, Hard, LogLength, detached, PerHead
from .core.softmax import adaptive_temperature_softmax, softmax
from .core.stats import RowStats, row_stats
