"""The fingerprint of a model's weights."""

from __future__ import annotations

import torch

from sharpmax.diagnostics.fingerprint import fingerprint
from tests.diagnostics.models import build


def test_the_same_weights_have_the_same_fingerprint() -> None:
    model = build("llama")
    assert fingerprint(model) == fingerprint(build("llama"))
    assert fingerprint(model.double()) == fingerprint(build("llama"))
    narrow = build("llama").bfloat16()
    assert fingerprint(narrow) == fingerprint(build("llama").bfloat16().float())
    assert fingerprint(narrow) != fingerprint(model)


def test_a_step_of_training_changes_it() -> None:
    model = build("llama")
    before = fingerprint(model)
    ids = torch.arange(3, 20)[None]
    optimiser = torch.optim.SGD([model.model.layers[1].mlp.down_proj.weight], lr=1e-3)
    model(input_ids=ids, labels=ids).loss.backward()
    optimiser.step()
    assert fingerprint(model) != before


def test_names_and_shapes_count() -> None:
    weight = torch.zeros(6, 4)
    tall, wide = torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 4, bias=False)
    tall.weight.data, wide.weight.data = weight, weight.reshape(4, 6)
    assert fingerprint(tall) != fingerprint(wide)
    assert fingerprint(torch.nn.Sequential(tall)) != fingerprint(tall)
    assert fingerprint(torch.nn.Linear(4, 6, device="meta")) == fingerprint(torch.nn.Linear(4, 6, device="meta"))


def test_values_are_taken_from_all_rows_and_columns() -> None:
    layer = torch.nn.Linear(512, 1024, bias=False)
    with torch.no_grad():
        before = fingerprint(layer)
        layer.weight[:, 300:400] += 1
        after = fingerprint(layer)
        layer.weight[700:800] += 1
    assert len({before, after, fingerprint(layer)}) == 3
