"""Attention with adaptive temperature on a GPU, against stock attention and a literal Figure 4, in speed and in error.

    python -m benchmarks.attention [--quick] [--flex] [--parts NAME ...] [--lengths N ...] [--only NAME ...]
                                   [--heads FILE ...] [--out FILE]

Two ways of ``sharpmax.torch.scaled_dot_product_attention`` are measured: what ``impl="auto"`` takes, and
``impl="stock"``, where a kernel gives statistics, beta and ``beta * q``, and stock attention (cuDNN) does the rest. On
Hopper the first is ``impl="triton"``: a kernel gives the statistics and beta, and another one attends with beta on the
logits in float32; except in training with "detached", the same policy without its gradient, where it is "stock".
Our kernels are timed alone too. Inputs are scaled so that the paper's policy acts; the share of rows with beta above
1.3 is recorded with each result. With --heads, inputs are what ``benchmarks.recorded_heads`` has recorded of a model.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import sharpmax
import sharpmax.torch
from benchmarks.figure4 import torch_figure4
from benchmarks.recorded_heads import read
from sharpmax.core.files import write_text
from sharpmax.provenance import provenance
from sharpmax.torch.geometry import ALL, Geometry
from sharpmax.torch.triton import Tiles, adaptive_backward, gradient, prefill
from sharpmax.torch.triton.tiles import tiles_for

MAIN = (4, 16, 4096, 128)
SHAPES = ((4, 16, 1024, 128), (4, 16, 2048, 128), MAIN, (1, 16, 16384, 128), (1, 16, 32768, 128), (1, 16, 16384, 64))
LONG = ((1, 16, 131072, 128), (1, 4, 1048576, 128))
PARTS = ("results", "standard_normal", "accuracy", "long")
ENTROPY = 3.0  # where the paper's polynomial acts; logits of deviation d have entropy log(n) - d^2 / 2
POLICY: Any = sharpmax.PAPER.lower()
DETACHED = sharpmax.detached(sharpmax.PAPER)
CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
Grads = tuple[Tensor, ...]
Forward = Callable[[], Any]


class Inputs(NamedTuple):
    """Tensors of one case, leaves of autograd, and what the kernels need to know."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    causal: bool

    @property
    def geometry(self) -> Geometry:
        return Geometry(1 / math.sqrt(self.q.shape[-1]), right=0 if self.causal else ALL)


