"""``sharpen``: adaptive temperature, or another mechanism, on in a model that is in memory, and off again."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary, ref

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..core.policies import PAPER, PerHead, Policy
from ..mechanisms import Mechanism, find
from ..torch.checks import check_policy
from ..torch.choice import IMPLEMENTATIONS
from .interface import IMPL, NAME, register
from .keywords import check_keywords
from .stored import KEY, Rule, check_storable, check_switchable, choice_for, read, written

SAVED = "attn_implementation"
"""The key of a saved config that asks for an attention implementation; transformers reads it, and never writes it."""
_INTERNAL = "_attn_implementation_internal"


_CALLS: WeakKeyDictionary[nn.Module, list[ref[Sharpened]]] = WeakKeyDictionary()
"""The calls of :func:`sharpen` on a model, in their order. One whose handle nobody holds cannot be undone any more."""


class Sharpened:
    """A model with adaptive temperature on; :meth:`undo`, or the end of a ``with`` block, puts it back as it was.

    Attributes:
      model: the model that was given.
      rules: the policies and mechanisms of its layers and heads, the last that names a head decides.
    """

    def __init__(self, model: nn.Module, rules: tuple[Rule, ...], restore: list[tuple[Any, dict[str, Any]]]) -> None:
        self.model = model
        self.rules = rules
        self._restore = restore
        for part in self._parts():
            _CALLS.setdefault(part, []).append(ref(self))

    def __repr__(self) -> str:
        return f"Sharpened({type(self.model).__name__}, {'; '.join(map(str, self.rules))})"

    def undo(self) -> None:
        """Put the model's config, its submodels' and its attention back as they were; a second time does nothing.

        What came later must be undone first, since it would come back otherwise; ValueError says so.
        """
        if not self._restore:
            return
        held = {part: [call for known in _CALLS.get(part, []) if (call := known())] for part in self._parts()}
        if any(calls[-1] is not self for calls in held.values() if self in calls):
            raise ValueError("expected later calls of sharpen on this model to be undone first")
        for part, calls in held.items():
            _CALLS[part] = [ref(call) for call in calls if call is not self]
        for owner, attributes in self._restore:
            for name, value in attributes.items():
                if value is _ABSENT:
                    owner.__dict__.pop(name, None)
                else:
                    owner.__dict__[name] = value
        self._restore = []

    def _parts(self) -> list[PreTrainedModel]:
        """The models of transformers that it changes, those within others too."""
        return [module for module in self.model.modules() if isinstance(module, PreTrainedModel)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.undo()
        except ValueError as late:
            if error is None:
                raise
            error.add_note(f"the model stays sharpened: {late}")


_ABSENT: Any = object()


def sharpen(
    model: nn.Module,
    policy: Policy = PAPER,
    *,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | Mapping[int, Iterable[int]] | None = None,
    mechanism: Mechanism | str | None = None,
    impl: str = "auto",
) -> Sharpened:
    """Turn adaptive temperature on in a model, for all of its attention or for the layers and heads named.

    Args:
      model: any transformers model whose attention can be exchanged, or a module that holds one (PEFT's, DDP's).
      policy: one of sharpmax's own policies, which are saved with the model's config.
      layers: indices of the layers that get the policy (a module's ``layer_idx``); all if not given.
      heads: indices of the query heads that get it, in every such layer, or ``{layer: heads}``; all if not given.
      mechanism: a mechanism, or the name of one, in the place of softmax and policy; saved likewise. It is for whole
        layers. One that has parameters, takes more heads or changes the feed-forward layers is refused, and so is
        decoding with one that reads earlier queries.
      impl: as in :func:`sharpmax.torch.scaled_dot_product_attention`; not saved with the model.

    What is not named keeps the policy it has: plain softmax, unless a call before this one said otherwise. In a model
    with a vision or audio tower, only the language model is sharpened.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"expected impl to be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    policy, found = _asked(policy, mechanism, heads)
    roots = _pluggable(model)
    for root in roots:
        check_keywords({"output_attentions": root.config.output_attentions})
    if hasattr(model, "peft_config"):
        warnings.warn(
            "the files of a PEFT adapter have no place for sharpmax policies: call sharpen again on a model that they "
            "are loaded into",
            stacklevel=2,
        )
    configs = _policy_configs(model, roots)
    rules = tuple(rule._replace(mechanism=found) for rule in _rules(model, configs, policy, layers, heads))
    everything = rules if rules[0].everywhere() else (*_present_rules(roots), *rules)
    text = written(everything)
    _check_layers(model, configs, text)
    owners = [(config, (_INTERNAL, KEY, SAVED)) for config in _configs(model)]
    owners += [(module, (IMPL,)) for module in model.modules()]
    restore = [(owner, {name: owner.__dict__.get(name, _ABSENT) for name in names}) for owner, names in owners]
    handle = Sharpened(model, everything, restore)
    register()
    try:
        for root in roots:
            request = _request(root)
            root.set_attn_implementation(request)
            setattr(root.config, SAVED, request)
        for config in configs:
            setattr(config, KEY, text)
        if impl != "auto":
            for module in model.modules():
                setattr(module, IMPL, impl)
    except BaseException:
        handle.undo()
        raise
    return handle


def _asked(policy: Policy, mechanism: Any, heads: Any) -> tuple[Any, Mechanism | None]:
    """The policy, or ``None`` and the mechanism that stands in its place."""
    if mechanism is None:
        check_policy(policy)
        check_storable(policy)
        return policy, None
    if policy != PAPER:
        raise ValueError("expected a mechanism or a policy, got both")
    found = find(mechanism)
    check_switchable(found)
    if found.policy is not None:
        check_storable(found.policy)
        return found.policy, None
    if heads is not None:
        raise ValueError(f"{found.about.title} is for all heads of a layer; expected layers in place of heads")
    return None, found


def warn_if_idle(model: nn.Module) -> None:
    """Warn about a model that holds policies but runs with another attention implementation."""
    for root in _outermost(model):
        config = root.config.get_text_config()
        if hasattr(config, KEY) and config._attn_implementation != NAME:
            warnings.warn(
                f"{type(root).__name__} was saved with sharpmax policies, but runs with {config._attn_implementation} "
                f'attention: call sharpmax.huggingface.register() and load it with attn_implementation="{NAME}"',
                stacklevel=2,
            )


def _pluggable(model: Any) -> list[PreTrainedModel]:
    """The outermost transformers models in ``model``, all of whose attention can be exchanged."""
    if not isinstance(model, nn.Module) or not (found := _outermost(model)):
        raise TypeError(f"expected a transformers model, got {type(model).__name__}")
    for root in found:
        if not (root._can_set_attn_implementation() and any(map(_asks_the_interface, root.modules()))):
            raise ValueError(f"{type(root).__name__} has no attention that transformers can exchange")
    return found


def _outermost(model: nn.Module) -> list[PreTrainedModel]:
    """The transformers models in ``model``, but for those inside of others."""
    found: list[PreTrainedModel] = []
    inner: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module) not in inner:
            found.append(module)
            inner.update(map(id, module.modules()))
    return found


