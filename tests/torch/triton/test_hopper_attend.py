"""The attention kernel for Hopper, against float64 and the portable kernel; interpreted and compiled where none is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import given as for_all
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from sharpmax.torch.geometry import Geometry
from sharpmax.torch.triton import Tiles, hopper, prefill
from tests.torch.triton.compiled import printed
from tests.torch.triton.hopper_cases import (
    CASES,
    CAUSAL,
    DEVICE,
    FROM_THE_END,
    NARROW,
    ON_HOPPER,
    PORTABLE_TYPES,
    WIDE,
    forget_launches,
    random_cases,
    sized,
)
from tests.torch.triton.oracle import POLICY, Case, Inputs, attention, inputs, logits

PORTABLE = Tiles(64, 64, 4, 2)
PLAIN = Case("plain", queries=300, keys=300, geometry=CAUSAL, **WIDE)


def attended(given: Inputs, beta: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The output and logsumexp by the kernel for Hopper, and beta."""
    q, k, v, geometry = given.q, given.k, given.v, given.case.geometry
    found, policy, _ = prefill.row_stats_and_scaled_query(q, k, geometry, POLICY, scaled_query=False, config="hopper")
    beta = policy if beta is None else beta
    return *prefill.attend(q, k, v, beta, geometry, row_max=found[0], config="hopper"), beta


