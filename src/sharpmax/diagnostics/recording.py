"""``record``: how sharp every head of a model is, while the model runs as it always does."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..core.policies import PAPER, Constant, Policy
from ..huggingface import sharpen
from ..huggingface.interface import Call, observe
from ..huggingface.interface import attention as sharpmax_attention
from ..huggingface.switch import _outermost
from ..theory import dispersion_length
from ..torch.attention import row_betas
from ..torch.checks import check_policy
from .arguments import EPSILON, check_numbers
from .rows import as_inputs, call_rows, counting_rows, documents, is_windowed, last_logits
from .summary import METRICS, last_rows, reduced
from .table import LONGEST, Table, rounded

WHOLE = ("tokens", "n")
Heads = Iterable[int] | Mapping[int, Iterable[int]] | None


class AttentionRow(NamedTuple):
    """The last row of one head: its logits over all keys (``-inf`` where one is not seen), and the policy's beta."""

    forward: int
    sequence: int
    layer: int
    head: int
    logits: Tensor
    beta: float

    @property
    def weights(self) -> Tensor:
        """The coefficients of the model as it is."""
        return torch.softmax(self.logits, -1)

    @property
    def sharpened(self) -> Tensor:
        """The coefficients with the policy's beta."""
        if math.isinf(self.beta):
            ties = (self.logits == self.logits.max()).to(self.logits.dtype)
            return ties / ties.sum()
        return torch.softmax(self.beta * self.logits, -1)


class _Seen(NamedTuple):
    """What is kept of one call: where it came from, and the numbers ``[B, H, metrics]`` on the model's device."""

    forward: int
    first_sequence: int
    layer: int
    module: str
    window: int | None
    numbers: Tensor


class Recording(Table):
    """The table that :func:`record` fills: one row for each forward, sequence, layer and head.

    Columns are ``forward``, ``sequence``, ``layer``, ``head``, ``module``, ``window``, those of
    :data:`~sharpmax.diagnostics.METRICS`, and ``dispersion_n``.
    """

    def __init__(self, policy: Policy, epsilon: float) -> None:
        super().__init__([])
        self.policy, self.epsilon = policy, epsilon
        self.attention: list[AttentionRow] = []
        self.layers: set[int] = set()
        self._seen: list[_Seen] = []

    @property
    def rows(self) -> list[dict[str, Any]]:
        for call in self._seen:
            self._rows.extend(_rows(call, self.epsilon))
        self._seen.clear()
        return self._rows

    def _add(self, seen: _Seen) -> None:
        self._seen.append(seen)
        self.layers.add(seen.layer)


@contextmanager
def record(
    model: nn.Module,
    policy: Policy | None = None,
    *,
    layers: Iterable[int] | None = None,
    attention: Heads = None,
    epsilon: float = EPSILON,
    sample: int | None = None,
    impl: str = "auto",
) -> Iterator[Recording]:
    """Record the sharpness of every attention head of a Hugging Face model.

    ::

        with sharpmax.diagnostics.record(model) as stats:
            model(**inputs)
        stats.to_pandas()

    Within the block the model computes what it always computes: with its own policies if it is sharpened, else with
    ``Constant(1)``, which is plain softmax; its attention is as it was afterwards. Every row's statistics are streamed:
    nothing of size n x n is held. What gradient checkpointing computes a second time is not counted again.

    Args:
      model: any model that takes an attention implementation.
      policy: what ``beta``, ``acts`` and ``outside`` are computed for, from logits before any beta; ``PAPER`` if not
        given. It does not act.
      layers: record these alone.
      attention: keep the last row of these heads, ``{layer: heads}`` or layers (with all of their heads), in
        ``.attention``.
      epsilon: ``dispersion_n`` is the n from which Theorem 2.2 has every coefficient below it, were the largest spread
        that was observed the bound of all. There is none (``None``) for a head with a window, whose rows do not grow.
      sample: about how many rows of an input to compute, in eight blocks evenly apart that end with the last row; all
        of them if not given, and where an input is padded. Long inputs then cost hardly more than the model itself.
      impl: how statistics are computed; see :func:`sharpmax.torch.row_stats`.
    """
    chosen = PAPER if policy is None else policy
    check_policy(chosen)
    check_numbers(epsilon, sample)
    recording = Recording(chosen, epsilon)
    wanted = None if layers is None else frozenset(layers)
    observer = _Observer(model, recording, wanted, attention, sample, impl)
    with _watched(model), observer.counting_forwards(), observe(observer):
        yield recording
    if observer.forward >= 0 and not observer.called:
        warnings.warn(
            f"{type(model).__name__} ran, but none of its attention was seen: record does not see what torch.compile "
            "has compiled, so run the model itself",
            stacklevel=3,
        )


@contextmanager
def _watched(model: nn.Module) -> Iterator[None]:
    """Within the block attention is sharpmax's: with plain softmax in models that run with another."""
    with ExitStack() as stack:
        for root in _outermost(model) or [model]:
            if not runs_sharpmax(root):
                stack.enter_context(sharpen(root, Constant(1)))
        yield


