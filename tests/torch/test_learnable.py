"""Learnable policies as torch modules."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sharpmax
import sharpmax.torch

X = torch.tensor(np.random.default_rng(8).normal(size=(2, 3, 4, 20)), dtype=torch.float32)


def test_it_starts_where_its_structure_says_and_gets_gradients() -> None:
    policy = sharpmax.torch.Learnable(sharpmax.LearnableTemperature(heads=3, init=2.0))
    weights = sharpmax.adaptive_temperature_softmax(X, policy=policy)
    torch.testing.assert_close(weights, sharpmax.softmax(X, beta=2.0))
    (weights**2).sum().backward()
    gradient = policy.get_parameter("log_beta").grad
    assert gradient is not None
    assert gradient.shape == (3,)
    assert bool((gradient > 0).all())  # sharper rows have a larger sum of squares


def test_ssmax() -> None:
    policy = sharpmax.torch.Learnable(sharpmax.LearnableLogLength(heads=3, scale=0.4, bias=0.1))
    weights = sharpmax.adaptive_temperature_softmax(X, policy=policy)
    expected = sharpmax.adaptive_temperature_softmax(X, policy=sharpmax.LogLength(0.4, 0.1))
    torch.testing.assert_close(weights, expected)
    with torch.no_grad():
        policy.get_parameter("scale")[1] = 2.0
    changed = sharpmax.adaptive_temperature_softmax(X, policy=policy)
    torch.testing.assert_close(changed[:, 0], expected[:, 0])
    torch.testing.assert_close(changed[:, 1], sharpmax.softmax(X[:, 1], beta=2.0 * float(np.log(20)) + 0.1))


def test_training_sharpens_a_head_that_wants_it() -> None:
    policy = sharpmax.torch.Learnable(sharpmax.LearnableTemperature())
    optimiser = torch.optim.Adam(policy.parameters(), lr=0.1)
    rows = X.reshape(-1, 20)
    for _ in range(30):
        loss = -sharpmax.adaptive_temperature_softmax(rows, policy=policy).amax(-1).log().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert float(policy.get_parameter("log_beta").detach().exp()) > 3


def test_state_and_structure_are_saved_apart() -> None:
    policy = sharpmax.torch.Learnable(sharpmax.LearnableLogLength(heads=3, bias=0.5))
    assert set(policy.state_dict()) == {"scale", "bias"}
    again = sharpmax.torch.Learnable(sharpmax.policy_from_dict(policy.structure.to_dict()))
    again.load_state_dict(policy.state_dict())
    assert again.structure == policy.structure
    assert "LearnableLogLength(heads=3" in repr(again)


def test_compiled_and_bad_input() -> None:
    policy = sharpmax.torch.Learnable(sharpmax.LearnableTemperature(heads=3))
    compiled = torch.compile(
        lambda x: sharpmax.adaptive_temperature_softmax(x, policy=policy), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(X), sharpmax.softmax(X))
    with pytest.raises(ValueError, match=r"\[..., 3 heads, length\]"):
        sharpmax.adaptive_temperature_softmax(X[:, :2], policy=policy)
    with pytest.raises(TypeError, match="expected LearnableTemperature or LearnableLogLength, got Constant"):
        sharpmax.torch.Learnable(sharpmax.Constant())  # pyright: ignore[reportArgumentType]
