"""Zero-shot effect: policies switched on in a model that was not trained with them.

policies (and which heads are sharp), measures  ->  study (what is asked)  ->  run (cells, each in a file)  ->  results
(all cells of a folder)  ->  table
"""

from ...extras import require

for _package in ("torch", "transformers"):
    require(_package, "huggingface", "sharpmax.tasks.zero_shot")

from .measures import answers, is_right, perplexity, text  # noqa: E402
from .policies import CHOICES, head_stats, sharp_heads  # noqa: E402
from .results import collect  # noqa: E402
from .run import Subject, find_subject, measure, prepare  # noqa: E402
from .study import QUICK, TASKS, Settings, load_study, settle  # noqa: E402
from .table import value, zero_shot_table  # noqa: E402

__all__ = [
    "CHOICES",
    "QUICK",
    "TASKS",
    "Settings",
    "Subject",
    "answers",
    "collect",
    "find_subject",
    "head_stats",
    "is_right",
    "load_study",
    "measure",
    "perplexity",
    "prepare",
    "settle",
    "sharp_heads",
    "text",
    "value",
    "zero_shot_table",
]
