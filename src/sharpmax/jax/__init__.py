"""sharpmax for JAX."""

from ..extras import require

require("jax", "jax", "sharpmax.jax")

from .attention import Attention, dot_product_attention, row_stats  # noqa: E402
from .mechanisms import Held  # noqa: E402

__all__ = ["dot_product_attention", "row_stats", "Attention", "Held"]
