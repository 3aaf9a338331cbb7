"""Looking into nested JSON."""

from __future__ import annotations

from typing import Any


def strings(value: Any) -> list[str]:
    """Every text that ``value`` holds, at any depth."""
    if isinstance(value, dict):
        return [s for v in value.values() for s in strings(v)]
    if isinstance(value, list):
        return [s for v in value for s in strings(v)]
    return [value] if isinstance(value, str) else []
