"""Launches that are worked out once: when what was compiled is launched directly, and when Triton decides anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from sharpmax.torch.triton.launch import Launch, Masks, _expanded_strides, form_of
from tests.torch.triton.compiled import LAUNCHES, printed


class Compiled:
    """What a launch of a compiled kernel gives back."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.seen.append(("again", grid, arguments))


class Kernel:
    """In the place of a kernel: notes how it was launched, and is compiled unless it is interpreted."""

    def __init__(self, *, interpreted: bool = False) -> None:
        self.seen: list[Any] = []
        self.interpreted = interpreted

    @staticmethod
    def fn(x: Any, out: Any, length: Any, seed: Any, BLOCK: Any) -> None: ...

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> Any:
            self.seen.append(("first", grid, arguments, options))
            return None if self.interpreted else Compiled(self.seen)

        return launch


def launch(kernel: Any, programs: Any = 3) -> Launch:
    return Launch(kernel, programs, {"length": 5, "BLOCK": 16, "unknown": 1}, {"num_warps": 2})


def test_the_second_run_is_direct() -> None:
    kernel, x, out = Kernel(), torch.zeros(8), torch.zeros(8)
    run = launch(kernel)
    run({"x": x, "out": out, "seed": 7, "more": None}, x)
    other = torch.ones(8)
    run({"x": other, "out": out, "seed": 8}, x)
    first, again = kernel.seen
    assert first == ("first", (3, 1, 1), (x, out, 5, 7, 16), {"num_warps": 2})
    assert again[:2] == ("again", (3, 1, 1))
    assert again[2][0] is other
    assert again[2][2:] == (5, 8, 16)


def test_what_begins_elsewhere_is_left_to_triton() -> None:
    kernel, x = Kernel(), torch.zeros(8)
    run, moved = launch(kernel, (2, 4)), torch.zeros(9)[1:]
    for given in (moved, x, moved, x):
        run({"x": given, "out": x, "seed": 0}, x)
    assert [entry[0] for entry in kernel.seen] == ["first", "first", "first", "again"]
    assert all(entry[1] == (2, 4, 1) for entry in kernel.seen)


def test_other_types_are_left_to_triton() -> None:
    kernel, x = Kernel(), torch.zeros(8)
    run = launch(kernel)
    for given, out, seed in ((x, x, 1), (x.half(), x, 1), (x, None, 1), (x, x, 2**31), (x, x, 2)):
        run({"x": given, "out": out, "seed": seed}, x)
    assert [entry[0] for entry in kernel.seen] == ["first"] * 4 + ["again"]


def test_an_interpreted_kernel_is_launched_as_ever() -> None:
    kernel, x = Kernel(interpreted=True), torch.zeros(8)
    run = launch(kernel)
    for _ in range(3):
        run({"x": x, "out": x, "seed": 0}, x)
    assert [entry[0] for entry in kernel.seen] == ["first"] * 3


def test_no_programs_no_launch() -> None:
    kernel, x = Kernel(), torch.zeros(8)
    launch(kernel, 0)({"x": x, "out": x, "seed": 0}, x)
    assert not kernel.seen


def test_arguments_are_made_of_tensors() -> None:
    kernel, x = Kernel(), torch.arange(8.0)
    run = Launch(kernel, 1, {"length": 5, "BLOCK": 16}, {}, made={"out": ("x", lambda t: t.shape)})
    run({"x": x, "seed": 0}, x)
    assert kernel.seen[0][2][1] == (8,)


def test_forms() -> None:
    x = torch.zeros(2, 3, 4)
    assert form_of(x) == form_of(torch.ones(2, 3, 4))
    assert form_of(x) != form_of(x.mT)
    assert form_of(x) != form_of(x.to(torch.float16))
    assert form_of(torch.zeros(25)[1:].view(2, 3, 4)) == form_of(x)._replace(aligned=False)
    assert hash(form_of(x)) == hash(form_of(torch.ones(2, 3, 4)))


