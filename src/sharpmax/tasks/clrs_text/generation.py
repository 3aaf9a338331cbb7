"""Greedy continuations of many prompts: each has a slot of one large cache, which the next takes when it is done.

Sequences of any lengths go on together, a token at a time, without padding: every slot knows how much of it is valid,
and sharpmax's attention reads no more than that. Prompts are read packed. On a GPU a step is a CUDA graph.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ...huggingface.interface import NAME
from ...huggingface.ready import cached_masks, layer_windows, packed_masks

MOST_SLOTS = {"cpu": 16, "cuda": 1024}
MEMORY = 0.6
"""The part of a GPU's free memory that the cache may take, unless another is asked for."""

STEPS = {"cpu": 1, "cuda": 16}
"""Steps between two looks at what was written: looking waits for the device, and what a slot writes after its end is in
vain."""

READ = {"cpu": 4096, "cuda": 65_536}
"""Tokens of prompts that are read together, at most."""

READING = 0.2
"""The part of a GPU's free memory that reading may take."""


def generate(
    model: Any,
    prompts: Sequence[list[int]],
    limits: Sequence[int],
    *,
    end: Collection[int],
    pad: int,
    budget: int | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Yield ``(i, tokens)``, the greedy continuation of prompt ``i``, in the order in which they are finished.

    Args:
      model: a decoder of transformers that attends through sharpmax.
      prompts: token by token; none is empty.
      limits: the most new tokens of each.
      end: tokens that end a continuation; they are not part of it.
      pad: what slots without a prompt read.
      budget: tokens that the cache may hold; by default, what fits.
    """
    return Generation(budget)(model, prompts, limits, end=end, pad=pad)


class Generation:
    """:func:`generate` for many calls: the slots of a model stay from one to the next as long as they suffice.

    Args:
      budget: tokens that the cache may hold; by default, what fits.
      memory: the part of a GPU's free memory that the cache may take where there is no budget.
    """

    def __init__(self, budget: int | None = None, memory: float = MEMORY) -> None:
        self.budget, self.memory = budget, memory
        self._slots: _Slots | None = None
        self._most = 0

    def __call__(
        self, model: Any, prompts: Sequence[list[int]], limits: Sequence[int], *, end: Collection[int], pad: int
    ) -> Iterator[tuple[int, list[int]]]:
        """As :func:`generate`."""
        if len(prompts) != len(limits) or not all(prompts):
            raise ValueError(f"expected prompts with a limit each, none empty, got {len(prompts)} and {len(limits)}")
        if getattr(model.config.get_text_config(), "_attn_implementation", None) != NAME:
            raise ValueError(f"expected a model with attn_implementation={NAME!r}")
        layer_windows(model.config)
        waiting = deque(
            sorted((i for i in range(len(prompts)) if limits[i] > 0), key=lambda i: -_total(prompts, limits, i))
        )
        for i in range(len(prompts)):
            if limits[i] <= 0:
                yield i, []
        if not waiting:
            return
        slots = self._suited(model, len(waiting), _total(prompts, limits, waiting[0]), pad)
        running: dict[int, _Running] = {}
        while waiting or running:
            free = [slot for slot in range(slots.count) if slot not in running]
            if waiting and (not running or 8 * len(free) >= slots.count):
                chosen = _next(waiting, prompts, len(free), slots.readable)
                first = slots.read(free[: len(chosen)], [prompts[i] for i in chosen])
                running |= {slot: _Running(i, limits[i]) for slot, i in zip(free, chosen, strict=False)}
                yield from _taken(running, dict(zip(free, ([token] for token in first), strict=False)), end)
                continue
            slots.forget(free)
            written = slots.write(STEPS[slots.kind])
            yield from _taken(running, {slot: written[slot] for slot in running}, end)

    def _suited(self, model: Any, wanted: int, capacity: int, pad: int) -> _Slots:
        """Slots with room for ``capacity`` tokens, ``wanted`` of them or as many as there can be."""
        kept = self._slots
        if kept is not None and (kept.model, kept.pad) == (model, pad) and kept.capacity >= capacity:
            if kept.count >= min(wanted, self._most):
                return kept
            capacity = kept.capacity
        kept = self._slots = None  # its memory is needed
        self._most = _most_slots(model, capacity, self.budget, self.memory)
        self._slots = _Slots(model, min(wanted, self._most), capacity, pad)
        return self._slots


@dataclass
class _Running:
    index: int
    limit: int
    tokens: list[int] = field(default_factory=list)


def _total(prompts: Sequence[list[int]], limits: Sequence[int], i: int) -> int:
    return len(prompts[i]) + limits[i]


def _next(waiting: deque[int], prompts: Sequence[list[int]], most: int, tokens: int) -> list[int]:
    """The prompts that are read next: at least one, ``most`` at most, together within ``tokens``."""
    chosen = [waiting.popleft()]
    tokens -= len(prompts[chosen[0]])
    while waiting and len(chosen) < most and len(prompts[waiting[0]]) <= tokens:
        tokens -= len(prompts[waiting[0]])
        chosen.append(waiting.popleft())
    return chosen


def _taken(
    running: dict[int, _Running], written: dict[int, list[int]], end: Collection[int]
) -> Iterator[tuple[int, list[int]]]:
    """Add what was written to the continuations, and give up the slots of those that are done."""
    for slot, tokens in written.items():
        one = running[slot]
        for token in tokens:
            if token not in end:
                one.tokens.append(token)
            if token in end or len(one.tokens) == one.limit:
                del running[slot]
                yield one.index, one.tokens
                break


def _most_slots(model: Any, capacity: int, budget: int | None, memory: float = MEMORY) -> int:
    kind = _kind(model)
    most = MOST_SLOTS[kind]
    if budget is None and kind == "cuda":
        torch.cuda.empty_cache()  # what torch holds for itself counts as taken
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        columns = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token = 2 * config.num_hidden_layers * heads * columns * model.dtype.itemsize
        budget = int(memory * torch.cuda.mem_get_info(model.device)[0] / token)
    return most if budget is None else max(1, min(most, budget // capacity))


def _most_read(model: Any) -> int:
    """Tokens of prompts that can be read together: a layer's activations must find room beside the cache."""
    kind = _kind(model)
    if kind != "cuda":
        return READ[kind]
    config = model.config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    token = (4 * inner + 12 * config.hidden_size) * model.dtype.itemsize
    return max(1, min(READ[kind], int(READING * torch.cuda.mem_get_info(model.device)[0] / token)))


def _kind(model: Any) -> str:
    return "cuda" if model.device.type == "cuda" else "cpu"


class _SlotCache(Cache):
    """Keys and values of the slots, ``[slots, heads, capacity, columns]``, of every layer.

    ``at``, slots and positions, is where the keys of the next pass belong. While prompts are read, they are packed, and
    attend to themselves alone.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.slots, self.capacity = slots, capacity
        self.kept: dict[int, list[Tensor]] = {}
        self.at: tuple[Tensor, Tensor]
        self.reading = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep new keys and values, and return those to attend to."""
        new = key_states, value_states
        if layer_idx not in self.kept:
            self.kept[layer_idx] = [x.new_zeros((self.slots, x.shape[1], self.capacity, x.shape[3])) for x in new]
        slots, positions = self.at
        for kept, states in zip(self.kept[layer_idx], new, strict=True):
            kept[slots, :, positions] = states.transpose(1, 2).flatten(0, 1)
        key, value = new if self.reading else self.kept[layer_idx]
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots differ; models ask for it where they are not given positions."""
        return 0


class _Slots:
    """The slots of a model: prompts are read into them, and continuations written, all at once."""

    def __init__(self, model: Any, count: int, capacity: int, pad: int) -> None:
        self.model, self.count, self.capacity, self.pad = model, count, capacity, pad
        self.kind, device = _kind(model), model.device
        self.readable = _most_read(model)
        self.cache = _SlotCache(count, capacity)
        self.every = torch.arange(count, device=device)
        self.token = torch.full((count,), pad, device=device)
        self.length = torch.zeros(count, dtype=torch.int64, device=device)
        self.valid = torch.ones(count, dtype=torch.int32, device=device)
        self.written = torch.zeros((count, STEPS[self.kind]), dtype=torch.int64, device=device)
        self.column = torch.zeros(1, dtype=torch.int64, device=device)
        self.masks = cached_masks(model.config, self.valid, capacity)
        self.graph: torch.cuda.CUDAGraph | None = None
        if self.kind == "cuda":
            with self._device():
                self._capture()

    def _device(self) -> contextlib.AbstractContextManager[Any]:
        """Kernels, streams and graphs belong to the current GPU, which need not be the model's."""
        return torch.cuda.device(self.model.device) if self.kind == "cuda" else contextlib.nullcontext()

    def read(self, slots: Sequence[int], prompts: Sequence[list[int]]) -> list[int]:
        """Read prompts into slots; the first token of each continuation."""
        with self._device(), torch.no_grad():
            return self._read(slots, prompts)

    def _read(self, slots: Sequence[int], prompts: Sequence[list[int]]) -> list[int]:
        device, lengths = self.model.device, torch.tensor([len(prompt) for prompt in prompts])
        ends = lengths.cumsum(0)
        ids = torch.tensor([token for prompt in prompts for token in prompt])
        position = torch.arange(len(ids)) - (ends - lengths).repeat_interleave(lengths)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32).to(device)
        where = torch.tensor(slots)
        self.cache.reading, self.cache.at = True, (where.repeat_interleave(lengths).to(device), position.to(device))
        logits = self.model(
            input_ids=ids[None].to(device),
            position_ids=position[None].to(device),
            attention_mask=packed_masks(self.model.config, starts, len(ids)),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=(ends - 1).to(device),
        ).logits
        self.cache.reading = False
        first, where = logits[0].argmax(-1), where.to(device)
        self.token[where], self.length[where] = first, lengths.to(device)
        return first.tolist()

    def forget(self, slots: Sequence[int]) -> None:
        """Slots that nobody reads: a step costs them one key."""
        if slots:
            self.length[torch.tensor(slots, device=self.length.device)] = 0

    def write(self, steps: int) -> list[list[int]]:
        """Write so many tokens into every slot, and return them."""
        with self._device(), torch.no_grad():
            self.column.zero_()
            for _ in range(steps):
                self._step() if self.graph is None else self.graph.replay()
            return self.written.tolist()

    def _step(self) -> None:
        self.valid.copy_(self.length + 1)
        self.cache.at = self.every, self.length
        logits = self.model(
            input_ids=self.token[:, None],
            position_ids=self.length[:, None],
            attention_mask=self.masks,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        self.token.copy_(logits[:, -1].argmax(-1))
        self.written.scatter_(1, self.column.expand(self.count)[:, None], self.token[:, None])
        self.length.add_(1).clamp_(max=self.capacity - 1)
        self.column.add_(1)

    @torch.no_grad()
    def _capture(self) -> None:
        """Make a step a CUDA graph; its replay starts from whatever the slots hold by then."""
        self._step()  # here the cache is made, on the stream that it stays on
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.column.zero_()
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.column.zero_()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._step()
            self.graph = graph
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            warnings.warn(
                f"a {type(self.model).__name__} cannot be captured as a CUDA graph, so every step is launched from "
                f"the host, which is slower: {str(error).splitlines()[0]}",
                stacklevel=2,
            )
        self.column.zero_()
        self.token.fill_(self.pad)
        self.length.zero_()
