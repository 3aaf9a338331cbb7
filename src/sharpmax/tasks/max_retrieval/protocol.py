"""How a head is trained: a small, frozen configuration that is saved as JSON.

Appendix A.4 leaves things open (how L2 enters, whether the learning rate decays, matmul precision): each is a field.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import jax
import jax.numpy as jnp

from ...core.files import write_text
from ...core.policies import Constant, Policy, policy_from_dict
from ...core.policies.base import check_number, set_field
from ...mechanisms import Mechanism, Temperature, mechanism_from_dict
from .attention import Rule, simplest
from .data import Task

SCHEMA = "sharpmax.max-retrieval-protocol/1"

Schedule = Literal["constant", "linear", "cosine"]
L2Kind = Literal["sum", "half", "decoupled"]
L2On = Literal["kernels", "all"]
Precision = Literal["default", "high", "highest"]


def _pair(value: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"expected {what} to be two numbers, got {value!r}")
    return value[0], value[1]


LARGEST_WHOLE = 2**31 - 1
"""Whole numbers are int32 to the compiled step."""

LARGEST_REAL = 1e38
"""All others are float32, and so is twice each."""


def check_whole(value: Any, what: str, least: int, most: int = LARGEST_WHOLE) -> int:
    """``value``; refused unless it is a whole number from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"expected {what} to be a whole number of at least {least}, got {value!r}")
    if value > most:
        raise ValueError(f"expected {what} to be at most {most:,}, got {value:,}")
    return value


def _check_real(value: Any, what: str, least: float) -> float:
    number = check_number(value, what, least=least)
    if number > LARGEST_REAL:
        raise ValueError(f"expected {what} to be at most {LARGEST_REAL:g}, got {number:g}")
    return number


