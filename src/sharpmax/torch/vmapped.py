"""What ``torch.func.vmap`` makes of an operator: the mapped axis is folded into the batch."""

from __future__ import annotations

from typing import Any


def folded(op: Any, batched: int, mask: int, whole: tuple[int, ...]) -> Any:
    """A vmap rule for an operator whose first ``batched`` arguments are tensors ``[B, ...]`` or ``None``.

    ``mask`` is the one of them whose first axis may have size 1; ``whole`` are those that cannot be mapped over.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        if any(arguments[i] is not None for i in whole):
            raise ValueError("torch.func.vmap does not map over packed documents or dropout; loop over them instead")
        n = info.batch_size
        mapped: list[Any] = [
            x if i >= batched or x is None else x.expand(n, *x.shape) if axis is None else x.movedim(axis, 0)
            for i, (x, axis) in enumerate(zip(arguments, in_dims, strict=True))
        ]
        batch = mapped[0].shape[1]
        if mapped[mask] is not None:
            mapped[mask] = mapped[mask].expand(n, batch, *mapped[mask].shape[2:])
        results = op(*(x.flatten(0, 1) if i < batched and x is not None else x for i, x in enumerate(mapped)))
        asked = [r.ndim > 1 for r in results]
        unfolded = (r.unflatten(0, (n, batch)) if there else r for r, there in zip(results, asked, strict=True))
        return tuple(unfolded), tuple(0 if there else None for there in asked)

    return rule
