"""sharpmax for Hugging Face transformers: ``attn_implementation="sharpmax"``."""

from ..extras import require

require("torch", "huggingface", "sharpmax.huggingface")
require("transformers", "huggingface", "sharpmax.huggingface")

from .interface import Call, observe, register  # noqa: E402
from .stored import Rule, stored_rules  # noqa: E402
from .switch import Sharpened, sharpen, warn_if_idle  # noqa: E402

__all__ = ["Call", "Rule", "Sharpened", "observe", "register", "sharpen", "stored_rules", "warn_if_idle"]
