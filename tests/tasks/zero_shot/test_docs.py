"""What docs/zero_shot.md says of results is what the result files hold."""

from __future__ import annotations

from typing import Any

import pytest

from sharpmax.tasks.zero_shot import zero_shot_table
from tests.doc_tables import ROOT, load

PAGE = (ROOT / "docs/zero_shot.md").read_text(encoding="utf-8")
SMOLLM, GEMMA = "smollm2-135m-instruct", "gemma-3-270m"


def results(model: str) -> dict[str, Any]:
    return load(f"results/zero_shot/zero_shot_{model}.json")


def numbers(model: str, task: str, policy: str, what: str) -> dict[int, Any]:
    """One number of every cell of a task and policy, by size."""
    cells = [c for c in results(model)["cells"] if (c["task"], c["policy"]) == (task, policy)]
    return {c["size"]: c[what] for c in cells}


def perplexities(model: str, policy: str) -> dict[int, float]:
    return numbers(model, "perplexity", policy, "perplexity")


def ratios(model: str, policy: str) -> list[float]:
    """Perplexities within the context, as multiples of those of the model as it is."""
    plain, found = perplexities(model, "off"), perplexities(model, policy)
    return [found[n] / plain[n] for n in found if n <= results(model)["context"]]


def added(model: str, policy: str) -> list[float]:
    """The smallest and the largest of :func:`ratios` as percents above 1."""
    return [100 * (end(ratios(model, policy)) - 1) for end in (min, max)]


def instead(task: str, policy: str, what: str, size: int, digits: int = 0) -> str:
    """What SmolLM2 has with a policy, and without."""
    with_it, without = (numbers(SMOLLM, task, name, what)[size] for name in (policy, "off"))
    return f"{with_it:.{digits}f} instead of {without:.{digits}f}"


def nats(task: str, policy: str, size: int) -> str:
    return instead(task, policy, "answer_nll", size, 2).replace(" instead", " nats instead")


def rounding() -> str:
    """How far ``log_context``, which is 1 within the context, is from the model as it is."""
    moved = max(
        abs(with_it - numbers(SMOLLM, task, "off", "right")[n])
        for task in ("needle", "maximum")
        for policy in ("log_context", "log_context_sharp")
        for n, with_it in numbers(SMOLLM, task, policy, "right").items()
        if n <= results(SMOLLM)["context"]
    )
    share = max(map(abs, added(SMOLLM, "log_context")))
    return f"moves the perplexity by up to {share:.1f} %, and up to {moved} answers of 100"


def smollm_phrases() -> list[str]:
    low, high = added(SMOLLM, "paper_sharp")
    lists, sharp = (numbers(SMOLLM, "maximum", policy, "right") for policy in ("off", "paper_sharp"))
    held = numbers(SMOLLM, "needle", "held", "right")[8192]
    plain, same = (numbers(SMOLLM, "needle", policy, "answer_nll") for policy in ("off", "log_context"))
    shifted = max(abs(plain[n] - same[n]) for n in plain if n <= results(SMOLLM)["context"])
    return [
        rounding(),
        f"perplexity {instead('perplexity', 'paper', 'perplexity', 512, 2)} at 512 tokens, and "
        f"{instead('needle', 'paper', 'right', 8192)} needles of 100 at 8,192",
        f"(perplexity {perplexities(SMOLLM, 'held')[8192]:.2f}, {held} needles)",
        f"perplexity rises by {low:.0f} to {high:.0f} %",
        f"finds {sharp[4]} maxima of 100 among 4 items instead of {lists[4]}",
        f"gives the right answers less probability: {nats('maximum', 'paper_sharp', 4)}",
        f"less probable ({nats('needle', 'paper_sharp', 4096)} at 4,096)",
        f"at most {added(SMOLLM, 'log_512_sharp')[1]:.1f} % above that without",
        f"{instead('needle', 'log_512_sharp', 'right', 8192)} needles at 8,192",
        f"({nats('needle', 'log_512_sharp', 4096)} at 4,096, {nats('needle', 'log_512_sharp', 8192)} at 8,192; "
        f"rounding moves these by up to {shifted:.3f})",
        f"({instead('perplexity', 'log_512', 'perplexity', 8192, 2)} at 8,192)",
        f"right in {lists[4]} % of lists of 4 and {lists[8]} % of lists of 8",
        f"(perplexity {perplexities(SMOLLM, 'off')[16384]:,.0f})",
    ]


def gemma_phrases() -> list[str]:
    needles = {policy: numbers(GEMMA, "needle", policy, "right") for policy in results(GEMMA)["policies"]}
    plain, same, longer = needles["off"], needles["log_context"], needles["log_512"]
    return [
        f"{needles['paper'][4096]} of 50 at 4,096 tokens, where the model as it is finds all {plain[4096]}. "
        f"Range-safe it finds {needles['held'][4096]}:",
        f"finds {longer[32768]} at 32,768",
        f"but for rounding, finds {same[32768]}.",
    ]


@pytest.mark.parametrize("model", [SMOLLM, GEMMA])
def test_the_tables_are_those_of_the_results(model: str) -> None:
    assert zero_shot_table(results(model)) in PAGE


@pytest.mark.parametrize("phrase", [*smollm_phrases(), *gemma_phrases()])
def test_the_text_says_what_the_results_say(phrase: str) -> None:
    assert phrase in " ".join(PAGE.split())


def test_beyond_its_context_every_policy_harms_smollm2() -> None:
    beyond = {policy: perplexities(SMOLLM, policy)[16384] for policy in results(SMOLLM)["policies"]}
    assert min(beyond, key=lambda policy: beyond[policy]) == "off"


def test_what_is_said_of_gemmas_needles_at_many_lengths_holds() -> None:
    needles = {name: numbers(GEMMA, "needle", name, "right") for name in ("off", "paper", "held", "log_512")}
    assert [needles["log_512"][n] for n in (4096, 8192)] == [needles["off"][n] for n in (4096, 8192)]
    assert [n for n, found in needles["held"].items() if found < needles["paper"][n]] == [16384]