@dataclass(frozen=True)
class Protocol:
    """One way to train the network of Appendix A.3.

    Args:
      learning_rate: that of Adam after warm-up.
      schedule: how it goes on: constant, or decayed to 0 at the last step, linearly or along a cosine.
      warmup: over how many first steps it rises from 0.
      b1, b2, epsilon: Adam's decay rates, and what it adds to the root.
      l2: strength lambda of the L2 regularisation.
      l2_kind: ``"sum"`` adds ``lambda * sum w^2`` to the loss, ``"half"`` half of it; ``"decoupled"`` is AdamW.
      l2_on: the parameters it is on: kernels, or biases too.
      clip: the largest norm of a gradient; larger ones are scaled down. ``None`` does nothing.
      batch: sets a step.
      steps: gradient steps.
      sizes: smallest and largest set; the sets of a batch have one size, drawn uniformly.
      emphasis: the share of batches that have the largest size regardless; it rises from 0 to this at the last step.
      focus: by how many powers of e the priorities of a set are drawn together towards 1, at most: the range shrinks to
        ``exp(-u)``, with ``u`` uniform up to ``focus`` times the share of steps done. 0 is the sampler of A.2.
      policy: the inverse temperature that training uses; ``Constant(1)`` is softmax.
      mechanism: what turns logits into weights in the place of a softmax with that temperature; what it learns is part
        of the head. ``None`` is that softmax, and a ``Temperature`` whose policy is not learned becomes ``policy``.
      task: what is asked for, the class of the ``"max"`` or ``"second"`` largest item, or ``"recall"`` of an item's.
      anneal: what beta is multiplied by at the first and at the last step, geometric in between.
      attention_loss: weight of ``-log a_target``, the cross-entropy of the attention itself. For every mechanism, ``a``
        is here the softmax of the logits (of the first map, if there are two), times beta where it has a finite one.
      average: decay rate of the moving average of the parameters that is evaluated in their place; 0 is none.
      precision: of matrix products, as JAX names it; only ``"highest"`` is float32 on every accelerator.
    """

    learning_rate: float = 1e-3
    schedule: Schedule = "constant"
    warmup: int = 0
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8
    l2: float = 0.0
    l2_kind: L2Kind = "sum"
    l2_on: L2On = "all"
    clip: float | None = None
    batch: int = 128
    steps: int = 100_000
    sizes: tuple[int, int] = (5, 16)
    emphasis: float = 0.0
    focus: float = 0.0
    policy: Policy = field(default_factory=Constant)
    anneal: tuple[float, float] = (1.0, 1.0)
    attention_loss: float = 0.0
    average: float = 0.0
    precision: Precision = "highest"
    mechanism: Mechanism | None = None
    task: Task = "max"

    def __post_init__(self) -> None:
        for name in ("learning_rate", "epsilon", "l2", "focus", "attention_loss"):
            set_field(self, name, _check_real(getattr(self, name), name, 0))
        for name in ("b1", "b2", "average", "emphasis"):
            value = check_number(getattr(self, name), name, least=0)
            if value > 1 or (value == 1 and name != "emphasis"):
                raise ValueError(f"expected {name} to be {'at most' if name == 'emphasis' else 'below'} 1, got {value}")
            set_field(self, name, value)
        for name, least in (("batch", 1), ("steps", 1), ("warmup", 0)):
            check_whole(getattr(self, name), name, least)
        choices = {"schedule": Schedule, "l2_kind": L2Kind, "l2_on": L2On, "precision": Precision, "task": Task}
        for name, kinds in choices.items():
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(
                    f"expected {name} to be one of {', '.join(get_args(kinds))}, got {getattr(self, name)!r}"
                )
        if self.clip is not None:
            set_field(self, "clip", _check_real(self.clip, "clip", 0))
        smallest, largest = _pair(self.sizes, "sizes")
        check_whole(smallest, "the smallest size", 1)
        check_whole(largest, "the largest size", smallest)
        set_field(self, "sizes", (smallest, largest))
        set_field(self, "anneal", tuple(_check_real(v, "anneal", 1e-9) for v in _pair(self.anneal, "anneal")))
        if not callable(self.policy):
            raise ValueError(f"expected policy to be a sharpmax policy, got {self.policy!r}")
        self._check_mechanism()
        if self.task == "second" and smallest < 2:
            raise ValueError(f"expected sets of at least 2 items for the second largest, got sizes from {smallest}")
        if self.task == "recall" and self.focus > 0:
            raise ValueError("focus draws priorities together, which items of recall do not have; leave it out")

    def _check_mechanism(self) -> None:
        if self.mechanism is None:
            return
        if not isinstance(self.mechanism, Mechanism):
            raise ValueError(f"expected mechanism to be one of sharpmax.mechanisms, got {self.mechanism!r}")
        if self.policy != Constant():
            raise ValueError("expected a policy or a mechanism, got both; a mechanism without a temperature has none")
        if self.mechanism.heads not in (None, 1):
            raise ValueError(f"expected a mechanism for one head, got one for {self.mechanism.heads}")
        simple = simplest(self.mechanism)
        if not isinstance(simple, Mechanism):
            set_field(self, "policy", simple)
            set_field(self, "mechanism", None)
        elif self.anneal != (1.0, 1.0) and not isinstance(simple, Temperature):
            raise ValueError(f"anneal changes beta, which {simple.about.title} does not have; leave it out")

    @property
    def rule(self) -> Rule:
        """What turns logits into weights: the mechanism, or the policy where there is none."""
        return self.policy if self.mechanism is None else self.mechanism

    def to_dict(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_dict` makes the same protocol."""
        content = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if not hasattr(self.policy, "to_dict"):
            raise TypeError(f"a {type(self.policy).__name__} cannot be saved as JSON; use a policy of sharpmax")
        return {
            "schema": SCHEMA,
            **content,
            "sizes": list(self.sizes),
            "anneal": list(self.anneal),
            "policy": self.policy.to_dict(),  # pyright: ignore[reportAttributeAccessIssue]
            "mechanism": None if self.mechanism is None else self.mechanism.to_dict(),
        }

    @classmethod
    def from_dict(cls, content: Any) -> Self:
        """The protocol that :meth:`to_dict` described; fields left out have their defaults."""
        schema = content.get("schema") if isinstance(content, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"expected a protocol with schema {SCHEMA!r}, got {schema!r}")
        known = [f.name for f in dataclasses.fields(cls)]
        given = {key: value for key, value in content.items() if key != "schema"}
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"a protocol has no field {', '.join(unknown)}; its fields are {', '.join(known)}")
        if "policy" in given:
            given["policy"] = policy_from_dict(given["policy"])
        if given.get("mechanism") is not None:
            given["mechanism"] = mechanism_from_dict(given["mechanism"])
        return cls(**given)

    def save(self, path: str | Path) -> None:
        """Write the protocol as JSON; the file is replaced whole or not at all."""
        write_text(path, json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")


PRESETS = {
    "paper": Protocol(l2=1e-3, l2_kind="half", l2_on="kernels"),
    "sharp": Protocol(learning_rate=3e-3, schedule="cosine", emphasis=1.0, attention_loss=1.0),
}
"""``paper`` is the reading of Appendix A.4 closest to Table 1; ``sharp`` the recipe that goes furthest beyond it."""


def load_protocol(name: str | Path) -> Protocol:
    """A preset by name, or a protocol from a JSON file. Nothing in the file is executed."""
    if str(name) in PRESETS:
        return PRESETS[str(name)]
    try:
        content = json.loads(Path(name).read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        known = ", ".join(PRESETS)
        raise ValueError(
            f"expected a protocol to be one of {known}, or a JSON file, got {str(name)!r}, which is no file"
        ) from None
    except ValueError as error:
        raise ValueError(f"{name} is not a protocol file: {error}") from None
    return Protocol.from_dict(content)


class Numbers(NamedTuple):
    """The fields of a protocol that are plain numbers: arrays to a compiled step, so that protocols train together."""

    learning_rate: Any
    decay: Any  # 0 constant, 1 linear, 2 cosine
    warmup: Any
    b1: Any
    b2: Any
    epsilon: Any
    l2_kernels: Any  # the gradient of the L2 term is this times the parameter
    l2_biases: Any
    decoupled_kernels: Any
    decoupled_biases: Any
    clip: Any
    smallest: Any
    largest: Any
    emphasis: Any
    focus: Any
    anneal: Any
    attention_loss: Any
    average: Any


def numbers(protocol: Protocol) -> Numbers:
    """The :class:`Numbers` of ``protocol``."""
    in_loss = {"sum": 2 * protocol.l2, "half": protocol.l2, "decoupled": 0.0}[protocol.l2_kind]
    decoupled = protocol.l2 if protocol.l2_kind == "decoupled" else 0.0
    on_biases = float(protocol.l2_on == "all")
    return Numbers(
        learning_rate=protocol.learning_rate,
        decay=get_args(Schedule).index(protocol.schedule),
        warmup=protocol.warmup,
        b1=protocol.b1,
        b2=protocol.b2,
        epsilon=protocol.epsilon,
        l2_kernels=in_loss,
        l2_biases=in_loss * on_biases,
        decoupled_kernels=decoupled,
        decoupled_biases=decoupled * on_biases,
        clip=float("inf") if protocol.clip is None else protocol.clip,
        smallest=protocol.sizes[0],
        largest=protocol.sizes[1],
        emphasis=protocol.emphasis,
        focus=protocol.focus,
        anneal=protocol.anneal,
        attention_loss=protocol.attention_loss,
        average=protocol.average,
    )


def learning_rate(numbers: Numbers, step: jax.Array, steps: int) -> jax.Array:
    """The learning rate of a step (from 0), its schedule reaching 0 after the last one."""
    t, warmup = step.astype(jnp.float32), numbers.warmup
    rise = jnp.where(t < warmup, (t + 1) / jnp.maximum(warmup, 1), 1.0)
    done = jnp.clip((t - warmup) / jnp.maximum(steps - warmup, 1), 0.0, 1.0)
    fall = jnp.stack([jnp.ones_like(done), 1 - done, (1 + jnp.cos(jnp.pi * done)) / 2])[numbers.decay]
    return numbers.learning_rate * rise * fall
