"""sharpmax for Flax: the linen and the nnx interface."""

from ..extras import require

require("flax", "jax", "sharpmax.flax")

from .learnable import Learnable, LearnableNNX  # noqa: E402

__all__ = ["Learnable", "LearnableNNX"]