def runs_sharpmax(model: nn.Module) -> bool:
    """Whether the (language) model's attention is sharpmax's."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return False
    return ALL_ATTENTION_FUNCTIONS.get(config.get_text_config()._attn_implementation) is sharpmax_attention


class _Observer:
    """Takes every call of attention and gives its numbers to a recording."""

    def __init__(
        self,
        model: nn.Module,
        recording: Recording,
        layers: frozenset[int] | None,
        attention: Heads,
        sample: int | None,
        impl: str,
    ) -> None:
        self.model, self.recording, self.layers, self.sample, self.impl = model, recording, layers, sample, impl
        self.attention = _heads(attention)
        self.names = {id(module): name for name, module in model.named_modules()}
        self.order: dict[int, int] = {}
        self.forward, self.depth, self.called = -1, 0, False

    @contextmanager
    def counting_forwards(self) -> Iterator[None]:
        """Count calls of the model, or of what stands below its head."""
        base = getattr(self.model, "base_model", None)
        counted = {id(m): m for m in (self.model, base) if isinstance(m, nn.Module)}
        handles = [m.register_forward_pre_hook(self._enter) for m in counted.values()]
        handles += [m.register_forward_hook(self._leave, always_call=True) for m in counted.values()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, *_: Any) -> None:
        self.forward += self.depth == 0
        self.depth += 1

    def _leave(self, *_: Any) -> None:
        self.depth -= 1

    def __call__(self, call: Call) -> None:
        self.called = True
        if torch._C._current_graph_task_id() != -1:  # a checkpoint computes again, within a backward
            return
        layer = getattr(call.module, "layer_idx", None)
        if not isinstance(layer, int):
            layer = self.order.setdefault(id(call.module), len(self.order))
        if self.layers is not None and layer not in self.layers:
            return
        if call.mechanism is not None:
            title = call.mechanism.about.title
            warnings.warn(f"layer {layer} has {title}: what is recorded is the softmax of its logits", stacklevel=2)
        sequence = 0
        for part in documents(call):
            self._record(part, layer, sequence)
            sequence += part.query.shape[0]

    def _record(self, call: Call, layer: int, sequence: int) -> None:
        inputs = as_inputs(call)
        rows = call_rows(call, self.impl, self.sample)
        window = inputs.geometry.left + inputs.geometry.right + 1 if is_windowed(inputs) else _window(call.module)
        name = self.names.get(id(call.module), type(call.module).__name__)
        forward = max(self.forward, 0)
        numbers = reduced(rows, self.recording.policy)
        self.recording._add(_Seen(forward, sequence, layer, name, window, numbers))
        if self.attention is None or layer not in self.attention:
            return
        last = last_rows(rows.counts)
        logits = last_logits(inputs, last_rows(counting_rows(inputs))).cpu()
        betas = row_betas(self.recording.policy, rows.whole)
        beta = betas.gather(2, last.view(-1, 1, 1).expand(*logits.shape[:2], 1)).cpu()
        heads = self.attention[layer]
        for b in range(logits.shape[0]):
            for h in range(logits.shape[1]) if heads is None else heads:
                row = AttentionRow(forward, sequence + b, layer, h, logits[b, h], float(beta[b, h, 0]))
                self.recording.attention.append(row)


def _window(module: Any) -> int | None:
    """The sliding window that a module would have for inputs longer than it."""
    if hasattr(module, "sliding_window"):
        return module.sliding_window
    config = getattr(module, "config", None)
    return None if hasattr(config, "layer_types") else getattr(config, "sliding_window", None)


def _heads(attention: Heads) -> dict[int, list[int] | None] | None:
    if attention is None:
        return None
    if isinstance(attention, Mapping):
        return {layer: list(heads) for layer, heads in attention.items()}
    return dict.fromkeys(attention)


def _rows(call: _Seen, epsilon: float) -> Iterator[dict[str, Any]]:
    for b, heads in enumerate(call.numbers.tolist()):
        for h, values in enumerate(heads):
            found = {name: rounded(name, value) for name, value in zip(METRICS, values, strict=True)}
            found |= {name: int(found[name] or 0) for name in WHOLE}
            yield {
                "forward": call.forward,
                "sequence": call.first_sequence + b,
                "layer": call.layer,
                "head": h,
                "module": call.module,
                "window": call.window,
                **found,
                "dispersion_n": None if call.window is not None else dispersion_n(found["spread_max"], epsilon),
            }


def dispersion_n(spread: float | None, epsilon: float = EPSILON) -> float | None:
    """The n of Theorem 2.2 for a spread; a float where it is too long to be written out, ``None`` beyond 1e300."""
    if spread is None or spread + math.log(1 / epsilon) > math.log(LONGEST):
        return None
    found = dispersion_length(spread, epsilon).paper
    return found if found < 1 << 53 else float(f"{float(found):.7g}")
