"""Attention over ranks is attention over the whole sequence: outputs, statistics, beta and every gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import sharpmax
from sharpmax.torch import scaled_dot_product_attention
from sharpmax.torch.distributed import cost, ring_attention
from tests.torch.distributed import cases
from tests.torch.distributed.cases import Shape, alone, assembled, together
from tests.torch.distributed.world import World

CAUSAL: dict[str, Any] = {"is_causal": True}
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(2, tmp_path_factory.mktemp("two"))
    yield world
    world.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(4, tmp_path_factory.mktemp("four"))
    yield world
    world.close()


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    return request.getfixturevalue(request.param)


def compare(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float, loose: float | None = None
) -> None:
    """Relative to the largest value; gradients of rounded types may be ``loose``."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        allowed = tolerance if loose is None or name in ("output", "entropy", "beta", "count") else loose
        error = np.abs(found[name] - x).max()
        assert error <= allowed * max(1.0, np.abs(x).max()), f"{name}: {error:.2e}"


CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "full": (sharpmax.PAPER, {}),
    "causal": (sharpmax.PAPER, CAUSAL),
    "softcap": (sharpmax.PAPER, CAUSAL | {"softcap": 2.0}),
    "window": (sharpmax.PAPER, CAUSAL | {"window": 5, "scale": 0.3}),
    "left and right": (sharpmax.PAPER, {"window": (2, 9)}),
    "right, softcap": (sharpmax.PAPER, {"window": (-1, 3), "softcap": 2.0}),
    "detached": (sharpmax.detached(sharpmax.PAPER), CAUSAL),
    "length": (sharpmax.LogLength(), CAUSAL),
    "length in a window": (sharpmax.LogLength(), {"window": 4}),
    "constant": (sharpmax.Constant(1.7), {}),
    "callable": (cases.of_spread_and_lse, CAUSAL),
    "learnable": (cases.learnable, CAUSAL),
}
POLICIES = {"paper": sharpmax.PAPER, "detached": sharpmax.detached(sharpmax.PAPER), "constant": sharpmax.Constant(1.0)}


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("world", ["two", "four"], indirect=True)
def test_ranks_together_equal_one_process(world: World, layout: str, call: str) -> None:
    policy, given = CALLS[call]
    of = (Shape(), torch.float64, policy)
    expected = alone(*of, **given)
    assert policy is not sharpmax.PAPER or (expected["beta"] > 1.05).mean() > 0.7
    compare(assembled(world.run(together, *of, layout, **given), layout), expected, 1e-11)


@pytest.mark.parametrize("policy", POLICIES)
def test_gathered_keys_give_the_same(four: World, policy: str) -> None:
    call = (Shape(), torch.float64, POLICIES[policy])
    found = four.run(together, *call, "zigzag", communication="gather", **CAUSAL)
    compare(assembled(found, "zigzag"), alone(*call, **CAUSAL), 1e-11)


@pytest.mark.parametrize(
    "shape", [Shape(key_heads=4, value_columns=8), Shape(heads=2, key_heads=1), Shape(batch=1, tokens=8)], ids=str
)
def test_heads_and_sizes(four: World, shape: Shape) -> None:
    call = (shape, torch.float64, sharpmax.PAPER)
    compare(assembled(four.run(together, *call, "zigzag", **CAUSAL), "zigzag"), alone(*call, **CAUSAL), 1e-11)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "loose"),
    [(torch.float32, 2e-5, 1e-4), (torch.float16, 4e-3, 2e-2), (torch.bfloat16, 2e-2, 8e-2)],
    ids=str,
)
@pytest.mark.parametrize("value_columns", [6, 8])  # as wide as queries, torch's kernel for the CPU serves
def test_narrow_types(two: World, dtype: torch.dtype, tolerance: float, loose: float, value_columns: int) -> None:
    call = (Shape(value_columns=value_columns), dtype, sharpmax.PAPER_HELD)
    compare(assembled(two.run(together, *call, "zigzag", **CAUSAL), "zigzag"), alone(*call, **CAUSAL), tolerance, loose)


