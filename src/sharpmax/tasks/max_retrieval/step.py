"""The compiled part of training: many steps of many members (a protocol and a seed each) in one call.

A step is a pure function of (protocol, seed, step number): data come from the training stream of the seed with the step
folded in. Random numbers and schedules are made for a block of steps at once, and all parameters of a member lie in one
flat vector, so that a step is a few matrix products and one update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from ...core.policies import Policy
from ...mechanisms import Mechanism
from .attention import Rule
from .data import CLASSES, Batch, Stream, Task, sample, stream_key
from .layout import Layout, layout
from .model import Params, forward
from .protocol import Numbers, Protocol, learning_rate

BLOCK = 100
"""Steps whose data are made at once (fewer where the number of steps is not a multiple)."""

MANY_STEPS = 1000
"""From so many steps on, and where no mechanism makes it slow, compiling a step for several paddings is worth it."""


class State(NamedTuple):
    """Flat parameters, Adam's moments and the moving average (``None`` without one): ``[members, D]`` each."""

    theta: Any
    m: Any
    v: Any
    average: Any


class Fixed(NamedTuple):
    """What is the same for all members that train together, and compiled into the step."""

    batch: int
    steps: int
    smallest: int
    items: int
    policy: Policy
    precision: str
    clipped: bool
    focused: bool
    annealed: bool
    supervised: bool
    averaged: bool
    mechanism: Mechanism | None
    task: Task

    @property
    def rule(self) -> Rule:
        """What turns logits into weights."""
        return self.policy if self.mechanism is None else self.mechanism

    @property
    def layout(self) -> Layout:
        """The parameters of a member."""
        return layout(self.task, self.mechanism)

    @classmethod
    def of(cls, protocols: list[Protocol]) -> Self:
        """What ``protocols`` share, refused where they do not."""
        first = protocols[0]
        for name in ("batch", "steps", "policy", "precision", "mechanism", "task"):
            if any(getattr(p, name) != getattr(first, name) for p in protocols):
                raise ValueError(f"protocols that train together must have one {name}; train these one after the other")
        return cls(
            batch=first.batch,
            steps=first.steps,
            smallest=min(p.sizes[0] for p in protocols),
            items=max(p.sizes[1] for p in protocols),
            policy=first.policy,
            precision=first.precision,
            clipped=any(p.clip is not None for p in protocols),
            focused=any(p.focus > 0 for p in protocols),
            annealed=any(p.anneal != (1.0, 1.0) for p in protocols),
            supervised=any(p.attention_loss > 0 for p in protocols),
            averaged=any(p.average > 0 for p in protocols),
            mechanism=first.mechanism,
            task=first.task,
        )


class _Controls(NamedTuple):
    """What schedules say at one step."""

    rate: jax.Array  # learning rate
    first: jax.Array  # Adam's bias corrections
    second: jax.Array
    factor: jax.Array  # of beta
    average: jax.Array


@partial(jax.jit, static_argnames="fixed")
def initial_state(seeds: jax.Array, fixed: Fixed) -> State:
    """The state before the first step, for every seed."""
    theta = jax.vmap(lambda seed: fixed.layout.ravel(fixed.layout.init(stream_key(seed, Stream.INITIAL))))(seeds)
    return State(theta, jnp.zeros_like(theta), jnp.zeros_like(theta), theta if fixed.averaged else None)


COMPILER_OPTIONS: dict[str, dict[str, bool | str]] = {
    "gpu": {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}
}
"""By platform: what makes a resumed run equal an uninterrupted one to the bit. Kernels that are chosen by timing them
may be others in the next process, and timing them takes most of a minute."""


@cache
def compiled_steps(platform: str) -> Callable[..., tuple[State, tuple[jax.Array, jax.Array]]]:
    """:func:`run_steps`, compiled for a platform."""
    static = ("fixed", "length", "unroll", "one_by_one")
    return jax.jit(run_steps, static_argnames=static, compiler_options=COMPILER_OPTIONS.get(platform))


