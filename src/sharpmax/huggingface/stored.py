"""The policies and mechanisms of a model, in the model's config.

The config holds one text, the JSON of ``{"schema": ..., "rules": [{"policy", "layers", "heads"}, ...]}``, with
``"mechanism"`` in the place of ``"policy"`` where softmax is replaced. Of the rules that name a head, the last decides;
a head that none names has plain softmax. A mechanism is for all heads of a layer. A text, not an object, because
transformers reads and edits the objects in a config, and because ``torch.compile`` takes a text as a constant.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..core.policies import PAPER, Constant, Detached, LearnableStructure, PerHead, Policy, policy_from_dict
from ..core.policies.base import Serialisable
from ..mechanisms import Mechanism, mechanism_from_dict

KEY = "sharpmax"
SCHEMA = "sharpmax.huggingface/1"


class Rule(NamedTuple):
    """A policy, or a mechanism in its place, and the layers and heads that it is for (``None`` for all)."""

    policy: Policy | None
    layers: frozenset[int] | None = None
    heads: frozenset[int] | None = None
    mechanism: Mechanism | None = None

    def __str__(self) -> str:
        where = [
            f"{what} {', '.join(map(str, sorted(which)))}"
            for what, which in (("layers", self.layers), ("heads", self.heads))
            if which is not None
        ]
        return f"{self.choice} in {' and '.join(where) if where else 'all heads'}"

    @property
    def choice(self) -> Any:
        """The mechanism if there is one, else the policy."""
        return self.policy if self.mechanism is None else self.mechanism

    def everywhere(self) -> bool:
        """Whether the rule leaves nothing to the rules before it."""
        return self.layers is None and self.heads is None


def check_storable(policy: Any) -> None:
    """Refuse a policy that a config cannot hold."""
    parts = policy.policies if isinstance(policy, PerHead) else (policy,)
    for part in parts:
        inner = part.policy if isinstance(part, Detached) else part
        if isinstance(inner, torch.nn.Module | LearnableStructure):
            raise ValueError(
                "a learnable policy has parameters, which transformers' attention interface has no place for; "
                "fit it, and give sharpen the policy that was fitted"
            )
        if not isinstance(inner, Serialisable):
            raise TypeError(
                f"expected a policy of sharpmax's own, which can be saved with the model, got {type(inner).__name__}"
            )


def check_switchable(mechanism: Mechanism) -> None:
    """Refuse a mechanism that a model cannot get by an exchange of its attention function."""
    title = mechanism.about.title
    if mechanism.initial():
        raise ValueError(
            f"{title} has parameters, which transformers' attention interface has no place for; build the model with "
            "sharpmax.torch.MultiheadAttention"
        )
    if mechanism.maps > 1:
        raise ValueError(
            f"{title} takes {mechanism.maps} heads of query and key for each of value, which the model has not; build "
            "it with sharpmax.torch.MultiheadAttention"
        )
    if mechanism.activation is not None:
        raise ValueError(
            f"{title}: the exchange of attention does not reach the feed-forward layers; set their activation in the "
            "model's code"
        )


def written(rules: tuple[Rule, ...]) -> str:
    """The text for a config."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "rules": [
                {
                    "policy" if rule.mechanism is None else "mechanism": rule.choice.to_dict(),
                    "layers": None if rule.layers is None else sorted(rule.layers),
                    "heads": None if rule.heads is None else sorted(rule.heads),
                }
                for rule in rules
            ],
        },
        allow_nan=False,
    )


@functools.lru_cache(maxsize=64)
def read(text: str) -> tuple[Rule, ...]:
    """The rules in a config's text."""
    try:
        content = json.loads(text)
    except (TypeError, json.JSONDecodeError):
        raise ValueError(f"expected the config's {KEY!r} to be JSON that sharpmax wrote, got {text!r}") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"expected the config's {KEY!r} to have schema {SCHEMA!r}, got {schema!r}")
    try:
        return tuple(_rule(rule) for rule in content["rules"])
    except (KeyError, TypeError):
        raise ValueError(f"the rules in the config's {KEY!r} are not complete: {text}") from None