def _asks_the_interface(module: nn.Module) -> bool:
    """Whether the code of a module comes with transformers' table of attention functions."""
    return hasattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS")


def _request(root: PreTrainedModel) -> str | dict[str, str]:
    """What to ask transformers for: sharpmax, in a model with a vision or audio tower for its language model only."""
    config, text = root.config, root.config.get_text_config()
    towers = {name: NAME for name in config.sub_configs if getattr(config, name, None) is text}
    return towers or NAME


def _configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Every config that a module of the model reads, and those inside of it, each once."""
    return _with_parts(getattr(module, "config", None) for module in model.modules())


def _with_parts(configs: Iterable[Any]) -> list[PreTrainedConfig]:
    pending = list(configs)
    found: dict[int, PreTrainedConfig] = {}
    while pending:
        config = pending.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            pending += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def _policy_configs(model: nn.Module, roots: list[PreTrainedModel]) -> list[PreTrainedConfig]:
    """The configs that get the policies: all, but for those of a model with towers and of the towers."""
    others: list[PreTrainedConfig] = []
    for root in roots:
        if isinstance(request := _request(root), dict):
            parts = [getattr(root.config, name, None) for name in root.config.sub_configs if name not in request]
            others += [root.config, *_with_parts(parts)]
    left_out = set(map(id, others))
    return [config for config in _configs(model) if id(config) not in left_out]


def _present_rules(roots: list[PreTrainedModel]) -> tuple[Rule, ...]:
    """The rules in force: those of the config if sharpmax is on, the paper's where it is on without any."""
    config = roots[0].config.get_text_config()
    if config._attn_implementation != NAME:
        return ()
    text = getattr(config, KEY, None)
    return (Rule(PAPER),) if text is None else read(text)


def _rules(
    model: nn.Module,
    configs: list[PreTrainedConfig],
    policy: Policy | None,
    layers: Iterable[int] | None,
    heads: Iterable[int] | Mapping[int, Iterable[int]] | None,
) -> tuple[Rule, ...]:
    known, count = _layers(model, configs), _heads(configs)
    if isinstance(policy, PerHead) and count is not None and len(policy.policies) != count:
        raise ValueError(f"expected a policy for each of {count} heads, got {len(policy.policies)}")
    if isinstance(heads, Mapping):
        if layers is not None:
            raise ValueError("heads={layer: heads} names the layers already; leave layers out")
        chosen = _indices(heads, "layers", known)
        return tuple(
            Rule(policy, frozenset({layer}), _indices(heads[layer], "heads", range(count or 0)))
            for layer in sorted(chosen)
        )
    return (
        Rule(
            policy,
            None if layers is None else _indices(layers, "layers", known),
            None if heads is None else _indices(heads, "heads", range(count or 0)),
        ),
    )


def _layers(model: nn.Module, configs: list[PreTrainedConfig]) -> set[int]:
    """The layers that modules with one of the configs say they are."""
    own = set(map(id, configs))
    modules = (module for module in model.modules() if id(getattr(module, "config", None)) in own)
    return {layer for module in modules if isinstance(layer := getattr(module, "layer_idx", None), int)}


def _heads(configs: list[PreTrainedConfig]) -> int | None:
    """The smallest number of heads that the configs name."""
    counts = {getattr(config, "num_attention_heads", None) for config in configs}
    return min((count for count in counts if isinstance(count, int)), default=None)


def _check_layers(model: nn.Module, configs: list[PreTrainedConfig], text: str) -> None:
    """Refuse rules that do not go together in one layer."""
    if (count := _heads(configs)) is not None:
        for layer in sorted(_layers(model, configs)):
            choice_for(text, layer, count)


def _indices(values: Any, what: str, known: Any) -> frozenset[int]:
    """``values`` as a set of indices, each of them known."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"expected {what} to be a list of whole numbers, got {values!r}")
    found = list(values)
    unknown = [value for value in found if type(value) is not int or value not in known]
    if not found or unknown:
        have = f"{min(known)} to {max(known)}" if known else f"no {what} that can be told apart"
        raise ValueError(f"expected {what} of the model, which has {have}, got {unknown or 'none'}")
    return frozenset(found)
