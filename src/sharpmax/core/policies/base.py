"""What a policy is, the plain numbers it lowers to, and its JSON form."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np

from ..arrays import Array, library_of
from ..files import write_text
from ..stats import RowStats

SCHEMA = "sharpmax.policy/1"


class Policy(Protocol):
    """Anything that maps :class:`~sharpmax.RowStats` to beta, one inverse temperature per row."""

    def __call__(self, stats: RowStats, /) -> Array: ...


def check_callable(policy: Any) -> None:
    """Refuse what is no policy: it cannot be called, or is a class of policies."""
    if isinstance(policy, type):
        raise TypeError(f"expected a policy, got the class {policy.__name__}; {policy.__name__}(...) makes one")
    if not callable(policy):
        got = repr(policy) if isinstance(policy, str) else type(policy).__name__
        raise TypeError(
            f"expected policy to be callable with RowStats, got {got}; sharpmax.PAPER is one, and "
            "sharpmax.Constant(1.0) is plain softmax"
        )


def needs_spread(policy: Policy) -> bool:
    """Whether ``policy`` reads ``stats.spread`` (assumed of any callable that does not say)."""
    return getattr(policy, "needs_spread", True)


class Lowered(NamedTuple):
    """A policy as plain numbers, which is all that a kernel needs to evaluate it.

    With ``v`` the variable (the row's entropy, or the logarithm of its count)::

        beta = max(polynomial(clip(v, lo, hi)), floor)    where v > threshold,    else 1

    ``coefficients`` run from the highest power to the constant, as in ``numpy.polyval``.
    """

    variable: Literal["entropy", "log_count"]
    coefficients: tuple[float, ...]
    lo: float = -math.inf
    hi: float = math.inf
    threshold: float = -math.inf
    floor: float = 0.0

    def __call__(self, stats: RowStats) -> Array:
        """Beta of every row."""
        xp = library_of(stats.sum).xp
        v = self._variable(xp, stats)
        u = self._clipped(xp, v)
        value = xp.full_like(u, self.coefficients[0])
        for coefficient in self.coefficients[1:]:
            value = value * u + coefficient
        value = xp.maximum(value, xp.full_like(value, self.floor))
        return value if self.threshold == -math.inf else xp.where(v > self.threshold, value, 1.0)

    def slope(self, stats: RowStats) -> Array:
        """The derivative of beta with respect to the variable, of every row.

        It is 0 where a bound, the floor or the threshold decides, and half of the polynomial's exactly at a bound or
        the floor, as automatic differentiation has it.
        """
        xp = library_of(stats.sum).xp
        v = self._variable(xp, stats)
        u = self._clipped(xp, v)
        value, slope = xp.full_like(u, self.coefficients[0]), xp.zeros_like(u)
        for coefficient in self.coefficients[1:]:
            value, slope = value * u + coefficient, slope * u + value
        slope = slope * _step(xp, v, self.lo) * _step(xp, -v, -self.hi) * _step(xp, value, self.floor)
        return slope if self.threshold == -math.inf else xp.where(v > self.threshold, slope, 0.0)

    @property
    def constant(self) -> bool:
        """Whether beta has no gradient, whatever the logits."""
        return self.variable == "log_count" or len(self.coefficients) == 1

    def _variable(self, xp: Any, stats: RowStats) -> Array:
        return stats.entropy if self.variable == "entropy" else log_count(xp, stats)

    def _clipped(self, xp: Any, v: Array) -> Array:
        if self.lo > -math.inf:
            v = xp.maximum(v, xp.full_like(v, self.lo))
        return xp.minimum(v, xp.full_like(v, self.hi)) if self.hi < math.inf else v


def _step(xp: Any, x: Array, bound: float) -> Array:
    """1 above ``bound``, 0 below, one half at it."""
    return (xp.astype(x > bound, x.dtype) + xp.astype(x >= bound, x.dtype)) / 2


def log_count(xp: Any, stats: RowStats) -> Array:
    """``log n`` of every row, 0 where the row is empty."""
    return xp.log(xp.maximum(xp.astype(stats.count, stats.sum.dtype), xp.ones_like(stats.sum)))


class Serialisable:
    """A frozen dataclass that is saved as JSON under its class name; ``schema`` says what family it is of."""

    kinds: ClassVar[dict[str, type[Serialisable]]] = {}
    schema: ClassVar[str] = SCHEMA

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not abstract:
            Serialisable.kinds[cls.__name__] = cls

    def to_dict(self) -> dict[str, Any]:
        """A JSON object from which :func:`from_dict` (:func:`policy_from_dict` of a policy) makes the same object."""
        return {"schema": self.schema, **_plain(self)}

    def save(self, path: str | Path) -> None:
        """Write this as JSON; the file is replaced whole or not at all."""
        write_text(path, json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read an object of this class."""
        found = from_file(path, cls.schema)
        if not isinstance(found, cls):
            raise ValueError(f"{path} holds a {type(found).__name__}, not a {cls.__name__}")
        return found


def load_policy(path: str | Path) -> Any:
    """Read any policy that was saved as JSON. Nothing in the file is executed."""
    return from_file(path, SCHEMA)


def policy_from_dict(content: Any) -> Any:
    """The policy that :meth:`Serialisable.to_dict` described."""
    return from_dict(content, SCHEMA)


def from_file(path: str | Path, schema: str) -> Any:
    """Read what was saved as JSON under ``schema``. Nothing in the file is executed."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a {_family(schema)} file: {error}") from None
    return from_dict(content, schema)


def from_dict(content: Any, schema: str) -> Any:
    """What :meth:`Serialisable.to_dict` described, of the family ``schema``."""
    found = content.get("schema") if isinstance(content, dict) else None
    if found != schema:
        raise ValueError(f"expected a {_family(schema)} with schema {schema!r}, got {found!r}")
    return _built({key: value for key, value in content.items() if key != "schema"}, schema)


def _family(schema: str) -> str:
    """``"policy"`` of ``"sharpmax.policy/1"``."""
    return schema.partition(".")[2].partition("/")[0]


def _plain(value: Any) -> Any:
    if isinstance(value, Serialisable):
        fields = (f.name for f in dataclasses.fields(value) if f.init)  # pyright: ignore[reportArgumentType]
        return {"kind": type(value).__name__, **{name: _plain(getattr(value, name)) for name in fields}}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be saved as JSON; save its parameters with the model instead")


def _built(value: Any, schema: str) -> Any:
    """``value`` as the object it describes; those inside of a policy, or of a mechanism, are policies."""
    if isinstance(value, list):
        return tuple(_built(item, SCHEMA) for item in value)
    if not isinstance(value, dict):
        return value
    kind, known_kinds = value.get("kind"), {k: c for k, c in Serialisable.kinds.items() if c.schema == schema}
    if not isinstance(kind, str) or kind not in known_kinds:
        raise ValueError(f"unknown {_family(schema)} kind {kind!r}; known are {', '.join(sorted(known_kinds))}")
    cls = known_kinds[kind]
    known = {f.name for f in dataclasses.fields(cls) if f.init}  # pyright: ignore[reportArgumentType]
    given = {key: _built(item, SCHEMA) for key, item in value.items() if key != "kind"}
    if unknown := sorted(set(given) - known):
        raise ValueError(f"{kind} has no field {', '.join(unknown)}; its fields are {', '.join(sorted(known))}")
    try:
        return cls(**given)
    except TypeError as error:
        raise ValueError(f"the fields of {kind} are not complete or of the wrong type: {error}") from None


def check_number(value: Any, what: str, *, least: float = -math.inf) -> float:
    """``value`` as a float; refused unless it is a finite number of at least ``least``."""
    number = _number(value)
    if not math.isfinite(number) or number < least:
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise ValueError(f"expected {what} to be a finite number{bound}, got {value!r}")
    return number


def _number(value: Any) -> float:
    """``value`` as a float, NaN if it is not a number (text and truth values are none)."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_numbers(values: Any, what: str) -> tuple[float, ...]:
    """``values`` as a tuple of finite floats, at least one."""
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise ValueError(f"expected {what} to be a sequence of numbers, got {values!r}")
    found = tuple(_number(value) for value in values)
    if not found or not all(math.isfinite(value) for value in found):
        raise ValueError(f"expected {what} to be one or more finite numbers, got {values!r}")
    return found


def check_choice(value: Any, what: str, choices: tuple[Any, ...]) -> None:
    """Refuse ``value`` unless it is one of ``choices``, of the same type."""
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise ValueError(f"expected {what} to be one of {', '.join(map(str, choices))}, got {value!r}")


def set_field(instance: Any, name: str, value: Any) -> None:
    """Set a field of a frozen dataclass from its ``__post_init__``."""
    object.__setattr__(instance, name, value)
