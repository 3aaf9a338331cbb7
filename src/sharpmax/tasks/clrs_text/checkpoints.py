"""Checkpoints of a training run: a folder of safetensors, and ``checkpoint.json`` that names it and says what it is.

    OUT/checkpoint-STEP/model.safetensors       weights
    OUT/checkpoint-STEP/optimizer.safetensors   moments and counts of AdamW, PARAMETER/exp_avg and so on
    OUT/checkpoint.json                         step, settings, where every process stands in its data; replaced last

Whenever a run is killed, ``checkpoint.json`` names a folder that is there and whole. Weights and moments are those of
the whole model, however it was divided among processes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from ...core.files import write_text

SCHEMA = "sharpmax.clrs-text-checkpoint/3"
FIELDS = ("folder", "step", "groups", "settings", "config", "start", "seconds", "memory", "processes")
POINTER = "checkpoint.json"
FOLDER = re.compile(r"\.?checkpoint-\d+.*")
"""What folders of tensors are called, and those that a write that was killed leaves."""

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The whole weights of a model that may be divided among processes, each once; all processes must ask.

    Names are those in the model that was wrapped. Only the first process is sure to get them.
    """
    found: Any = get_model_state_dict(model, options=WHOLE)
    once = {*_parameters(model), *(clean(name) for name, _ in _inner(model).named_buffers())}
    return {name: tensor for name, tensor in found.items() if name in once}


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter once, by the name that it had before the model was wrapped."""
    return {clean(name): parameter for name, parameter in _inner(model).named_parameters()}


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def clean(name: str) -> str:
    """A parameter's name without what FSDP, compilation and checkpointing add to it."""
    for word in ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(word, "")
    return name


def save(out: Path, step: int, model: nn.Module, optimizer: Any, record: dict[str, Any], *, main: bool) -> None:
    """Write a checkpoint in place of the one before; all processes must call, ``main`` writes.

    ``record`` is anything for JSON.
    """
    tensors = weights(model)
    moments: Any = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    if not main:
        return
    name = f"checkpoint-{step:08d}"
    with written_folder(out / name) as folder:
        write_tensors(folder / "model.safetensors", tensors)
        flat = {
            f"{parameter}/{key}": value for parameter, row in moments["state"].items() for key, value in row.items()
        }
        write_tensors(folder / "optimizer.safetensors", flat)
    content = {"schema": SCHEMA, "folder": name, "step": step, "groups": moments["param_groups"]} | record
    write_text(out / POINTER, json.dumps(content, allow_nan=False) + "\n")
    remove(out, keep=name)


def remove(out: Path, keep: str | None = None) -> None:
    """Remove checkpoints, all or all but one."""
    if keep is None:
        (out / POINTER).unlink(missing_ok=True)
    for old in out.iterdir():
        if old.name != keep and FOLDER.fullmatch(old.name) and old.is_dir():
            shutil.rmtree(old, ignore_errors=True)


def read(out: Path) -> dict[str, Any] | None:
    """What ``checkpoint.json`` says; ``None`` if there is none."""
    path = out / POINTER
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a checkpoint: {error}") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"expected {path} to have the schema {SCHEMA!r}, got {schema!r}")
    if missing := [name for name in FIELDS if name not in content]:
        raise ValueError(f"{path} is damaged: expected the fields of a checkpoint, got no {missing[0]}")
    return content


def kept(out: Path) -> str:
    """What of a run outlives bad news."""
    return "the last checkpoint is kept" if (out / POINTER).exists() else "nothing is saved yet"


def check_start(content: dict[str, Any], config: dict[str, Any], start: str, out: Path) -> None:
    """Refuse the checkpoint, or the report, of a run that began with another model."""
    found = content["config"]
    for name in sorted({*found, *config}):
        if found.get(name) != config.get(name):
            raise ValueError(
                f"expected {out} to hold a run of the same model, got one of a model with {name} "
                f"{found.get(name)} in place of {config.get(name)}"
            )
    if content["start"] != start:
        raise ValueError(f"expected {out} to hold a run of the same model, got one that began with other weights")


def restore(out: Path, content: dict[str, Any], model: nn.Module, optimizer: Any) -> None:
    """Put weights and moments of a checkpoint into a model and an optimiser, divided among processes or not."""
    folder = out / content["folder"]
    found: Any = _tensors(folder / "model.safetensors")
    if missing := sorted(set(_parameters(model)) - set(found)):
        raise ValueError(f"expected {folder} to hold the weights of the model, got no {missing[0]}")
    state: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _tensors(folder / "optimizer.safetensors").items():
        parameter, _, key = name.rpartition("/")
        state.setdefault(parameter, {})[key] = tensor
    options = StateDictOptions(full_state_dict=True, strict=False)  # a tied weight is there once
    set_model_state_dict(model, found, options=options)
    moments: Any = {"state": state, "param_groups": content["groups"]}
    set_optimizer_state_dict(model, optimizer, moments, options=StateDictOptions(full_state_dict=True))


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"expected {path} to be the tensors of a checkpoint, got {error}") from None


@contextmanager
def written_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``target``, in place of what is there, when it is full and on the disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        for path in temporary.iterdir():
            path.chmod(0o644)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Around what writes safetensors: a disk that is full, say, raises OSError, as it does elsewhere."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors, copied where several share their memory."""
    with disk_errors(path):
        whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(whole, path, metadata={"format": "pt"})


def random_state() -> dict[str, str]:
    """The state of torch's generators in this process, for JSON."""
    state = {"cpu": bytes(torch.get_rng_state().tolist()).hex()}
    if torch.cuda.is_available():
        state["cuda"] = bytes(torch.cuda.get_rng_state().tolist()).hex()
    return state


def set_random_state(state: dict[str, str]) -> None:
    """Put the generators back."""
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["cpu"])), dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(list(bytes.fromhex(state["cuda"])), dtype=torch.uint8))
