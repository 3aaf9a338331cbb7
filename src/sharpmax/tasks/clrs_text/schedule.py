"""The learning rate: a linear warm-up, then half a cosine."""

from __future__ import annotations

import math


def rate_at(step: int, steps: int, *, peak: float, warmup: float, final: float) -> float:
    """The learning rate of a step, the first of which is 0.

    Args:
      step: which one.
      steps: how many there are.
      peak: the highest rate, reached at the end of the warm-up.
      warmup: the share of steps for the warm-up.
      final: the share of ``peak`` that is left after the last step.
    """
    rising = math.ceil(warmup * steps)
    if step < rising:
        return peak * (step + 1) / rising
    share = (step - rising) / max(steps - rising, 1)
    return peak * (final + (1 - final) * (1 + math.cos(math.pi * share)) / 2)
