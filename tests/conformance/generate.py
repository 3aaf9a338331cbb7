"""Writes the golden cases.

    python -m tests.conformance.generate            # write cases/*.json (minutes: the longest rows have 131072 logits)
    python -m tests.conformance.generate --check    # make them anew, and compare with the files

The package under test contributes nothing but the JSON form of its policies; every number comes from :mod:`.oracle`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from sharpmax.core.policies import (
    PAPER,
    PAPER_HELD,
    Constant,
    EntropyCurve,
    EntropyPolynomial,
    Hard,
    LogLength,
    detached,
)

from . import oracle, recipes
from .cases import FOLDER

STORED_LENGTH = 64
"""Rows up to this length are stored as numbers, longer ones as recipes."""

MARGIN = 2e-3
"""No row's entropy may come closer than this to a point where its policy or its policy's slope jumps: there, two right
implementations may fall on different sides. It is far above the error of any entropy here, of order 1e-5 at most."""

_COEFFICIENTS = PAPER.coefficients
POLICIES: dict[str, Any] = {
    "paper": PAPER,
    "held": PAPER_HELD,
    "constant1": Constant(1.0),
    "constant0": Constant(0.0),
    "constant2.5": Constant(2.5),
    "hard": Hard(),
    "logn": LogLength(),
    "ssmax": LogLength(scale=0.43, bias=0.25),
    "ssmax-negative": LogLength(scale=0.1, bias=-1.0),
    "relative": LogLength.relative(8),
    "yarn": LogLength.yarn(8),
    "llama4": LogLength.llama4(5, scale=0.3),
    "hold-end": EntropyPolynomial(_COEFFICIENTS, domain=(1.2, 2.2), beyond="hold_end"),
    "hold-peak": EntropyPolynomial(_COEFFICIENTS, domain=(1.15, 4.0), beyond="hold_peak"),
    "raise": EntropyPolynomial(_COEFFICIENTS, domain=(0.1, 12.5), beyond="raise"),
    "extrapolate": EntropyPolynomial((0.3, 0.5, 0.25), threshold=0.1, floor=0.0, domain=(0.5, 1.0)),
    "curve": EntropyCurve((0.6, 1.5, 2.5, 4.0), (1.1, 1.3, 1.9, 2.6), threshold=0.55),
    "curve-floor": EntropyCurve((0.5, 1.0, 3.5), (0.7, 0.8, 1.4), threshold=0.2, floor=0.9),
    "detached": detached(PAPER),
    "detached-curve": detached(EntropyCurve((0.6, 3.0), (1.0, 2.0))),
}


def specs() -> Iterator[dict[str, Any]]:
    """Every case before it is solved: family, dtype, policy, recipe, and how ``where`` masks."""
    for dtype in recipes.DTYPES:
        for policy in POLICIES:
            for n, scale in ((16, 1.5), (33, 1.0)) if policy in ("paper", "held", "curve") else ((16, 1.5),):
                yield spec("policies", dtype, policy, "normal", n, scale=scale)
        for policy in ("hold-end", "hold-peak"):  # below the domain, and above it
            yield spec("policies", dtype, policy, "normal", 3, scale=0.5)
            yield spec("policies", dtype, policy, "normal", 64, scale=0.3)
        for n in (2, 3, 5, 8, 16, 33, 64):
            yield spec("sizes", dtype, "held", "normal", n)
        for policy in ("paper", "constant2.5", "hard", "logn", "detached"):
            yield spec("sizes", dtype, policy, "normal", 1)
        for policy in ("paper", "hard"):
            yield spec("sizes", dtype, policy, "normal", 0)
        for offset in (1e4, -1e4):
            # bfloat16 holds multiples of 64 near 1e4, float16 of 8; wider logits keep these rows from being all tied.
            scale = {"float16": 6.0, "bfloat16": 48.0}.get(dtype, 1.0)
            for policy, n in (("paper", 16), ("held", 64), ("constant1", 64), ("detached", 16)):
                yield spec("offsets", dtype, policy, "normal", n, scale=scale, offset=offset)
        for scale in (1e-6, 1e-3, 0.1, 0.5, 3.0, 10.0, 100.0, 1e3):
            yield spec("scales", dtype, "held", "normal", 33, scale=scale)
        for scale in (0.5, 2.0):
            yield spec("scales", dtype, "paper", "normal", 64, scale=scale)
        for policy in ("paper", "hard", "ssmax"):
            yield spec("shapes", dtype, policy, "sparse", 64)
            yield spec("shapes", dtype, policy, "tied", 64)
            yield spec("shapes", dtype, policy, "equal", 16, offset=3.25)
            yield spec("shapes", dtype, policy, "needle", 64, height=9.0)
        yield spec("shapes", dtype, "held", "needle", 16, height=1e4)
        yield spec("shapes", dtype, "paper", "extremes", 8)
        for policy in ("paper", "logn", "hard"):
            for by in ("where", "inf", "lowest"):
                yield spec("masks", dtype, policy, "normal", 33, mask=by, keep=0.6)
        yield spec("masks", dtype, "held", "normal", 33, mask="where", keep=0.6, fill="max")
        yield spec("masks", dtype, "held", "normal", 33, mask="where", keep=0.6, fill="nan")
        yield spec("masks", dtype, "paper", "normal", 64, mask="inf", keep=0.02)
        for policy in ("paper", "constant2.5", "hard", "ssmax"):
            for by in ("where", "inf", "lowest"):
                if policy != "ssmax" or by == "where":
                    yield spec("masked", dtype, policy, "normal", 8, mask=by, keep=0.0)
        for policy in ("paper", "held", "curve"):
            yield spec("long", dtype, policy, "normal", 257)
            yield spec("long", dtype, policy, "sparse", 1024, scale=2.0)
        yield spec("long", dtype, "held", "normal", 1024, mask="where", keep=0.5)
        yield spec("long", dtype, "paper", "normal", 4096, scale=3.0, mask="inf", keep=0.8)
        yield spec("long", dtype, "held", "normal", 4096)
        yield spec("long", dtype, "paper", "normal", 32768, scale=3.5)
    yield spec("longest", "float32", "paper", "normal", 131072, scale=3.75)
    yield spec("longest", "float32", "held", "equal", 131072, offset=2.0)
    yield spec("longest", "float32", "held", "normal", 131072, scale=0.3)
    yield spec("longest", "float64", "held", "normal", 131072)
    yield spec("longest", "bfloat16", "paper", "normal", 131072, scale=3.75)
    yield spec("longest", "float16", "constant2.5", "normal", 131072)


def spec(
    family: str,
    dtype: str,
    policy: str,
    kind: str,
    n: int,
    *,
    mask: str | None = None,
    keep: float = 1.0,
    fill: str | None = None,
    **shape: float,
) -> dict[str, Any]:
    """One case before it is solved. Its id says everything about it, and seeds its numbers."""
    words = [policy, kind, f"n{n}", *(f"{name}{value:g}" for name, value in shape.items())]
    if mask is not None:
        words += [mask + (f"-{fill}" if fill else "") if keep else f"all-{mask}"]
    case_id = f"{family}/{dtype}/" + "-".join(words)
    # The seed leaves the type out, so that the four types see the same row, each rounded in its own way.
    seed = zlib.crc32("-".join(words).encode()) or 1
    recipe: dict[str, Any] = {"kind": kind, "n": n, "seed": seed, **shape}
    where = None
    if mask == "where":
        where = {"seed": seed + 11, "keep": keep}
    elif mask is not None:
        recipe["mask"] = {"by": mask, "seed": seed + 11, "keep": keep}
    return {
        "family": family,
        "id": case_id,
        "dtype": dtype,
        "policy": policy,
        "row": recipe,
        "where": where,
        "fill": fill,
    }


def solved(item: dict[str, Any]) -> dict[str, Any]:
    """The JSON form of a case, with its results."""
    recipe, dtype, policy = item["row"], item["dtype"], POLICIES[item["policy"]].to_dict()
    n, seed = recipe["n"], recipe["seed"]
    logits = recipes.make_logits(recipe, dtype)
    where = recipes.make_where(item["where"], n)
    fill = {None: None, "nan": math.nan, "max": -recipes.LOWEST[dtype]}[item["fill"]]
    logits = recipes.fill_masked(logits, where, fill)
    cotangent = recipes.make_cotangent(seed + 23, n)
    answer = oracle.solve(logits.tolist(), None if where is None else where.tolist(), cotangent.tolist(), dtype, policy)
    if answer.stats["count"] > 1 and answer.beta.margin < MARGIN:
        raise ValueError(f"{item['id']}: its entropy is {float(answer.beta.margin):.2g} from a jump of its policy")
    beta_terms = {
        name: number(getattr(answer.beta, name)) for name in ("slope", "sensitivity", "curvature", "magnitude")
    }
    expect: dict[str, Any] = {"stats": {name: number(value) for name, value in answer.stats.items()}}
    expect |= {"beta": number(answer.beta.value), "beta_terms": beta_terms}
    stored = n <= STORED_LENGTH
    indices = range(n) if stored else chosen_indices(logits, seed)
    probes = [] if stored else [recipes.make_probe(s, n).tolist() for s in (seed + 31, seed + 37, seed + 41)]
    expect |= {
        "indices": "all" if stored else list(indices),
        "probes": [] if stored else [seed + 31, seed + 37, seed + 41],
        "weights": [number(answer.weights[i]) for i in indices],
        "weight_probes": [number(oracle.dot(answer.weights, probe)) for probe in probes],
        "gradient": [number(answer.gradient[i]) for i in indices],
        "gradient_probes": [number(oracle.dot(answer.gradient, probe)) for probe in probes],
    }
    head = {"id": item["id"], "dtype": dtype, "policy": policy}
    if stored:
        head |= {
            "row": {"values": [number(x) for x in logits]},
            "where": None if where is None else where.astype(int).tolist(),
        }
        head |= {"cotangent": cotangent.tolist()}
    else:
        head |= {"row": recipe, "where": item["where"], "cotangent": seed + 23, "digest": recipes.digest(logits)}
    return {**head, "expect": expect}


def chosen_indices(logits: np.ndarray, seed: int) -> list[int]:
    """Two dozen places: both ends, the maximum and its neighbours in rank, and some at random."""
    n = len(logits)
    ranked = np.argsort(-logits, kind="stable")[:8].tolist()
    spread = (recipes.bits(seed + 43, 14) % np.uint64(n)).tolist()
    return sorted({0, n - 1, *map(int, ranked), *map(int, spread)})


def number(value: Any) -> Any:
    """A number for JSON; infinities and NaN become strings."""
    value = value if isinstance(value, int) else float(value)
    return value if math.isfinite(value) else str(value)


def files(items: list[dict[str, Any]]) -> dict[str, str]:
    """The text of every file: one case to a line."""
    families: dict[str, list[str]] = {}
    for item in items:
        line = json.dumps(solved(item), separators=(",", ":"), allow_nan=False)
        families.setdefault(item["family"], []).append(line)
    head = '{"schema":"sharpmax.conformance/1","cases":[\n'
    return {f"{family}.json": head + ",\n".join(lines) + "\n]}\n" for family, lines in families.items()}


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Write, or check, the golden cases.")
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    check = parser.parse_args(arguments).check
    texts = files(list(specs()))
    if check:
        present = {path.name: path.read_text("utf-8") for path in FOLDER.glob("*.json")}
        wrong = sorted(name for name in texts.keys() | present.keys() if texts.get(name) != present.get(name))
        print(f"these files differ: {', '.join(wrong)}" if wrong else f"{len(texts)} files are up to date")
        return 1 if wrong else 0
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.json"):
        path.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