def test_an_offset_of_all_logits_costs_few_digits(two: World) -> None:
    call, given = (Shape(), torch.float64, sharpmax.PAPER), {"offset": 1e3} | CAUSAL
    compare(assembled(two.run(together, *call, "zigzag", **given), "zigzag"), alone(*call, **given), 1e-8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo sends tensors of a CPU")
def test_the_kernels_work_on_pairs_of_shards(two: World) -> None:
    pytest.importorskip("triton")
    call = (Shape(batch=1, heads=2, key_heads=1, tokens=16), torch.float32, sharpmax.PAPER)
    found = two.run(cases.with_kernels, *call, "zigzag", **CAUSAL)
    compare(assembled(found, "zigzag"), alone(*call, **CAUSAL), 1e-4)


@pytest.mark.parametrize("communication", ["ring", "gather"])
def test_layers_after_each_other_and_a_graph_that_is_kept(two: World, communication: str) -> None:
    expected = cases.stacked(None)
    for found in two.run(cases.stacked, communication):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-11)


@pytest.mark.parametrize("sizes", [(0, 4, 2, 8), (1, 4, 2, 0)], ids=["no batch", "no tokens"])
def test_nothing_gives_nothing(two: World, sizes: tuple[int, ...]) -> None:
    call = (Shape(*sizes), torch.float32, sharpmax.PAPER)
    for found in two.run(together, *call, "zigzag", **CAUSAL):
        assert all(x.size == 0 for x in found.values())


def test_a_group_of_some_ranks(four: World) -> None:
    call = (Shape(), torch.float64, sharpmax.PAPER)
    found = four.run(together, *call, "zigzag", ranks=[1, 3], **CAUSAL)
    assert found[0] is None
    assert found[2] is None
    compare(assembled([found[1], found[3]], "zigzag"), alone(*call, **CAUSAL), 1e-11)


def test_a_rank_outside_of_the_group_is_told(two: World) -> None:
    inside, outside = two.run(cases.outside)
    assert not inside
    assert outside.startswith("expected a process group that this process (rank 1) is in, got")


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_sequence_comes_back_whole(four: World, layout: str) -> None:
    found = four.run(cases.round_trip, layout)
    assert all(whole for whole, _ in found)
    assert sorted(x for _, at in found for x in at) == list(range(24))
    assert found[0][1] == ([0, 1, 2, 21, 22, 23] if layout == "zigzag" else [0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("communication", ["ring", "gather"])
@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_sent_and_held_are_those_on_paper(four: World, policy: str, communication: str) -> None:
    paper = cost(
        64, 4, heads=4, key_heads=2, columns=8, value_columns=6, bytes_per_number=4, policy=POLICIES[policy],
        communication=communication,
    )  # fmt: skip
    for found in four.run(cases.traffic, POLICIES[policy], communication):
        assert found == [paper.forward_sent, paper.backward_sent, paper.forward_held, paper.backward_held]


def test_a_window_sends_only_where_it_reaches(four: World) -> None:
    """64 tokens, 16 on a rank: a window of 17 tokens reaches one rank back, and no further."""
    full = four.run(cases.traffic, sharpmax.PAPER, "ring", None, "contiguous")
    near = four.run(cases.traffic, sharpmax.PAPER, "ring", 17, "contiguous")
    for all_around, one_back in zip(full, near, strict=True):
        assert [3 * x for x in one_back[:2]] == all_around[:2]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tokens": [4, 6]}, "expected the shape [B, H, n, D] of query alike on every rank, got (1, 2, 4, 8)"),
        ({"dtype": [torch.float32, torch.float64]}, "the type of query alike on every rank, got float32 on rank 0"),
        ({"is_causal": [True, False]}, "the bounds of the window alike on every rank"),
        ({"scale": [0.5, 0.25]}, "got (0.5, 0.0, -1, -1) on rank 0 and (0.25, 0.0, -1, -1) on rank 1"),
        ({"layout": ["zigzag", "contiguous"]}, "layout alike on every rank, got zigzag on rank 0 and contiguous"),
        ({"communication": ["ring", "gather"]}, "communication alike on every rank"),
        ({"policy": [sharpmax.PAPER, POLICIES["detached"]]}, "got (True, True) on rank 0 and (True, False) on rank 1"),
        (
            {"policy": [sharpmax.PAPER, sharpmax.LogLength()]},
            "whether statistics are needed, and have a gradient alike",
        ),
    ],
    ids=str,
)
def test_ranks_that_differ_are_told(two: World, given: dict[str, Any], says: str) -> None:
    for message in two.run(cases.refusal, **given):
        assert says in message


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tokens": 5}, "expected an even number of tokens on every rank for layout='zigzag', got 5"),
        ({"keys": 6}, "expected as many queries as keys on a rank"),
        ({"layout": "striped"}, "expected layout to be one of zigzag, contiguous, got 'striped'"),
        ({"communication": "mail"}, "expected communication to be one of ring, gather, got 'mail'"),
        ({"policy": sharpmax.Hard()}, "does not serve hard attention"),
        ({"impl": "reference"}, "impl='reference' does not serve shards; streaming, triton can"),
        (
            {"impl": "triton", "softcap": 2.0},
            "does not serve the gradient of beta over ranks with a softcap; streaming can",
        ),
        ({"impl": "triton"}, "impl='triton' does not serve tensors on cpu; streaming can"),
        ({"window": 0}, "expected window to be"),
        ({"attn_mask": True, "dropout_p": 0.1}, "ring_attention does not serve attn_mask, dropout_p; it serves"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused(two: World, given: dict[str, Any], says: str) -> None:
    for message in two.run(cases.refusal, **given):
        assert says in message


def test_without_a_process_group() -> None:
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match=r"expected a process group, got none: call .*init_process_group first"):
        ring_attention(x, x, x)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU)])