def made(shape: tuple[int, int, int, int], causal: bool, deviation: float, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (torch.randn(shape, device="cuda", generator=generator) for _ in range(4))
    q *= math.sqrt(shape[-1]) / q.norm(dim=-1, keepdim=True)  # rows whose logits deviate alike have like entropies
    factor = math.sqrt(deviation)
    q, k, v = ((x * f).to(dtype).requires_grad_() for x, f in ((q, factor), (k, factor), (v, 1.0)))
    return Inputs(q, k, v, do.to(dtype), causal)


def deviation_for(length: int) -> float:
    return math.sqrt(2 * (math.log(length) - ENTROPY))


# --------------------------------------------------------------------------------------------------------------------
# The functions that are compared. Forward functions give the output, whole ones the gradients of q, k and v.
# --------------------------------------------------------------------------------------------------------------------


def stock(q: Tensor, k: Tensor, v: Tensor, causal: bool, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def stock_gradients(x: Inputs, backend: SDPBackend) -> Grads:
    return torch.autograd.grad(stock(x.q, x.k, x.v, x.causal, backend), (x.q, x.k, x.v), x.do)


def figure4(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    logits = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(hidden, torch.finfo(q.dtype).min)  # with -inf, the listing's gradients are NaN
    return torch_figure4(logits) @ v


def figure4_gradients(x: Inputs) -> Grads:
    return torch.autograd.grad(figure4(x.q, x.k, x.v, x.causal), (x.q, x.k, x.v), x.do)


def statistics(x: Inputs, *, scaled_query: bool, config: Tiles | None = None) -> Any:
    return prefill.row_stats_and_scaled_query(
        x.q.detach(), x.k.detach(), x.geometry, POLICY, scaled_query=scaled_query, config=config
    )


def adaptive(q: Tensor, k: Tensor, v: Tensor, causal: bool, impl: str, policy: Any = sharpmax.PAPER) -> Tensor:
    return sharpmax.torch.scaled_dot_product_attention(q, k, v, is_causal=causal, impl=impl, policy=policy)


def adaptive_gradients(x: Inputs, impl: str, policy: Any = sharpmax.PAPER) -> Grads:
    return torch.autograd.grad(adaptive(x.q, x.k, x.v, x.causal, impl, policy), (x.q, x.k, x.v), x.do)


def flex_functions(x: Inputs) -> dict[str, Forward]:
    """FlexAttention, plain and with beta on its scores (a way of its own, without the gradient of beta)."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    length = x.q.shape[2]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length) if x.causal else None
    _, beta, _ = statistics(x, scaled_query=False)

    def sharpened(score: Tensor, b: Tensor, h: Tensor, i: Tensor, _: Tensor) -> Tensor:
        return score * beta[b, h, i]

    def run(score_mod: Any, gradients: bool) -> Any:
        out = compiled(x.q, x.k, x.v, score_mod=score_mod, block_mask=mask)
        return torch.autograd.grad(out, (x.q, x.k, x.v), x.do) if gradients else out

    return {
        f"{name} {what}": lambda mod=mod, grads=grads: run(mod, grads)
        for name, mod in (("flex", None), ("flex with beta", sharpened))
        for what, grads in (("forward", False), ("forward+backward", True))
    }


def kernels(x: Inputs) -> dict[str, Forward]:
    """Our kernels, each alone."""
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    stats, beta, _ = statistics(x, scaled_query=False)
    out, lse = prefill.attend(q, k, v, beta, x.geometry, row_max=stats[0])
    ones = torch.full_like(beta, 1e-3)
    portable, attending = (
        tiles_for(kind, q.shape[-1], q.dtype, q.device, banded=x.causal) for kind in ("stats", "attend")
    )
    given: dict[str, Any] = {"out": out, "lse": lse, "grad_out": x.do, "row_max": stats[0]}
    moved: dict[str, Any] = {"grad_sum": ones, "grad_moment": ones}
    rows: dict[str, Any] = {"row_sum": stats[1], "row_moment": stats[2]}
    return {
        "kernel stats": lambda: statistics(x, scaled_query=False),
        "kernel stats and scaled query": lambda: statistics(x, scaled_query=True),
        "kernel stats and scaled query, portable": lambda: statistics(x, scaled_query=True, config=portable),
        "kernel attend": lambda: prefill.attend(q, k, v, beta, x.geometry, row_max=stats[0]),
        "kernel attend, portable": lambda: prefill.attend(q, k, v, beta, x.geometry, config=attending),
        "kernels of the gradient for Hopper": lambda: adaptive_backward(
            q, k, v, beta, x.geometry, POLICY, **given, **rows
        ),
        "kernel backward of attend": lambda: gradient.backward(q, k, v, beta, x.geometry, **given, need_beta=True),
        "kernel backward of stats": lambda: gradient.backward(q, k, None, None, x.geometry, row_max=stats[0], **moved),
        "kernel backward of both": lambda: gradient.backward(q, k, v, beta, x.geometry, **given, **moved, delta=ones),
        "kernel backward of scaled query": lambda: gradient.backward(
            q, k, None, beta, x.geometry, row_max=stats[0], **rows, lowered=POLICY, grad_scaled=x.do
        ),
        "kernel gradient of beta": lambda: gradient.beta_gradient(q, k, v, beta, x.geometry, **given),
    }


def functions(x: Inputs, flex: bool, parts: bool) -> dict[str, Forward]:
    plain = (x.q.detach(), x.k.detach(), x.v.detach(), x.causal)
    found: dict[str, Forward] = {
        "cudnn forward": lambda: stock(*plain, CUDNN),
        "cudnn forward+backward": lambda: stock_gradients(x, CUDNN),
        "flash forward": lambda: stock(*plain, FLASH),
        "flash forward+backward": lambda: stock_gradients(x, FLASH),
        "auto forward": lambda: adaptive(*plain, "auto"),
        "auto forward+backward": lambda: adaptive_gradients(x, "auto"),
        "auto forward+backward, detached": lambda: adaptive_gradients(x, "auto", DETACHED),
        "stock forward": lambda: adaptive(*plain, "stock"),
        "stock forward+backward": lambda: adaptive_gradients(x, "stock"),
    }
    if parts:
        found |= kernels(x)
    if flex:
        found |= flex_functions(x)
    return found | {
        "figure 4 forward": lambda: figure4(*plain),
        "figure 4 forward+backward": lambda: figure4_gradients(x),
    }


def few(x: Inputs, backward: bool) -> dict[str, Forward]:
    """What is run where one run takes seconds."""
    chosen = ["cudnn forward", "auto forward", "stock forward"]
    if backward:
        chosen += ["cudnn forward+backward", "auto forward+backward", "stock forward+backward", "figure 4 forward"]
    return {name: function for name, function in functions(x, False, False).items() if name in chosen}


# --------------------------------------------------------------------------------------------------------------------
# Measuring.
# --------------------------------------------------------------------------------------------------------------------


def milliseconds(function: Forward, quick: bool) -> float:
    """The median time."""
    warmup, repeat = (10, 50) if quick else (25, 200)
    return float(triton.testing.do_bench(function, warmup=warmup, rep=repeat, return_mode="median"))  # pyright: ignore


def measured(name: str, function: Forward, quick: bool) -> dict[str, Any]:
    """Time, and the peak of memory beyond what was there before and what is returned."""
    try:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = function()
        torch.cuda.synchronize()
        peak, kept = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
        del result
        return {
            "ms": round(milliseconds(function, quick), 4),
            "peak_mb": round(peak / 2**20, 1),
            "returned_mb": round(kept / 2**20, 1),
        }
    except torch.OutOfMemoryError:
        return {"ms": None, "reason": "out of memory"}
    except RuntimeError as error:
        return {"ms": None, "reason": f"{name}: {str(error).splitlines()[0][:200]}"}
    finally:
        torch.cuda.empty_cache()


def speed(
    x: Inputs, compared: dict[str, Forward], quick: bool, only: Sequence[str] = (), **about: Any
) -> dict[str, Any]:
    """Times of what is compared (cuDNN's and ``only`` those, if any), as they are and as multiples of cuDNN's."""
    _, beta, _ = statistics(x, scaled_query=False)
    wanted = ("cudnn", *only) if only else ("",)
    times = {name: measured(name, function, quick) for name, function in compared.items() if name.startswith(wanted)}
    for name, time in times.items():
        peer = "cudnn forward" + ("+backward" if "+backward" in name else "")
        if time["ms"] is not None and times[peer]["ms"] is not None:
            time["ratio_to_cudnn"] = round(time["ms"] / times[peer]["ms"], 3)
    result = {
        "shape": list(x.q.shape),
        "causal": x.causal,
        **about,
        "share_beta_above_1_3": round(float((beta > 1.3).float().mean()), 4),
        "times": times,
    }
    kind = "causal" if x.causal else "full"
    print(f"{tuple(x.q.shape)} {kind}, {result['share_beta_above_1_3']:.0%} of beta above 1.3")
    for name, time in times.items():
        shown = f"{time['ms']:9.3f} ms {time['peak_mb']:9.1f} MB" if time["ms"] is not None else f"  {time['reason']}"
        print(f"  {name:36} {shown}  x{time.get('ratio_to_cudnn', math.nan):.2f}", flush=True)
    return result


def gaussian(
    shape: tuple[int, int, int, int], causal: bool, quick: bool, flex: bool, only: Sequence[str],
    deviation: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    deviation = deviation_for(shape[2]) if deviation is None else deviation
    x = made(shape, causal, deviation, torch.bfloat16)
    compared = functions(x, flex and shape == MAIN, shape == MAIN)
    return speed(x, compared, quick, only, logit_deviation=round(deviation, 3))


def long(shape: tuple[int, int, int, int], only: Sequence[str]) -> dict[str, Any]:
    deviation = deviation_for(shape[2])
    x = made(shape, True, deviation, torch.bfloat16)
    return speed(x, few(x, backward=shape == LONG[0]), True, only, logit_deviation=round(deviation, 3))


def recorded(path: Path, only: Sequence[str]) -> dict[str, Any]:
    """The heads of a real layer, causal."""
    said, tensors = read(path)
    q, k, v = (t.to("cuda").requires_grad_() for t in tensors)
    x = Inputs(q, k, v, torch.randn_like(v), True)
    return speed(x, functions(x, False, False), True, only, model=said["model"], layer=int(said["layer"]))


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def exact64(x: Inputs) -> tuple[Tensor, Grads, Any]:
    """Output, gradients and beta of adaptive attention in float64."""
    q, k, v = (t.detach().double().requires_grad_() for t in (x.q, x.k, x.v))
    logits = q @ k.mT * x.geometry.scale
    where = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril() if x.causal else None
    beta = POLICY(sharpmax.row_stats(logits.detach(), where=where, with_min=False))
    out = sharpmax.adaptive_temperature_softmax(logits, where=where) @ v
    return out.detach(), torch.autograd.grad(out, (q, k, v), x.do.double()), beta


def stock64(q: Tensor, x: Inputs) -> tuple[Tensor, Grads]:
    """Output and gradients of plain attention on the query ``q`` in float64."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, x.k, x.v))
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(q, k, v, is_causal=x.causal)
    return out.detach(), torch.autograd.grad(out, (q, k, v), x.do.double())


def accuracy(causal: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Errors against float64, as norms against norms; the peer is stock attention on the query that it is given."""
    x = made((3, 16, 2048, 128), causal, deviation_for(2048), dtype)  # enough for the kernels for Hopper
    out, grads, beta64 = exact64(x)
    _, beta, scaled = statistics(x, scaled_query=True)
    found = {
        "auto": (adaptive(x.q, x.k, x.v, causal, "auto").detach(), adaptive_gradients(x, "auto")),
        "stock": (adaptive(x.q, x.k, x.v, causal, "stock").detach(), adaptive_gradients(x, "stock")),
        "figure 4": (figure4(x.q, x.k, x.v, causal).detach(), figure4_gradients(x)),
    }
    names = ("output", "dq", "dk", "dv")
    errors = {
        path: {n: relative(a, b) for n, a, b in zip(names, (o, *g), (out, *grads), strict=True)}
        for path, (o, g) in found.items()
    }
    peer_x = Inputs(scaled.detach().requires_grad_(), x.k, x.v, x.do, causal)
    peer64 = stock64(scaled, x)
    peer = (stock(scaled, x.k, x.v, causal, CUDNN).detach(), *stock_gradients(peer_x, CUDNN))
    errors["peer"] = {n: relative(a, b) for n, a, b in zip(names, peer, (peer64[0], *peer64[1]), strict=True)}
    ratios = {
        path: {n: round(errors[path][n] / errors["peer"][n], 3) for n in names} for path in errors if path != "peer"
    }
    result = {
        "shape": list(x.q.shape),
        "causal": causal,
        "dtype": str(dtype).removeprefix("torch."),
        "share_beta_above_1_3": round(float((beta > 1.3).float().mean()), 4),
        "beta_largest_relative_error": float(((beta - beta64) / beta64).abs().max()),
        "relative_errors": errors,
        "ratios_to_peer": ratios,
    }
    print(f"errors, {result['dtype']} {'causal' if causal else 'full'}:", json.dumps(result["ratios_to_peer"]))
    print("  beta", result["beta_largest_relative_error"], "peer", json.dumps(errors["peer"]), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, causal and full, short timings")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too, whose compilation is slow")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="these parts of the result")
    parser.add_argument("--lengths", type=int, nargs="+", help="these lengths alone")
    parser.add_argument("--only", nargs="+", default=(), help="cuDNN, and functions whose names begin like these")
    parser.add_argument("--heads", type=Path, nargs="+", help="files of recorded heads, and nothing else")
    parser.add_argument(
        "--out",
        type=Path,
        help="attention_cuda.json of benchmarks/results, or for --heads, attention_recorded_cuda.json",
    )
    arguments = parser.parse_args()
    quick, flex, only = arguments.quick, arguments.flex, arguments.only
    name = "attention_recorded_cuda.json" if arguments.heads else "attention_cuda.json"
    out: Path = arguments.out or Path(__file__).parent / "results" / name
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.attention needs a GPU")
    content: dict[str, Any] = {"dtype": "bfloat16", "policy": sharpmax.PAPER.to_dict()}

    def save(part: str, results: Iterable[dict[str, Any]]) -> None:
        """Results are kept one by one: a run that is left has those that it had."""
        found: list[dict[str, Any]] = []
        content[part] = found
        for result in results:
            found.append(result)
            content["provenance"] = provenance(["python", "-m", "benchmarks.attention", *sys.argv[1:]])
            finite = json.loads(json.dumps(content), parse_constant=lambda _: None)  # JSON has no NaN
            write_text(out, json.dumps(finite, indent=2) + "\n")

    if arguments.heads:
        save("recorded", (recorded(path, only) for path in arguments.heads))
        return
    lengths = arguments.lengths or ([MAIN[2]] if quick else [shape[2] for shape in (*SHAPES, *LONG)])
    shapes, longest = ([shape for shape in found if shape[2] in lengths] for found in (SHAPES, LONG))
    kinds = (True,) if quick else (False, True)
    parts = {
        "results": (gaussian(shape, causal, quick, flex, only) for shape in shapes for causal in (False, True)),
        "standard_normal": (gaussian(MAIN, True, quick, False, only, 1.0) for _ in range(not quick)),
        "accuracy": (accuracy(causal, torch.bfloat16) for causal in kinds),
        "long": (long(shape, only) for shape in longest),
    }
    for part in PARTS:
        if part in arguments.parts:
            save(part, parts[part])


if __name__ == "__main__":
    main()