def _rule(rule: dict[str, Any]) -> Rule:
    where = (_numbers(rule["layers"]), _numbers(rule["heads"]))
    if "mechanism" not in rule:
        return Rule(policy_from_dict(rule["policy"]), *where)
    mechanism = mechanism_from_dict(rule["mechanism"])
    check_switchable(mechanism)
    return Rule(None, *where, mechanism)


def _numbers(values: list[int] | None) -> frozenset[int] | None:
    return None if values is None else frozenset(values)


@functools.lru_cache(maxsize=4096)
def choice_for(text: str | None, layer: int | None, heads: int) -> Policy | Mechanism:
    """The policy or mechanism of an attention layer with so many heads; the paper's where a config holds none."""
    if text is None:
        return PAPER
    chosen: list[Any] = [Constant(1.0)] * heads
    for rule in read(text):
        if rule.layers is not None and layer is None:
            raise ValueError("the policy is for some layers, but this model's attention does not know its layer")
        if rule.layers is None or layer in rule.layers:
            named = range(heads) if rule.heads is None else [head for head in rule.heads if head < heads]
            parts = rule.choice.policies if isinstance(rule.choice, PerHead) else (rule.choice,) * heads
            if len(parts) != heads:
                raise ValueError(f"expected a policy for each of {heads} heads, got {len(parts)}")
            for head in named:
                chosen[head] = parts[head]
    if all(choice == chosen[0] for choice in chosen):
        return chosen[0]
    if mechanism := next((choice for choice in chosen if isinstance(choice, Mechanism)), None):
        raise ValueError(
            f"expected {mechanism.about.title} for all heads of a layer, got other heads with a policy; name layers "
            "in place of heads"
        )
    return PerHead(tuple(chosen))


class _Traced:
    """Choices as attributes, which is how ``torch.compile`` finds an object that was made while it traces."""


_traced = _Traced()
_names: dict[tuple[str | None, int | None, int], str] = {}


@torch.compiler.assume_constant_result
def _name(text: str | None, layer: int | None, heads: int) -> str:
    """The attribute that holds a layer's policy or mechanism."""
    key = (text, layer, heads)
    if key not in _names:
        name = f"choice_{len(_names)}"
        setattr(_traced, name, choice_for(*key))
        _names[key] = name
    return _names[key]


@torch.compiler.assume_constant_result
def _names_layers(text: str | None) -> bool:
    """Whether layers differ; where they do not, ``torch.compile`` compiles one layer for all."""
    return text is not None and _ask_rules(text)


@functools.lru_cache(maxsize=256)
def _ask_rules(text: str) -> bool:
    return any(rule.layers is not None for rule in read(text))


def choice_of(module: torch.nn.Module, heads: int) -> Policy | Mechanism:
    """The policy or mechanism of a model's attention module."""
    text = getattr(getattr(module, "config", None), KEY, None)
    layer = getattr(module, "layer_idx", None) if _names_layers(text) else None
    if torch.compiler.is_compiling():
        return getattr(_traced, _name(text, layer, heads))
    return choice_for(text, layer, heads)


def stored_rules(source: Any) -> tuple[Rule, ...] | None:
    """The rules that a model, its config, or the config in a directory holds; ``None`` where there are none.

    Nothing but the config is read, so that a policy of another version is refused before weights are loaded.
    """
    config = getattr(source, "config", source)
    if isinstance(config, str | os.PathLike):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        content = json.loads(path.read_text(encoding="utf-8"))
        parts = [content, *(part for part in content.values() if isinstance(part, dict))]
        text = next((part[KEY] for part in parts if KEY in part), None)
    else:
        text = getattr(config.get_text_config(), KEY, None)
    return None if text is None else read(text)
