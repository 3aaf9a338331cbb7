"""The logit spread of heads on fixed sets, and the bound of Proposition 3.1 on it: what Figure 9 shows."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ...mechanisms import Mechanism
from .data import Stream, Task, sample, stream_key
from .layers import is_key
from .layout import Layout, layout
from .model import ATTENTION, augmented, bound, spread_and_vectors


def probe(
    theta: jax.Array,
    seeds: jax.Array,
    *,
    items: int,
    precision: str,
    task: Task = "max",
    mechanism: Mechanism | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Mean logit spread and mean bound of Proposition 3.1 on 128 fixed sets of every member (Figure 9).

    Logits are the scaled products of (the first) queries and keys, whatever a mechanism makes of them. Singular values
    are NumPy's: those of small matrices take an accelerator far longer. The bound of a member that diverged is NaN.
    """
    head = layout(task, mechanism)
    found = _probe(theta, seeds, items=items, precision=precision, task=task, head=head)
    spread, x, y = (np.asarray(a) for a in found)
    host = np.asarray(theta)
    finite = np.isfinite(host).all(axis=-1)
    layer = head.unravel(host[finite])[ATTENTION]
    bounds = np.full_like(spread, np.nan)
    with np.errstate(over="ignore", invalid="ignore"):
        bounds[:, finite] = bound(augmented(layer["query"]), augmented(layer["key"]), x[:, finite], y[:, finite])
        return spread.mean(axis=0), bounds.mean(axis=0)


@partial(jax.jit, static_argnames=("items", "precision", "task", "head"))
def _probe(
    theta: jax.Array, seeds: jax.Array, *, items: int, precision: str, task: Task, head: Layout
) -> tuple[jax.Array, ...]:
    """Spread ``[sets, members]``, longest item ``[sets, members, 1, 129]`` and query ``[sets, members, 129]``."""

    def member(theta: jax.Array, seed: jax.Array) -> tuple[jax.Array, ...]:
        batch = sample(stream_key(seed, Stream.PROBE), 128, items, task=task)
        if is_key(batch.query):
            batch = batch._replace(query=batch.query[:, 0])
        spread, x, y = spread_and_vectors(head.unravel(theta), batch, precision)
        longest = jnp.argmax(jnp.linalg.norm(x, axis=-1), axis=-1)
        return spread, jnp.take_along_axis(x, longest[:, None, None], axis=-2), y

    return jax.vmap(member, out_axes=1)(theta, seeds)
