"""The loss of packed documents against transformers' own, in value and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sharpmax.huggingface import Call, observe, register
from sharpmax.tasks.clrs_text.loss import Learner, check_head, chunk_of, prepared
from sharpmax.tasks.clrs_text.packing import IGNORED
from tests.huggingface import families

register()

LENGTHS = [[9, 1, 14, 6], [16, 2, 12]]


def batch() -> dict[str, torch.Tensor]:
    """Two sequences of packed documents, the beginnings of which have no labels."""
    ids = families.tokens(2, 30)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    return {"input_ids": ids, "position_ids": positions, "labels": torch.where(positions < 3, IGNORED, ids)}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("family", ["llama", "smollm", "gemma", "gemma2", "gemma3", "mistral", "gpt2"])
def test_loss_and_gradients_are_those_of_transformers(family):
    model, given = families.causal(family), batch()
    if family == "gemma2":
        assert model.config.final_logit_softcapping is not None
    expected = model(**given, use_cache=False).loss
    expected.backward()
    theirs = gradients(model)
    learner = Learner(model)
    learner.chunk = 16  # several chunks, of which the last is not full
    tensors, labels = prepared(given)
    loss = learner(**tensors) / labels
    loss.backward()
    # transformers computes the loss in float32, whatever the type of the model
    torch.testing.assert_close(loss.float(), expected.float(), rtol=1e-6, atol=0)
    ours = gradients(model)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", ["smollm", "gemma3"])
def test_made_up_labels_and_documents_change_nothing(family):
    model = families.causal(family)
    learner = Learner(model)
    plain, labels = prepared(batch())
    filled, same = prepared(batch(), chunk=64, documents=16)
    assert labels == same
    assert len(filled["places"]) == 64 > len(plain["places"]) == labels
    assert len(filled["starts"]) == 17 > len(plain["starts"]) == 8
    first, second = learner(**plain), learner(**filled)
    torch.testing.assert_close(first, second, rtol=1e-12, atol=0)
    first.backward()
    expected = gradients(model)
    second.backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_documents_are_described_on_the_host_and_never_worked_out_from_positions(family, monkeypatch):
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", None)
    calls: list[Call] = []
    tensors, _ = prepared(batch())
    with observe(calls.append):
        Learner(families.causal(family))(**tensors)
    for call in calls:
        assert call.documents is not None
        assert call.documents.tolist() == [0, 9, 10, 24, 30, 46, 48, 60]
    windows = [call.options["window"] for call in calls]
    assert windows == ([None, None] if family == "llama" else [7, None])


class Reads(TorchDispatchMode):
    """Notes operators that a host waits for: those that read a number, or whose result's shape is in the data."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(word in func.__name__ for word in self.WAITING):
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "smollm", "gemma2", "gemma3"])
def test_the_host_waits_for_nothing_that_the_device_computes(family):
    model, given = families.causal(family, dtype=torch.float32), batch()
    tensors, labels = prepared(given)
    with Reads() as reads, torch.autocast("cpu", torch.bfloat16):
        (Learner(model)(**tensors) / labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert reads.found == []
    with Reads() as reads:
        model(**given, use_cache=False)  # positions alone must be looked at
    assert reads.found


def test_under_autocast_the_loss_is_still_that_of_transformers():
    model, given = families.causal("smollm", dtype=torch.float32), batch()
    tensors, labels = prepared(given)
    exact = (Learner(model)(**tensors) / labels).item()
    with torch.autocast("cpu", torch.bfloat16):
        loss, expected = Learner(model)(**tensors) / labels, model(**given, use_cache=False).loss
    assert loss.dtype == torch.float32
    assert loss.item() != exact
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    theirs = gradients(model)
    loss.backward()
    for name, gradient in gradients(model).items():
        assert gradient.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(gradient.ravel(), theirs[name].ravel(), 0) > 0.999


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_layers_compile_without_a_break(family):
    torch._dynamo.reset()
    model = families.causal(family)
    learner, (tensors, _) = Learner(model), prepared(batch())
    expected = learner(**tensors)
    expected.backward()
    theirs = gradients(model)
    for layer in model.base_model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    found = learner(**tensors)
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-7, atol=1e-10)


def test_a_model_whose_logits_are_something_else_is_refused():
    model = families.causal("llama")
    check_head(model)
    for bias in (torch.ones, torch.zeros):  # one of zeros changes nothing yet, and would never learn
        model.lm_head.bias = torch.nn.Parameter(bias(families.VOCABULARY, dtype=torch.float64))
        with pytest.raises(ValueError, match="got a LlamaForCausalLM, which computes others"):
            check_head(model)


def test_a_model_with_dropout_is_looked_at_without_it():
    model = families.causal("gpt2").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    check_head(model)
    assert model.training


def test_a_chunk_holds_a_bounded_number_of_logits():
    assert chunk_of(49_152) == 2_048
    assert chunk_of(256_000) == 512
    assert chunk_of(53) == 8_192
