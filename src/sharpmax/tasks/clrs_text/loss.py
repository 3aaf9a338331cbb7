"""The loss of a language model on packed documents, without logits of all tokens at once.

Logits are computed for tokens with a label only, and for a chunk of them at a time: a vocabulary of 49,152 makes 12 GB
of float32 of 65,536 tokens, and of a chunk 0.4, which is there a few times over while its loss is computed. The
gradient of a chunk is computed with its loss, so logits are computed once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...huggingface.ready import layer_windows, packed_masks
from .loader import Batch
from .packing import IGNORED

LOGITS = 2**27
"""How many logits a chunk may have."""

LONGEST, SHORTEST = 8_192, 256
DOCUMENTS = 256
"""On a GPU, the number of documents is made up to a multiple of this by empty ones, so that few shapes are seen."""


def chunk_of(vocabulary: int) -> int:
    """How many tokens are a chunk: a power of 2."""
    most = max(SHORTEST, min(LONGEST, LOGITS // vocabulary))
    return 1 << (most.bit_length() - 1)


def prepared(batch: Batch, *, chunk: int = 1, documents: int = 1) -> tuple[dict[str, Tensor], int]:
    """What a :class:`Learner` takes, still on the host, and how many labels there are.

    Everything whose size depends on what is in the batch is worked out here, so that the device is never waited for.

    Args:
      batch: of a :class:`~sharpmax.tasks.clrs_text.Loader`.
      chunk: the number of labels is made up to a multiple of this, with labels that do not count.
      documents: the same for documents, with empty ones.
    """
    ids, positions, labels = (batch[name] for name in ("input_ids", "position_ids", "labels"))
    rows, length = labels.shape
    following = np.full((rows, length), IGNORED, np.int64)
    following[:, :-1] = labels.numpy()[:, 1:]
    following = following.ravel()
    places = np.flatnonzero(following != IGNORED)
    size = -(-max(len(places), 1) // chunk) * chunk
    targets = np.full(size, IGNORED, np.int64)
    targets[: len(places)] = following[places]
    starts = np.flatnonzero(positions.numpy().ravel() == 0)
    room = -(-len(starts) // documents) * documents
    return {
        "input_ids": ids,
        "position_ids": positions,
        "starts": torch.from_numpy(np.pad(starts, (0, room + 1 - len(starts)), constant_values=rows * length)).int(),
        "places": torch.from_numpy(np.concatenate([places, np.arange(size - len(places)) % following.size])),
        "targets": torch.from_numpy(targets),
    }, len(places)


class Learner(nn.Module):
    """A causal language model of transformers and the sum of its losses, in one module that Accelerate can wrap.

    Args:
      model: attends through sharpmax.
      compile: whether to compile what is computed of a chunk.
    """

    def __init__(self, model: Any, *, compile: bool = False) -> None:
        super().__init__()
        config = model.config.get_text_config()
        self.model = model
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.chunk = chunk_of(model.get_output_embeddings().weight.shape[0])
        self._loss = torch.compile(chunk_loss, dynamic=False) if compile else chunk_loss
        layer_windows(config)
        self._no_split_modules = getattr(model, "_no_split_modules", None)  # where FSDP divides a model

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, starts: Tensor, places: Tensor, targets: Tensor
    ) -> Tensor:
        """The sum of the losses at ``places`` (of all tokens, flat), where ``targets`` are what comes next."""
        hidden = self.model.base_model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=packed_masks(self.model.config, starts, input_ids.shape[1]),
            use_cache=False,
        ).last_hidden_state
        picked = hidden.flatten(0, 1).index_select(0, places)
        weight = self.model.get_output_embeddings().weight
        return ChunkedLoss.apply(picked, weight, targets, self.chunk, self.softcap, self._loss)


def check_head(model: Any) -> None:
    """Raise ValueError unless :class:`Learner` computes the logits that the model itself does."""
    head = model.get_output_embeddings()
    ids = torch.arange(8, device=head.weight.device)[None]
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    training = model.training
    model.eval()  # dropout makes other numbers of every pass
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = _capped(hidden @ head.weight.T, softcap)
    model.train(training)
    same = logits.shape == expected.shape and torch.allclose(logits, expected, rtol=1e-3, atol=1e-3)
    if getattr(head, "bias", None) is not None or not same:
        raise ValueError(
            f"expected logits that are the last hidden states times the output embeddings, with a softcap or without, "
            f"got a {type(model).__name__}, which computes others"
        )


class ChunkedLoss(torch.autograd.Function):
    """The sum of the cross-entropies of ``hidden @ weight.T``, chunk after chunk, with the gradients of both."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, softcap: float | None, loss: Any
    ) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden, dtype=dtype) if wants_hidden else None
        sums = torch.promote_types(hidden.dtype, torch.float32)
        d_weight = torch.zeros_like(weight, dtype=sums) if wants_weight else None
        total = hidden.new_zeros((), dtype=sums)
        with torch.autocast(device, enabled=False):
            rows, matrix = hidden.to(dtype), weight.to(dtype)
            for start in range(0, len(rows), chunk):
                part = slice(start, start + chunk)
                found, gradient = loss(rows[part], matrix, targets[part], softcap)
                total += found
                if d_hidden is not None:
                    torch.mm(gradient, matrix, out=d_hidden[part])
                if d_weight is not None:
                    d_weight += gradient.T @ rows[part]
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (scale,) = gradients
        d_hidden, d_weight = ctx.saved_tensors
        found = (
            None if gradient is None else gradient.to(dtype).mul_(scale)
            for gradient, dtype in zip((d_hidden, d_weight), ctx.dtypes, strict=True)
        )
        return *found, *(None,) * 4


def chunk_loss(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies of a chunk, and its gradient with respect to the logits before the softcap."""
    logits = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32))
    capped = _capped(logits, softcap)
    counts = targets != IGNORED
    index = torch.where(counts, targets, 0)[:, None]
    lse = capped.logsumexp(-1, keepdim=True)
    total = torch.where(counts[:, None], lse - capped.gather(1, index), 0).sum()
    gradient = (capped - lse).exp() * counts[:, None]
    gradient = gradient.scatter_add(1, index, -counts[:, None].to(gradient.dtype))
    if softcap is not None:
        gradient = gradient * (1 - (capped / softcap) ** 2)
    return total, gradient.to(hidden.dtype)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
