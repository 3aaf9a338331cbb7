"""Training max-retrieval heads against the paper's listing, and how long the whole of Table 1 takes.

    python -m benchmarks.max_retrieval [--steps 100000]

The peer is the listing of Appendix A.3 as printed, with optax's Adam and a jitted step in a Python loop, one head, at
JAX's default matmul precision (ours is "highest"). Every size needs a compilation of its own: it draws from four of the
twelve, compiled before the clock starts. Both sides draw their sets inside the compiled step and minimise the same
loss. They run in turn, round after round; a seed-step is one step of one head.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.listing import Model, features
from sharpmax.core.files import write_text
from sharpmax.paper import table1
from sharpmax.paper.max_retrieval import SHIPPED, find_heads
from sharpmax.provenance import provenance
from sharpmax.tasks.max_retrieval import PRESETS, Protocol, train
from sharpmax.tasks.max_retrieval.data import Stream, sample, stream_key
from sharpmax.tasks.max_retrieval.step import Fixed, compiled_steps, initial_state
from sharpmax.tasks.max_retrieval.training import UNROLL, numbers_of

PROTOCOL = PRESETS["paper"]
SEEDS = 10
LISTING_SIZES = (5, 8, 12, 16)


class Listing:
    """One head trained as the paper's listing suggests."""

    def __init__(self, protocol: Protocol, seed: int = 0) -> None:
        model, self.optimizer = Model(), optax.adam(protocol.learning_rate)
        self.generator = np.random.default_rng(seed)
        self.key = stream_key(seed, Stream.TRAINING)
        batch = sample(self.key, protocol.batch, LISTING_SIZES[-1])
        self.params = model.init(jax.random.key(seed), *features(batch))
        self.state = self.optimizer.init(self.params)

        def loss(params: Any, key: jax.Array, n: int) -> jax.Array:
            batch = sample(key, protocol.batch, n)
            scores: Any = model.apply(params, *features(batch))
            entropy = optax.softmax_cross_entropy_with_integer_labels(scores, batch.label).mean()
            kernels = [leaf for path, leaf in jax.tree.leaves_with_path(params) if path[-1].key == "kernel"]
            return entropy + 0.5 * protocol.l2 * sum(jnp.sum(w * w) for w in kernels)

        @functools.partial(jax.jit, static_argnames="n")
        def step(params: Any, state: Any, key: jax.Array, n: int) -> tuple[Any, Any, jax.Array, jax.Array]:
            key, now = jax.random.split(key)
            value, gradient = jax.value_and_grad(loss)(params, now, n)
            update, state = self.optimizer.update(gradient, state, params)
            return optax.apply_updates(params, update), state, key, value

        self.step = step
        for n in LISTING_SIZES:
            self._step(n)

    def _step(self, n: int) -> jax.Array:
        self.params, self.state, self.key, value = self.step(self.params, self.state, self.key, n)
        return value

    def run(self, steps: int) -> float:
        """``steps`` steps of random sizes; the last loss."""
        return float([self._step(int(n)) for n in self.generator.choice(LISTING_SIZES, steps)][-1])


def ours(protocol: Protocol, seeds: int, steps: int) -> Callable[[], float]:
    """A compiled chunk of ``steps`` steps of ``seeds`` heads, ready to run."""
    platform = jax.default_backend()
    fixed, member_seeds = Fixed.of([protocol]), jnp.arange(seeds, dtype=jnp.uint32)
    state, values = initial_state(member_seeds, fixed), numbers_of([protocol], seeds)
    options = {"fixed": fixed, "length": steps, "unroll": UNROLL.get(platform, 1), "one_by_one": platform == "cpu"}

    def run() -> float:
        _, (loss, _) = compiled_steps(platform)(state, member_seeds, values, jnp.int32(0), **options)
        return float(loss.mean())

    return run


def seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def compare(steps: int, rounds: int) -> dict[str, Any]:
    """Seed-steps per second of the listing and of ours, with one head and with ten."""
    listing = Listing(PROTOCOL)
    calls: dict[str, tuple[Callable[[], float], int]] = {"listing": (functools.partial(listing.run, steps), steps)}
    for seeds in (1, SEEDS):
        calls[f"sharpmax_{seeds}"] = (ours(PROTOCOL, seeds, steps), steps * seeds)
    for call, _ in calls.values():
        call()
    samples = [{name: count / seconds(call) for name, (call, count) in calls.items()} for _ in range(rounds)]
    rates = {name: statistics.median(s[name] for s in samples) for name in calls}
    return {
        "steps": steps,
        "rounds": rounds,
        "seed_steps_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "ratio_to_listing": {
            name: round(rate / rates["listing"], 2) for name, rate in rates.items() if name != "listing"
        },
    }


def whole(steps: int, sets: int | None) -> dict[str, Any]:
    """Seconds for ten heads trained, and for Table 1 of the shipped ones, with and without compilation.

    Without it, training goes by the rate after the first chunk, and Table 1 is made a second time.
    """
    protocol = dataclasses.replace(PROTOCOL, steps=steps)
    count = table1.SETS.get(jax.default_backend(), 64) if sets is None else sets
    heads = find_heads("paper", SHIPPED / "paper")
    rates: list[float] = []
    training = seconds(lambda: train(protocol, range(SEEDS), progress=lambda p: rates.append(p.steps_per_second)))
    table = [seconds(lambda: table1.data(heads, table1.TABLE1.sizes, count)) for _ in range(2)]
    times = {
        "with_compilation": {"training": training, "table1": table[0]},
        "without_compilation": {"training": steps / rates[-1], "table1": table[1]},
    }
    return {
        "steps": steps,
        "seeds": SEEDS,
        "sets": count,
        "sizes": list(table1.TABLE1.sizes),
        **{name: {key: round(value, 1) for key, value in by.items()} for name, by in times.items()},
    }


def main() -> None:
    warnings.filterwarnings("ignore", "The inputs_kv arg", DeprecationWarning)  # the listing is as printed
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare-steps", type=int, default=1000, help="steps of one round of the comparison")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="also time a whole training of so many steps and Table 1")
    parser.add_argument("--sets", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None, help="default: in benchmarks/results")
    arguments = parser.parse_args()
    platform = jax.default_backend()
    content: dict[str, Any] = {"protocol": "paper", "compare": compare(arguments.compare_steps, arguments.rounds)}
    print(json.dumps(content["compare"], indent=2), flush=True)
    if arguments.steps:
        content["whole"] = whole(arguments.steps, arguments.sets)
        print(json.dumps(content["whole"], indent=2), flush=True)
    content["provenance"] = provenance(["python", "-m", "benchmarks.max_retrieval", *sys.argv[1:]])
    default = Path(__file__).parent / "results" / f"max_retrieval_{'cuda' if platform == 'gpu' else platform}.json"
    write_text(arguments.out or default, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
