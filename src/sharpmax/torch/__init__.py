"""sharpmax for PyTorch."""

from ..extras import require

require("torch", "torch", "sharpmax.torch")

from .attention import Attention, row_stats, scaled_dot_product_attention  # noqa: E402
from .decode import decode_attention, paged_decode_attention  # noqa: E402
from .learnable import Learnable  # noqa: E402
from .multihead import MultiheadAttention  # noqa: E402
from .varlen import varlen_attention  # noqa: E402

__all__ = [
    "scaled_dot_product_attention",
    "row_stats",
    "varlen_attention",
    "decode_attention",
    "paged_decode_attention",
    "MultiheadAttention",
    "Attention",
    "Learnable",
]
