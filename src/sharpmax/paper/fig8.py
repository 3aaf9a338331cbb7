"""Figure 8: accuracy on CLRS-Text against size, of a model trained with and without adaptive temperature."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.files import write_bytes, write_text
from ..core.policies import PAPER, PAPER_HELD, Constant, policy_from_dict
from ..inputs import InputError, user_input
from ..tasks.clrs_text.outcomes import LEFT_OUT, load_evaluation
from ..tasks.clrs_text.settings import FREE
from .fig8_views import CAPTION, FEWEST, color_sentence, draw, figure_size, findings, markdown, training_sentence
from .figures import numbers, render, save_exhibit
from .paired import Pairs, holm, intervals, mcnemar

NAME = "fig8"
VARIANTS = ("baseline", "adaptive", "also")
PARTS: dict[str, Callable[[int, Sequence[int]], bool]] = {
    "in": lambda size, trained: size in trained,
    "out": lambda size, trained: size not in trained,
    "beyond": lambda size, trained: size > max(trained, default=0),
}
"""In distribution, which is at sizes of training, out of it, and the part of that which is larger than any of them."""

NEEDED = ("--baseline", "--adaptive")
SHIPPED = Path(__file__).resolve().parents[3] / "results" / "clrs_text" / "evaluations"
"""In a checkout, the evaluations of the comparison that comes with it, by policy."""


def data(evaluations: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Curves and tests, from evaluations of the same samples: ``baseline``, ``adaptive`` and perhaps ``also``."""
    check_same(evaluations)
    first = evaluations["baseline"]
    content: dict[str, Any] = {
        "caption": "",
        "variants": {name: _variant(found) for name, found in evaluations.items()},
        "settings": first["settings"],
        "algorithms": {
            algorithm: {
                "training_sizes": entry["training_sizes"],
                "sizes": [int(size) for size in entry["sizes"]],
                "n": [row["n"] for row in entry["sizes"].values()],
                "too_long": [row["too_long"] for row in entry["sizes"].values()],
                "curves": {
                    name: _curve(found["algorithms"][algorithm]["sizes"].values())
                    for name, found in evaluations.items()
                },
            }
            for algorithm, entry in first["algorithms"].items()
        },
        "comparisons": {
            name: {part: comparison(first, found, part) for part in PARTS}
            for name, found in evaluations.items()
            if name != "baseline"
        },
        "training_differs": training_differs(evaluations.values()),
    }
    content["findings"] = findings(content)
    return content | {"caption": CAPTION.format(**_caption_words(content))}


