"""Triton kernels: row statistics, attention with beta, and their gradients."""

from ...extras import require

require("triton", "triton", "sharpmax.torch.triton")

from .gradient import backward, beta_gradient, policy_gradient  # noqa: E402
from .hopper_backward import adaptive_backward  # noqa: E402
from .hopper_backward import taken as adaptive_backward_taken  # noqa: E402
from .prefill import attend, row_stats, row_stats_and_scaled_query  # noqa: E402
from .tiles import Tiles  # noqa: E402

__all__ = [
    "row_stats",
    "row_stats_and_scaled_query",
    "attend",
    "backward",
    "beta_gradient",
    "policy_gradient",
    "adaptive_backward",
    "adaptive_backward_taken",
    "Tiles",
]