@pytest.mark.parametrize("shape", [(2, 1, 5, 7), (1, 3, 1, 7), (5, 1), (1, 1)])
def test_strides_of_masks_are_those_of_the_expanded_mask(shape: tuple[int, ...]) -> None:
    mask = torch.zeros(shape)
    whole = (2, 3, 5, 7)
    assert _expanded_strides(form_of(mask), whole) == mask.expand(whole).stride()
    with pytest.raises(ValueError, match="broadcasts against"):
        _expanded_strides(form_of(torch.zeros(2, 2, 5, 7)), whole)


def test_masks_stand_in() -> None:
    q, mask = torch.zeros(1, 2, 3, 4), torch.ones(3, 3, dtype=torch.bool)
    given = Masks(mask).given(q)
    assert given["mask"].dtype == torch.uint8
    assert given["cu_q"] is q
    assert Masks().form == (None, False, None)
    wide = Masks.of(torch.tensor([[-1e300, 0.5]], dtype=torch.float64))
    assert wide.form.mask is not None
    assert wide.form.mask.dtype == torch.float32
    assert wide.given(q)["mask"].tolist() == [[-torch.inf, 0.5]]
    assert Masks(cu_q=torch.arange(4), cu_k=torch.arange(4)).form.documents == 3


ONE_KERNEL_FOR_EACH_LAUNCH = """
import itertools, torch
import sharpmax
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from sharpmax.torch import decode_attention, paged_decode_attention
from sharpmax.torch.geometry import Geometry
from sharpmax.torch.triton import decode, launch, gradient, prefill

backend, runs, wrong, kernels = make_backend(GPUTarget("cuda", 90, 32)), 0, [], set()

def run(self, given):
    global runs
    arguments = self.arguments.copy()
    for i, name, make in self.filled:
        arguments[i] = given[name]
    if any(isinstance(x, torch.Tensor) and x.data_ptr() % 16 for x in arguments):
        return
    names = launch._parameters(self.kernel)
    bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
    chosen = bind(*arguments, **self.options)[1]
    kernels.add(self.kernel.fn.__name__)
    before, runs = self.__dict__.setdefault("chosen", chosen), runs + 1
    wrong.extend((self.kernel.fn.__name__, *x) for x in zip(names, before, chosen, strict=True) if x[1] != x[2])

launch.Launch._run, launch.check_device, decode.INTERPRETED = run, lambda *_: None, True
policy = sharpmax.PAPER.lower()
types = (torch.float16, torch.bfloat16, torch.float32)
geometries = (Geometry(0.1), Geometry(0.1, right=0), Geometry(1, softcap=3, left=7, right=0, lower_right=True))
for _, dtype, geometry, length in itertools.product(range(2), types, geometries, (1, 16, 33)):
    q, k = torch.zeros(2, 4, length, 32, dtype=dtype), torch.zeros(2, 2, length, 32, dtype=dtype)
    for masks in (
        {}, {"key_lengths": torch.ones(2, dtype=torch.int64)}, {"key_lengths": torch.ones(2, dtype=torch.int32)},
        {"mask": torch.zeros(1, 1, length, length, dtype=torch.bool)}, {"mask": torch.zeros(2, 1, 1, length)},
    ):
        (top, total, moment, _, _), beta, _ = prefill.row_stats_and_scaled_query(q, k, geometry, policy, **masks)
        prefill.row_stats(q, k, geometry, with_min=True, **masks)
        for seed in (0, 1, 16, 2**31 - 1):
            out, lse = prefill.attend(q, k, k, beta.double(), geometry, dropout_p=0.1, seed=seed, **masks)
        given = {"out": out, "lse": lse, "grad_out": out.transpose(1, 2).contiguous().transpose(1, 2), "row_max": top}
        gradient.backward(q, k, k, beta, geometry, **given, need_beta=True, **masks)
        gradient.backward(q, k, None, None, geometry, row_max=top, grad_sum=beta, **masks)
        dbeta, _ = gradient.beta_gradient(q, k, k, beta, geometry, **given, **masks)
        gradient.policy_gradient(policy, total, moment, dbeta)
        whole = {"row_max": top, "row_sum": total, "row_moment": moment, "lowered": policy, "grad_scaled": q}
        gradient.backward(q, k, None, beta, geometry, **whole, **masks)
whole_numbers = sharpmax.EntropyPolynomial((2, 1), threshold=0)
for _, dtype, lengths, width, window in itertools.product(
    range(2), types, (None, torch.int32, torch.int64), (32, 64), (None, 16)
):
    q, k = torch.zeros(2, 4, 1, width, dtype=dtype), torch.zeros(2, 2, 4096, width, dtype=dtype)
    pages, table = torch.zeros(50, 16, 2, width, dtype=dtype), torch.zeros(2, 9, dtype=torch.int32)
    valid = None if lengths is None else torch.ones(2, dtype=lengths)
    for policy in (sharpmax.PAPER, sharpmax.Constant(2), whole_numbers, lambda stats: 1 + stats.spread):
        given = {"policy": policy, "window": window, "impl": "triton"}
        decode_attention(q, k, k, valid, **given)
        decode_attention(q, k, k, valid, key_mask=torch.ones(2, 4096, dtype=torch.bool), **given)
        if valid is not None:
            paged_decode_attention(q, pages, pages, table, valid, **given)
assert kernels >= {"combine_kernel", "logits_kernel", "values_kernel", "key_kernel", "policy_gradient_kernel"}, kernels
print(runs, sorted(set(map(str, wrong))))
"""