def by_portable(given: Inputs, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The output and logsumexp by the portable kernel."""
    return prefill.attend(given.q, given.k, given.v, beta, given.case.geometry, config=PORTABLE)


@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("dtype", PORTABLE_TYPES, ids=str)
@pytest.mark.parametrize("case", sized(CASES))
def test_it_gives_what_float64_and_the_portable_kernel_give(case: Case, dtype: torch.dtype) -> None:
    given = inputs(case, dtype, DEVICE)
    out, lse, beta = attended(given)
    portable, _ = by_portable(given, beta)
    z, seen = logits(given, given.q.double(), given.k.double())
    expected, of_rows = attention(z, seen, given.v.double(), beta.double())
    error, peer = (float((x.double() - expected).norm()) for x in (out, portable))
    assert error <= 1.2 * peer
    filled = of_rows.isfinite()
    assert torch.equal(lse.isfinite(), filled)
    torch.testing.assert_close(lse[filled].double(), of_rows[filled], rtol=1e-5, atol=1e-4)
    assert not out[~filled].any()


@pytest.mark.usefixtures("hopper_kernels")
@settings(
    max_examples=60 if ON_HOPPER else 10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@for_all(case=random_cases(), dtype=st.sampled_from(PORTABLE_TYPES))
def test_random_calls_are_those_of_the_portable_kernel(case: Case, dtype: torch.dtype) -> None:
    given = inputs(case, dtype, DEVICE)
    out, lse, beta = attended(given)
    expected, of_rows = by_portable(given, beta)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse, of_rows, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("beta", [0.0, 1.0, 1e4, 1e6])
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_equal_and_huge_logits(offset: float, beta: float, dtype: torch.dtype) -> None:
    """A common offset of every logit, and one logit far above the others; at any temperature."""
    q, k = torch.zeros(2, 1, 2, 512, 128, device=DEVICE, dtype=dtype)
    q[..., 0], k[..., 0] = 1.0, offset
    k[:, 1, 7, 0] = offset + 1e4
    v = torch.randn_like(k)
    given = replace(inputs(replace(PLAIN, heads=2, key_heads=2), dtype, DEVICE), q=q, k=k, v=v)
    given.case = replace(given.case, geometry=Geometry(1.0), queries=512, keys=512)
    out, lse, _ = attended(given, torch.full(q.shape[:3], beta, device=DEVICE))
    assert lse.isfinite().all()
    mean = v.float().mean(2, keepdim=True).expand(v.shape)
    one = mean if beta == 0 else v[:, :, 7:8].float().expand(v.shape)
    torch.testing.assert_close(out[:, 0].float(), mean[:, 0], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(out[:, 1].float(), one[:, 1], rtol=2e-2, atol=2e-3)


@pytest.mark.usefixtures("hopper_kernels")
def test_what_is_no_number_stays_so_and_rows_without_keys_give_nothing() -> None:
    """A beta that is NaN; and an infinite value before all keys of some rows, which see none."""
    case = Case("rows without keys", queries=556, keys=300, geometry=FROM_THE_END, **WIDE)
    given = inputs(case, torch.bfloat16, DEVICE)
    beta = torch.ones(1, 1, 556, device=DEVICE)
    beta[..., 400] = torch.nan
    out, _, _ = attended(given, beta)
    assert torch.equal(out.isnan().any(-1), beta.isnan())
    given.v[:, :, 0] = torch.inf
    out, lse, _ = attended(given)
    assert not out[:, :, :256].any()
    assert torch.equal(lse.isinf(), torch.arange(556, device=DEVICE)[None, None] < 256)


@pytest.mark.usefixtures("hopper_kernels")
def test_the_order_of_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections of a few of all sequences, the last one narrower; and the same bits every time."""
    batch, heads, length, section = (4, 16, 1300, 5) if ON_HOPPER else (1, 5, 300, 2)
    sizes = {"queries": length, "keys": length, **NARROW}
    case = Case("sections", batch=batch, heads=heads, key_heads=heads, geometry=CAUSAL, **sizes)
    given = inputs(case, torch.bfloat16, DEVICE)
    whole, again = attended(given)[:2], attended(given)[:2]
    monkeypatch.setattr(hopper, "SECTION", section * length * 64 * 4)
    forget_launches()
    parts = attended(given)[:2]
    for a, b, c in zip(whole, again, parts, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
def test_in_a_cuda_graph() -> None:
    given = inputs(CASES[2], torch.bfloat16, "cuda")
    attended(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _, _ = attended(given)
    given.q.copy_(given.q.flip(2))
    graph.replay()
    assert torch.equal(out, attended(given)[0])


REFUSED: list[tuple[str, Case, dict[str, Any]]] = [
    ("calls with the maxima of rows", PLAIN, {"row_max": None}),
    ("calls without dropout", PLAIN, {"dropout_p": 0.1}),
    ("values as wide as queries", replace(PLAIN, value_width=64), {}),
    ("calls without a mask", replace(PLAIN, mask="boolean"), {}),
    ("calls without key lengths", replace(PLAIN, lengths=(20,)), {}),
    ("heads of 64 or 128 columns in a two-byte type", replace(PLAIN, width=32, value_width=32), {}),
    ("tensors on a Hopper GPU", PLAIN, {}),
]


@pytest.mark.parametrize(("sentence", "case", "options"), REFUSED, ids=[sentence for sentence, _, _ in REFUSED])
def test_what_it_does_not_serve_it_refuses(sentence: str, case: Case, options: dict[str, Any]) -> None:
    given = inputs(case, torch.float16, "cpu")
    beta = torch.ones(given.q.shape[:3])
    options = {"row_max": beta, **given.options, **options}
    with pytest.raises(ValueError, match=f"^the attention kernel for Hopper serves {sentence}$"):
        prefill.attend(given.q, given.k, given.v, beta, case.geometry, **options, config="hopper")


COMPILE = """
import torch, triton
from triton._utils import canonicalize_dtype
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from sharpmax.torch.triton import hopper, hopper_attend_kernel as module

def type_of(name, q, k):
    if name.endswith("_desc"):
        made = k if name in ("k_desc", "v_desc") else q
        return f"tensordesc<{canonicalize_dtype(made.base.dtype)}{made.block_shape},{made.layout!r}>"
    if name in ("beta", "row_max", "lse"):
        return "*fp32"
    return "i32" if name in module.WHOLE_NUMBERS else "constexpr" if name.isupper() else "fp32"

for width, dtype, causal in ((128, torch.bfloat16, True), (64, torch.float16, False)):
    x = torch.zeros(1, 1, 256, width, dtype=dtype)
    q, k = hopper.descriptor(x, module.LINES.value), hopper.descriptor(x, module.KEYS.value)
    kernel = module.hopper_attend_kernel
    signature = {name: type_of(name, q, k) for name in kernel.arg_names}
    keys, values = hopper.ATTEND_STAGES[width]
    flags = {"K_STAGES": keys, "V_STAGES": values, "CAUSAL": causal, "EDGES": causal, "LATER": causal}
    compiled = triton.compile(
        GluonASTSource(kernel, signature, flags), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}
    )
    print("kernel", compiled.metadata.shared, compiled.asm["ptx"].count("wgmma.mma_async"))
"""


def test_it_compiles_for_hopper_without_a_gpu_and_keeps_its_products() -> None:
    pytest.importorskip("triton.experimental.gluon._runtime")
    found = [tuple(map(int, line.split()[1:])) for line in printed(COMPILE).splitlines() if line.startswith("kernel")]
    wide, narrow = 2 * 2 * (8 + 8), 2 * 2 * (4 + 8)  # two warpgroups, the first or last tile and the others
    assert [products for _, products in found] == [wide, narrow]
    assert max(shared for shared, _ in found) <= 227 * 1024  # what a program may have
