"""``record`` against the weights that eager attention returns, on tiny models of several families."""

from __future__ import annotations

import importlib.util
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax
from sharpmax import PAPER, PAPER_HELD, Constant, EntropyPolynomial, Hard, LogLength, PerHead
from sharpmax.diagnostics import METRICS, Table, record
from sharpmax.diagnostics.ranges import policy_range
from sharpmax.huggingface import sharpen
from sharpmax.theory import dispersion_length
from tests.diagnostics.models import batch, build

FAMILIES = ("llama", "gemma2", "gpt2", "bert")
ACTING = ("acting_mean", "acting_last")


def upper_end(policy: Any) -> float:
    found = policy_range(policy)
    assert found is not None
    return found[1]


def expected(weights: Tensor, mask: Tensor, policy: Any) -> dict[str, float]:
    """The metrics of one sequence and head from its matrix of coefficients ``[Lq, Lk]``, in float64."""
    tokens = mask.nonzero().flatten().tolist()
    rows = [weights[i].double() for i in tokens]
    first = tokens[0]
    seen = [row[row > 0] for row in rows]
    entropy = torch.stack([-(p * p.log()).sum() for p in seen])
    n = torch.tensor([len(p) for p in seen])
    spread = torch.stack([(p.max() / p.min()).log() for p in seen])
    largest, sink = torch.stack([p.max() for p in seen]), torch.stack([row[first] for row in rows])
    several = n > 1
    others = [torch.cat([row[:first], row[first + 1 :]]) for row in rows]
    others = [p[p > 0] / p.sum() for p in others]
    sinkless = torch.stack([-(p * p.log()).sum() for p in others])
    after = several & torch.tensor([len(p) > 0 for p in others])
    beta = policy.lower()(sharpmax.RowStats(torch.zeros(()), entropy.exp(), 0 * entropy, None, n))
    return {
        "tokens": len(tokens),
        "n": int(n[-1]),
        "entropy_mean": float(entropy.mean()),
        "entropy_std": float(entropy.std(correction=0)),
        "entropy_last": float(entropy[-1]),
        "normalised_mean": float((entropy[several] / n[several].log()).mean()),
        "normalised_last": float(entropy[-1] / n[-1].log()),
        "largest_mean": float(largest.mean()),
        "largest_last": float(largest[-1]),
        "spread_min": float(spread[several].min()),
        "spread_max": float(spread[several].max()),
        "spread_mean": float(spread[several].mean()),
        "spread_std": float(spread[several].std(correction=0)),
        "spread_last": float(spread[-1]),
        "beta_mean": float(beta.mean()),
        "beta_last": float(beta[-1]),
        "acts": float((beta != 1).double().mean()),
        "outside": float((entropy > upper_end(policy)).double().mean()),
        "sink_mean": float(sink[after].mean()),
        "sink_last": float(sink[-1]),
        "sinkless_mean": float(sinkless[after].mean()),
        "sinkless_last": float(sinkless[-1]),
    }


@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_those_of_eager_weights(family: str, padding: str) -> None:
    if padding == "left" and family == "bert":
        pytest.skip("encoders are padded on the right")
    policy = EntropyPolynomial((0.5, 0.4), threshold=0.9, domain=(0.0, 1.5))
    inputs = batch(padding)
    with torch.no_grad():
        attentions = build(family, "eager")(**inputs, output_attentions=True).attentions
        model = build(family)
        with record(model, policy) as stats:
            model(**inputs)
    assert len(stats) == len(attentions) * 2 * 4
    for row in stats:
        weights = attentions[row["layer"]][row["sequence"], row["head"]]
        truth = expected(weights, inputs["attention_mask"][row["sequence"]], policy)
        assert {*truth, *ACTING} == set(METRICS)
        assert [row[name] for name in ACTING] == [None, None]  # plain softmax
        for name, value in truth.items():
            assert row[name] == pytest.approx(value, rel=2e-3, abs=2e-3), (name, row["layer"], row["head"])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_computes_as_ever_and_is_left_as_it_was(family: str) -> None:
    model, inputs = build(family), batch("")
    before, name = model.config.to_dict(), model.config._attn_implementation
    with torch.no_grad():
        stock = model(**inputs)[0]
        with record(model):
            recorded = model(**inputs)[0]
    torch.testing.assert_close(recorded, stock, rtol=1e-4, atol=1e-4)
    if family in ("llama", "gpt2"):
        assert torch.equal(recorded, stock)
    assert model.config._attn_implementation == name
    assert model.config.to_dict() == before
    with pytest.raises(RuntimeError, match="mine"), record(model):
        raise RuntimeError("mine")
    assert model.config._attn_implementation == name