def one(request: pytest.FixtureRequest) -> Iterator[str]:
    device = str(request.param)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    yield device
    dist.destroy_process_group()


@pytest.mark.parametrize("given", [{}, CAUSAL, CAUSAL | {"window": 5}], ids=str)
def test_a_group_of_one_is_attention_itself(one: str, given: dict[str, Any]) -> None:
    q, k, v, g_out = (x.to(one) for x in cases.whole(Shape(tokens=48, value_columns=8), torch.float32))
    tensors = [x.requires_grad_() for x in (q, k, v)]
    found = ring_attention(q, k, v, **given)
    expected = scaled_dot_product_attention(q, k, v, impl="reference", enable_gqa=True, **given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(*(torch.autograd.grad(x, tensors, g_out) for x in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_an_infinite_beta_is_a_large_one(one: str) -> None:
    x = torch.randn(1, 2, 8, 16, device=one)
    found = ring_attention(x, x, x, policy=lambda stats: torch.full_like(stats.sum, torch.inf))
    assert torch.equal(found, ring_attention(x, x, x, policy=sharpmax.Constant(1e4)))


def test_a_compiled_model_calls_it(one: str) -> None:
    x = torch.randn(1, 2, 8, 16, device=one)
    compiled = torch.compile(lambda x: 2 * ring_attention(x, x, x, is_causal=True), backend="eager")
    torch.testing.assert_close(compiled(x), 2 * ring_attention(x, x, x, is_causal=True))


def test_gradients_of_gradients_are_refused(one: str) -> None:
    x = torch.randn(1, 1, 4, 8, device=one, requires_grad=True)
    (g,) = torch.autograd.grad(ring_attention(x, x, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


def test_autocast_and_more_axes(one: str) -> None:
    x = torch.randn(2, 3, 2, 8, 16, device=one)
    with torch.autocast(one, torch.bfloat16):
        found = ring_attention(x, x, x, is_causal=True, return_stats=True)
    assert found.output.dtype == torch.bfloat16
    assert found.output.shape == x.shape
    assert found.beta.shape == found.stats.entropy.shape == x.shape[:-1]
    assert found.beta.dtype == torch.float32
