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


def instead(task: str, policy: str, what: str, size: int, digits: int = 0, model: str = SMOLLM) -> str:
    """What a model has with a policy, and without."""
    with_it, without = (numbers(model, task, name, what)[size] for name in (policy, "off"))
    return f"{with_it:.{digits}f} instead of {without:.{digits}f}"


def nats(task: str, policy: str, size: int, model: str = SMOLLM) -> str:
    return instead(task, policy, "answer_nll", size, 2, model).replace(" instead", " nats instead")


def shifted(model: str) -> float:
    """How far rounding alone (``log_context`` within the context) moves the mean log-probability of needles."""
    plain, same = (numbers(model, "needle", policy, "answer_nll") for policy in ("off", "log_context"))
    return max(abs(plain[n] - same[n]) for n in plain if n <= results(model)["context"])


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
        f"rounding moves these by up to {shifted(SMOLLM):.3f})",
        f"({instead('perplexity', 'log_512', 'perplexity', 8192, 2)} at 8,192)",
        f"right in {lists[4]} % of lists of 4 and {lists[8]} % of lists of 8",
        f"(perplexity {perplexities(SMOLLM, 'off')[16384]:,.0f})",
    ]


def gemma_phrases() -> list[str]:
    needles = {policy: numbers(GEMMA, "needle", policy, "right") for policy in results(GEMMA)["policies"]}
    plain, paper = needles["off"], needles["paper"]
    whole, held = ratios(GEMMA, "paper"), ratios(GEMMA, "held")
    low, high = added(GEMMA, "paper_sharp")
    moved = max(map(abs, added(GEMMA, "log_context")))
    lists = (numbers(GEMMA, "maximum", policy, "right") for policy in ("off", "log_context"))
    answers = max(abs(a - b) for a, b in zip(*(x.values() for x in lists), strict=True))
    sharp = [nats("needle", "paper_sharp", n, GEMMA) for n in (512, 4096, 16384, 32768)]
    beyond = perplexities(GEMMA, "log_context")[65536] / perplexities(GEMMA, "off")[65536] - 1
    return [
        f"moves the perplexity by up to {moved:.1f} %, answers of lists by {answers} of 50, and the mean "
        f"log-probability of needles by up to {shifted(GEMMA):.3f} nats",
        f"multiplies perplexity by {min(whole):.1f} to {max(whole):.1f} (range-safe {min(held):.1f} to "
        f"{max(held):.1f}), and of 50 needles it finds {paper[512]} at 512 tokens, {paper[4096]} at 4,096 and "
        f"{paper[32768]} at 32,768, where the model as it is finds {plain[512]}, {plain[4096]} and {plain[32768]}.",
        f"{sharp[0]} at 512 tokens, {sharp[1]} at 4,096, {sharp[2]} at 16,384, {sharp[3]} at 32,768.",
        f"{needles['paper_sharp'][2048]} are found instead of {plain[2048]} at 2,048 tokens, "
        f"{needles['paper_sharp'][16384]} instead of {plain[16384]} at 16,384.",
        f"Perplexity rises by {low:.0f} to {high:.0f} %, more than in SmolLM2",
        f"less probable at every size ({nats('maximum', 'paper_sharp', 4, GEMMA)} at 4 items)",
        f"it adds up to {added(GEMMA, 'log_512_sharp')[1]:.1f} % to the perplexity",
        f"({nats('needle', 'log_512_sharp', 16384, GEMMA)} at 16,384)",
        f"it adds up to {added(GEMMA, 'log_512')[1]:.1f} % and finds {needles['log_512'][32768]} needles at 32,768 "
        f"tokens instead of {plain[32768]}",
        f"{100 * numbers(GEMMA, 'maximum', 'off', 'right')[4] / 50:.0f} % of lists of 4.",
        f"`log_context` by {100 * beyond:.1f} %",
    ]


@pytest.mark.parametrize("model", [SMOLLM, GEMMA])
def test_the_tables_are_those_of_the_results(model: str) -> None:
    assert zero_shot_table(results(model)) in PAGE


@pytest.mark.parametrize("phrase", [*smollm_phrases(), *gemma_phrases()])
def test_the_text_says_what_the_results_say(phrase: str) -> None:
    assert phrase in " ".join(PAGE.split())


@pytest.mark.parametrize(("model", "size"), [(SMOLLM, 16384), (GEMMA, 65536)])
def test_beyond_its_context_every_policy_harms(model: str, size: int) -> None:
    beyond = {policy: perplexities(model, policy)[size] for policy in results(model)["policies"]}
    assert min(beyond, key=lambda policy: beyond[policy]) == "off"


def test_what_is_said_of_gemma_at_many_lengths_holds() -> None:
    policies = ("off", "paper_sharp", "log_512_sharp")
    plain, paper, slow = (numbers(GEMMA, "needle", name, "answer_nll") for name in policies)
    assert all(paper[n] < plain[n] for n in plain)
    assert [n for n in plain if slow[n] > plain[n] + shifted(GEMMA)] == [8192, 16384, 32768]
    lists, sharper = (numbers(GEMMA, "maximum", name, "answer_nll") for name in ("off", "paper_sharp"))
    assert all(sharper[n] > lists[n] for n in lists)
    printed, held = (perplexities(GEMMA, name) for name in ("paper", "held"))
    assert [n for n in printed if held[n] < printed[n]] == [2048, 4096, 8192, 16384, 32768, 65536]


def test_in_smollm2_the_polynomial_makes_needles_less_probable() -> None:
    plain, paper = (numbers(SMOLLM, "needle", name, "answer_nll") for name in ("off", "paper_sharp"))
    assert [n for n in plain if n <= 8192 and paper[n] <= plain[n]] == []
