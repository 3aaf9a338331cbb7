"""How sharp the heads of a real model are, and where they will stop being so: tables, pictures, a page."""

from ..extras import require

require("torch", "huggingface", "sharpmax.diagnostics")
require("transformers", "huggingface", "sharpmax.diagnostics")

from .measure import Diagnosis, diagnose  # noqa: E402
from .record import AttentionRow, Recording, record  # noqa: E402
from .summary import METRICS  # noqa: E402
from .table import Table  # noqa: E402

__all__ = ["record", "Recording", "AttentionRow", "Table", "METRICS", "diagnose", "Diagnosis"]