def run_steps(
    state: State,
    seeds: jax.Array,
    numbers: Numbers,
    start: jax.Array,
    *,
    fixed: Fixed,
    length: int,
    unroll: int = 1,
    one_by_one: bool = False,
) -> tuple[State, tuple[jax.Array, jax.Array]]:
    """``length`` steps of every member from step ``start``; the state, and mean loss and accuracy ``[members]``.

    Members run side by side, all of them padded to the largest size; or one by one, each step padded less, which is
    faster where work counts and not the number of operations.
    """

    def member(args: tuple[State, jax.Array, Numbers]) -> tuple[State, tuple[jax.Array, jax.Array]]:
        several = one_by_one and fixed.mechanism is None and fixed.steps >= MANY_STEPS
        paddings = tuple(range(fixed.items, fixed.smallest - 1, -4))[::-1] if several else (fixed.items,)
        return _member_steps(*args, start=start, fixed=fixed, length=length, unroll=unroll, paddings=paddings)

    members = (state, seeds, numbers)
    return jax.lax.map(member, members) if one_by_one else jax.vmap(member)(members)


def _member_steps(
    state: State,
    seed: jax.Array,
    numbers: Numbers,
    *,
    start: jax.Array,
    fixed: Fixed,
    length: int,
    unroll: int,
    paddings: tuple[int, ...],
) -> tuple[State, tuple[jax.Array, jax.Array]]:
    block = math.gcd(length, BLOCK)
    step = partial(_step, numbers=numbers, fixed=fixed, paddings=paddings)
    key = stream_key(seed, Stream.TRAINING)

    def run_block(state: State, first: jax.Array) -> tuple[State, tuple[jax.Array, jax.Array]]:
        steps = first + jnp.arange(block)
        data = jax.vmap(lambda t: (_batch(key, numbers, fixed, t), _controls(numbers, fixed, t)))(steps)
        state, metrics = jax.lax.scan(lambda state, xs: step(state, *xs), state, data, unroll=math.gcd(block, unroll))
        return state, jax.tree.map(jnp.mean, metrics)

    state, metrics = jax.lax.scan(run_block, state, start + block * jnp.arange(length // block))
    return state, jax.tree.map(jnp.mean, metrics)


def _done(fixed: Fixed, t: jax.Array) -> jax.Array:
    """The share of training that is done: 0 at the first step, 1 at the last."""
    return t.astype(jnp.float32) / max(fixed.steps - 1, 1)


def _batch(key: jax.Array, numbers: Numbers, fixed: Fixed, t: jax.Array) -> Batch:
    """The sets of step ``t``, padded to the largest size. The key's first ``batch`` children are for the sets."""
    key, done = jax.random.fold_in(key, t), _done(fixed, t)
    coin, where = jax.random.uniform(jax.random.fold_in(key, fixed.batch), (2,))
    count = numbers.largest - numbers.smallest + 1
    size = jnp.minimum(numbers.smallest + jnp.floor(where * count).astype(jnp.int32), numbers.largest)
    size = jnp.where(coin < numbers.emphasis * done, numbers.largest, size)
    batch = sample(key, fixed.batch, fixed.items, size, fixed.task)
    if fixed.focused:
        depth = jax.random.uniform(jax.random.fold_in(key, fixed.batch + 1), (fixed.batch, 1))
        width = jnp.exp(-numbers.focus * done * depth)
        batch = batch._replace(priority=1 - width * (1 - batch.priority))
    return batch


def _controls(numbers: Numbers, fixed: Fixed, t: jax.Array) -> _Controls:
    taken = (t + 1).astype(jnp.float32)
    low, high = (jnp.log(factor) for factor in numbers.anneal)
    return _Controls(
        rate=learning_rate(numbers, t, fixed.steps),
        first=1 / (1 - numbers.b1**taken),
        second=1 / (1 - numbers.b2**taken),
        factor=jnp.exp(low + _done(fixed, t) * (high - low)),
        average=jnp.minimum(numbers.average, taken / (taken + 10)),
    )


def _loss(
    params: Params, batch: Batch, factor: jax.Array, weight: jax.Array, fixed: Fixed
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """What is minimised apart from L2; and of it the cross-entropy, and the accuracy."""
    annealed = (lambda beta: beta * factor) if fixed.annealed else (lambda beta: beta)
    scores, e, beta = forward(params, batch, fixed.rule, fixed.precision, beta=annealed)
    right = jnp.arange(CLASSES) == batch.label[..., None]
    entropy = jnp.mean(-jnp.sum(jnp.where(right, jax.nn.log_softmax(scores), 0.0), axis=-1))
    accuracy = jnp.mean((jnp.argmax(scores, axis=-1) == batch.label).astype(jnp.float32))
    total = entropy
    if fixed.supervised:
        assert batch.mask is not None
        if isinstance(beta, jax.Array):  # Hard attention has none that is finite.
            beta = jnp.where(jnp.isinf(beta), 1.0, beta)
        scaled = jnp.where(batch.mask, jnp.expand_dims(jnp.asarray(beta), -1) * e, -jnp.inf)
        wanted = jnp.arange(e.shape[-1]) == batch.target[..., None]
        at_target = jnp.sum(jnp.where(wanted, scaled, 0.0), axis=-1)
        total = total + weight * jnp.mean(jax.nn.logsumexp(scaled, axis=-1) - at_target)
    return total, (entropy, accuracy)


def _gradients(
    params: Params, batch: Batch, factor: jax.Array, weight: jax.Array, fixed: Fixed, paddings: tuple[int, ...]
) -> tuple[Params, tuple[jax.Array, jax.Array]]:
    """The gradient and metrics of :func:`_loss`, the sets padded to the first of ``paddings`` that holds them."""

    def padded_to(items: int) -> Callable[[Params, Batch], tuple[Params, tuple[jax.Array, jax.Array]]]:
        def gradients(params: Params, batch: Batch) -> tuple[Params, tuple[jax.Array, jax.Array]]:
            cut = {name: getattr(batch, name)[..., :items] for name in ("priority", "category", "mask")}
            return jax.grad(_loss, has_aux=True)(params, batch._replace(**cut), factor, weight, fixed)

        return gradients

    assert batch.mask is not None
    which = jnp.searchsorted(jnp.asarray(paddings), jnp.sum(batch.mask))
    return jax.lax.switch(which, [padded_to(items) for items in paddings], params, batch)


def _step(
    state: State,
    batch: Batch,
    controls: _Controls,
    *,
    numbers: Numbers,
    fixed: Fixed,
    paddings: tuple[int, ...],
) -> tuple[State, tuple[jax.Array, jax.Array]]:
    """One step of Adam (Kingma & Ba, 2015) or AdamW (Loshchilov & Hutter, 2019) of one member."""
    theta, head = state.theta, fixed.layout
    params = head.unravel(theta)
    gradients, metrics = _gradients(params, batch, controls.factor, numbers.attention_loss, fixed, paddings)
    g = head.ravel(gradients) + _by_kind(head, numbers.l2_kernels, numbers.l2_biases) * theta
    if fixed.clipped:
        g = g * jnp.minimum(1.0, numbers.clip / jnp.maximum(jnp.linalg.norm(g), 1e-30))
    m = numbers.b1 * state.m + (1 - numbers.b1) * g
    v = numbers.b2 * state.v + (1 - numbers.b2) * g * g
    update = m * controls.first / (jnp.sqrt(v * controls.second) + numbers.epsilon)
    decay = _by_kind(head, numbers.decoupled_kernels, numbers.decoupled_biases)
    theta = theta - controls.rate * (update + decay * theta)
    average = state.average
    if fixed.averaged:
        average = controls.average * average + (1 - controls.average) * theta
    return State(theta, m, v, average), metrics


def _by_kind(head: Layout, kernels: Any, biases: Any) -> jax.Array:
    """One number for every entry of the flat vector: that of kernels, that of biases, 0 for what a mechanism learns."""
    strength = jnp.where(head.is_kernel, kernels, biases)
    return jnp.where(head.is_learned, 0.0, strength) if head.is_learned.any() else strength
