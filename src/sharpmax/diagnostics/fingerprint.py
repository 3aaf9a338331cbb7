"""Whether two models have the same weights, told from a sample of them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

VALUES = 1024
"""How many values of a parameter are looked at, at most."""

STRIDE = 2_654_435_761
"""Between them, modulo the size: a prime, so that they are spread over rows and columns."""


def fingerprint(model: nn.Module) -> str:
    """A SHA-256 of the names, shapes and some values of all parameters.

    It is the same on every device, and for weights that are held in a wider dtype without being changed. A model that
    was trained further has another; a change to a few values of a large parameter may be missed.
    """
    import torch

    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}\0{tuple(parameter.shape)}\0".encode())
        if parameter.is_meta or parameter.numel() == 0:
            continue
        values = parameter.detach().reshape(-1)
        places = torch.arange(min(VALUES, values.numel())) * STRIDE % values.numel()
        taken = values[places.to(values.device)].to("cpu", torch.float32)
        digest.update(taken.numpy().astype("<f4").tobytes())
    return digest.hexdigest()
