"""Protocols: JSON and bad input."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharpmax
from sharpmax.tasks.max_retrieval.protocol import PRESETS, Protocol, learning_rate, load_protocol, numbers

EVERYTHING = Protocol(
    learning_rate=2e-3,
    schedule="cosine",
    warmup=10,
    l2=1e-4,
    l2_kind="decoupled",
    l2_on="kernels",
    clip=1.0,
    steps=200,
    sizes=(4, 12),
    emphasis=0.5,
    focus=2.0,
    policy=sharpmax.detached(sharpmax.PAPER),
    anneal=(1.0, 3.0),
    attention_loss=0.1,
    average=0.999,
    precision="high",
)


@pytest.mark.parametrize("protocol", [*PRESETS.values(), EVERYTHING])
def test_a_saved_protocol_is_the_same(protocol: Protocol, tmp_path: Path) -> None:
    protocol.save(tmp_path / "p.json")
    assert load_protocol(tmp_path / "p.json") == protocol
    assert hash(protocol) == hash(load_protocol(tmp_path / "p.json"))


def test_presets_have_names() -> None:
    assert load_protocol("paper") is PRESETS["paper"]
    assert load_protocol("sharp") is PRESETS["sharp"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": float("nan")}, "learning_rate to be a finite number"),
        ({"l2": -1}, "l2 to be a finite number of at least 0"),
        ({"b1": 1.0}, "b1 to be below 1"),
        ({"emphasis": 1.5}, "emphasis to be at most 1"),
        ({"schedule": "step"}, "schedule to be one of constant, linear, cosine"),
        ({"steps": 0}, "steps to be a whole number of at least 1"),
        ({"steps": 2**31}, "steps to be at most 2,147,483,647, got 2,147,483,648"),
        ({"warmup": 2**31}, "warmup to be at most 2,147,483,647"),
        ({"sizes": (5, 2**31)}, "the largest size to be at most 2,147,483,647"),
        ({"anneal": (1.0, 1e308)}, r"anneal to be at most 1e\+38, got 1e\+308"),
        ({"l2": 1e39}, r"l2 to be at most 1e\+38"),
        ({"clip": 1e39}, r"clip to be at most 1e\+38"),
        ({"batch": 1.5}, "batch to be a whole number"),
        ({"sizes": (5,)}, "sizes to be two numbers"),
        ({"sizes": (16, 5)}, "the largest size to be a whole number of at least 16"),
        ({"anneal": (1.0, 0.0)}, "anneal to be a finite number"),
        ({"clip": -1.0}, "clip to be a finite number"),
        ({"policy": 3}, "policy to be a sharpmax policy"),
    ],
)
def test_bad_fields_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Protocol(), **change)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for name in ("papper", "", tmp_path):
        with pytest.raises(ValueError, match="one of paper, sharp, or a JSON file"):
            load_protocol(name)
    path.write_text("{")
    with pytest.raises(ValueError, match="is not a protocol file"):
        load_protocol(path)
    path.write_text('{"steps": 3}')
    with pytest.raises(ValueError, match="expected a protocol with schema"):
        load_protocol(path)
    path.write_text(json.dumps({**Protocol().to_dict(), "momentum": 1}))
    with pytest.raises(ValueError, match="a protocol has no field momentum"):
        load_protocol(path)


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        (Protocol(steps=100), optax.constant_schedule(1e-3)),
        (Protocol(steps=100, schedule="linear"), optax.linear_schedule(1e-3, 0, 100)),
        (Protocol(steps=100, schedule="cosine"), optax.cosine_decay_schedule(1e-3, 100)),
    ],
)
def test_schedules_are_those_of_optax(protocol: Protocol, expected: optax.Schedule) -> None:
    steps = np.arange(100)
    rates = learning_rate(numbers(protocol), jnp.asarray(steps), 100)
    np.testing.assert_allclose(rates, np.asarray([expected(t) for t in steps]), rtol=1e-5, atol=1e-9)


def test_warmup_rises_to_the_learning_rate() -> None:
    rates = learning_rate(numbers(Protocol(steps=100, warmup=10)), jnp.arange(20), 100)
    np.testing.assert_allclose(rates, 1e-3 * np.minimum(1, np.arange(1, 21) / 10), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "on", "expected"),
    [
        ("sum", "all", (0.2, 0.2, 0.0, 0.0)),
        ("half", "kernels", (0.1, 0.0, 0.0, 0.0)),
        ("decoupled", "all", (0.0, 0.0, 0.1, 0.1)),
        ("decoupled", "kernels", (0.0, 0.0, 0.1, 0.0)),
    ],
)
def test_l2_is_a_gradient_or_a_decay(kind: Any, on: Any, expected: tuple[float, ...]) -> None:
    values = numbers(Protocol(l2=0.1, l2_kind=kind, l2_on=on))
    assert (values.l2_kernels, values.l2_biases, values.decoupled_kernels, values.decoupled_biases) == expected
