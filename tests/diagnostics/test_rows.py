"""Statistics of rows with and without the sink, held to a dense float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sharpmax import PAPER
from sharpmax.diagnostics.rows import as_inputs, call_rows, documents, is_windowed, last_logits
from sharpmax.huggingface.interface import Call
from tests.diagnostics import dense

LEFT = torch.tensor([[False] * 5 + [True] * 18, [True] * 23])[:, None, None]
RIGHT = torch.tensor([[True] * 23, [True] * 17 + [False] * 6])[:, None, None]
BIAS = torch.randn(1, 4, 23, 23, generator=torch.Generator().manual_seed(5))
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "cache": {"is_causal": "lower_right", "queries": 4},
    "one query": {"is_causal": "lower_right", "queries": 1},
    "window": {"is_causal": True, "window": 7},
    "window of a cache": {"is_causal": "lower_right", "window": 7, "queries": 9},
    "both sides": {"window": (5, 3)},
    "softcap": {"is_causal": True, "softcap": 3.0, "scale": 0.7},
    "left padding": {"is_causal": True, "attn_mask": LEFT, "first": [5, 0]},
    "left padding, window": {"is_causal": True, "window": 6, "attn_mask": LEFT, "first": [5, 0]},
    "right padding": {"is_causal": True, "attn_mask": RIGHT},
    "encoder": {"attn_mask": RIGHT},
    "static cache": {"is_causal": "lower_right", "key_lengths": torch.tensor([14, 20]), "queries": 6},
    "lengths": {"is_causal": True, "key_lengths": torch.tensor([14, 23])},
    "bias": {"attn_mask": BIAS},
    "bias and causal": {"attn_mask": BIAS.masked_fill(torch.ones(23, 23).triu(1) > 0, -torch.inf)},
}


def call(options: dict[str, Any], dtype: torch.dtype = torch.float64, sink: float = 0.0) -> Call:
    given = {key: value for key, value in options.items() if key not in ("queries", "first")}
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, options.get("queries", 23), 8, generator=g)
    k, v = (torch.randn(2, 2, 23, 8, generator=g) for _ in range(2))
    if sink:  # a key that every query points at
        q[..., 0] = 1.0
        for b, j in enumerate(options.get("first", [0, 0])):
            k[b, :, j, 0] = sink
    mask = given.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        given["attn_mask"] = mask.to(dtype)
    q, k, v = (2 * x.to(dtype) for x in (q, k, v))
    return Call(nn.Identity(), q, k, v, {"enable_gqa": True, **given}, PAPER, None)


@pytest.mark.parametrize("sink", [0.0, 30.0], ids=["", "sink"])
@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_dense_oracle(name: str, sink: float) -> None:
    made = call(CASES[name], sink=sink)
    found, truth = call_rows(made), dense.rows(made, CASES[name].get("first"))
    assert found.whole.sum.shape == made.query.shape[:3]
    compared = 0
    for b, heads in enumerate(truth):
        for h, rows in enumerate(heads):
            for i, row in enumerate(rows):
                at = b, h, i
                if row is None:
                    assert found.whole.count[at] == 0
                    continue
                ours = (
                    found.whole.entropy[at], found.largest[at], found.whole.spread[at], found.whole.count[at],
                    found.sink_mass[at], found.rest.entropy[at],
                )  # fmt: skip
                torch.testing.assert_close(
                    torch.tensor([float(x) for x in ours]), torch.tensor(row), rtol=1e-6, atol=2e-7
                )
                compared += 1
    assert compared > 0
    if sink and name == "causal":
        assert float(found.sink_mass[:, :, 1:].min()) > 0.999


def test_float32_keeps_the_entropy_beside_a_sink_that_has_nearly_all() -> None:
    """Subtracting the sink from the whole row would leave nothing but rounding."""
    wide = call({"is_causal": True}, sink=15.0)
    narrow = wide._replace(query=wide.query.float(), key=wide.key.float(), value=wide.value.float())
    exact, found = call_rows(wide), call_rows(narrow)
    assert float(1 - exact.sink_mass[:, :, 5:].max()) < 1e-7
    torch.testing.assert_close(found.rest.entropy.double(), exact.rest.entropy, rtol=1e-4, atol=1e-4)


def test_rows_of_padding_do_not_count() -> None:
    assert call_rows(call(CASES["left padding"])).counts.sum(-1).tolist() == [18, 23]
    assert call_rows(call(CASES["right padding"])).counts.sum(-1).tolist() == [23, 17]
    assert call_rows(call(CASES["lengths"])).counts.sum(-1).tolist() == [14, 23]
    assert call_rows(call(CASES["static cache"])).counts.sum(-1).tolist() == [6, 6]
    assert call_rows(call(CASES["cache"])).counts.all()


def test_packed_documents_are_told_apart() -> None:
    whole = call({"is_causal": True})
    parts = list(documents(whole._replace(documents=torch.tensor([0, 9, 23, 46], dtype=torch.int32))))
    assert [tuple(part.query.shape) for part in parts] == [(1, 4, 9, 8), (1, 4, 14, 8), (1, 4, 23, 8)]
    torch.testing.assert_close(parts[1].key, whole.key[:1, :, 9:])
    torch.testing.assert_close(parts[2].query, whole.query[1:])
    assert all(part.documents is None for part in parts)
    assert next(iter(documents(whole))) is whole


@pytest.mark.parametrize("name", CASES)
def test_logits_of_the_last_row(name: str) -> None:
    made = call(CASES[name])
    inputs = as_inputs(made)
    last = torch.tensor([made.query.shape[2] - 1, made.query.shape[2] - 1])
    found = last_logits(inputs, last)
    options = made.options
    for b in range(2):
        for h in range(4):
            truth = dense.logits(made.query, made.key, b, h, int(last[b]), 2, options, 8)
            torch.testing.assert_close(found[b, h], truth)


def test_windows_are_told() -> None:
    windowed = [name for name, options in CASES.items() if is_windowed(as_inputs(call(options)))]
    assert windowed == ["window", "window of a cache", "both sides", "left padding, window"]


def test_no_keys_and_no_queries() -> None:
    made = call({})
    for keys, queries in ((0, 3), (1, 3), (3, 0)):
        cut: Tensor = made.key[:, :, :keys]
        found = call_rows(made._replace(key=cut, value=cut, query=made.query[:, :, :queries]))
        assert found.whole.sum.shape == (2, 4, queries)
        assert not found.rest.entropy.isnan().any()


@pytest.mark.parametrize("name", ["plain", "causal", "window", "softcap", "cache", "window of a cache"])
def test_a_sample_has_rows_of_the_whole(name: str) -> None:
    options = {**CASES[name], "queries": CASES[name].get("queries", 23) if "cache" not in name else 17}
    made = call(options)
    whole, some = call_rows(made), call_rows(made, sample=16)
    queries = made.query.shape[2]
    rows = [row for i in range(1, 9) for row in (round(i * queries / 8) - 2, round(i * queries / 8) - 1)]
    assert some.counts.shape[1] == 16
    assert rows[-1] == queries - 1
    for field in ("whole", "rest", "sink"):
        for ours, theirs in zip(getattr(some, field), getattr(whole, field), strict=True):
            torch.testing.assert_close(ours, theirs[:, :, rows])


def test_a_sample_of_padded_inputs_is_everything() -> None:
    assert call_rows(call(CASES["left padding"]), sample=16).counts.shape[1] == 23
    assert call_rows(call(CASES["causal"]), sample=100).counts.shape[1] == 23
