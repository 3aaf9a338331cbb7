"""Row functions for torch's autograd. Imported only once a tensor has been met, so torch is there.

A module of its own because ``torch.compile`` traces a ``torch.autograd.Function`` but not the making of one.
"""

from __future__ import annotations

import sys
from typing import Any

from .arrays import library_of
from .rowwise import Kernel, RowFunction, run

torch = sys.modules["torch"]


def _autograd_function(kernel: Kernel, backward_kernel: Kernel, differentiable: tuple[int, ...]) -> Any:
    class Rowwise(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> tuple[Any, ...]:
            return run(kernel, library_of(inputs[0]), inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs, *output)
            ctx.number_of_inputs = len(inputs)
            ctx.mark_non_differentiable(*(o for i, o in enumerate(output) if i not in differentiable))

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
            saved = ctx.saved_tensors
            gradients = iter(run(backward_kernel, library_of(saved[0]), (*saved, *cotangents)))
            # The mask, second of the inputs, has no gradient.
            return tuple(None if i == 1 else next(gradients) for i in range(ctx.number_of_inputs))

    return Rowwise


for _function in RowFunction.every:
    _function.torch_function = _autograd_function(_function.forward, _function.backward, _function.differentiable)