def test_every_launch_stands_for_one_kernel() -> None:
    """By Triton's own rules for an sm_90, over calls that differ in one thing or another; without launching any."""
    runs, wrong = printed(ONE_KERNEL_FOR_EACH_LAUNCH).strip().split(" ", 1)
    assert int(runs) > 4000
    assert wrong == "[]"


LENGTHS_OF_1 = """
def show(compiled):
    products = compiled.asm["ptx"].count("wgmma.mma_async") > 0
    print("kernel", *(compiled.src.signature[name] for name in ("q_len", "k_len")), products)

for keys, heads in ((6, 1), (1, 2)):
    q, k = (torch.zeros(1, n, length, 16, dtype=torch.float16) for n, length in ((heads, 1), (1, keys)))
    rows = torch.ones(1, heads, 1)
    given = {"out": q, "grad_out": q, "lse": rows, "row_max": rows, "grad_sum": rows}
    gradient.backward(q, k, k, rows, Geometry(1.0), **given)
prefill.row_stats(q, k, Geometry(1.0))
prefill.attend(q, k, k, rows, Geometry(1.0))
"""


def test_lengths_of_1_compile_for_hopper_without_a_gpu_and_are_no_constants() -> None:
    """With those, Triton 3.6 failed at one query with one key in grouped heads, and its ptxas at one with several."""
    found = [line for line in printed(LAUNCHES + LENGTHS_OF_1).splitlines() if line.startswith("kernel")]
    assert found == ["kernel i32 i32 True"] * 6


@pytest.mark.gpu
def test_compiled_kernels_are_launched_again_with_other_tensors_numbers_and_places() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    run = Launch(_added, 1, {"length": 100, "BLOCK": 128, "half": 0.5}, {"num_warps": 1})
    buffers = torch.arange(512.0, device="cuda").view(2, 256)
    for i, (start, seed) in enumerate([(0, 1), (0, 16), (1, 3), (4, 2**31 - 1)]):
        x = buffers[i % 2, start : start + 100]
        out = torch.full((100,), -1.0, device="cuda")
        run({"x": x, "out": out, "seed": seed}, x)
        torch.testing.assert_close(out, x * 0.5 + seed)
    assert run.again is not None


@triton.jit(do_not_specialize=["seed"])
def _added(x, out, length, half, seed, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < length) * half + seed, mask=at < length)
