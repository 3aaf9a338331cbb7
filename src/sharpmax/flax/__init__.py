"""sharpmax for Flax: the linen and the nnx interface."""

from ..extras import require

require("flax", "jax", "sharpmax.flax")

from .attention import attention_fn  # noqa: E402
from .learnable import Learnable, LearnableNNX  # noqa: E402

__all__ = ["attention_fn", "Learnable", "LearnableNNX"]
