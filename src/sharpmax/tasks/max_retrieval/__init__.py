"""Max retrieval (Section 4.1, Appendix A): read the class of the largest item of a set with one attention head.

data  ->  model  ->  training (protocol, checkpoint)  ->  fitting  ->  evaluation
"""

from ...extras import require

for _package in ("jax", "safetensors", "scipy"):
    require(_package, "experiments", "sharpmax.tasks.max_retrieval")

from .checkpoint import Checkpoint, load_checkpoint  # noqa: E402
from .comparison import paired_p_values  # noqa: E402
from .evaluation import Evaluation, evaluate  # noqa: E402
from .fitting import Fitted, Samples, collect, fit  # noqa: E402
from .protocol import PRESETS, Protocol, load_protocol  # noqa: E402
from .training import Trained, find_begun, progress_bar, train, train_together  # noqa: E402

__all__ = [
    "PRESETS",
    "Checkpoint",
    "Evaluation",
    "Fitted",
    "Protocol",
    "Samples",
    "Trained",
    "collect",
    "evaluate",
    "find_begun",
    "fit",
    "load_checkpoint",
    "load_protocol",
    "paired_p_values",
    "progress_bar",
    "train",
    "train_together",
]