def test_a_sharpened_model_computes_as_ever() -> None:
    model, inputs = build("llama"), batch("")
    with torch.no_grad():
        stock = model(**inputs).logits
        with record(model) as plain:
            model(**inputs)
        with sharpen(model, Constant(3), layers=[0, 1]):
            outside = model(**inputs).logits
            with record(model) as sharpened:
                inside = model(**inputs).logits
            assert model.config._attn_implementation == "sharpmax"
            assert torch.equal(model(**inputs).logits, outside)
    assert torch.equal(inside, outside)
    assert not torch.allclose(inside, stock)
    first, same = (
        [{name: value for name, value in row.items() if name not in ACTING} for row in table.where(layer=0)]
        for table in (sharpened, plain)
    )
    assert first == same  # logits before beta
    assert sharpened.where(layer=1).rows != plain.where(layer=1).rows


def test_policies_that_are_idle_stay_so() -> None:
    model, inputs = build("llama"), batch("")
    sharpen(model, Constant(3))
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        outside = model(**inputs).logits
        with record(model):
            inside = model(**inputs).logits
        assert torch.equal(model(**inputs).logits, outside)
    assert torch.equal(inside, outside)


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_checkpoints_are_counted_once(reentrant: bool) -> None:
    model, inputs = build("llama").train(), batch("")
    with record(model) as plain:
        model(**inputs, use_cache=False).logits.sum().backward()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with record(model) as stats:
        model(**inputs, use_cache=False).logits.sum().backward()
        model(**inputs, use_cache=False).logits.sum().backward()
    assert len(stats) == 2 * len(plain) == 2 * 2 * 3 * 4
    assert stats.where(forward=0).rows == plain.rows


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Dynamo")
@pytest.mark.parametrize("before", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_compiled_model_is_not_seen_and_that_is_said(before: bool) -> None:
    model, inputs = build("llama"), batch("")["input_ids"]
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="eager")
    with torch.no_grad():
        if before:
            compiled(inputs)
        with (
            pytest.warns(UserWarning, match="LlamaForCausalLM ran, but none of its attention was seen"),
            record(model) as stats,
        ):
            compiled(inputs)
        assert len(stats) == 0
        with record(model, layers=[9]) as stats:
            model(inputs)
        with record(model):
            pass


def test_an_infinite_beta() -> None:
    model = build("llama")
    with torch.no_grad(), record(model, Hard(), attention={0: [0]}) as stats:
        model(**batch(""))
    assert {row["beta_mean"] for row in stats} == {row["beta_last"] for row in stats} == {math.inf}
    assert {row["acts"] for row in stats} == {1}
    (first, _) = stats.attention
    assert first.beta == math.inf
    assert first.sharpened.max() == 1
    assert {row["beta_last"] for row in json.loads(stats.to_json(), parse_constant=pytest.fail)} == {"inf"}
    assert ",inf," in stats.to_csv()


def test_windowed_heads_have_no_length_at_which_they_disperse() -> None:
    model = build("gemma2")
    with torch.no_grad(), record(model, epsilon=0.05) as stats:
        model(**batch(""))
    assert {row["layer"]: row["window"] for row in stats} == {0: 9, 1: None, 2: 9}
    with torch.no_grad(), record(model) as short:  # where the window does not bind yet
        model(input_ids=batch("")["input_ids"][:, :5])
    assert {row["layer"]: row["window"] for row in short} == {0: 9, 1: None, 2: 9}
    for row in stats:
        if row["window"]:
            assert row["dispersion_n"] is None
            assert row["n"] == 9
        else:
            assert row["dispersion_n"] == dispersion_length(row["spread_max"], 0.05).paper


def test_every_forward_is_counted_also_below_the_head_and_in_generation() -> None:
    model, inputs = build("llama"), batch("")
    with torch.no_grad(), record(model, layers=[1]) as stats:
        model(**inputs)
        model.base_model(**inputs, use_cache=False)
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert {row["layer"] for row in stats} == {1}
    tokens = {row["forward"]: (row["tokens"], row["n"]) for row in stats}
    assert tokens == {0: (21, 21), 1: (21, 21), 2: (21, 21), 3: (1, 22), 4: (1, 23)}
    assert stats.where(forward=0, sequence=1).column("entropy_mean") == pytest.approx(
        stats.where(forward=1, sequence=1).column("entropy_mean")
    )


def test_packed_documents_are_sequences_of_their_own() -> None:
    model = build("llama")
    ids = batch("")["input_ids"]
    positions = torch.cat([torch.arange(8), torch.arange(13)])[None]
    with torch.no_grad():
        with record(model) as packed:
            model(input_ids=ids[:1], position_ids=positions, use_cache=False)
        with record(model) as alone:
            model(input_ids=ids[:1, :8])
            model(input_ids=ids[:1, 8:])
    assert [row["tokens"] for row in packed.where(layer=0, head=0)] == [8, 13]
    for row in alone:
        (other,) = packed.where(sequence=row["forward"], layer=row["layer"], head=row["head"])
        assert other["entropy_last"] == pytest.approx(row["entropy_last"], rel=1e-4, abs=1e-5)
        assert other["sink_mean"] == pytest.approx(row["sink_mean"], rel=1e-4, abs=1e-5)


