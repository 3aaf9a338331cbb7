"""``diagnose``: a model over growing inputs, one length after the other, each saved as soon as it is done."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..core.files import write_text
from ..core.policies import PAPER, Policy
from ..huggingface.stored import KEY
from ..provenance import provenance
from .arguments import EPSILON, check_lengths
from .fingerprint import fingerprint
from .positions import check_tokens
from .progress import Progress, layers_told
from .recording import AttentionRow, Recording, dispersion_n, record, runs_sharpmax
from .sources import Source
from .summary import METRICS
from .table import Table, as_json, number, rounded, table_of

SCHEMA = "sharpmax.diagnosis/2"
COLUMNS = ("length", "layer", "head", "window", "prompts", *METRICS, "entropy_last_over_prompts", "dispersion_n")
"""Columns of a diagnosis: means over the prompts of one length, but for ``spread_min`` and ``spread_max``."""

LONGEST_ROW, ROW_BYTES = 1024, 1_000_000
STEP, HIDDEN = 1 / 1024, 0xFFFF
"""Logits of attention rows are kept as how many steps they lie below the row's largest, in 16 bits."""


class Diagnosis:
    """What was found: ``data`` is everything, ready for JSON; ``table`` one row for each length, layer and head."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    @property
    def table(self) -> Table:
        columns = self.data["columns"]
        return table_of(columns, self.data["rows"])

    @property
    def findings(self) -> list[str]:
        """What was found, in a few lines to print."""
        from .report.findings import Heads
        from .report.lines import lines

        return lines(Heads(self.data))

    def save(self, out: str | Path) -> list[Path]:
        """Write report.html, diagnosis.json, diagnosis.csv and diagnosis.png into the folder ``out``."""
        from .report import write

        return write(Path(out), self.data)


def diagnose(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    lengths: Sequence[int] | None = None,
    *,
    name: str | None = None,
    policy: Policy = PAPER,
    layers: Iterable[int] | None = None,
    epsilon: float = EPSILON,
    sample: int | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Measure every head of ``model`` on inputs of ``source`` that grow.

    Args:
      model, tokenizer: of Hugging Face. No logits over the vocabulary are computed.
      source: :class:`~sharpmax.diagnostics.sources.MaximumPrompts` or :class:`~sharpmax.diagnostics.sources.Prefixes`.
      lengths: of the inputs, in the source's unit; its own choice if not given.
      name: what to call the model; what its configuration says if not given.
      policy: as in :func:`~sharpmax.diagnostics.record`; one that can be saved.
      layers, epsilon, sample: as there.
      out: a folder; every length is saved there when it is done, and what lies there already is not computed again.
      progress: called with (length, inputs done, inputs in all): when a length is begun, after every layer and
        input, and once for a length that was there already.
    """
    asked = sorted(set(source.lengths if lengths is None else lengths))
    chosen = None if layers is None else sorted(set(layers))
    check_lengths(asked)
    source.check(tokenizer, asked)
    check_tokens(model, [len(ids) for length in asked for ids in source.inputs(tokenizer, length)])
    about = {
        "schema": SCHEMA,
        "model": _about(model, name),
        "source": {**source.about, "unit": source.unit},
        "policy": _policy(policy),
        "layers": chosen,
        "epsilon": epsilon,
        **({} if sample is None else {"sample": sample}),
    }
    parts = None if out is None else Path(out) / "parts"
    saved = {} if parts is None else _saved(parts, about)
    found = {length: saved[length] for length in asked if length in saved}
    model.eval()
    for length in asked:
        if length in found:
            if progress is not None:
                progress(length, len(found[length]["tokens"]), len(found[length]["tokens"]))
            continue
        measured = _measure(model, source.inputs(tokenizer, length), length, policy, chosen, epsilon, sample, progress)
        measured["tokens_of_row"] = _words(tokenizer, measured.pop("ids"))
        found[length] = {"about": about, **measured}
        if parts is not None:
            write_text(parts / _file(length), json.dumps(found[length], allow_nan=False) + "\n")
    return Diagnosis(_together(about, asked, found))


def _measure(
    model: nn.Module, inputs: Sequence[Sequence[int]], length: int, policy: Policy, layers: list[int] | None,
    epsilon: float, sample: int | None, progress: Progress | None,
) -> dict[str, Any]:  # fmt: skip
    """All inputs of one length: rows of :data:`COLUMNS`, and the last attention rows of the first input."""
    body: Any = getattr(model, "base_model", model)
    device = next(model.parameters()).device
    collected: list[dict[str, Any]] = []
    kept: list[AttentionRow] = []
    if progress is not None:
        progress(length, 0, len(inputs))
    for i, ids in enumerate(inputs):
        keep = range(10_000) if i == 0 and len(ids) <= LONGEST_ROW else None
        recording = record(model, policy, layers=layers, attention=keep, epsilon=epsilon, sample=sample)
        tell = None if progress is None else partial(_within, progress, length, i, len(inputs))
        with torch.inference_mode(), recording as stats, layers_told(model, tell), _up_to(model, layers, stats):
            body(input_ids=torch.tensor([list(ids)], device=device), **_without_cache(model))
        _check_recorded(stats, layers)
        collected += stats.rows
        kept += stats.attention
        if progress is not None:
            progress(length, i + 1, len(inputs))
    rows = _over_prompts(length, collected, epsilon)
    short_enough = bool(kept) and len(inputs[0]) * len(kept) * 8 / 3 <= ROW_BYTES
    return {
        "length": length,
        "tokens": [len(ids) for ids in inputs],
        "rows": rows,
        "ids": list(inputs[0]) if short_enough else [],
        "attention": [_packed(row) for row in kept] if short_enough else [],
    }


