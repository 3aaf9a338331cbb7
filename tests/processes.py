"""Which processes still run."""

from __future__ import annotations

from pathlib import Path

import pytest

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


def members(session: int) -> list[str]:
    """The processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, belongs = stat.read_text().rpartition(") ")[2].split()[:4]
        except OSError:
            continue
        if int(belongs) == session and state != "Z":
            found.append(stat.parent.name)
    return found
