"""Random calls of attention, of packed documents and of caches, for hypothesis."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import sharpmax
from tests.torch import decode_cases

POLICIES: dict[str, Any] = {
    "paper": sharpmax.PAPER,
    "curve": sharpmax.EntropyCurve((0.5, 1.5), (1.0, 2.5)),
    "detached": sharpmax.detached(sharpmax.PAPER_HELD),
    "log": sharpmax.LogLength(),
    "constant": sharpmax.Constant(1.7),
    "spread": lambda stats: 1 + 0.1 * stats.spread,
}
COLUMNS = [(1, 1), (4, 4), (3, 5), (16, 16), (20, 7)]
WINDOWS = [None, 1, 3, (0, 0), (2, -1), (-1, 1)]


class Heads(NamedTuple):
    """How many heads of keys, how many of queries for each, and their columns."""

    kv: int
    group: int
    columns: int
    value_columns: int

    def tensors(self, g: torch.Generator, dtype: torch.dtype, queries: Any, keys: Any) -> list[Tensor]:
        """Query, key and value; ``queries`` and ``keys`` are a batch and a length each."""
        sizes = (self.kv * self.group, *queries, self.columns), (self.kv, *keys, self.columns)
        made = [
            torch.randn(size, generator=g, dtype=torch.float64)
            for size in (*sizes, (self.kv, *keys, self.value_columns))
        ]
        return [(2 * x).to(dtype).transpose(0, 1).detach().requires_grad_() for x in made]


def heads(columns: list[tuple[int, int]] = COLUMNS, *, few: bool = False) -> st.SearchStrategy[Heads]:
    numbers = [(1, 1), (1, 2)] if few else [(1, 1), (1, 3), (2, 1), (2, 2)]
    return st.builds(lambda number, widths: Heads(*number, *widths), st.sampled_from(numbers), st.sampled_from(columns))


def generators() -> st.SearchStrategy[torch.Generator]:
    return st.integers(0, 999).map(lambda seed: torch.Generator().manual_seed(seed))


@st.composite
def calls(draw: st.DrawFn, dtype: torch.dtype, *, plain: bool = False, few: bool = False) -> dict[str, Any]:
    """Arguments of ``compare``: of ``few`` heads, but longer; or ``plain``, which torch's own attention can serve."""
    g, longest = draw(generators()), 20 if few else 9
    queries, keys = draw(st.integers(0, longest)), draw(st.integers(0, longest))
    columns = [(1, 1), (4, 4), (16, 16), (20, 20)] if plain else COLUMNS
    of = draw(heads(columns, few=few))
    batch = draw(st.integers(1, 2 // of.group if few else 2))
    lengths = torch.randint(0, keys + 1, (batch,), generator=g)
    kw: dict[str, Any] = {
        "is_causal": draw(st.sampled_from([False, True] if plain else [False, True, "lower_right"])),
        "scale": draw(st.sampled_from([None, 0.7] if plain else [None, 0.7, -0.3])),
    }
    if not (plain and kw["is_causal"]):
        kw["key_lengths"] = draw(st.sampled_from([None, lengths]))
        kw["attn_mask"] = draw(masks(g, (batch, of.kv * of.group, queries, keys), dtype, numbers=not plain))
    if not plain:
        kw["window"], kw["softcap"] = draw(st.sampled_from(WINDOWS)), draw(st.sampled_from([None, 1.5]))
    return {
        "tensors": of.tensors(g, dtype, (batch, queries), (batch, keys)),
        "policy": POLICIES[draw(st.sampled_from(sorted(POLICIES)))],
        **kw,
    }


@st.composite
def masks(
    draw: st.DrawFn, g: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, *, numbers: bool
) -> Tensor | None:
    """A mask that broadcasts against a shape, boolean or of numbers, some of which hide."""
    kind = draw(st.sampled_from(["none", "boolean", *(["numbers", "hiding"] if numbers else [])]))
    shape = tuple(draw(st.sampled_from([1, n])) for n in shape)
    shown = torch.rand(shape, generator=g) > 0.4
    if kind in ("none", "boolean"):
        return shown if kind == "boolean" else None
    added = torch.randn(shape, generator=g, dtype=torch.float64).to(draw(st.sampled_from([dtype, torch.float32])))
    lowest = draw(st.sampled_from([-torch.inf, torch.finfo(added.dtype).min]))
    return added if kind == "numbers" else added.masked_fill(~shown, lowest)


class Documents(NamedTuple):
    """A call of packed documents: tensors ``[tokens, heads, columns]``, where documents start, and options."""

    tensors: list[Tensor]
    starts: tuple[Tensor, Tensor]
    policy: Any
    options: dict[str, Any]


@st.composite
def documents(draw: st.DrawFn, dtype: torch.dtype, *, few: bool = False) -> Documents:
    """Some without queries or without keys; with tokens of none before the first and after the last."""
    count = draw(st.integers(0, 2 if few else 4))
    starts = []
    for _ in range(2):
        lengths = draw(st.lists(st.integers(0, 6), min_size=count + 2, max_size=count + 2))
        starts.append(torch.tensor(lengths).cumsum(0))
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.sampled_from(WINDOWS)),
        "softcap": draw(st.sampled_from([None, 1.5])),
        "scale": draw(st.sampled_from([None, 0.7])),
        "return_stats": draw(st.booleans()),
    }
    of, policy = draw(heads(few=few)), POLICIES[draw(st.sampled_from(sorted(POLICIES)))]
    made = of.tensors(draw(generators()), dtype, (int(starts[0][-1]),), (int(starts[1][-1]),))
    return Documents(made, (starts[0][:-1], starts[1][:-1]), policy, options)


class Caches(NamedTuple):
    """A call that decodes: tensors, valid keys of each, the name of a policy, options, hidden keys, a size of pages."""

    tensors: tuple[Tensor, Tensor, Tensor]
    lengths: list[int]
    policy: str
    options: dict[str, Any]
    mask: Tensor
    page_size: int


@st.composite
def caches(draw: st.DrawFn, dtype: torch.dtype, device: str = "cpu") -> Caches:
    of, batch, capacity = draw(heads()), draw(st.integers(1, 3)), draw(st.integers(1, 40))
    tensors = decode_cases.inputs(
        batch=batch, heads=of.kv * of.group, kv_heads=of.kv, queries=draw(st.integers(1, 4)), capacity=capacity,
        dim=of.columns, value_dim=of.value_columns, dtype=dtype, device=device, seed=draw(st.integers(0, 999)),
    )  # fmt: skip
    lengths = draw(st.lists(st.integers(0, capacity), min_size=batch, max_size=batch))
    options = {
        "window": draw(st.sampled_from([None, 1, 3, 17])),
        "softcap": draw(st.sampled_from([None, 1.5])),
        "scale": draw(st.sampled_from([None, 0.7])),
    }
    mask = torch.rand((batch, capacity), generator=draw(generators())) > 0.3
    names = ["callable", "constant", "detached", "held", "log length", "paper", "yarn"]
    return Caches(
        tensors, lengths, draw(st.sampled_from(names)), options, mask.to(device), draw(st.sampled_from([1, 5, 16]))
    )