def _within(progress: Progress, length: int, done: int, total: int, share: float) -> None:
    """Tell how far the next input is; the last step is told when it is done."""
    if share < 1:
        progress(length, done + share, total)


class _EnoughError(Exception):
    """Ends a forward whose later layers are of no interest."""


@contextmanager
def _up_to(model: nn.Module, layers: list[int] | None, stats: Recording) -> Iterator[None]:
    """Within the block a forward ends after the last of ``layers``, if the model's modules say which they are."""
    last = None if layers is None else max(layers)

    def enough(*_: Any) -> None:
        if last in stats.layers:
            raise _EnoughError

    of_last = [m for m in model.modules() if last is not None and getattr(m, "layer_idx", None) == last]
    handles = [module.register_forward_hook(enough) for module in of_last]
    try:
        yield
    except _EnoughError:
        pass
    finally:
        for handle in handles:
            handle.remove()


def _without_cache(model: Any) -> dict[str, Any]:
    config = getattr(model, "config", None)
    return {"use_cache": False} if getattr(config, "use_cache", None) is not None else {}


def _check_recorded(stats: Recording, layers: list[int] | None) -> None:
    if not stats.rows:
        which = "" if layers is None else f" in layers {', '.join(map(str, layers))}"
        raise ValueError(f"the model called no attention{which}, so there is nothing to show")
    broken = sorted({row["layer"] for row in stats if None in (row["entropy_mean"], row["entropy_last"])})
    if broken:
        raise ValueError(f"the attention logits of layer {broken[0]} are not all finite, so there is nothing to show")


def _over_prompts(length: int, rows: Sequence[Mapping[str, Any]], epsilon: float) -> list[list[Any]]:
    """Rows of single inputs, gathered by layer and head; values in the order of :data:`COLUMNS`."""
    heads: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        heads.setdefault((row["layer"], row["head"]), []).append(row)
    gathered = []
    for (layer, head), several in sorted(heads.items()):
        found: dict[str, Any] = {"length": length, "layer": layer, "head": head, "prompts": len(several)}
        found["window"] = several[0]["window"]
        for name in METRICS:
            values = [row[name] for row in several if row[name] is not None]
            combine = {"spread_min": min, "spread_max": max}.get(name, statistics.fmean)
            found[name] = rounded(name, combine(values), 6) if values else None
        entropies = [row["entropy_last"] for row in several]
        found["entropy_last_over_prompts"] = number(statistics.pstdev(entropies), 6)
        found["dispersion_n"] = None if found["window"] else dispersion_n(found["spread_max"], epsilon)
        gathered.append([as_json(found[name]) for name in COLUMNS])
    return gathered


def _packed(row: AttentionRow) -> dict[str, Any]:
    """An attention row in 16 bits a logit, which are enough for what is seen."""
    below = ((row.logits.max() - row.logits).double() / STEP).clamp(max=HIDDEN - 1).round().numpy()
    steps = np.where(row.logits.isinf().numpy(), HIDDEN, below).astype("<u2")
    text = base64.b64encode(steps.tobytes()).decode("ascii")
    return {"layer": row.layer, "head": row.head, "beta": as_json(rounded("beta", row.beta, 5)), "below": text}


def unpacked(row: Mapping[str, Any]) -> np.ndarray:
    """The logits of an attention row, less the largest; ``-inf`` where a key is not seen."""
    steps = np.frombuffer(base64.b64decode(row["below"]), "<u2")
    return np.where(steps == HIDDEN, -math.inf, -STEP * steps)


def _words(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    return [tokenizer.decode([i]) for i in ids]


def _about(model: Any, name: str | None) -> dict[str, Any]:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    settings = json.dumps(config.to_dict(), sort_keys=True, default=str)
    return {
        "name": name or Path(getattr(model.config, "name_or_path", "") or type(model).__name__).name,
        "class": type(model).__name__,
        "context": getattr(config, "max_position_embeddings", None),
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "config_sha256": hashlib.sha256(settings.encode()).hexdigest(),
        "weights_sha256": fingerprint(model),
        **({"policies": getattr(config, KEY, None)} if runs_sharpmax(model) else {}),
    }


def _policy(policy: Any) -> dict[str, Any]:
    if not hasattr(policy, "to_dict"):
        raise ValueError(f"expected a policy that can be saved as JSON, got {type(policy).__name__}")
    return policy.to_dict()


def _file(length: int) -> str:
    return f"{length:07d}.json"


def _saved(parts: Path, about: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """What earlier runs saved, by length; refused if any of it was about something else."""
    found = {}
    ours = json.loads(json.dumps(about))
    for path in sorted(parts.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            theirs, length = dict(content["about"]), content["length"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}); delete it and it is made again") from None
        if theirs != ours:
            differing = ", ".join(key for key in ours if theirs.get(key) != ours[key]) or "fields"
            raise ValueError(
                f"{parts.parent} holds a diagnosis that differs in {differing}; choose another folder, or delete "
                f"{parts}"
            )
        found[length] = content
    return found


def _together(
    about: Mapping[str, Any], lengths: Sequence[int], found: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """All lengths in one; attention rows are those of the longest input that has some."""
    with_rows = [length for length in lengths if found[length]["attention"]]
    attention = None
    if with_rows:
        part = found[with_rows[-1]]
        attention = {"length": with_rows[-1], "words": part["tokens_of_row"], "heads": part["attention"]}
    return {
        **about,
        "lengths": [{"length": n, "tokens": found[n]["tokens"]} for n in lengths],
        "columns": list(COLUMNS),
        "rows": [row for length in lengths for row in found[length]["rows"]],
        "attention": attention,
        "provenance": provenance(),
    }
