"""Training (Appendix A.4): seeds side by side, steps in compiled chunks, a checkpoint after every chunk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...progress import progress_bar as shared_bar
from ...provenance import continued
from .checkpoint import SIDECAR, Checkpoint, check_same, checked_seeds, load_checkpoint
from .probe import probe
from .protocol import Numbers, Protocol, numbers
from .step import Fixed, State, compiled_steps, initial_state

CHUNK = {"cpu": 250, "gpu": 5_000}
"""Steps between checkpoints unless another number is asked for, by platform: a chunk of ten heads takes some seconds,
which is how long Ctrl-C may take."""

RECORDS = 20
"""The history has at most so many entries after the first, evenly over the steps."""

UNROLL = {"cpu": 1, "gpu": 4}
"""Steps that are unrolled into one iteration of the compiled loop, by platform; one where a mechanism is in it, which
makes them slow to compile."""

Trained = Checkpoint
"""What training returns: the last checkpoint, whether it was written or not."""


class Progress(NamedTuple):
    """Where training stands after a chunk; loss and accuracy are means over the chunk and all members.

    Before the first chunk they are NaN, the speed is 0 and the time left infinite.
    """

    step: int
    steps: int
    loss: float
    accuracy: float
    steps_per_second: float
    seconds_left: float


def train(
    protocol: Protocol,
    seeds: Sequence[int],
    out: str | Path | None = None,
    *,
    chunk: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    provenance: dict[str, Any] | None = None,
) -> Trained:
    """Train one head for every seed, or go on where the checkpoint in ``out`` stands.

    A run is a pure function of the protocol, the seeds and ``chunk``: one that was interrupted and resumed on the same
    kind of device ends with the same bits as one that was not.

    Args:
      protocol: how to train.
      seeds: whole numbers from 0 to 2**32 - 1, each its own head and data.
      out: a directory for checkpoints; ``None`` writes none.
      chunk: steps between checkpoints, by default those of :data:`CHUNK` (a run that is resumed keeps the number it
        began with).
      progress: called before the first chunk and after every one.
      provenance: kept in the checkpoint; what made the one that this goes on from is added to it.
    """
    seeds, begun = checked_seeds(seeds), None if out is None else find_begun(protocol, seeds, out)
    if begun is not None:
        if begun.finished:
            return begun
        chunk = begun.chunk
    last = begun
    for (last,) in _run([protocol], seeds, begun, chunk, progress, provenance or {}):
        if out is not None:
            last.save(out)
    assert last is not None
    return last


def find_begun(protocol: Protocol, seeds: Sequence[int], out: str | Path, *, tensors: bool = True) -> Checkpoint | None:
    """The checkpoint in ``out`` from which to go on, if there is one; refused if it is not of this run.

    Without ``tensors`` it says where the run stands and no more, and another process may be training there.
    """
    seeds = checked_seeds(seeds)
    if not (Path(out) / SIDECAR).exists():
        return None
    begun = load_checkpoint(out, tensors=tensors)
    check_same(begun, protocol, seeds, out)
    return begun


def train_together(
    protocols: Sequence[Protocol],
    seeds: Sequence[int],
    *,
    chunk: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[Trained]:
    """Train one head for every protocol and seed in one compiled program, without checkpoints.

    For studies: the protocols may differ in everything but ``batch``, ``steps``, ``policy``, ``precision``,
    ``mechanism`` and ``task``.
    """
    if not protocols:
        raise ValueError("expected at least one protocol, got none")
    trained: list[Trained] = []
    for trained in _run(list(protocols), checked_seeds(seeds), None, chunk, progress, {}):  # noqa: B007
        pass
    return trained


def _run(
    protocols: list[Protocol],
    seeds: tuple[int, ...],
    begun: Checkpoint | None,
    chunk: int | None,
    progress: Callable[[Progress], None] | None,
    provenance: dict[str, Any],
) -> Iterator[list[Checkpoint]]:
    """A checkpoint of every protocol after every chunk. Members are protocol by protocol, seed by seed."""
    platform = jax.default_backend()
    if chunk is None:
        chunk = CHUNK.get(platform, CHUNK["gpu"])
    if chunk < 1:
        raise ValueError(f"expected chunk to be at least 1, got {chunk}")
    fixed, steps = Fixed.of(protocols), protocols[0].steps
    member_seeds = jnp.asarray(np.tile(np.asarray(seeds, np.uint32), len(protocols)))
    values = numbers_of(protocols, len(seeds))
    step, histories, before = 0 if begun is None else begun.step, [[] for _ in protocols], 0.0
    if progress is not None:
        progress(Progress(step, steps, math.nan, math.nan, 0.0, math.inf))
    if begun is None:
        state = initial_state(member_seeds, fixed)
        _record(histories, 0, len(seeds), {}, state, member_seeds, fixed)
    else:
        state, histories = begun.state, [list(begun.history)]
        before = begun.seconds
        provenance = continued(provenance, begun.provenance) if provenance else begun.provenance
    devices = devices_for(len(member_seeds))
    state, member_seeds, values = _placed((state, member_seeds, values), devices)
    began = time.perf_counter()
    first_step, settled = step, began
    while step < steps:
        length = min(chunk, steps - step)
        state, (loss, accuracy) = compiled_steps(platform)(
            state,
            member_seeds,
            values,
            jnp.int32(step),
            fixed=fixed,
            length=length,
            unroll=UNROLL.get(platform, 1) if fixed.mechanism is None else 1,
            one_by_one=platform == "cpu" and len(devices) == 1,
        )
        loss, accuracy = np.asarray(loss), np.asarray(accuracy)
        step += length
        if RECORDS * step // steps > RECORDS * (step - length) // steps:
            _record(histories, step, len(seeds), {"loss": loss, "accuracy": accuracy}, state, member_seeds, fixed)
        now = time.perf_counter()
        host = jax.tree.map(np.asarray, state)
        yield [
            Checkpoint(
                protocol=protocol,
                seeds=seeds,
                step=step,
                chunk=chunk,
                state=_members(host, i, len(seeds), averaged=protocol.average > 0),
                history=list(histories[i]),
                seconds=before + now - began,
                provenance=provenance,
            )
            for i, protocol in enumerate(protocols)
        ]
        if progress is not None:  # What is shown is saved.
            rate = (step - first_step) / (now - settled)
            progress(Progress(step, steps, float(loss.mean()), float(accuracy.mean()), rate, (steps - step) / rate))
        if settled == began and step < steps:  # The first chunk compiled; the rate is that of the others.
            first_step, settled = step, now


def numbers_of(protocols: list[Protocol], seeds: int) -> Numbers:
    """The numbers of every member, ``[members]`` each: protocol by protocol, seed by seed."""

    def stack(*values: float) -> jax.Array:
        return jnp.asarray(np.asarray(values, np.int32 if isinstance(values[0], int) else np.float32))

    return jax.tree.map(stack, *(numbers(protocol) for protocol in protocols for _ in range(seeds)))


def devices_for(members: int) -> list[Any]:
    """As many devices as share the members evenly."""
    devices = jax.devices()
    return devices[: max(k for k in range(1, len(devices) + 1) if members % k == 0)]


def _placed(tree: Any, devices: list[Any]) -> Any:
    """``tree`` spread over ``devices`` by member; as it is on one device."""
    if len(devices) == 1:
        return tree
    mesh = jax.sharding.Mesh(np.asarray(devices), ("members",))
    return jax.device_put(tree, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("members")))


def _members(state: State, index: int, seeds: int, *, averaged: bool) -> State:
    """The members of one protocol, copied so that no checkpoint holds on to all of them."""
    parts = (None if a is None else a[index * seeds : (index + 1) * seeds].copy() for a in state)
    theta, m, v, average = parts
    return State(theta, m, v, average if averaged else None)


def _record(
    histories: list[list[dict[str, Any]]],
    step: int,
    seeds: int,
    metrics: dict[str, np.ndarray],
    state: State,
    member_seeds: jax.Array,
    fixed: Fixed,
) -> None:
    """Add what Figure 9 and the training log need after a chunk: one number per seed."""
    head = {"task": fixed.task, "mechanism": fixed.mechanism}
    spread, bound = probe(state.theta, member_seeds, items=fixed.items, precision=fixed.precision, **head)
    columns = {name: np.asarray(values) for name, values in {**metrics, "spread": spread, "bound": bound}.items()}
    for i, history in enumerate(histories):
        part = slice(i * seeds, (i + 1) * seeds)
        history.append({"step": step, **{name: _plain(column[part]) for name, column in columns.items()}})


def _plain(values: np.ndarray) -> list[float | None]:
    """``values`` for JSON, which has no word for what a run that diverged gives."""
    return [float(value) if np.isfinite(value) else None for value in values]


@contextmanager
def progress_bar(what: str = "training") -> Iterator[Callable[[Progress], None]]:
    """A bar in the terminal with loss, accuracy, speed and time left; yields what ``progress`` takes."""
    with shared_bar(what) as show:
        yield lambda p: show(p.step, p.steps, _now(p))


def _now(p: Progress) -> str:
    if p.steps_per_second == 0:
        return "compiling"
    return f"loss {p.loss:.4f}, {p.accuracy:.2%} right, {p.steps_per_second:,.0f}/s"
