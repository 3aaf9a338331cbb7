"""Zero-shot effect: policies switched on in a model that was not trained with them.

policies (and which heads are sharp)  ->  measures  ->  run (cells, each in a file)  ->  table
"""

from ...extras import require

for _package in ("torch", "transformers"):
    require(_package, "huggingface", "sharpmax.tasks.zero_shot")

from .measures import answers, is_right, perplexity, text  # noqa: E402
from .policies import CHOICES, head_stats, sharp_heads  # noqa: E402
from .run import QUICK, TASKS, Settings, Subject, check_cells, find_subject, measure  # noqa: E402
from .table import value, zero_shot_table  # noqa: E402

__all__ = [
    "CHOICES",
    "QUICK",
    "TASKS",
    "Settings",
    "Subject",
    "answers",
    "check_cells",
    "find_subject",
    "head_stats",
    "is_right",
    "measure",
    "perplexity",
    "sharp_heads",
    "text",
    "value",
    "zero_shot_table",
]