def check_same(evaluations: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError unless all evaluations are of the same samples in the same way, with the policies they claim."""
    first = evaluations["baseline"]
    for name, found in evaluations.items():
        policy = found["model"]["policy"]
        if name == "baseline" and policy is not None:
            raise ValueError(
                "expected the baseline to be a model with plain softmax, got one with adaptive temperature"
            )
        if name == "adaptive" and policy is None:
            raise ValueError(
                "expected a model with adaptive temperature beside the baseline, got one with plain softmax"
            )
        ours, theirs = _asked(first), _asked(found)
        if other := [what for what in ours if ours[what] != theirs[what]]:
            raise ValueError(
                f"expected evaluations of the same samples, got other {', '.join(other)} for {name} than for baseline"
            )


def _asked(found: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same in evaluations that are compared."""
    split = found["settings"]["split"]
    return {
        "algorithms": list(split["sizes"]),
        **{what: split[what] for what in ("sizes", "seeds", "samples", "traces")},
        "length": found["settings"]["length"],
        "tokenizer": found["model"]["tokenizer"],
        "questions": found["settings"]["questions"],
        "dtype": found["model"]["dtype"],
        "training sizes": {name: entry["training_sizes"] for name, entry in found["algorithms"].items()},
    }


def _variant(found: Mapping[str, Any]) -> dict[str, Any]:
    """What the exhibit tells of a model."""
    training, policy = found["training"], found["model"]["policy"]
    before = None if training is None else _rules(training["settings"]["policy"])
    named = {} if training is None else {"name": Path(training["settings"]["model"]).name}
    return {
        "label": label(policy),
        "trained_as": None if training is None else label(before),
        "as_trained": None if training is None else before == policy,
        **found["model"],
        **named,
        "training": None if training is None else {key: training[key] for key in training if key != "sizes"},
        "accuracy": found["accuracy"],
        "trace_accuracy": found["trace_accuracy"],
        "throughput": found["throughput"],
        "measured_by": found.get("measured_by"),
    }


def label(policy: Sequence[Mapping[str, Any]] | None) -> str:
    """What the policies of a model are called in the figure."""
    if policy is None:
        return "softmax"
    named = {PAPER: "adaptive temperature", PAPER_HELD: "adaptive temperature, held"}
    rule = policy[-1]
    where = "" if rule["layers"] is None and rule["heads"] is None else ", in some heads"
    made = policy_from_dict(dict(rule["policy"]))
    return named.get(made, f"adaptive temperature, {type(made).__name__}") + where


def _curve(rows: Collection[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Means and deviations over the seeds, by size; ``None`` where no sample fits."""
    keys = ("accuracy", "deviation", "trace_accuracy")
    return {key: [_number(row[key]) for row in rows] for key in keys}


def _number(value: float | None) -> float | None:
    return None if value is None else numbers(value)


def comparison(first: Mapping[str, Any], second: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Two models on the same samples, algorithm by algorithm, at sizes of one of the :data:`PARTS`.

    A question that repeats counts once. Algorithms without samples of the kind are not in it.
    """
    counted = {
        algorithm: pairs_of(entry, second["algorithms"][algorithm], part)
        for algorithm, entry in first["algorithms"].items()
    }
    counted = {algorithm: pairs for algorithm, pairs in counted.items() if pairs.n}
    p_values = [mcnemar(pairs.first, pairs.second) for pairs in counted.values()]
    corrected = holm(p_values)
    return {
        "algorithms": {
            algorithm: {
                "n": pairs.n,
                "baseline_right": pairs.both + pairs.first,
                "right": pairs.both + pairs.second,
                "baseline_alone": pairs.first,
                "alone": pairs.second,
                "difference": numbers(pairs.difference),
                "p_value": numbers(p),
                "p_holm": numbers(held),
            }
            for (algorithm, pairs), p, held in zip(counted.items(), p_values, corrected, strict=True)
        },
        "total": _total(list(counted.values())) if counted else None,
    }


def _total(groups: Sequence[Pairs]) -> dict[str, Any]:
    """All algorithms together: by sample, and as the mean over algorithms with enough of them."""
    everything = Pairs(*(sum(column) for column in zip(*groups, strict=True)))
    many = [pairs for pairs in groups if pairs.n >= FEWEST]
    return {
        "n": everything.n,
        "baseline_accuracy": numbers((everything.both + everything.first) / everything.n),
        "accuracy": numbers((everything.both + everything.second) / everything.n),
        "difference": numbers(everything.difference),
        "interval": numbers(intervals(groups)["samples"]),
        "p_value": numbers(mcnemar(everything.first, everything.second)),
        "mean_of": len(many),
        "mean_difference": numbers(sum(pairs.difference for pairs in many) / len(many)) if many else None,
        "mean_interval": numbers(intervals(many)["groups"]) if many else None,
    }


def pairs_of(first: Mapping[str, Any], second: Mapping[str, Any], part: str) -> Pairs:
    """Samples of one algorithm that both models were asked, a repeated question once."""
    counts = dict.fromkeys(("00", "01", "10", "11"), 0)
    for size, row in first["sizes"].items():
        if not PARTS[part](int(size), first["training_sizes"]):
            continue
        replies = zip(row["final"], second["sizes"][size]["final"], row["distinct"], strict=True)
        for ours, theirs, distinct in replies:
            for a, b, new in zip(ours, theirs, distinct, strict=True):
                if new == "1" and LEFT_OUT not in (a, b):
                    counts[a + b] += 1
    return Pairs(sum(counts.values()), counts["10"], counts["01"], counts["11"])


def _rules(policy: Mapping[str, Any] | None) -> list[dict[str, Any]] | None:
    """The policy of a training run's settings as a model's config has it; ``None`` for plain softmax."""
    if policy is None or policy_from_dict(dict(policy)) == Constant(1.0):
        return None
    return [{"policy": policy, "layers": None, "heads": None}]


def training_differs(evaluations: Collection[Mapping[str, Any]]) -> list[str] | None:
    """What decides the result of training, besides the policy, and is not the same for all models.

    ``None`` where nothing is known of the training of one of them.
    """
    trained = [found["training"] for found in evaluations]
    if any(training is None for training in trained):
        return None
    decide = [{key: one[key] for key in ("start", "processes")} | one["settings"] for one in trained]
    names = dict.fromkeys(name for settings in decide for name in settings if name not in ("policy", *FREE))
    return [name for name in names if any(settings.get(name) != decide[0].get(name) for settings in decide)]


def _caption_words(content: Mapping[str, Any]) -> dict[str, Any]:
    split = content["settings"]["split"]
    variants = content["variants"]
    return {
        "models": " and ".join(dict.fromkeys(f"{v['name']} ({v['label']})" for v in variants.values())),
        "traces": "with traces" if split["traces"] else "without traces",
        "samples": split["samples"],
        "seeds": len(split["seeds"]),
        "length": content["settings"]["length"],
        "colors": " ".join(color_sentence(name, variant) for name, variant in variants.items()),
        "training": training_sentence(content["training_differs"]),
        "findings": " ".join(content["findings"]),
    }


def run(out: Path, baseline: Path | None = None, adaptive: Path | None = None, also: Path | None = None) -> list[Path]:
    """Write fig8.png, .pdf, .json and .md into ``out``.

    Args:
      out: folder for the files.
      baseline: what ``sharpmax clrs-text evaluate`` wrote of a model with plain softmax: its folder or evaluation.json.
      adaptive: the same of one with adaptive temperature, on the same samples.
      also: a third one, to be compared with the baseline too.

    Without evaluations, a fig8.json that is in ``out`` is drawn again, and stays as it is; where there is none, the
    evaluations are those that come with a checkout.
    """
    if baseline is None and adaptive is None and also is None:
        if (out / f"{NAME}.json").is_file():
            return _again(out)
        if SHIPPED.is_dir():
            baseline, adaptive = SHIPPED / "none", SHIPPED / "paper"
    if baseline is None or adaptive is None:
        raise InputError(f"expected {' and '.join(NEEDED)}, the folders of two evaluations of CLRS-Text, got not both")
    given = zip(VARIANTS, (baseline, adaptive, also), strict=True)
    with user_input():
        content = data({name: load_evaluation(path) for name, path in given if path is not None})
    paths = save_exhibit(out, NAME, content, draw, figure_size(content))
    write_text(out / f"{NAME}.md", markdown(content))
    return [*paths, out / f"{NAME}.md"]


def ready(out: Path) -> bool:
    """Whether it can be made without being given evaluations."""
    return (out / f"{NAME}.json").is_file() or SHIPPED.is_dir()


def _again(out: Path) -> list[Path]:
    """Draw what fig8.json holds."""
    path = out / f"{NAME}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        pictures, text = render(content, draw, figure_size(content)), markdown(content)
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path} is not what `sharpmax reproduce fig8` writes ({error!r}): make it again") from error
    for suffix, picture in pictures.items():
        write_bytes(out / f"{NAME}.{suffix}", picture)
    write_text(out / f"{NAME}.md", text)
    return [out / f"{NAME}.{suffix}" for suffix in (*pictures, "json", "md")]
