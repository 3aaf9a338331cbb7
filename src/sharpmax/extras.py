"""Optional packages: an error that names the extra to install."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(package: str, extra: str, for_what: str) -> ModuleType:
    """Import ``package``, or say which extra of sharpmax brings it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package.partition(".")[0]:
            raise
        message = f"{for_what} needs {package}, which is not installed: pip install 'sharpmax[{extra}]'"
        raise ModuleNotFoundError(message, name=package) from None
