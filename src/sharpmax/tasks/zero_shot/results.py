"""What a folder holds of a study, whoever measured it, and what is missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from ...provenance import makers
from . import measures, policies
from .study import HEADS, Cell, load_study, read_cell


def collect(folder: Path) -> dict[str, Any]:
    """All cells of the study in ``folder`` that are there, with what they share and what made them."""
    study = load_study(folder)
    if study is None or not HEADS.file(folder).exists():
        raise ValueError(f"{folder} holds no study to report on; leave --report out to begin one")
    plan = study.settings.cells()
    found = {cell: content for cell in (HEADS, *plan) if (content := read_cell(cell, folder, study)) is not None}
    ends = measures.stretch_ends(study.text_tokens, study.settings.longest, study.settings.segments)
    return {
        "model": study.model,
        "context": study.context,
        "dtype": study.dtype,
        "settings": dataclasses.asdict(study.settings),
        "text": {
            "tokens": study.text_tokens,
            "sha256": study.text,
            "segments": len(ends),
            "targets": study.settings.targets,
        },
        "policies": {name: policies.CHOICES[name].label for name in study.settings.policies},
        "heads": found[HEADS]["result"],
        "cells": [{**cell._asdict(), **found[cell]["result"]} for cell in plan if cell in found],
        "missing": missing(plan, found),
        "measured_by": makers(content["provenance"] for content in found.values()),
    }


def missing(plan: Iterable[Cell], there: Container[Cell]) -> list[str]:
    """A line for each task that lacks cells: its sizes, and how many policies where not all of them are lacking."""
    lines = []
    for task, cells in groupby(plan, key=lambda cell: cell.task):
        sizes = []
        for size, group in groupby(cells, key=lambda cell: cell.size):
            lacking = [cell not in there for cell in group]
            if any(lacking):
                some = "" if all(lacking) else f" ({sum(lacking)} of {len(lacking)} policies)"
                sizes.append(f"{size:,}{some}")
        if sizes:
            lines.append(f"{task} at {', '.join(sizes)}")
    return lines
