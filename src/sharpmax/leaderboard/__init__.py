"""The leaderboard: heads trained and evaluated with every mechanism, on every task, from the same seeds.

settings  ->  cells (train, evaluate, resume)  ->  report (statistics)  ->  views (Markdown, CSV, figures)
"""

from ..extras import require

for _package in ("jax", "safetensors", "scipy", "matplotlib"):
    require(_package, "experiments", "sharpmax.leaderboard")

from .entries import begun, chosen_mechanisms, chosen_tasks, mechanisms  # noqa: E402
from .report import assemble, write_report  # noqa: E402
from .run import OutOfTimeError, compare  # noqa: E402
from .settings import Settings, settle  # noqa: E402

__all__ = [
    "OutOfTimeError",
    "Settings",
    "assemble",
    "begun",
    "chosen_mechanisms",
    "chosen_tasks",
    "compare",
    "mechanisms",
    "settle",
    "write_report",
]
