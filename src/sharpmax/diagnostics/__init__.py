"""How sharp the heads of a real model are, and where they will stop being so: tables, pictures, a page."""

from typing import TYPE_CHECKING, Any

from .table import Table

if TYPE_CHECKING:
    from .measure import Diagnosis, diagnose
    from .recording import AttentionRow, Recording, record
    from .summary import METRICS

__all__ = ["record", "Recording", "AttentionRow", "Table", "METRICS", "diagnose", "Diagnosis"]

_MODULES = {
    "measure": ("Diagnosis", "diagnose"),
    "recording": ("AttentionRow", "Recording", "record"),
    "summary": ("METRICS",),
}


def __getattr__(name: str) -> Any:
    """What needs PyTorch is imported when it is asked for: arguments are checked before that."""
    from importlib import import_module

    from ..extras import require

    for module, names in _MODULES.items():
        if name in names:
            for package in ("torch", "transformers"):
                require(package, "huggingface", "sharpmax.diagnostics")
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
