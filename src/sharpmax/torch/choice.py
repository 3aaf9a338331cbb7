"""Which implementation of attention serves a call, and what each of them does not serve."""

from __future__ import annotations

import functools

import torch

from ..core.policies import Detached, Policy, is_hard, lowered
from .checks import Inputs, differentiated, forward_mode, has_tangent, needs_gradient, transformed
from .geometry import ALL, LARGEST_HEAD, LARGEST_POLYNOMIAL
from .installed import HAS_TRITON, triton_is_old
from .learnable import parameters_of

IMPLEMENTATIONS = ("auto", "reference", "streaming", "triton", "stock")
CUDNN_FIRST = (9, 10)
"""The generations of GPUs (Hopper and Blackwell's for data centres) on which cuDNN's attention is torch's fastest."""


def check_impl(impl: str, among: tuple[str, ...] = IMPLEMENTATIONS[1:]) -> None:
    """Refuse the name of an implementation that there is not; ``among`` are those to name."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"expected impl to be one of {', '.join(('auto', *among))}, got {impl!r}")


def choose(
    impl: str,
    inputs: Inputs,
    policy: Policy | None,
    *,
    may_round: bool = False,
    drops: bool = False,
    among: tuple[str, ...] = IMPLEMENTATIONS[1:],
    what: str = "the call",
) -> str:
    """The implementation that serves a call: ``impl`` itself, or for ``"auto"`` the first that can.

    On a GPU, ``"auto"`` is ``"triton"``, which applies beta to the logits in float32: its error is about that of stock
    attention. Where it cannot serve (float64, heads of more than 256 columns, a mask that needs a gradient, hard
    attention), and on every other device, it is ``"streaming"``. ``torch.func.grad`` and its like take no custom
    operator, nor does differentiation in forward mode; under them it is ``"reference"``.

    With ``may_round``, which is for where :func:`own_kernels_pay` does not hold, it is ``"stock"``, which rounds
    ``beta * query``, for calls that cuDNN's kernels serve, which are faster than our portable ones: on NVIDIA GPUs of
    compute capability 9 or 10, for float16 and bfloat16, plain or causal (with as many queries as keys), without a
    mask or key lengths, with more than one key, and with values as wide as queries, which is a multiple of 8 and at
    most :func:`widest_of_cudnn`. With dropout, torch may give them to another kernel. There the error of the output was
    measured at 3 times that of stock attention on ``beta * query``, and is held to 4 times.

    ``among`` are the implementations that there are of ``what`` is asked for, and ``drops`` says whether weights are
    dropped.
    """
    check_impl(impl, among)

    def serves(name: str) -> bool:
        return name in among and not _refusal(name, inputs, policy, drops)

    if impl == "auto":
        if may_round and _stock_is_fast(inputs) and serves("stock") and serves("triton"):
            return "stock"
        for name in ("triton", "streaming", "reference"):
            if serves(name):
                return name
    elif serves(impl):
        return impl
    if impl not in ("auto", *among):
        raise ValueError(f"impl={impl!r} does not serve {what}; {', '.join(among)} can")
    can = [name for name in among if serves(name)] or ["scaled_dot_product_attention with impl='reference'"]
    reason = _refusal("streaming" if impl == "auto" else impl, inputs, policy, drops)
    raise ValueError(f"impl={impl!r} does not serve {reason}; {', '.join(can)} can")


def _stock_is_fast(inputs: Inputs) -> bool:
    """Whether torch has a kernel for the call that is faster than our portable ones."""
    q, k, v, mask, key_lengths, geometry, _ = inputs
    return (
        v is not None
        and mask is None
        and key_lengths is None
        and q.dtype in (torch.float16, torch.bfloat16)
        and v.shape[-1] == q.shape[-1]
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= widest_of_cudnn(q.device)
        and k.shape[2] > 1
        and all(x.stride(-1) == 1 for x in (k, v))
        and (not geometry.banded or q.shape[2] == k.shape[2])
    )


@torch.compiler.assume_constant_result
def compute_capability(device: torch.device) -> int:
    """The generation of an NVIDIA GPU (9 is Hopper), 0 for any other device."""
    return _ask_for_capability(device)


@torch.compiler.assume_constant_result
def widest_of_cudnn(device: torch.device) -> int:
    """The widest heads that torch gives cuDNN's attention, on a GPU where that is its fastest; 0 on any other."""
    capability = compute_capability(device)
    off = not torch.backends.cuda.cudnn_sdp_enabled() or torch.are_deterministic_algorithms_enabled()
    if capability not in CUDNN_FIRST or off:
        return 0
    return 256 if capability == 9 and (torch.backends.cudnn.version() or 0) >= 91000 else 128


