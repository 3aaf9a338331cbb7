"""Operators of torch that plain eager code calls without torch's dispatcher.

``torch.compile``, ``torch.func.vmap``, fake tensors and everything else that looks at operators sees a custom operator.
Where nothing looks, its function is called as it is, within an ``autograd.Function`` where gradients are wanted: the
dispatcher's way to a custom operator in Python and back costs a call as much as launching several kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Operator:
    """A function of tensors, numbers and lists of numbers, as a custom operator ``name`` and by itself.

    What it returns may not be what it was given, nor lie in the same memory. ``opaque`` is the custom operator.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.opaque = torch.library.custom_op(name, function, mutates_args=())
        self.function = function
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self.register_fake, self.register_vmap = self.opaque.register_fake, self.opaque.register_vmap
        self._tracked: Any = None

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None] | None = None
    ) -> None:
        """As :meth:`torch.library.CustomOpDef.register_autograd` has it."""
        self.opaque.register_autograd(backward, setup_context=setup_context)

        def forward(ctx: Any, *arguments: Any) -> Any:  # a setup_context of its own looks at signatures in every call
            output = self.function(*arguments)
            if setup_context is not None:
                setup_context(ctx, arguments, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._tracked = type(f"{self.__name__}_tracked", (torch.autograd.Function,), methods)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or named:
            return self.opaque(*arguments, **named)
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        if _watched(tensors):
            return self.opaque(*arguments)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return self.opaque(*arguments) if self._tracked is None else self._tracked.apply(*arguments)
        return self.function(*arguments)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make an :class:`Operator` of a function."""
    return lambda function: Operator(name, function)


def stand_for_others(tensors: Iterable[Tensor]) -> bool:
    """Whether tensors may stand for others than those that lie in their memory: a transform, a trace, a subclass."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or not all(map(_plain, tensors))
    )


def _watched(tensors: list[Tensor]) -> bool:
    """Whether something may want to see which operators run: a transform, a mode, a trace, a profiler, a subclass."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0
        or torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
        or stand_for_others(tensors)
    )


def _plain(x: Tensor) -> bool:
    """Whether a tensor is the numbers that lie in its memory: not their negatives, nor those of a batched gradient."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and not x.is_meta
        and not x.is_neg()
        and not x._is_zerotensor()
        and not functorch.is_legacy_batchedtensor(x)
    )
