"""softmax and adaptive_temperature_softmax: Figure 4, masks, axes, types, gradients, transforms, bad input."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import sharpmax
from benchmarks.figure4 import jax_figure4, torch_figure4
from sharpmax.core import rowwise
from tests.arrays import LIBRARIES, gradient, make, numbers

RNG = np.random.default_rng(1)
LOGITS = RNG.normal(size=(6, 40)) * np.array([[0.01], [0.5], [1.0], [2.0], [5.0], [20.0]])
COTANGENT = RNG.normal(size=LOGITS.shape)


def test_figure_4_in_value_and_gradient() -> None:
    # In float64 Figure 4's 1e-9 moves the entropy by at most n * 1e-9, which bounds the difference here.
    tensor = torch.tensor(LOGITS, requires_grad=True)
    cotangent = torch.tensor(COTANGENT)
    expected = torch_figure4(tensor)
    (expected_gradient,) = torch.autograd.grad(expected, tensor, cotangent)
    got = sharpmax.adaptive_temperature_softmax(tensor)
    (got_gradient,) = torch.autograd.grad(got, tensor, cotangent)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(got_gradient, expected_gradient, atol=1e-6, rtol=0)
    with jax.enable_x64(True):
        logits = jnp.asarray(LOGITS)
        np.testing.assert_allclose(sharpmax.adaptive_temperature_softmax(logits), jax_figure4(logits), atol=1e-6)
        grads = [
            jax.grad(lambda a, f=f: jnp.vdot(f(a), jnp.asarray(COTANGENT)))(logits)
            for f in (sharpmax.adaptive_temperature_softmax, jax_figure4)
        ]
        np.testing.assert_allclose(*grads, atol=1e-6)
    # The gradient through beta matters: without it the result is another one.
    (detached,) = torch.autograd.grad(
        sharpmax.adaptive_temperature_softmax(tensor, policy=sharpmax.detached(sharpmax.PAPER)), tensor, cotangent
    )
    assert (detached - expected_gradient).abs().max() > 1e-3


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("axis", [-1, 0, 1, 2, (0, 2), (2, 1), None])
def test_any_axis(library: str, axis: Any) -> None:
    x = LOGITS[:, :24].reshape(4, 6, 6).astype(np.float32)
    weights = numbers(sharpmax.adaptive_temperature_softmax(make(library, x), axis))
    np.testing.assert_allclose(weights.sum(axis=axis), 1.0, rtol=1e-5)
    axes = tuple(range(3)) if axis is None else tuple(sorted(np.atleast_1d(axis) % 3))
    moved = np.moveaxis(x, axes, range(3 - len(axes), 3))
    flat = moved.reshape(*moved.shape[: 3 - len(axes)], -1)
    expected = numbers(sharpmax.adaptive_temperature_softmax(flat)).reshape(moved.shape)
    np.testing.assert_allclose(weights, np.moveaxis(expected, range(3 - len(axes), 3), axes), atol=1e-6)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_type_is_kept(library: str, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        x = make(library, LOGITS, dtype)
        weights = sharpmax.adaptive_temperature_softmax(x)
        assert weights.dtype == x.dtype
        eps = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-21, "float64": 1e-14}[dtype]
        exact = sharpmax.adaptive_temperature_softmax(numbers(x))
        np.testing.assert_allclose(numbers(weights), exact, atol=1e-30 if dtype == "float64" else 2e-7, rtol=4 * eps)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("policy", [sharpmax.PAPER, sharpmax.Hard(), sharpmax.LogLength(), sharpmax.Constant(0)])
def test_masks(library: str, policy: Any) -> None:
    kept = LOGITS[:, ::2]
    mask = np.zeros(LOGITS.shape, bool)
    mask[:, ::2] = True
    expected = numbers(sharpmax.adaptive_temperature_softmax(make(library, kept), policy=policy))
    lowest = float(np.finfo(np.float32).min)
    for x, where in ((LOGITS, mask), (np.where(mask, LOGITS, -np.inf), None), (np.where(mask, LOGITS, lowest), None)):
        keep = None if where is None else make(library, where, "bool")
        got = numbers(sharpmax.adaptive_temperature_softmax(make(library, x), where=keep, policy=policy))
        np.testing.assert_allclose(got[:, ::2], expected, atol=1e-6)
        assert not got[:, 1::2].any()


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize(
    "policy", [sharpmax.PAPER, sharpmax.Hard(), sharpmax.Constant(0), sharpmax.EntropyCurve((1, 2), (1, 2))]
)
def test_masked_rows_have_zero_weight_and_gradient_and_leave_others_alone(library: str, policy: Any) -> None:
    x = np.where(np.arange(3)[:, None] == 1, -np.inf, LOGITS[2:5])
    cotangent = make(library, COTANGENT[:3])
    weights = numbers(sharpmax.adaptive_temperature_softmax(make(library, x), policy=policy))
    assert not weights[1].any()
    got = gradient(
        library, lambda a: (sharpmax.adaptive_temperature_softmax(a, policy=policy) * cotangent).sum(), make(library, x)
    )
    alone = gradient(
        library,
        lambda a: (sharpmax.adaptive_temperature_softmax(a, policy=policy) * cotangent[2]).sum(),
        make(library, x[2]),
    )
    assert not got[1].any()
    assert np.all(np.isfinite(got))
    np.testing.assert_allclose(got[2], alone, atol=1e-6)


@pytest.mark.parametrize("library", LIBRARIES)
def test_hard_attention_is_uniform_over_tied_maxima(library: str) -> None:
    x = make(library, [[1.0, 3.0, 3.0, -2.0], [0.0, 0.0, 0.0, 0.0], [1e-6, 2e-6, 0.0, 2e-6]])
    weights = numbers(sharpmax.softmax(x, beta=float("inf")))
    np.testing.assert_array_equal(weights, [[0, 0.5, 0.5, 0], [0.25] * 4, [0, 0.5, 0, 0.5]])
    if library != "numpy":
        ramp = make(library, np.arange(12.0).reshape(3, 4))
        assert not gradient(library, lambda a: (sharpmax.softmax(a, beta=float("inf")) * ramp).sum(), x).any()


@pytest.mark.parametrize("library", LIBRARIES)
def test_beta_broadcasts_against_the_rows(library: str) -> None:
    x = make(library, LOGITS[:4].reshape(2, 2, 40))
    beta = np.array([[0.0, 1.0], [2.0, np.inf]])
    weights = numbers(sharpmax.softmax(x, beta=make(library, beta)))
    for i in range(2):
        for j in range(2):
            np.testing.assert_allclose(weights[i, j], numbers(sharpmax.softmax(x[i, j], beta=beta[i, j])), atol=1e-7)
    shared = numbers(sharpmax.softmax(x, beta=make(library, [1.0, 2.0])))
    np.testing.assert_allclose(
        shared[1, 1], weights[1, 0] * 0 + numbers(sharpmax.softmax(x[1, 1], beta=2.0)), atol=1e-7
    )


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_gradient_reaches_beta(library: str) -> None:
    x = LOGITS[2]
    step = 1e-6
    with jax.enable_x64(True):
        cotangent = make(library, COTANGENT[2], "float64")

        def loss(beta: Any) -> Any:
            return (sharpmax.softmax(make(library, x, "float64"), beta=beta) * cotangent).sum()

        got = gradient(library, loss, make(library, 1.7, "float64"))
        numeric = (numbers(loss(1.7 + step)) - numbers(loss(1.7 - step))) / (2 * step)
    np.testing.assert_allclose(got, numeric, rtol=1e-6)


@pytest.mark.parametrize("policy", [sharpmax.PAPER, sharpmax.PAPER_HELD, sharpmax.Constant(2), sharpmax.LogLength()])
def test_gradcheck_and_gradgradcheck(policy: Any) -> None:
    x = torch.tensor(LOGITS[1:4, :7], requires_grad=True)
    where = torch.tensor(RNG.random((3, 7)) > 0.2)

    def function(a: torch.Tensor) -> torch.Tensor:
        return sharpmax.adaptive_temperature_softmax(a, where=where, policy=policy)

    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))
    assert torch.autograd.gradcheck(lambda a: sharpmax.row_stats(a, where=where).entropy, (x,))


def test_the_analytic_backward_runs_and_equals_plain_autodiff(monkeypatch: pytest.MonkeyPatch) -> None:
    x, cotangent = torch.tensor(LOGITS), torch.tensor(COTANGENT)
    calls: list[str] = []
    original = rowwise.run
    from sharpmax.core import torch_functions

    monkeypatch.setattr(
        torch_functions, "run", lambda kernel, *rest: (calls.append(kernel.__name__), original(kernel, *rest))[1]
    )
    with_function = gradient("torch", lambda a: (sharpmax.adaptive_temperature_softmax(a) * cotangent).sum(), x)
    assert calls == ["_stats", "_weights", "_weights_backward", "_stats_backward"]
    monkeypatch.setattr(rowwise, "_records", lambda inputs: False)
    plain = gradient("torch", lambda a: (sharpmax.adaptive_temperature_softmax(a) * cotangent).sum(), x)
    assert len(calls) == 4
    np.testing.assert_allclose(with_function, plain, atol=1e-12)


def test_torch_functional_transforms_and_forward_mode() -> None:
    x, tangent = torch.tensor(LOGITS), torch.tensor(COTANGENT)
    whole = sharpmax.adaptive_temperature_softmax(x)
    torch.testing.assert_close(torch.func.vmap(sharpmax.adaptive_temperature_softmax)(x), whole)
    per_row = torch.func.vmap(torch.func.grad(lambda row, g: (sharpmax.adaptive_temperature_softmax(row) * g).sum()))
    expected = gradient("torch", lambda a: (sharpmax.adaptive_temperature_softmax(a) * tangent).sum(), x)
    np.testing.assert_allclose(numbers(per_row(x, tangent)), expected, atol=1e-12)
    value, slope = torch.func.jvp(sharpmax.adaptive_temperature_softmax, (x,), (tangent,))[:2]
    step = 1e-6
    numeric = (
        sharpmax.adaptive_temperature_softmax(x + step * tangent)
        - sharpmax.adaptive_temperature_softmax(x - step * tangent)
    ) / (2 * step)
    torch.testing.assert_close(value, whole)
    torch.testing.assert_close(slope, numeric, atol=1e-8, rtol=1e-5)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        unpacked = torch.autograd.forward_ad.unpack_dual(sharpmax.adaptive_temperature_softmax(dual))
    torch.testing.assert_close(unpacked.tangent, slope)


def test_jax_forward_mode_and_vmap_agree() -> None:
    x, tangent = jnp.asarray(LOGITS, jnp.float32), jnp.asarray(COTANGENT, jnp.float32)
    _, forward = jax.jvp(sharpmax.adaptive_temperature_softmax, (x,), (tangent,))
    _, pullback = jax.vjp(sharpmax.adaptive_temperature_softmax, x)
    np.testing.assert_allclose(jnp.vdot(tangent, forward), jnp.vdot(pullback(tangent)[0], tangent), rtol=1e-4)
    np.testing.assert_allclose(
        jax.vmap(sharpmax.adaptive_temperature_softmax)(x), sharpmax.adaptive_temperature_softmax(x), atol=1e-7
    )


def test_torch_compile_whole_graph_forward_backward_and_dynamic_sizes() -> None:
    compiled = torch.compile(sharpmax.adaptive_temperature_softmax, fullgraph=True)
    for rows, n in ((5, 40), (3, 24), (6, 33)):  # compiled for one shape, for all shapes, and used again
        x = torch.tensor(LOGITS[:rows, :n], dtype=torch.float32, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        got, expected = compiled(x), sharpmax.adaptive_temperature_softmax(y)
        torch.testing.assert_close(got, expected)
        cotangent = torch.tensor(COTANGENT[:rows, :n], dtype=torch.float32)
        got.backward(cotangent)
        expected.backward(cotangent)
        torch.testing.assert_close(x.grad, y.grad, atol=2e-6, rtol=1e-4)


@pytest.mark.thorough
def test_torch_compile_with_a_symbolic_axis_and_under_transforms() -> None:
    x = torch.tensor(LOGITS[:, :30]).reshape(3, 2, 30)
    compiled = torch.compile(sharpmax.adaptive_temperature_softmax, fullgraph=True, dynamic=True, backend="aot_eager")
    for axis in (-1, -2, 0):
        torch.testing.assert_close(compiled(x, axis), sharpmax.adaptive_temperature_softmax(x, axis))
    per_row = torch.vmap(torch.func.grad(lambda row: sharpmax.adaptive_temperature_softmax(row)[0]))
    rows = x.reshape(6, 30)
    torch.testing.assert_close(torch.compile(per_row, fullgraph=True, backend="aot_eager")(rows), per_row(rows))


@pytest.mark.thorough
def test_torch_compile_gives_no_warning_when_nothing_ran_before() -> None:
    code = (
        "import warnings; warnings.simplefilter('error'); "
        "warnings.filterwarnings('ignore', message='.*(script|instantiated).*', category=DeprecationWarning); "
        "import torch, sharpmax; x = torch.randn(3, 5, requires_grad=True); "
        "torch.compile(sharpmax.adaptive_temperature_softmax, fullgraph=True, backend='aot_eager')(x).sum().backward()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_non_contiguous_and_read_only_input() -> None:
    x = np.asfortranarray(RNG.normal(size=(300, 600)).astype(np.float32))[::-1, ::2]
    x.setflags(write=False)
    expected = sharpmax.adaptive_temperature_softmax(np.ascontiguousarray(x))
    np.testing.assert_array_equal(sharpmax.adaptive_temperature_softmax(x), expected)
    tensor = torch.tensor(np.ascontiguousarray(x)).T
    torch.testing.assert_close(sharpmax.adaptive_temperature_softmax(tensor, 0), torch.tensor(expected).T)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (1,), (2, 1)])
def test_empty_and_single(library: str, shape: tuple[int, ...]) -> None:
    weights = numbers(sharpmax.adaptive_temperature_softmax(make(library, np.zeros(shape))))
    np.testing.assert_array_equal(weights, np.ones(shape))


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_a_spread_beyond_the_type_gives_no_nan(library: str) -> None:
    x = make(library, [[3e38, -1e38, 0.0]])
    got = gradient(library, lambda beta: sharpmax.softmax(x, beta=beta)[0, 0], make(library, [1.0]))
    assert got.tolist() == [0.0]


@pytest.mark.parametrize("library", LIBRARIES)
def test_nan_is_not_hidden(library: str) -> None:
    weights = numbers(sharpmax.adaptive_temperature_softmax(make(library, [[0.0, np.nan, 1.0], [0.0, 1.0, 2.0]])))
    assert np.isnan(weights[0]).all()
    assert np.isfinite(weights[1]).all()


@pytest.mark.parametrize("library", LIBRARIES)
def test_bad_input_is_refused_in_one_sentence(library: str) -> None:
    x = make(library, LOGITS)
    for error, message, call in (
        (
            TypeError,
            "float16, bfloat16, float32 or float64, got int32",
            lambda: sharpmax.softmax(make(library, [1], "int32")),
        ),
        (ValueError, r"axis 2 does not exist in an array of shape \(6, 40\)", lambda: sharpmax.softmax(x, 2)),
        (ValueError, "names one axis", lambda: sharpmax.softmax(x, (0, -2))),
        (
            TypeError,
            "axis to be a whole number, several, or None, got 1.0",
            lambda: sharpmax.softmax(x, any_object(1.0)),
        ),
        (TypeError, r"axis .* got an array of shape \(6, 40\)", lambda: sharpmax.row_stats(x, any_object(x))),
        (TypeError, "beta to be a number or an array, got str", lambda: sharpmax.softmax(x, beta=any_object("2"))),
        (TypeError, "boolean array, got float32", lambda: sharpmax.softmax(x, where=x)),
        (TypeError, "boolean array, got bool", lambda: sharpmax.softmax(x, where=True)),
        (ValueError, "where to broadcast", lambda: sharpmax.softmax(x, where=make(library, [True, False], "bool"))),
        (ValueError, "beta to broadcast", lambda: sharpmax.softmax(x, beta=make(library, [1.0, 2.0]))),
        (ValueError, "at least 0, got -1", lambda: sharpmax.softmax(x, beta=-1)),
        (ValueError, "at least 0, got nan", lambda: sharpmax.softmax(x, beta=float("nan"))),
        (
            TypeError,
            "callable with RowStats, got float",
            lambda: sharpmax.adaptive_temperature_softmax(x, policy=any_object(1.0)),
        ),
        (
            TypeError,
            r"expected a policy, got the class LogLength; LogLength\(\.\.\.\) makes one",
            lambda: sharpmax.adaptive_temperature_softmax(x, policy=any_object(sharpmax.LogLength)),
        ),
    ):
        with pytest.raises(error, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def any_object(value: object) -> Any:
    """``value``, whatever a type checker would say."""
    return value


def test_arrays_of_two_libraries_are_refused() -> None:
    with pytest.raises(TypeError, match="where to be a torch array like the logits, got a numpy array"):
        sharpmax.softmax(torch.ones(3), where=np.ones(3, bool))
    with pytest.raises(TypeError, match="beta to be a numpy array like the logits, got a torch array"):
        sharpmax.softmax(np.ones((2, 3)), beta=torch.ones(2))
    np.testing.assert_allclose(sharpmax.softmax(jnp.ones(4), where=np.arange(4) < 2), [0.5, 0.5, 0, 0])
    np.testing.assert_allclose(sharpmax.softmax(np.ones((2, 4)), any_object(np.int64(1)), beta=np.float32(2)), 0.25)


def test_lists_are_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"NumPy, PyTorch or JAX array, got list; .*numpy.asarray"):
        sharpmax.softmax([1.0, 2.0])