def before_ampere(device: torch.device) -> bool:
    """Whether it is an NVIDIA GPU of a generation that the kernels are not for."""
    return 0 < compute_capability(device) < 8


@functools.cache
def _ask_for_capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" and torch.version.hip is None else 0


@torch.compiler.assume_constant_result
def hopper_processors(device: torch.device) -> int:
    """How many processors a GPU has that the kernels for Hopper are known to run on, 0 for any other device."""
    if not HAS_TRITON or compute_capability(device) != 9 or triton_is_old():
        return 0
    from .triton import hopper

    return hopper.known_processors(device)


def own_kernels_pay(inputs: Inputs, policy: Policy, dropout_p: float, return_stats: bool) -> bool:
    """Whether the kernels for Hopper serve a call, with its gradient where one is asked for, and keep the card at work.

    Then ``"auto"`` is ``"triton"``, and rounds no ``beta * query``. The kernels are for policies that lower to a
    polynomial of the entropy: they attend with maxima of the statistics, which others may not need, and with betas that
    are not negative, which others may give. The gradient they have is that of such a policy, not of a detached one, nor
    of statistics that are returned. Where tensors begin in memory is not looked at: portable kernels do what these
    cannot take.
    """
    q, k, v, mask, key_lengths, geometry, _ = inputs
    count = hopper_processors(q.device)
    if count == 0 or v is None or mask is not None or key_lengths is not None or dropout_p > 0:
        return False
    from .triton import hopper, hopper_backward

    form = lowered(policy)
    if form is None or form.constant or form.floor < 0 or len(form.coefficients) > LARGEST_POLYNOMIAL:
        return False
    if needs_gradient(q, k, v):
        if isinstance(policy, Detached) or return_stats:
            return False
        pays = hopper_backward.pays(q, k, geometry.banded, count)
        served = pays and not hopper_backward.refusal(q, k, v, geometry, form)
    else:
        pays = hopper.fills(q.shape, hopper.ATTEND_ROWS, geometry.banded, count)
        served = pays and not hopper.plain_refusal(q, k, v, geometry)
    return served and all(hopper.regular(x.shape, x.stride()) for x in (q, k, v))


def _refusal(impl: str, inputs: Inputs, policy: Policy | None, drops: bool) -> str:
    """What of a call ``impl`` does not serve, empty if it serves all of it."""
    if impl != "reference" and differentiated():
        return "torch.func.grad, jvp and their like"
    if impl in ("streaming", "triton") and drops and transformed():
        return "dropout under torch.func.vmap"
    if impl != "reference" and forward_mode() and has_tangent(*inputs, *parameters_of(policy)):
        return "differentiation in forward mode"
    if impl == "triton":
        return triton_refusal(inputs, policy)
    return _stock_refusal(inputs, policy) if impl == "stock" else ""


def triton_refusal(inputs: Inputs, policy: Policy | None) -> str:
    """What of a call the kernels do not serve, empty if they serve all of it."""
    q, v, mask = inputs.q, inputs.v, inputs.mask
    if not HAS_TRITON:
        return "a call without Triton (pip install 'sharpmax[triton]')"
    if q.device.type != "cuda":
        return f"tensors on {q.device.type}"
    if triton_is_old():
        return "a call with a Triton older than 3.4 (pip install 'triton>=3.4')"
    if before_ampere(q.device):
        return "GPUs before Ampere"
    if q.dtype == torch.float64:
        return "float64"
    if q.shape[-1] > LARGEST_HEAD or (v is not None and v.shape[-1] > LARGEST_HEAD):
        return f"heads of more than {LARGEST_HEAD} columns"
    if v is not None and v.shape[-1] == 0:
        return "values without columns"
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return "the gradient of a mask"
    return "hard attention" if is_hard(policy) else ""


def _stock_refusal(inputs: Inputs, policy: Policy | None) -> str:
    q, k, v, mask, key_lengths, geometry, _ = inputs
    if geometry.softcap > 0:
        return "a softcap"
    if geometry.scale <= 0:
        return "a scale that is not positive"
    if v is not None and v.shape[-1] == 0:
        return "values without columns"
    if mask is not None and mask.dtype != torch.bool:
        return "a mask of numbers"
    if geometry.banded:
        aligned = not geometry.lower_right or q.shape[2] == k.shape[2]
        if geometry.left != ALL or geometry.right != 0 or not aligned:
            return "a window, or causality counted from the last key"
        if mask is not None or key_lengths is not None:
            return "causality with a mask or key lengths"
    return "hard attention" if is_hard(policy) else ""
