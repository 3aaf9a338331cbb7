"""Documents packed into one row, against each document on its own and against Figure 4 written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening

from sharpmax.huggingface import Call, observe, register
from tests.huggingface import families
from tests.huggingface.oracle import NAME as ORACLE
from tests.huggingface.oracle import register_oracle

register()
register_oracle()

LENGTHS = [9, 1, 14, 6]
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
STARTS = torch.tensor([0, 9, 10, 24, 30], dtype=torch.int32)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "mistral", "gpt2"])
def test_packed_documents_do_not_see_each_other(family):
    ids, model = families.tokens(1, 30), families.causal(family)
    calls: list[Call] = []
    with observe(calls.append), torch.no_grad():
        packed = model(ids, position_ids=POSITIONS, use_cache=False).logits
        alone = torch.cat([model(part).logits for part in ids.split(LENGTHS, dim=1)], 1)
        oracle = families.causal(family, attention=ORACLE)(ids, position_ids=POSITIONS, use_cache=False).logits
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(packed, oracle, rtol=1e-9, atol=1e-9)
    for call in calls[:2]:
        assert call.documents is not None
        assert torch.equal(call.documents, STARTS)
        assert call.options["attn_mask"] is None


def test_two_packed_rows():
    ids, model = families.tokens(2, 12), families.causal("llama")
    positions = torch.stack([torch.arange(12), torch.cat([torch.arange(5), torch.arange(7)])])
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        alone = [model(part[None]).logits[0] for part in (ids[0], ids[1, :5], ids[1, 5:])]
    torch.testing.assert_close(packed.flatten(0, 1), torch.cat(alone), rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:Using `DataCollatorWithFlattening`")
def test_what_the_flattening_collator_makes_is_served_with_gradients():
    ids = families.tokens(1, 30)
    features = [{"input_ids": part[0].tolist()} for part in ids.split(LENGTHS, dim=1)]
    batch: Any = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features)
    assert torch.equal(batch["cu_seq_lens_q"], STARTS)
    model, oracle = families.causal("gemma3"), families.causal("gemma3", attention=ORACLE)
    calls: list[Call] = []
    with observe(calls.append):
        loss = model(**batch, use_cache=False).loss
    assert all(call.documents is not None for call in calls)
    expected = oracle(batch["input_ids"], position_ids=batch["position_ids"], labels=batch["labels"], use_cache=False)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-10, atol=1e-10)
    loss.backward()
    expected.loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: n + m)


def test_packed_documents_with_padding_are_refused():
    ids, mask = families.padded([30], 30, "left")
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="cannot be combined with a mask"):
        families.causal("llama")(ids, attention_mask=mask, cu_seq_lens_q=STARTS, cu_seq_lens_k=STARTS)


def compiled(model: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def test_compiled_packed_documents():
    ids, model = families.tokens(1, 30), families.causal("mistral")
    run = compiled(model)
    for positions in (POSITIONS, torch.arange(30)[None]):
        expected = model(ids, position_ids=positions, use_cache=False).logits
        found = run(ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