def test_attention_rows_with_and_without_the_policy() -> None:
    inputs = batch("left")
    with torch.no_grad():
        weights = build("llama", "eager")(**inputs, output_attentions=True).attentions
        model = build("llama")
        with record(model, LogLength(scale=0.7, bias=0.2), attention={2: [1, 3]}) as stats:
            model(**inputs)
    assert [(row.sequence, row.layer, row.head) for row in stats.attention] == [
        (0, 2, 1),
        (0, 2, 3),
        (1, 2, 1),
        (1, 2, 3),
    ]
    for row in stats.attention:
        truth = weights[2][row.sequence, row.head, -1]
        torch.testing.assert_close(row.weights, truth, rtol=1e-3, atol=1e-4)
        assert row.beta == pytest.approx(0.7 * math.log(15 if row.sequence == 0 else 21) + 0.2)
        sharp = truth.double() ** row.beta
        torch.testing.assert_close(row.sharpened.double(), sharp / sharp.sum(), rtol=2e-3, atol=1e-4)


def test_ranges_of_policies() -> None:
    assert upper_end(PAPER) == pytest.approx(5.9445, abs=1e-4)
    assert upper_end(PAPER_HELD) == pytest.approx(4.412, abs=1e-3)
    assert policy_range(EntropyPolynomial((1.0, 0.5))) == (-math.inf, math.inf)
    assert policy_range(sharpmax.EntropyCurve((1, 2, 4), (1, 2, 3))) == (1, 4)
    assert policy_range(sharpmax.detached(PAPER)) == policy_range(PAPER)
    assert policy_range(LogLength()) is None
    model = build("llama")
    per_head = PerHead((PAPER, Constant(1), EntropyPolynomial((0.0, 2.0), threshold=0.0, domain=(8, 9)), LogLength()))
    with torch.no_grad(), record(model, per_head) as stats:
        model(**batch(""))
    assert all(row["outside"] == 0 for row in stats if row["head"] != 2)
    assert all(row["outside"] == pytest.approx(20 / 21) for row in stats.where(head=2))
    assert all(row["acts"] == 0 for row in stats.where(head=1))
    with torch.no_grad(), record(model, LogLength()) as stats:
        model(**batch(""))
    assert {row["outside"] for row in stats} == {None}


def test_the_table_is_plain() -> None:
    model = build("llama")
    with torch.no_grad(), record(model) as stats:
        model(**batch(""))
    assert json.loads(stats.to_json()) == stats.rows
    heading, *lines = stats.to_csv().splitlines()
    assert heading.split(",") == stats.columns
    assert len(lines) == len(stats)
    assert len(stats.where(layer=1, sequence=0)) == 4
    with pytest.raises(ValueError, match="there is no column colour"):
        stats.where(colour=1)
    assert isinstance(stats.where(layer=0), Table)
    if importlib.util.find_spec("pandas") is None:
        with pytest.raises(ModuleNotFoundError, match=r"to_pandas needs pandas, .*sharpmax\[diagnostics\]"):
            stats.to_pandas()
    else:
        assert list(stats.to_pandas().columns) == stats.columns


def test_a_sample_of_rows() -> None:
    model = build("llama")
    with torch.no_grad():
        with record(model, attention=[1]) as whole:
            model(**batch(""))
        with record(model, attention=[1], sample=8) as some:
            model(**batch(""))
    assert {row["tokens"] for row in some} == {8}
    for ours, theirs in zip(some, whole, strict=True):
        for name in ("n", "entropy_last", "spread_last", "sink_last", "beta_last"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6)
    for ours, theirs in zip(some.attention, whole.attention, strict=True):
        torch.testing.assert_close(ours.logits, theirs.logits)
        assert ours.beta == pytest.approx(theirs.beta, rel=1e-5)


def test_bad_arguments() -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="epsilon to be above 0"), record(model, epsilon=0):
        pass
    with pytest.raises(ValueError, match="a sample of at least one row"), record(model, sample=0):
        pass
    with pytest.raises(TypeError, match="expected policy to be callable"), record(model, "paper"):  # pyright: ignore[reportArgumentType]
        pass
    with pytest.raises(TypeError, match="expected a transformers model"), record(torch.nn.Linear(2, 2)):
        pass


def test_memory_does_not_grow_with_the_square() -> None:
    """No tensor of the size of the logits is made."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, Tensor):
                    Largest.most = max(Largest.most, x.numel())
            return out

    model, n = build("llama"), 2048
    ids = torch.randint(3, 128, (1, n), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), record(model, layers=[0]), Largest():
        model.base_model(ids, use_cache=False)
    assert 0 < Largest.most < n * n / 8


def test_of_a_mechanism_it_is_said_that_softmax_is_recorded() -> None:
    model, plain = build("llama"), build("llama")
    with sharpen(model, mechanism="sparsemax", layers=[1]):
        stock = model(**batch("none"))[0]
        with (
            record(model) as stats,
            pytest.warns(UserWarning, match=r"layer 1 has sparsemax: what is recorded"),
        ):
            assert torch.equal(model(**batch("none"))[0], stock)
    with record(plain) as softmax:
        plain(**batch("none"))
    found, expected = (
        [row["entropy_mean"] for row in rows if row["layer"] == 0] for rows in (stats.rows, softmax.rows)
    )
    assert found == pytest.approx(expected)
