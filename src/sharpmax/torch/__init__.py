"""sharpmax for PyTorch."""

from ..extras import require

require("torch", "torch", "sharpmax.torch")

from .learnable import Learnable  # noqa: E402

__all__ = ["Learnable"]
