"""A discontinuity in the feed-forward part: softmax weights, and a step for the activation behind attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.arrays import Array, stop_gradient
from ..core.policies import Constant
from ..core.softmax import softmax
from .base import About, Mechanism
from .sigmoid import sigmoid


@dataclass(frozen=True)
class StepFeedForward(Mechanism):
    """Softmax, with ``1 where x > 0, else 0`` as the activation of the feed-forward layer behind attention."""

    about: ClassVar[About] = About(
        title="softmax, step in the feed-forward part",
        paper="Velickovic et al. (2025), section 5; the gradient is after Bengio et al. (2013), arXiv:1308.3432",
        equation="a_i = exp(s_i) / sum_j exp(s_j); activation(x) = 1 if x > 0, else 0",
        training="from scratch; a step has no gradient, so that of sigma(x) stands in for it in the backward pass",
        theorem=(
            "its assumption that feed-forward layers are continuous is broken, so inputs that come ever closer as n "
            "grows can still be told apart. A step is bounded, though, and so are the logits behind it: Lemma 2.1 "
            "holds, and coefficients disperse all the same"
        ),
        disperses=True,
    )
    inference: ClassVar[bool] = False

    @property
    def policy(self) -> Constant:
        """That of softmax: weights are the same."""
        return Constant()

    def formula(self, xp: Any, logits: Array, visible: Array, parameters: Mapping[str, Array]) -> Array:
        return softmax(logits, where=visible)

    def activation(self, xp: Any, x: Array) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """1 where ``x`` is above 0, else 0, exactly; the gradient is that of the logistic function."""
        soft = sigmoid(xp, x)
        return xp.astype(x > 0, x.dtype) + (soft - stop_gradient(soft))
