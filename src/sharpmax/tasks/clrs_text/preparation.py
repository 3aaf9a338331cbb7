"""What a training run is made of: samples, optimiser, compiled layers, and the numbers that its device takes."""

from __future__ import annotations

import atexit
import gc
import importlib
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from transformers import PreTrainedModel

from ...core.policies import policy_from_dict
from .benchmark import evaluation as evaluation_split
from .benchmark import training as training_split
from .loss import Learner, check_head
from .models import check_length, find_model
from .settings import GENERATED, Settings
from .stream import Generated, Samples, Stored


def resolved(settings: Settings, *, cpu: bool = False) -> Settings:
    """The settings with the precision that ``auto`` means here."""
    if settings.precision != "auto":
        return settings
    return replace(settings, precision="bf16" if torch.cuda.is_available() and not cpu else "float32")


def find_accelerator(settings: Settings, *, cpu: bool = False) -> Accelerator:
    """What knows the device, the precision and the other processes."""
    cpu = cpu or not torch.accelerator.is_available()  # else Accelerate sees one process where there are several
    if not torch.distributed.is_initialized():
        AcceleratorState._reset_state(reset_partial_state=True)  # of a run before this one, on another device
        atexit.unregister(_leave_group)
        atexit.register(_leave_group)
    return Accelerator(mixed_precision="bf16" if settings.precision == "bf16" else "no", cpu=cpu)


def _leave_group() -> None:
    """End the threads of a process group before Python ends: one that wants the interpreter then aborts the process.

    They end with the last reference to the group, and a model that was divided holds one until it is collected.
    """
    if torch.distributed.is_initialized():
        gc.collect()
        torch.distributed.destroy_process_group()


def find_samples(settings: Settings, *, rank: int = 0, ranks: int = 1) -> Samples:
    """The stream of samples that a process reads."""
    if settings.data == GENERATED:
        source = Generated(training_split(settings.traces).only(settings.algorithms, settings.sizes))
    else:
        if settings.algorithms is not None or settings.sizes is not None:
            raise ValueError("expected algorithms and sizes for generated samples only: a folder has its own")
        source = Stored(settings.data)
        if source.split.traces != settings.traces:
            have, want = ("with" if traces else "without" for traces in (source.split.traces, settings.traces))
            raise ValueError(f"expected samples {want} traces, got {settings.data!r}, which has them {have}")
        asked = evaluation_split()
        shared = sorted(set(source.split.seeds) & set(asked.seeds))
        if source.split.name == asked.name or shared:
            what = f"with its seed {shared[0]}" if source.split.name != asked.name else "which is one"
            raise ValueError(f"expected samples that are not of an evaluation set, got {settings.data!r}, {what}")
    return Samples(source, seed=settings.seed, rank=rank, ranks=ranks)


def find_network(settings: Settings) -> tuple[Any, Any]:
    """The model that a run begins with, and its tokenizer."""
    policy = None if settings.policy is None else policy_from_dict(settings.policy)
    return find_model(settings.model, policy=policy, seed=settings.seed)


def ready(network: Any, settings: Settings) -> Learner:
    """A model with its loss, in training, compiled where that is asked for; one that cannot be trained is refused."""
    check_length(network, settings.length)
    check_head(network)
    network.train()
    if settings.gradient_checkpointing:
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if settings.compile:
        compile_layers(network)
    return Learner(network, compile=settings.compile)


def find_optimizer(model: nn.Module, settings: Settings, *, fused: bool) -> torch.optim.AdamW:
    """AdamW; norms, biases and embeddings, those of the output too, tied or not, do not decay."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    network: Any = next(m for m in model.modules() if isinstance(m, PreTrainedModel))
    embeddings |= {id(p) for p in network.get_output_embeddings().parameters()}
    decaying = [p for p in model.parameters() if p.ndim > 1 and id(p) not in embeddings]
    chosen = set(map(id, decaying))
    others = [p for p in model.parameters() if id(p) not in chosen]
    groups = [
        {"params": decaying, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=fused)


def compile_layers(network: Any) -> None:
    """Let ``torch.compile`` compile every layer on its own, which is quicker than the model as a whole."""
    layers = getattr(network.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"expected a model with layers to compile, got a {type(network).__name__} without")
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * len(layers))  # layers may differ in their policy
    inductor: Any = importlib.import_module("torch._inductor.config")
    if hasattr(inductor, "deterministic"):
        inductor.deterministic = True  # else kernels are chosen by timing them, so a run that goes on may have others
    for layer in layers:
        layer.compile()
