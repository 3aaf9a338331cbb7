"""Attention with adaptive temperature over sequences that are spread over the processes of a group."""

import torch.distributed

if not torch.distributed.is_available():
    raise ImportError("sharpmax.torch.distributed needs torch.distributed, which this build of PyTorch does not have")

from .attention import ring_attention
from .cost import Cost, cost
from .layout import positions, shard, unshard

__all__ = ["ring_attention", "shard", "unshard", "positions", "cost", "Cost"]
